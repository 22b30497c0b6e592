"""The store as it should be: round trips, order, batches, statistics, resuming."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import fill
from tiny.torches import needs_torch, torch

from saejax.core.errors import BusyError, ConfigError, DataError
from saejax.store import Batches, EpochOrder, StoreLayout, StoreReader, StoreWriter, permute, verify
from saejax.store.layout import METADATA_NAMES

HOOKS = {"blocks.3.resid_pre": 8, "blocks.10.mlp_out": 5}
LAYOUT = StoreLayout(128, 16)
IDENTITY = {"model": {"name": "tiny", "revision": "abc"}, "context": 64}


def batch(index, size):
    """Rows [index * size, (index + 1) * size) of an endless stream, and their tokens."""
    rows = np.arange(index * size, (index + 1) * size)
    rng = np.random.default_rng([7, index, size])
    activations = {name: rng.normal(1.0, 2.0, (size, d)).astype(np.float32) for name, d in HOOKS.items()}
    tokens = {"token_id": rows * 3, "document": rows // 50, "position": rows % 50}
    return activations, tokens


def write(path, n_tokens=1000, *, size=37, available=10**9, stop_after=None, seed=3, identity=None):
    """Capture until the store is full or the text ends at `available`; True if it was finished."""
    with StoreWriter.open(
        path, identity=identity or IDENTITY, hook_points=HOOKS, n_tokens=n_tokens, layout=LAYOUT, seed=seed
    ) as writer:
        if not fill(writer, lambda index: batch(index, size), size, available, stop_after):
            return False
        assert writer.complete
    return True


def contents(path):
    """Every file of a store but the lease: relative name -> bytes."""
    files = (file for file in path.rglob("*") if file.is_file() and file.name != ".lock")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def bits(array):
    """bfloat16 as integers, so that comparisons are exact."""
    return array.view(np.uint16)


def stream(n, size=37):
    """The first n rows of the stream as float64 of bfloat16, and token ids."""
    parts = [batch(i, size) for i in range(-(-n // size))]
    rows = {name: np.concatenate([a[name] for a, _ in parts])[:n].astype(ml_dtypes.bfloat16) for name in HOOKS}
    return rows, {key: np.concatenate([t[key] for _, t in parts])[:n] for key in parts[0][1]}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "s"
    write(path)
    return path


@pytest.mark.parametrize(
    ("n_tokens", "available"), [(1000, 10**9), (256, 10**9), (5, 10**9), (1000, 700), (1000, 512), (10**6, 3)]
)
def test_round_trip_keeps_every_row_with_its_tokens_and_permutes_within_shards(tmp_path, n_tokens, available):
    write(tmp_path / "s", n_tokens, available=available)
    n = min(n_tokens, available)
    reader = StoreReader.open(tmp_path / "s")
    assert reader.n_tokens == n and reader.hook_points == HOOKS and reader.identity == IDENTITY
    assert verify(tmp_path / "s") == []
    rows = reader.rows(0, n, metadata=True)
    expected, tokens = stream(n)
    original = rows["token_id"] // 3  # which row of the stream is stored here
    assert np.array_equal(original // 128, np.arange(n) // 128)
    assert np.array_equal(np.sort(original), np.arange(n))
    assert n < 10 or not np.array_equal(original, np.arange(n))
    for name in HOOKS:
        assert np.array_equal(bits(rows[name]), bits(expected[name][original]))
    for key in tokens:
        assert np.array_equal(rows[key], tokens[key][original]) and rows[key].dtype == np.int32


def test_a_part_of_the_rows_and_of_the_hook_points(store):
    whole = StoreReader.open(store).rows(0, 1000)
    reader = StoreReader.open(store, ["blocks.10.mlp_out"])
    assert list(reader.hook_points) == ["blocks.10.mlp_out"]
    part = reader.rows(100, 700)
    assert list(part) == ["blocks.10.mlp_out"]
    assert np.array_equal(bits(part["blocks.10.mlp_out"]), bits(whole["blocks.10.mlp_out"][100:700]))
    assert reader.rows(3, 3)["blocks.10.mlp_out"].shape == (0, 5)
    with pytest.raises(DataError, match="rows 0 to 1000"):
        reader.rows(0, 1001)


def test_all_zero_rows_are_rows_and_not_missing_data(tmp_path):
    with StoreWriter.open(tmp_path / "s", identity={}, hook_points={"h": 4}, n_tokens=300, layout=LAYOUT) as writer:
        zeros = np.zeros(300, np.int32)
        tokens = {"token_id": zeros, "document": zeros, "position": zeros}
        writer.append({"h": np.zeros((300, 4), ml_dtypes.bfloat16)}, tokens, cursor={})
        writer.finish()
    assert not StoreReader.open(tmp_path / "s").rows(0, 300)["h"].any() and verify(tmp_path / "s") == []


def test_a_memory_store_works_like_a_folder(store):
    write("memory://test-store/s")
    assert verify("memory://test-store/s") == []
    one, two = StoreReader.open("memory://test-store/s").rows(0, 1000), StoreReader.open(store).rows(0, 1000)
    assert all(np.array_equal(bits(one[name]), bits(two[name])) for name in HOOKS)


def test_statistics_against_float64(store):
    reader = StoreReader.open(store)
    rows, _ = stream(1000)
    for name in HOOKS:
        x, got = rows[name].astype(np.float64), reader.statistics[name]
        norms = np.linalg.norm(x, axis=1)
        assert got.count == 1000
        np.testing.assert_allclose(got.mean, x.mean(0), rtol=1e-12)
        np.testing.assert_allclose(got.mean_norm, norms.mean(), rtol=1e-12)
        np.testing.assert_allclose(got.mean_squared_norm, (norms**2).mean(), rtol=1e-12)
        np.testing.assert_allclose(got.total_variance, x.var(0).sum(), rtol=1e-10)
    batches = -(-1000 // 37)
    assert reader.counters == {"seen": 37 * batches, "batches": batches}


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 3000), key=st.integers(0, 2**128 - 1))
def test_permute_is_a_bijection(n, key):
    out = permute(np.arange(n), n, key)
    assert np.array_equal(np.sort(out), np.arange(n))
    assert permute(n // 2, n, key) == out[n // 2]


def test_permute_of_a_huge_range_and_of_small_ones():
    index = np.arange(1000) * 4_000_000_000_000
    out = permute(index, 1 << 62, 5)
    assert len(np.unique(out)) == 1000 and out.min() >= 0 and out.max() < 1 << 62
    seen = {tuple(permute(np.arange(4), 4, key)) for key in range(600)}
    assert len(seen) == 24  # every order of four comes up
    first = np.bincount([int(permute(0, 10, key)) for key in range(2000)], minlength=10)
    assert first.min() > 130 and first.max() < 280
    for bad in (-1, 4):
        with pytest.raises(ConfigError):
            permute(np.array([bad]), 4, 0)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 700), chunk=st.integers(1, 40), block=st.integers(1, 9), seed=st.integers(0, 2**63))
def test_every_epoch_visits_each_row_once_and_blocks_have_their_place(n, chunk, block, seed):
    order = EpochOrder(n, chunk, block, seed)
    for epoch in (0, 1):
        rows = []
        for b in range(order.blocks):
            ids = np.concatenate([np.arange(c * chunk, min(n, (c + 1) * chunk)) for c in order.chunks((epoch, b))])
            assert len(ids) == order.size((epoch, b)) == min(n, (b + 1) * block * chunk) - b * block * chunk
            rows.append(ids[order.rows((epoch, b))])
        assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(n))


def test_the_order_is_the_same_for_ever():
    """Golden values: changing them silently would change every resumed run."""
    order = EpochOrder(100, 8, 4, 11)
    assert permute(np.arange(8), 8, 1).tolist() == [6, 3, 0, 2, 7, 5, 4, 1]
    assert order.chunks((2, 0)).tolist() == [7, 8, 0, 2]
    assert order.rows((2, 0))[:6].tolist() == [28, 25, 16, 9, 27, 6]


def test_batches_visit_each_row_once_an_epoch_across_borders(store):
    reader = StoreReader.open(store)
    batches = Batches(reader, 30, seed=1, block_chunks=4)  # blocks of 64 rows, epochs of 1000
    rows = [batches.batch_at(step) for step in range(100)]  # three epochs
    whole = reader.rows(0, 1000)
    for name in HOOKS:
        taken = np.concatenate([bits(b[name]) for b in rows])
        expected = np.sort(bits(whole[name]), axis=0)
        orders = [taken[e * 1000 : (e + 1) * 1000] for e in range(3)]
        for epoch in orders:
            assert np.array_equal(np.sort(epoch, axis=0), expected)
        assert not np.array_equal(orders[0], orders[1])


def test_hook_points_of_a_batch_stay_aligned(store):
    rows, _ = stream(1000)
    first, second = HOOKS
    partner = {bits(a).tobytes(): bits(b).tobytes() for a, b in zip(rows[first], rows[second], strict=True)}
    got = Batches(StoreReader.open(store), 50, seed=4, block_chunks=8).batch_at(7)
    for a, b in zip(got[first], got[second], strict=True):
        assert partner[a.tobytes()] == b.tobytes()


@pytest.mark.parametrize("batch_size", [1, 30, 64, 900, 2500])
def test_iterate_equals_batch_at_from_any_step_and_slices_make_the_global_batch(store, batch_size):
    reader = StoreReader.open(store)
    reference = [Batches(reader, batch_size, seed=1, block_chunks=4).batch_at(step) for step in range(6)]
    for start in (0, 1, 4):
        running = Batches(reader, batch_size, seed=1, block_chunks=4).iterate(start)
        for expected in reference[start:]:
            got = next(running)
            assert all(np.array_equal(bits(got[name]), bits(expected[name])) for name in HOOKS)
    world = 2 if batch_size % 2 == 0 else 1
    part = batch_size // world
    slices = [Batches(reader, batch_size, 1, 4, (r * part, (r + 1) * part)) for r in range(world)]
    for step, expected in enumerate(reference):
        parts = [part.batch_at(step) for part in slices]
        for name in HOOKS:
            assert np.array_equal(bits(np.concatenate([p[name] for p in parts])), bits(expected[name]))


@pytest.mark.parametrize("shares", [2, 4, 8])
def test_shares_make_the_same_batches_for_any_number_of_readers_and_spare_them_the_others_chunks(store, shares):
    """1000 rows are 62 chunks of 16 and 8 rows; a reader of whole shares reads their chunks alone."""
    reader, batch_size = StoreReader.open(store), 40
    whole = Batches(reader, batch_size, 1, 8, shares=shares)
    expected = [whole.batch_at(step) for step in range(60)]
    for rank, world in itertools.chain.from_iterable([(r, w) for r in range(w)] for w in {1, 2, shares}):
        part, own, read = batch_size // world, StoreReader.open(store), set()
        pieces = own.read_pieces

        def noted(name, wanted, pieces=pieces, read=read):
            read.update(low // 16 for low, _ in wanted)
            return pieces(name, wanted)

        own.read_pieces = noted
        mine = Batches(own, batch_size, 1, 8, (rank * part, (rank + 1) * part), shares=shares)
        for step, batch in enumerate(expected):
            got = mine.batch_at(step)
            for name in HOOKS:
                assert np.array_equal(bits(got[name]), bits(batch[name][rank * part : (rank + 1) * part]))
        assert {chunk % shares for chunk in read} == set(range(rank * shares // world, (rank + 1) * shares // world))
        again = mine.whole_batch_at(3)
        assert all(np.array_equal(bits(again[name]), bits(expected[3][name])) for name in HOOKS)


def test_every_share_visits_its_rows_once_an_epoch(store):
    reader, shares = StoreReader.open(store), 4
    batches = Batches(reader, 40, 1, 8, shares=shares)
    taken = [[] for _ in range(shares)]
    for step in range(26):
        rows = bits(batches.batch_at(step)[next(iter(HOOKS))])
        for share in range(shares):
            taken[share].append(rows[share * 10 : (share + 1) * 10])
    sizes = [16 * 16, 16 * 16, 15 * 16 + 8, 15 * 16]  # chunks 0, 4, ...; the ragged one, 62, is of share 2
    seen = [np.concatenate(rows)[:size] for rows, size in zip(taken, sizes, strict=True)]
    whole = bits(reader.rows(0, 1000)[next(iter(HOOKS))])
    assert sorted(map(bytes, np.concatenate(seen))) == sorted(map(bytes, whole))
    owner = {bytes(row): i // 16 % shares for i, row in enumerate(whole)}
    assert all({owner[bytes(row)] for row in rows} == {share} for share, rows in enumerate(seen))


def test_of_one_share_only_the_wanted_rows_are_held(store):
    batches = Batches(StoreReader.open(store), 40, 1, 8, (10, 20))
    batches.batch_at(0)
    (block,) = batches._shares[0]._blocks.values()
    assert {len(rows) for rows in block.result().values()} == {30}  # rows 10 to 19, 50 to 59, 90 to 99 of 128


def test_at_most_three_blocks_are_kept(store):
    batches = Batches(StoreReader.open(store), 64, seed=0, block_chunks=2)
    running = batches.iterate()
    for _ in range(40):
        next(running)
        assert len(batches._shares[0]._blocks) <= 3
    locate, blocks = batches._shares[0]._order.locate, batches._shares[0]._blocks
    used = [locate(40 * 64 - 1)[0], locate(40 * 64 - 1 + 32)[0]]
    assert all(key in blocks for key in used)  # the current one, and the next is on its way


def test_batches_refuse_impossible_sizes(store):
    reader = StoreReader.open(store)
    for size, part in [(0, None), (10, (0, 11)), (10, (2, 2)), (10, (-1, 2))]:
        with pytest.raises(ConfigError, match="batch_size"):
            Batches(reader, size, 0, rows=part)
    for shares in (0, 3, 400):
        with pytest.raises(ConfigError, match=rf"{shares} shares of a store of \d+ chunks"):
            Batches(reader, 400, 0, shares=shares)
    with pytest.raises(ConfigError, match="block_chunks"):
        Batches(reader, 8, 0, block_chunks=0)
    with pytest.raises(ConfigError, match="step=-1"):
        Batches(reader, 8, 0).batch_at(-1)


@pytest.mark.parametrize("size", [37, 128, 300, 64])
@pytest.mark.parametrize("available", [10**9, 700, 640])
def test_interrupted_captures_leave_the_same_bytes(tmp_path, size, available):
    write(tmp_path / "whole", size=size, available=available)
    runs = 1
    while not write(tmp_path / "broken", size=size, available=available, stop_after=max(2, 300 // size + 1)):
        runs += 1
        assert runs < 30
    assert runs > 1
    assert contents(tmp_path / "whole") == contents(tmp_path / "broken")


@pytest.mark.parametrize("shard", range(8))
def test_a_batch_of_several_shards_is_resumed_in_its_middle(tmp_path, shard):
    """Batches of 300 rows over shards of 128: the resumed rest of a batch fills further shards."""
    write(tmp_path / "whole", size=300)
    write(tmp_path / "broken", size=300)
    (tmp_path / "broken" / "commits" / f"{shard:06d}.json").unlink()
    write(tmp_path / "broken", size=300, stop_after=1)
    write(tmp_path / "broken", size=300)
    assert contents(tmp_path / "whole") == contents(tmp_path / "broken")


def test_a_finished_store_stays_as_it_is(tmp_path):
    write(tmp_path / "s")
    before = contents(tmp_path / "s")
    writer = StoreWriter.open(
        tmp_path / "s", identity=IDENTITY, hook_points=HOOKS, n_tokens=1000, layout=LAYOUT, seed=3
    )
    assert writer.complete and writer.full and writer.resume is None and writer.committed_rows == 1000
    assert writer.counters["batches"] == -(-1000 // 37)
    writer.finish()
    assert contents(tmp_path / "s") == before


def test_two_seeds_permute_differently(tmp_path, store):
    write(tmp_path / "s", seed=4)
    one, two = StoreReader.open(store), StoreReader.open(tmp_path / "s")
    assert not np.array_equal(one.array_rows("token_id", 0, 128), two.array_rows("token_id", 0, 128))


def test_rows_that_cannot_be_stored_are_refused_whole(tmp_path):
    def opened():
        return StoreWriter.open(tmp_path / "s", identity={}, hook_points={"h": 4}, n_tokens=300, layout=LAYOUT)

    tokens = {key: np.arange(3) for key in ("token_id", "document", "position")}
    good = np.ones((3, 4), np.float32)
    for value, name in [(np.nan, "h"), (np.inf, "h"), (3.4e38, "h")]:  # the last one rounds to infinity
        bad = good.copy()
        bad[1, 2] = value
        with opened() as writer, pytest.raises(DataError, match=f"'{name}' has 1 values that are not finite"):
            writer.append({"h": bad}, tokens, cursor={})
        assert writer.rows == 0
    cases = [
        ({"h": good[:, :3]}, tokens, "shape"),
        ({"h": good.astype(int)}, tokens, "float dtype"),
        ({"g": good}, tokens, "hook points"),
        ({"h": good}, tokens | {"position": np.arange(4)}, "position"),
        ({"h": good}, tokens | {"document": np.arange(3) + 2**31}, "int32"),
    ]
    for activations, given_tokens, message in cases:
        with opened() as writer, pytest.raises(DataError, match=message):
            writer.append(activations, given_tokens, cursor={})


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a..b", "a/b", "/abs", "a\\b", "a b", "token_id", "a\n", "é"]
)
def test_names_that_could_leave_their_folder_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="Hook point name"):
        StoreWriter.open(tmp_path / "s", identity={}, hook_points={name: 4}, n_tokens=10)
    assert not (tmp_path / "s").exists()


def test_layouts_and_sizes_that_cannot_be_are_refused(tmp_path):
    for sizes in [(100, 16), (0, 16), (16, 0), (1 << 25, 256), (16, 2.0)]:
        with pytest.raises(ConfigError, match="chunk_rows"):
            StoreLayout(*sizes)
    for hooks, n in [({}, 10), ({"h": 0}, 10), ({"h": 1 << 30}, 10), ({"h": 4}, 0)]:
        with pytest.raises(ConfigError):
            StoreWriter.open(tmp_path / "s", identity={}, hook_points=hooks, n_tokens=n)


def test_another_identity_is_refused_key_by_key(tmp_path):
    write(tmp_path / "s", stop_after=10)
    before = contents(tmp_path / "s")
    other = {"model": {"name": "large", "revision": "abc"}, "context": 64}
    with pytest.raises(DataError) as caught:
        StoreWriter.open(tmp_path / "s", identity=other, hook_points={"h": 4}, n_tokens=7, layout=LAYOUT, seed=9)
    message = str(caught.value)
    assert "identity.model.name: the store has 'tiny', this run wants 'large'" in message
    assert "requested_tokens: the store has 1000, this run wants 7" in message
    assert "seed: the store has 3, this run wants 9" in message and "hook_points.h" in message
    assert "revision" not in message and "Choose another store path" in message
    assert contents(tmp_path / "s") == before


def test_a_reader_refuses_what_it_was_not_asked_for(store, tmp_path):
    StoreReader.open(store, expect={"model": {"name": "tiny"}})
    with pytest.raises(DataError) as caught:
        StoreReader.open(store, expect={"model": {"name": "large"}, "context": 64, "dtype": "x"})
    message = str(caught.value)
    assert "model.name: the store has 'tiny', this run wants 'large'" in message
    assert "dtype: the store has nothing" in message and "context" not in message
    with pytest.raises(DataError, match=r"no hook point blocks\.9; it has: blocks\.10"):
        StoreReader.open(store, ["blocks.9"])
    with pytest.raises(DataError, match="no store at"):
        StoreReader.open(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_an_unfinished_store_says_how_far_it_is(tmp_path):
    assert not write(tmp_path / "s", stop_after=10)
    with pytest.raises(DataError, match=r"256 of 1,000 tokens .*\. Run the command that made the store again"):
        StoreReader.open(tmp_path / "s")
    assert len(verify(tmp_path / "s")) == 1


def test_a_resumed_capture_must_start_at_its_cursor(tmp_path):
    write(tmp_path / "s", stop_after=10)
    with StoreWriter.open(
        tmp_path / "s", identity=IDENTITY, hook_points=HOOKS, n_tokens=1000, layout=LAYOUT, seed=3
    ) as writer:
        assert (writer.resume, writer.to_skip) == ({"batch": 6}, 256 - 6 * 37)
        activations, tokens = batch(7, 37)
        for _ in range(2):
            with pytest.raises(DataError, match="continues at cursor"):
                writer.append(activations, tokens, cursor={"batch": 7})


@needs_torch
def test_tensors_of_torch_are_stored_as_the_numbers_that_they_hold(tmp_path):
    rows = np.random.default_rng(0).normal(size=(20, 4)).astype(ml_dtypes.bfloat16)
    ids = {name: torch.arange(20) for name in METADATA_NAMES}
    how = {"identity": {}, "hook_points": {"h": 4}, "n_tokens": 20, "layout": LAYOUT}
    for place, values in (("numpy", rows), ("torch", torch.from_numpy(rows.astype(np.float32)).bfloat16())):
        with StoreWriter.open(tmp_path / place, **how) as writer:
            writer.append({"h": values}, ids, cursor={})
            writer.finish()
    one, other = (StoreReader.open(tmp_path / place) for place in ("numpy", "torch"))
    assert one.fingerprint == other.fingerprint


def test_a_second_writer_is_refused_at_once(tmp_path):
    arguments = {"identity": {}, "hook_points": {"h": 4}, "n_tokens": 10, "layout": LAYOUT}
    with StoreWriter.open(tmp_path / "s", **arguments), pytest.raises(BusyError, match="another process"):
        StoreWriter.open(tmp_path / "s", **arguments)
    StoreWriter.open(tmp_path / "s", **arguments).close()


def test_a_text_without_rows_is_an_error(tmp_path):
    with pytest.raises(DataError, match="not one row"):
        write(tmp_path / "s", available=0)


def test_batches_without_rows_count_and_end_a_store(tmp_path):
    none = {key: np.arange(0) for key in ("token_id", "document", "position")}
    full = {key: np.arange(128) for key in none}

    def run(path, steps):
        with StoreWriter.open(path, identity={}, hook_points={"h": 4}, n_tokens=999, layout=LAYOUT) as writer:
            start = (writer.resume or {"batch": 0})["batch"]
            for index in range(start, steps):
                n, tokens = (128, full) if index == 0 else (0, none)
                writer.append(
                    {"h": np.ones((n, 4), np.float32)}, tokens, cursor={"batch": index}, counters={"dropped": 5}
                )
            if steps == 3:
                writer.finish()

    run(tmp_path / "whole", 3)
    run(tmp_path / "broken", 2)
    run(tmp_path / "broken", 3)
    assert contents(tmp_path / "whole") == contents(tmp_path / "broken")
    reader = StoreReader.open(tmp_path / "whole")
    assert reader.n_tokens == 128 and reader.counters == {"dropped": 15}


def test_blocks_read_ahead_change_no_batch(store):
    plain = Batches(StoreReader.open(store), 100, seed=1, block_chunks=2).iterate(3)
    deep = Batches(StoreReader.open(store), 100, seed=1, block_chunks=2, ahead=5).iterate(3)
    for _ in range(25):
        one, two = next(plain), next(deep)
        assert all((one[name] == two[name]).all() for name in one)
    with pytest.raises(ConfigError, match="ahead"):
        Batches(StoreReader.open(store), 100, seed=1, ahead=0)
