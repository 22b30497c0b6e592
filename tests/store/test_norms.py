"""What `saejax store info` and the end of a capture say of the lengths of rows."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tiny.commands import run_command

import saejax
from saejax.store import StoreReader
from saejax.store.describe import describe
from saejax.store.layout import StoreLayout
from saejax.store.norms import norm_lines, norms, sink_lines
from saejax.store.writer import StoreWriter

N, D = 2000, 6


def write(path: Path, x: np.ndarray, positions: np.ndarray, counters: dict[str, int]) -> StoreReader:
    layout = StoreLayout(shard_rows=512, chunk_rows=64)
    with StoreWriter.open(path, identity={}, hook_points={"h": D}, n_tokens=N, layout=layout, seed=3) as writer:
        zeros = np.zeros(N, np.int32)
        metadata = {"token_id": zeros, "document": zeros, "position": positions.astype(np.int32)}
        writer.append({"h": x.astype(ml_dtypes.bfloat16)}, metadata, cursor={}, counters=counters)
        writer.finish()
    return StoreReader.open(path)


def test_norms_are_those_of_the_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, positions = rng.normal(size=(N, D)) + 3, np.arange(N) % 20 + 1
    x[positions == 1] *= 2
    reader = write(tmp_path / "s", x, positions, {})
    exact = reader.rows(0, N, metadata=True)
    rows, place = exact["h"].astype(np.float64), exact["position"]
    of, lengths = norms(reader, "h"), np.sqrt((rows**2).sum(1))
    assert (of.n, of.median, of.largest) == (N, pytest.approx(np.median(lengths)), pytest.approx(lengths.max()))
    assert of.long == of.share == 0
    assert list(of.positions) == ["1", "2 to 3", "4 to 7", "8 to 15", "16 to 31"]
    for label, inside in (("1", place == 1), ("16 to 31", place >= 16)):
        assert of.positions[label] == pytest.approx(np.median(lengths[inside]) / np.median(lengths))
    assert of.positions["1"] > 1.5 and not of.few_decide
    assert sink_lines(tmp_path / "s") == []
    (line,) = norm_lines(reader)
    assert line.startswith(f"  norms at h, {N:,} rows: median {of.median:.4g}") and "at 16 to 31" in line


def test_a_few_rows_that_hold_the_variance_are_warned_of(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for every in (N, 100, 10):  # one row, one in a hundred, the first of texts of ten
        x = rng.normal(size=(N, D))
        x[::every] *= 500
        reader = write(tmp_path / f"{every}", x, np.arange(N) % 20, {"dropped_first": 12, "dropped_massive": 3})
        exact = reader.rows(0, N)["h"].astype(np.float64)
        far = np.sqrt((exact**2).sum(1)) > 5 * np.median(np.sqrt((exact**2).sum(1)))
        away = ((exact - exact.mean(0)) ** 2).sum(1)
        of = norms(reader, "h")
        assert far.sum() == pytest.approx(N / every, abs=3)
        assert (of.long, of.share) == (pytest.approx(far.mean()), pytest.approx(away[far].sum() / away.sum(), rel=1e-4))
        left_out, warning = sink_lines(tmp_path / f"{every}")
        assert "12 tokens that stand first, 3 with a massive activation" in left_out
        assert "of the variance at h" in warning and "Set capture.max_norm_ratio below" in warning


def test_a_store_of_zeros_has_norms_too(tmp_path: Path) -> None:
    reader = write(tmp_path / "s", np.zeros((N, D)), np.zeros(N), {})
    assert (norms(reader, "h").share, norms(reader, "h").positions, sink_lines(tmp_path / "s")) == (0.0, {}, [])


def test_info_of_a_damaged_store_says_what_it_can(tmp_path: Path) -> None:
    write(tmp_path / "s", np.ones((N, D)), np.zeros(N), {})
    assert any(line.startswith("  norms at h") for line in describe(tmp_path / "s"))
    for path in (tmp_path / "s").rglob("c/0*/*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-20])
    lines = describe(tmp_path / "s")
    assert any("complete: 2,000 rows" in line for line in lines)
    assert any(line.startswith("  norms: not known. Store") for line in lines)


def test_rows_from_elsewhere_are_warned_of_at_every_door(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is imported and an array in memory were captured by others, perhaps with their sinks."""
    x = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
    x[7] *= 500
    np.save(tmp_path / "x.npy", x)
    assert run_command("store", ["import", str(tmp_path / "s"), str(tmp_path / "x.npy")], hook_point="h") == 0
    assert "warning: 0.05% of the rows hold" in capsys.readouterr().out
    saejax.train(x, "topk", k=2, d_sae=16, batch_size=256, tokens=1024)
    assert "of the variance at x" in capsys.readouterr().out
    saejax.train(np.delete(x, 7, 0), "topk", k=2, d_sae=16, batch_size=256, tokens=1024)
    assert "of the variance" not in capsys.readouterr().out
