"""Arrays and iterators as batches: every row once an epoch, the same batches whoever asks, and what is refused."""

import itertools
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny.torches import needs_torch, torch

from saejax.core.arrays import as_array
from saejax.core.errors import ConfigError, DataError
from saejax.store import ArrayRows, Batches, IteratedBatches, arrays
from saejax.store.layout import BF16


def numbered(n: int, dtype: Any = np.float32) -> np.ndarray:
    """[n, 3], whose first column is the row's number."""
    rows = np.random.default_rng(0).normal(size=(n, 3))
    rows[:, 0] = np.arange(n)
    return rows.astype(dtype)


@pytest.mark.parametrize("n", [37, 300, 1000])
def test_an_epoch_has_every_row_once_and_begins_anywhere(n: int) -> None:
    x = numbered(n)
    batches = Batches(ArrayRows({"x": x}), 10, seed=3, block_chunks=2)
    steps = [next(batches.iterate(i))["x"] for i in range(n)]  # ten epochs
    for epoch in range(10):
        rows = np.concatenate(steps)[epoch * n : (epoch + 1) * n]
        np.testing.assert_array_equal(rows[np.argsort(rows[:, 0])], x)
    endless = batches.iterate(2)
    for i in range(2, 7):
        np.testing.assert_array_equal(next(endless)["x"], steps[i])
    assert (np.concatenate(steps)[:n, 0] != np.arange(n)).any()


def test_several_arrays_stay_aligned_and_memory_maps_are_read_in_pieces(tmp_path: Path) -> None:
    x, y = numbered(500), numbered(500) * 2
    np.save(tmp_path / "y.npy", y)
    rows = ArrayRows({"x": x, "y": np.load(tmp_path / "y.npy", mmap_mode="r")})
    batch = next(Batches(rows, 64, seed=1).iterate(4))
    np.testing.assert_array_equal(batch["x"] * 2, batch["y"])
    assert rows.hook_points == {"x": 3, "y": 3} and rows.n_tokens == 500
    np.testing.assert_allclose(rows.statistics["y"].mean, y.astype(np.float64).mean(0), rtol=1e-12)
    assert rows.statistics["x"].mean_norm == pytest.approx(np.linalg.norm(x, axis=1).mean())


@pytest.mark.parametrize(("given", "kept"), [(np.float32, np.float32), (np.float16, np.float16), (BF16, BF16)])
def test_types_that_devices_have_are_kept(given: Any, kept: Any) -> None:
    rows = ArrayRows({"x": numbered(100, given)})
    assert rows.dtype == kept == next(Batches(rows, 8, seed=0).iterate())["x"].dtype


@needs_torch
@pytest.mark.parametrize(("given", "kept"), [("bfloat16", BF16), ("float16", np.float16)])
def test_tensors_of_torch_are_the_arrays_that_they_hold(given: Any, kept: Any) -> None:
    tensor = torch.from_numpy(numbered(100)).to(getattr(torch, given)).requires_grad_()
    numpy = tensor.detach().float().numpy().astype(kept)
    one, other = ArrayRows({"x": tensor}), ArrayRows({"x": numpy})
    assert one.dtype == kept and one.fingerprint == other.fingerprint
    np.testing.assert_array_equal(one.rows(0, 100)["x"], numpy)
    items = [{"x": part} for part in tensor.split(30)]
    batch = next(IteratedBatches(iter(items), "x", 50, first_rows=50).iterate())["x"]
    assert batch.dtype == kept
    np.testing.assert_array_equal(batch, numpy[:50])


def test_float64_and_mixtures_become_float32() -> None:
    assert ArrayRows({"x": numbered(9, np.float64)}).dtype == np.float32
    mixed = ArrayRows({"x": numbered(9, np.float16), "y": numbered(9)})
    assert {a.dtype for a in mixed.rows(0, 5).values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_a_fingerprint_is_of_the_content(dtype: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Equal for equal rows, however they lie in memory; another for rows in another order, whose moments are equal."""
    monkeypatch.setattr(arrays, "_HASHED_ROWS", 16)
    x = (np.random.default_rng(0).integers(-8, 8, (50, 3)) / 4).astype(dtype)  # sums are exact, in any order
    one = ArrayRows({"x": x})
    np.save(tmp_path / "x.npy", x.view(np.uint8))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r").view(dtype)
    for same in (x.copy(), np.asfortranarray(x), np.repeat(x, 2, axis=0)[::2], mapped):
        assert ArrayRows({"x": same}).fingerprint == one.fingerprint
    swapped = x.copy()
    swapped[[20, 21]] = swapped[[21, 20]]
    assert (swapped != x).any()
    changed = x.copy()
    changed[49, 1] += 0.25
    others = {"x": swapped}, {"x": x[::-1]}, {"x": changed}, {"x": x[:49]}, {"y": x}, {"x": x.astype(np.float16)}
    assert len({one.fingerprint, *(ArrayRows(other).fingerprint for other in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros(3)}, r"x has shape \(3,\); give activations as \[N, d\]"),
        ({"x": np.zeros((2, 3, 4))}, r"x has shape \(2, 3, 4\)"),
        ({"x": np.zeros((0, 4))}, "not one activation to train on: x has no rows"),
        ({"x": np.zeros((4, 0))}, r"x has shape \(4, 0\)"),
        ({"x": np.zeros((4, 2), int)}, "dtype int64; give activations in a floating-point type"),
        *([({"x": torch.zeros(4, 2).to_sparse()}, r"x cannot be read as an array \(.*Sparse")] if torch else []),
        ({"x": np.ma.masked_less(np.ones((4, 2)), 2)}, "x: a masked array"),
        ({"x": np.zeros((4, 2), complex)}, "dtype complex128"),
        ({"x": np.zeros((4, 2)), "y": np.zeros((5, 2))}, "one row for each token"),
        ({"x": np.where(np.arange(9)[:, None] == 6, np.inf, np.ones((9, 2)))}, r"NaN or infinity \(first: row 6\)"),
    ],
)
def test_arrays_that_cannot_be_trained_on_are_refused(arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ArrayRows(arrays)


# --- iterators --------------------------------------------------------------------------------------------------


def pieces(x: np.ndarray, *sizes: int) -> list[np.ndarray]:
    return np.split(x, np.cumsum(sizes))


def test_pieces_of_any_size_become_batches_in_their_order() -> None:
    x = numbered(100)
    for start in (0, 1, 4):
        batches = IteratedBatches(iter(pieces(x, 3, 40, 1, 0, 26)), "x", 10, first_rows=30).iterate(start)
        for i in range(start, 10):
            np.testing.assert_array_equal(next(batches)["x"], x[10 * i : 10 * (i + 1)])
        with pytest.raises(DataError, match="ended after 100 activations"):
            next(batches)


def test_a_list_begins_again_and_an_iterator_is_read_once() -> None:
    x = numbered(30)
    again = IteratedBatches(pieces(x, 7, 12), "x", 20, first_rows=40)
    stream = again.iterate(3)
    np.testing.assert_array_equal(next(stream)["x"], x[np.arange(60, 80) % 30])
    with pytest.raises(ConfigError, match="read once"):
        next(again.iterate())
    np.testing.assert_array_equal(again.whole_batch_at(0)["x"], x[:20])
    assert again.places(0) == {}


@pytest.mark.parametrize("kind", [np.float32, np.float64, *([torch.float32, torch.bfloat16] if torch else [])])
@pytest.mark.parametrize("n", [1, 3, 10, 16, 37, 100])
def test_a_generator_may_refill_its_own_buffer(n: int, kind: Any) -> None:
    """What is kept while the next item is made is a copy, for items below, of and above the size of a batch."""
    x = numbered(200)

    def refilled() -> Iterator[Any]:
        in_torch = torch is not None and isinstance(kind, torch.dtype)
        buffer = torch.empty(n, 3, dtype=kind) if in_torch else np.empty((n, 3), kind)
        for start in range(0, 200 - n + 1, n):
            rows = x[start : start + n]
            buffer[:] = torch.from_numpy(rows) if in_torch else rows
            yield {"x": buffer}

    def fresh() -> Iterator[Any]:
        return ({"x": np.array(as_array(item["x"]))} for item in refilled())

    one, other = (IteratedBatches(items(), "x", 10, first_rows=25) for items in (refilled, fresh))
    assert one.fingerprint == other.fingerprint
    np.testing.assert_array_equal(one.whole_batch_at(0)["x"], other.whole_batch_at(0)["x"])
    batches = list(itertools.islice(zip(one.iterate(1), other.iterate(1), strict=True), 200 // n * n // 10 - 1))
    for got, want in batches:
        np.testing.assert_array_equal(got["x"], want["x"])
    held = [got["x"].copy() for got, _ in batches]
    assert all(np.array_equal(got["x"], kept) for (got, _), kept in zip(batches, held, strict=True))


def test_a_large_item_is_not_copied_as_a_whole() -> None:
    x = np.zeros((400_000, 8), np.float32)
    x[:, 0] = np.arange(len(x))
    tracemalloc.start()
    batches = IteratedBatches([x], "x", 1000, first_rows=1000)
    stream = batches.iterate()
    for _ in range(500):  # past its end
        batch = next(stream)["x"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(batch, x[99_000:100_000])
    assert peak < x.nbytes


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "gave not one activation"),
        ([np.zeros((5, 2))], None),
        (iter([np.ones((5, 2))]), "less than a batch of 8"),
        (iter([np.ones((9, 2)), np.ones((9, 3))]), r"every batch must have the hook points and widths \{'x': 2\}"),
        (iter([{"a": np.ones((9, 2))}, {"b": np.ones((9, 2))}]), "every batch must have"),
        (iter([{"a": np.ones((9, 2)), "b": np.ones((8, 2))}]), "one row for each token"),
        (iter([np.ones(9)]), r"\[N, d\]"),
    ],
)
def test_iterators_that_do_not_fit_are_refused(items: Any, message: str | None) -> None:
    if message is None:  # a short list begins again
        assert next(IteratedBatches(items, "x", 8, 8).iterate())["x"].shape == (8, 2)
        return
    with pytest.raises(DataError, match=message):
        IteratedBatches(items, "x", 8, first_rows=16)
