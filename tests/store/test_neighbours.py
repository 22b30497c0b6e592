"""Batches of neighbours: which windows an epoch has, against a search token by token; order, shares, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from saejax.core.errors import ConfigError
from saejax.store import ArrayRows, Batches, ImportConfig, StoreLayout, StoreReader, StoreWriter, import_files, merge
from saejax.store.neighbours import block_rows, runs

HOOKS = {"a": 4, "b": 3}
ROWS = 900
LAYOUT = StoreLayout(128, 16)


def text(rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Documents of 1 to 60 tokens, cut into pieces whose positions begin again, with tokens that were not stored."""
    rng, document, position = np.random.default_rng(seed), [], []
    while len(document) < rows:
        pieces = [int(length) for length in rng.integers(1, 31, rng.integers(1, 3))]
        here = np.concatenate([np.arange(1, length + 1) for length in pieces])
        here = here[rng.random(len(here)) > 0.04]
        document += [len(set(document)) * 3 + 5] * len(here)
        position += here.tolist()
    return np.array(document[:rows]), np.array(position[:rows])


def write(path: Path, layout: StoreLayout = LAYOUT, seed: int = 0, part: int = 0, parts: int = 1) -> Path:
    document, position = text(seed=seed + part)
    x = np.random.default_rng(seed).normal(size=(ROWS, 7)).astype(np.float32)
    with StoreWriter.open(
        path, identity={"m": 1}, hook_points=HOOKS, n_tokens=ROWS, layout=layout, seed=3, part=part, parts=parts
    ) as writer:
        # Of several parts none is full: their last shards are ragged.
        for start in range(0, ROWS // parts - 20 * (parts > 1), 37):
            rows = slice(start, min(start + 37, ROWS))
            tokens = {"token_id": np.arange(ROWS)[rows], "document": document[rows], "position": position[rows]}
            writer.append({"a": x[rows, :4], "b": x[rows, 4:]}, tokens, cursor={"start": start})
        writer.finish()
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("neighbours") / "s")


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16)


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(bits(one[name]), bits(other[name])) for name in one)


def tokens_of(reader: StoreReader) -> list[tuple[int, int, int]]:
    """(document, position, shard) of every row in stored order."""
    names = ("document", "position")
    columns = [reader.array_rows(name, 0, reader.n_tokens).tolist() for name in names]
    shard = np.searchsorted(reader.shard_starts, np.arange(reader.n_tokens), "right") - 1
    return list(zip(*columns, shard.tolist(), strict=True))


def searched(reader: StoreReader, n: int, shift: int, limit: int = 10**9) -> set[tuple[int, ...]]:
    """Every window of n rows, token by token in the order of the text; numbers of rows as stored."""
    tokens, found = tokens_of(reader), set()
    for shard, start in enumerate(reader.shard_starts[:-1].tolist()):
        run: list[int] = []
        for row in (start + reader.stream_places(shard))[: max(0, limit - start)].tolist():
            (document, position, _) = tokens[row]
            follows = bool(run) and tokens[run[-1]][:2] == (document, position - 1)
            run = [*run, row] if follows else [row]
            if len(run) >= n + shift and (len(run) - shift) % n == 0:
                found.add(tuple(run[-n:]))
    return found


def epochs(batches: Batches, n: int, steps: int) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
    """(epoch, its windows in order) of the first `steps` batches; the last epoch is not whole."""
    at = [batches.places(step) for step in range(steps)]
    epoch, row = (np.concatenate([one[name] for one in at]).reshape(-1, n) for name in ("epoch", "row"))
    assert (epoch == epoch[:, :1]).all()
    for number in range(int(epoch.max())):
        yield number, [tuple(window) for window in row[epoch[:, 0] == number].tolist()]


@pytest.mark.parametrize("n", [2, 5])
def test_an_epoch_has_every_window_once_and_the_next_ones_begin_elsewhere(store: Path, n: int) -> None:
    reader = StoreReader.open(store)
    batches = Batches(reader, 4 * n, seed=1, block_chunks=2, neighbours=n)
    wanted = [searched(reader, n, shift) for shift in range(n)]
    seen = set()
    for _, windows in epochs(batches, n, 8 * ROWS // (4 * n)):
        assert len(set(windows)) == len(windows)
        (shift,) = [shift for shift in range(n) if wanted[shift] == set(windows)]
        seen.add(shift)
    assert len(seen) > 1
    mean = np.mean([n * len(windows) for windows in wanted])
    assert batches.epoch_rows == round(mean) and batches.used == pytest.approx(mean / ROWS)
    assert 0.5 < batches.used < 1


def test_the_rows_of_a_batch_are_those_of_its_places_in_every_hook_point(store: Path) -> None:
    reader = StoreReader.open(store)
    batches, every, tokens = Batches(reader, 12, 1, neighbours=3), reader.rows(0, ROWS), tokens_of(reader)
    for step in (0, 11, 150):
        row = batches.places(step)["row"]
        assert same(batches.batch_at(step), {name: every[name][row] for name in HOOKS})
        for window in row.reshape(-1, 3):
            (document, first, shard) = tokens[window[0]]
            assert [tokens[i] for i in window] == [(document, first + j, shard) for j in range(3)]


def test_the_order_is_the_same_for_ever(store: Path) -> None:
    """Golden values: changing them silently would change every resumed run."""
    batches = Batches(StoreReader.open(store), 8, seed=1, block_chunks=2, neighbours=2)
    assert batches.places(0)["row"].tolist() == [700, 699, 530, 596, 512, 567, 78, 111]
    assert batches.places(300)["row"].tolist() == [71, 41, 528, 524, 759, 668, 25, 0]


def test_any_start_and_any_slice_give_the_same_batches(store: Path) -> None:
    reader = StoreReader.open(store)
    whole = Batches(reader, 24, 1, 2, neighbours=2)
    expected = [whole.batch_at(step) for step in range(80)]
    for start in (0, 33, 79):
        running = Batches(reader, 24, 1, 2, ahead=3, neighbours=2).iterate(start)
        assert all(same(next(running), batch) for batch in expected[start:])
    halves = [Batches(reader, 24, 1, 2, rows, neighbours=2) for rows in ((0, 8), (8, 24))]
    for step in (0, 40, 79):
        parts = [half.batch_at(step) for half in halves]
        assert same({name: np.concatenate([part[name] for part in parts]) for name in HOOKS}, expected[step])
        assert same(halves[0].whole_batch_at(step), expected[step])
    assert not same(Batches(reader, 24, 2, 2, neighbours=2).batch_at(0), expected[0])
    assert len(halves[0]._shares[0]._blocks) <= 3


@pytest.mark.parametrize("shares", [2, 4])
def test_shares_deal_out_whole_shards(store: Path, shares: int) -> None:
    reader, read = StoreReader.open(store), set()
    whole = Batches(StoreReader.open(store), 16, 1, 2, shares=shares, neighbours=2)
    part, pieces = 16 // shares, reader.read_pieces

    def noted(name: str, wanted: Any) -> Any:
        read.update(low // LAYOUT.shard_rows for low, _ in wanted)
        return pieces(name, wanted)

    reader.read_pieces = noted  # type: ignore[method-assign]
    mine = Batches(reader, 16, 1, 2, (part, 2 * part), shares=shares, neighbours=2)
    for step in range(60):
        want = {name: rows[part : 2 * part] for name, rows in whole.batch_at(step).items()}
        assert same(mine.batch_at(step), want)
    assert {shard % shares for shard in read} == {1}


def test_a_batch_has_windows_of_many_documents_and_shards(store: Path) -> None:
    """Of 64 windows of four mixed shards hardly two stand together."""
    reader = StoreReader.open(store)
    batches, tokens = Batches(reader, 128, 1, 2, neighbours=2), tokens_of(reader)
    rows = batches.places(0)["row"].reshape(-1, 2)[:, 0]
    documents, shards = ({tokens[row][i] for row in rows} for i in (0, 2))
    assert len(documents) >= 15 and len(shards) == 4


def test_max_rows_are_the_first_of_the_text(store: Path) -> None:
    reader = StoreReader.open(store)
    batches = Batches(reader, 4, 1, max_rows=200, neighbours=2)
    wanted = [searched(reader, 2, shift, limit=200) for shift in range(2)]
    for _, windows in epochs(batches, 2, 200):
        assert set(windows) in wanted
    assert batches.epoch_rows == sum(map(len, wanted))


def test_stores_of_int8_of_several_parts_and_merged_ones(tmp_path: Path, store: Path) -> None:
    int8 = write(tmp_path / "int8", StoreLayout(128, 16, "int8"))
    plain, eighth = (Batches(StoreReader.open(path), 8, 1, neighbours=2) for path in (store, int8))
    assert np.array_equal(plain.places(9)["row"], eighth.places(9)["row"])
    assert np.allclose(plain.batch_at(9)["a"].astype(float), eighth.batch_at(9)["a"].astype(float), atol=0.05)
    for part in (1, 0):
        write(tmp_path / "parts", part=part, parts=2)
    merge(tmp_path / "merged", [store, tmp_path / "parts"])
    for name in ("parts", "merged"):
        reader = StoreReader.open(tmp_path / name)
        batches = Batches(reader, 8, 1, neighbours=2)
        wanted = [searched(reader, 2, shift) for shift in range(2)]
        found = [set(windows) for _, windows in epochs(batches, 2, 400)]
        assert found and all(windows in wanted for windows in found)
        every, row = reader.rows(0, reader.n_tokens), batches.places(5)["row"]
        assert same(batches.batch_at(5), {hook: every[hook][row] for hook in HOOKS})


def test_imported_rows_need_their_places(tmp_path: Path) -> None:
    document, position = text(200)
    rows = {"x": np.ones((200, 4), np.float32)}
    save_file(rows, tmp_path / "bare.safetensors")
    save_file(rows | {"document": document, "position": position}, tmp_path / "placed.safetensors")
    for name in ("bare", "placed"):
        config = ImportConfig(hook_point="h", layout=LAYOUT)
        import_files(tmp_path / name, [tmp_path / f"{name}.safetensors"], config)
    assert Batches(StoreReader.open(tmp_path / "placed"), 8, 0, neighbours=2).used > 0.5
    merge(tmp_path / "both", [tmp_path / "placed", tmp_path / "bare"])
    for name in ("bare", "both"):
        with pytest.raises(ConfigError, match=r"no document and position\. Add them as columns"):
            Batches(StoreReader.open(tmp_path / name), 8, 0, neighbours=2)


def test_what_cannot_be_dealt_out_in_windows_is_refused(store: Path) -> None:
    reader = StoreReader.open(store)
    for size, how in ((9, {}), (8, {"rows": (1, 4)}), (12, {"shares": 4}), (8, {"shares": 0})):
        with pytest.raises(ConfigError, match=r"train\.neighbours=2: .* would cut a window of 2 tokens"):
            Batches(reader, size, 0, neighbours=2, **how)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"train\.shares=16 .* the store has 8"):
        Batches(reader, 32, 0, shares=16, neighbours=2)
    with pytest.raises(ConfigError, match=r"has no 200 neighbouring tokens \(train\.neighbours\)"):
        Batches(reader, 400, 0, neighbours=200)
    with pytest.raises(ConfigError, match="arrays do not say it"):
        Batches(ArrayRows({"x": np.ones((64, 4), np.float32)}), 8, 0, neighbours=2)


def test_runs_end_at_gaps_at_documents_and_at_rows_of_none() -> None:
    first, length = runs(np.array([3, 3, 3, 4, 4, -1, -1, 9]), np.array([1, 2, 4, 5, 6, 7, 8, 9]))
    assert (first.tolist(), length.tolist()) == ([0, 2, 3, 5, 6, 7], [2, 1, 2, 1, 1, 1])
    assert [part.tolist() for part in runs(np.zeros(0, np.int32), np.zeros(0, np.int32))] == [[], []]


def test_the_rows_of_a_block() -> None:
    assert block_rows(1, 64, StoreLayout(32_768, 256)) == 64 * 256
    assert block_rows(2, 64, StoreLayout(32_768, 256)) == 4 * 32_768
    assert block_rows(2, 64, StoreLayout(2048, 256)) == 8 * 2048
