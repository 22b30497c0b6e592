"""Stores of int8 with one scale a row: what comes back, and that all that holds of a store holds of them."""

import ml_dtypes
import numpy as np
import pytest
from tiny import fill, planted_experiment

from saejax.app.stages import run_train
from saejax.app.workspace import Workspace
from saejax.capture import CaptureConfig
from saejax.core.errors import ConfigError, DataError
from saejax.store import Batches, ImportConfig, StoreLayout, StoreReader, StoreWriter, import_files, merge, verify
from saejax.store.manifest import Header
from saejax.store.quantize import expanded, quantized
from saejax.store.space import predicted_bytes
from saejax.store.statistics import moments, sums_of

BF16 = np.dtype(ml_dtypes.bfloat16)
HOOKS = {"a": 24, "b": 5}
INT8 = StoreLayout(128, 16, "int8")


def activations(index, size):
    rng = np.random.default_rng([5, index])
    rows = np.arange(index * size, (index + 1) * size)
    values = {name: (rng.normal(1, 3, (size, d)) * 10 ** rng.uniform(-3, 3, (size, 1))) for name, d in HOOKS.items()}
    return values, {"token_id": rows, "document": rows // 50, "position": rows % 50}


def write(path, n=700, layout=INT8, stop_after=None, first=0, parts=1, part=0):
    with StoreWriter.open(
        path, identity={"model": "m"}, hook_points=HOOKS, n_tokens=n, layout=layout, seed=3, part=part, parts=parts
    ) as writer:
        fill(writer, lambda index: activations(index + first, 37), 37, 10**9, stop_after)
    return path


def bits(rows):
    return {name: values.view(np.uint16) if values.dtype == BF16 else values for name, values in rows.items()}


def same(left, right):
    return all(np.array_equal(bits(left)[name], bits(right)[name]) for name in left | right)


def files(path):
    return {f.relative_to(path): f.read_bytes() for f in path.rglob("*") if f.is_file() and f.name != ".lock"}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("int8")
    return write(folder / "int8"), write(folder / "bf16", layout=StoreLayout(128, 16))


def test_every_number_is_within_half_a_scale_and_a_rounding_of_the_exact_one():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(600, 40)) * 10 ** rng.uniform(-30, 30, (600, 1))).astype(BF16)
    x[7] = 0
    x[8] = ml_dtypes.finfo(BF16).max
    q, scale = quantized(x)
    exact = x.astype(np.float64)
    step = np.abs(exact).max(1, keepdims=True) / 127
    assert q.dtype == np.int8 and np.abs(q.astype(int)).max() == 127 and scale[7] == 0
    assert np.allclose(scale, step[:, 0], rtol=1e-6)
    off = np.abs(expanded(q, scale).astype(np.float64) - exact)
    assert (off <= step * 0.5001 + np.abs(exact + step) * 2**-8).all()


def test_rows_that_came_back_once_come_back_unchanged():
    x = np.random.default_rng(1).standard_t(2, (2000, 64)).astype(BF16)
    q, scale = quantized(x)
    again, same_scale = quantized(expanded(q, scale))
    assert np.array_equal(q, again) and np.array_equal(scale, same_scale)


def test_a_store_gives_the_expanded_rows_in_the_order_of_a_bfloat16_store(stores):
    int8, bf16 = map(StoreReader.open, stores)
    exact = bf16.rows(0, 700, metadata=True)
    expected = {name: expanded(*quantized(exact[name])) for name in HOOKS}
    found = int8.rows(0, 700, metadata=True)
    assert same(found, exact | expected) and int8.dtype == BF16
    assert verify(stores[0]) == []
    one, two = (Batches(reader, 48, seed=2, block_chunks=8) for reader in (int8, bf16))
    for step in (0, 5, 40):
        x = two.batch_at(step)
        assert same(one.batch_at(step), {name: expanded(*quantized(x[name])) for name in HOOKS})
    part = Batches(int8, 48, seed=2, block_chunks=8, rows=(16, 32)).batch_at(5)
    assert same(part, {name: rows[16:32] for name, rows in one.batch_at(5).items()})


def test_statistics_are_of_the_rows_that_are_read(stores):
    reader = StoreReader.open(stores[0], ["a"])
    exact = moments(sums_of(reader.rows(0, 700)["a"].astype(np.float64)))
    assert np.allclose(reader.statistics["a"].mean, exact.mean, rtol=1e-12)
    assert reader.statistics["a"].mean_squared_norm == pytest.approx(exact.mean_squared_norm, rel=1e-12)


def test_an_interrupted_store_ends_with_the_same_bytes(tmp_path, stores):
    write(tmp_path / "s", stop_after=8)
    write(tmp_path / "s")
    assert files(tmp_path / "s") == files(stores[0])
    for part in (1, 0):
        write(tmp_path / "parts", part=part, parts=2, first=100 * part)
    assert verify(tmp_path / "parts") == [] and StoreReader.open(tmp_path / "parts").n_tokens == 700


def test_damage_of_values_and_of_scales_is_found_and_named(tmp_path):
    for name in ("a", "a.scale"):
        path = write(tmp_path / name)
        file = next(f for f in sorted((path / "arrays" / name / "c").rglob("*")) if f.is_file())
        raw = bytearray(file.read_bytes())
        raw[9] ^= 4
        file.write_bytes(raw)
        assert any(name in problem for problem in verify(path))
        with pytest.raises(DataError, match=f"{name}'.*shard 0"):
            StoreReader.open(path).rows(0, 100)


def test_a_merge_loses_nothing_and_takes_bfloat16_where_one_source_has_it(tmp_path, stores):
    other = write(tmp_path / "other", first=50)
    merge(tmp_path / "both", [stores[0], other])
    merged = StoreReader.open(tmp_path / "both")
    assert merged.layout.dtype == "int8"
    rows = merged.rows(0, 1400)
    before = [StoreReader.open(path).rows(0, 700) for path in (stores[0], other)]
    for name in HOOKS:
        sources = np.concatenate([r[name] for r in before]).view(np.uint16)
        assert np.array_equal(np.unique(rows[name].view(np.uint16), axis=0), np.unique(sources, axis=0))
    merge(tmp_path / "mixed", [other, stores[1]])
    assert StoreReader.open(tmp_path / "mixed").layout == StoreLayout(128, 16)


def test_an_import_as_int8_is_half_as_large_and_as_large_as_predicted(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(4096, 256)).astype(np.float32))
    sizes = {}
    for dtype in ("bfloat16", "int8"):
        layout = StoreLayout(2048, 128, dtype)
        import_files(tmp_path / dtype, [tmp_path / "x.npy"], ImportConfig("h", layout=layout))
        reader = StoreReader.open(tmp_path / dtype)
        sizes[dtype] = sum(f.stat().st_size for f in (tmp_path / dtype / "arrays").rglob("h*/c/*/0"))
        predicted = predicted_bytes(Header(reader.identity, {"h": 256}, 4096, layout, 0))
        assert predicted == pytest.approx(sum(map(len, files(tmp_path / dtype).values())), rel=0.02)
    assert sizes["int8"] == pytest.approx(sizes["bfloat16"] / 2, rel=0.01)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: StoreLayout(dtype="int4"), "int4"),
        (lambda path: CaptureConfig(dtype="int8", into="training"), "into=training"),
        (
            lambda path: StoreWriter.open(
                path, identity={}, hook_points={"a": 2, "a.scale": 2}, n_tokens=9, layout=INT8
            ),
            r"a\.scale",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, make, says):
    with pytest.raises(ConfigError, match=says):
        make(tmp_path / "s")


def test_a_writer_of_the_other_type_is_refused(tmp_path, stores):
    with pytest.raises(DataError, match=r"layout\.dtype"):
        write(stores[1])


def test_an_experiment_trains_on_an_int8_store(tmp_path):
    e = planted_experiment(tmp_path, "int8", tokens=5 * 128, checkpoint_every=5, validate_every=5)
    planted = StoreReader.open(tmp_path / "stores" / "planted" / "train")
    rows = planted.rows(0, planted.n_tokens, metadata=True)
    x, tokens = {"h": rows.pop("h")}, rows
    (tmp_path / "stores" / "planted" / "train").rename(tmp_path / "exact")
    with StoreWriter.open(
        tmp_path / "stores" / "planted" / "train",
        identity=planted.identity,
        hook_points=planted.hook_points,
        n_tokens=planted.n_tokens,
        layout=StoreLayout(1024, 64, "int8"),
    ) as writer:
        writer.append(x, tokens, cursor={})
        writer.finish()
    assert run_train(Workspace(e)) == 0
    assert (e.run_dir / "metrics.jsonl").read_text().count("val/fve") >= 1


def test_held_out_activations_stay_exact():
    config = CaptureConfig(dtype="int8")
    assert config.layout("train").dtype == "int8" and config.layout("heldout") == StoreLayout()
