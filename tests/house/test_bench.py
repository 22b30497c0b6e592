"""The frame of `make bench`: what its floor counts, its page, its workers, and what Ctrl-C leaves."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.bench import __main__ as command
from benchmarks.bench import activations, frame, render, training, training_result
from benchmarks.bench.protocol import Worker, WorkerFailed, WorkerGone
from benchmarks.bench.rows import CPU_ROWS, GPU_ROWS, Row

pytestmark = pytest.mark.ci


def test_the_floor_is_one_product_where_latents_are_sparse_and_five_where_they_are_dense() -> None:
    topk = Row("a", "topk", d_in=768, d_sae=6144, batch=2048)
    assert topk.flops == 2 * 2048 * 768 * 6144
    assert topk.adam_bytes == 28 * 2 * 768 * 6144
    assert dataclasses.replace(topk, preset="standard").flops == 5 * topk.flops
    # A transcoder reads one of its sites; a cross-layer transcoder's four groups write 4 + 3 + 2 + 1 layers.
    assert dataclasses.replace(topk, preset="transcoder", sites=2).flops == topk.flops
    clt = dataclasses.replace(topk, preset="clt", sites=4)
    assert (clt.flops, clt.adam_bytes) == (4 * topk.flops, 28 * (4 + 10) * 768 * 6144)


@pytest.mark.parametrize("table", [CPU_ROWS, GPU_ROWS])
def test_rows_have_names_of_their_own_and_stand_beside_rows_of_their_shape(table: tuple[Row, ...]) -> None:
    rows = {row.name: row for row in table}
    assert len(rows) == len(table)
    for row in table:
        if row.beside:
            same = ("d_in", "d_sae", "k", "batch", "sites")
            assert [getattr(row, key) for key in same] == [getattr(rows[row.beside], key) for key in same], row.name


def test_the_activations_have_unit_mean_square_and_features_that_explain_them(tmp_path: Path) -> None:
    path = activations.make(tmp_path / "a.npy", 6000, 32, sites=2)
    a_NSD = np.load(path)
    assert a_NSD.shape == (6000, 2, 32)
    assert abs(np.square(a_NSD).mean() - 1) < 0.1
    again = np.load(activations.make(tmp_path / "b.npy", 6000, 32, sites=2))
    np.testing.assert_array_equal(a_NSD, again)
    whole = activations.explained(lambda x: (x[:, 1:], 3 * len(x)), path, 1000, slice(1, None))
    assert whole == {"fve": 1.0, "l0": 3.0}
    mean_D = a_NSD[:, 1].mean(0, dtype=np.float64)
    nothing = activations.explained(lambda x: (np.tile(mean_D, (len(x), 1)), 0), path, 1000, slice(1, None))
    assert abs(nothing["fve"]) < 1e-9


def test_a_worker_answers_what_it_is_told_and_says_why_it_cannot() -> None:
    code = (
        "import os; from benchmarks.bench.protocol import serve\n"
        "def half(of): print('prints are not answers'); return {'is': of / 2}\n"
        "def leave(): os._exit(3)\n"
        "serve({'half': half, 'leave': leave})"
    )
    with Worker("w", [sys.executable, "-c", code]) as worker:
        assert worker.ask("half", of=3) == {"is": 1.5}
        with pytest.raises(WorkerFailed, match="w: TypeError: unsupported operand"):
            worker.ask("half", of="x")
        assert worker.ask("half", of=4) == {"is": 2.0}
        with pytest.raises(WorkerGone, match="w ended with 3"):
            worker.ask("leave")
    with pytest.raises(WorkerGone, match="w was closed"):
        worker.ask("half", of=1)
    with (
        Worker("w", [sys.executable, "-c", "import time; time.sleep(60)"], limit_s=0.2) as worker,
        pytest.raises(WorkerGone, match=r"took more than 0 s for half"),
    ):
        worker.ask("half", of=1)


TINY = Row("tiny", "topk", d_in=16, d_sae=64, k=4, batch=64, steps=2, dead=8, beside="tiny-none", parts=True)


def test_a_row_of_ours_runs_in_processes_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = dataclasses.replace(TINY, name="tiny-none", dead=0, beside="")
    monkeypatch.setattr(training, "CPU_ROWS", (TINY, none))
    monkeypatch.setattr(training, "tokens", _few_tokens)
    monkeypatch.setattr(training, "_STREAM", 1000)
    told = frame.Told(quick=True, rounds=2, folder=tmp_path, backend="cpu", peers=None)
    assert frame.measure([(training, TINY)], told, tmp_path / "results.json", {"machine": "m"})

    (result,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert "failed" not in result, result
    ours = result["contestants"]["saejax"]
    assert [len(turn) for turn in ours["seconds"]] == [2, 2]
    assert ours["dead"] == 8  # in the last step, as in every one
    assert ours["l0"] == 4 and ours["fve"] > 0.1
    assert result["contestants"]["saejax tiny-none"]["dead"] == 0
    assert result["floor"]["flops"] == 2 * 64 * 16 * 64
    assert ours["flops"] > result["floor"]["flops"]
    assert ours["bytes"] > 0 and ours["memory"] > 3 * 4 * 2 * 16 * 64  # parameters and both moments at the least
    assert set(result["parts"]) == {"encoder", "loss", "loss and gradient"}
    whats = {figure["what"] for figure in training.figures([result])}
    assert {"time with dead latents over none", f"cores busy, of {result['cores']}"} <= whats


def _few_tokens(row: Row, folder: Path) -> tuple[Path, Path]:
    return activations.make(folder / "t.npy", 256, row.d_in), activations.make(folder / "h.npy", 128, row.d_in, seed=1)


def _section(run: Any) -> Any:
    rows = [SimpleNamespace(name=name, quick=name != "slow") for name in ("first", "second", "slow")]
    return SimpleNamespace(
        NAME="s",
        TITLE="Section",
        rows=lambda told: rows,
        run=run,
        page=lambda results, folder: [f"{r['row']} took {r['seconds']}" for r in results],
    )


def test_ctrl_c_keeps_what_was_measured_and_what_fails_or_is_left_out_is_said(tmp_path: Path) -> None:
    told, results = frame.Told(True, 1, tmp_path, "cpu", None), tmp_path / "results.json"

    def run(row: Any, told: frame.Told) -> dict[str, Any]:
        if row.name == "second":
            raise KeyboardInterrupt
        return {"seconds": 2, "figures": [{"what": "speed", "value": 3, "aim": 4, "better": "more"}]}

    section = _section(run)
    wanted = frame.chosen([section], told)
    assert [row.name for _, row in wanted] == ["first", "second"]
    assert not frame.measure(wanted, told, results, {"machine": "m", "command": "bench --rounds=1"})
    assert [r["row"] for r in frame.read(results)["results"]] == ["first"]

    def fail(row: Any, told: frame.Told) -> dict[str, Any]:
        if row.name == "second":
            raise frame.LeftOut("it needs 40 GB, 2 GB are free")
        raise RuntimeError("broken")

    slow = frame.chosen([_section(fail)], told, rows=["second", "slow"])
    assert frame.measure(slow, told, results, {"machine": "m", "command": "bench --rows=second,slow"})
    render.write([section], results, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "Written by `bench --rounds=1` and `bench --rows=second,slow`; do not edit." in page
    assert "first took 2" in page
    assert "| speed | at least 4 | 3 | 0 of 1 | first 3 |" in page
    assert "- second: left out, it needs 40 GB, 2 GB are free." in page
    assert "- slow: failed, RuntimeError: broken" in page

    # Another machine's figures begin a page of their own.
    assert frame.measure(wanted[:1], told, results, {"machine": "other"})
    assert [r["row"] for r in frame.read(results)["results"]] == ["first"]

    assert not frame.measure(wanted, told, results, {"machine": "third"}, minutes=-1)
    assert [r["row"] for r in frame.read(results)["results"]] == ["first"]

    with pytest.raises(ValueError, match="There is no row third; there are first, second, slow"):
        frame.chosen([section], told, rows=["third"])


def _result(row: Row, seconds: float, **peers: float) -> dict[str, Any]:
    def said(median: float) -> dict[str, Any]:
        use = {"real": 2.0, "user": 3.6, "system": 0.1, "peak": 2e9, "dead": 0, "fve": 0.8, "l0": 32.0}
        return {"seconds": [[median] * 2] * 2, "median": median, **use}

    ours = said(seconds) | {"flops": 2e10, "bytes": 3e9, "compile_seconds": 1.5, "matmul_dtype": "float32"}
    floor = {"products": 0.15, "adam": 0.05, "flops": row.flops, "bytes": row.adam_bytes}
    contestants = {"saejax": ours} | {name: said(median) for name, median in peers.items()}
    told = {"section": "training", "row": row.name, "about": row.to_json(), "tokens": 20480, "cores": 2}
    told |= {"ceiling": 0.99}
    return told | {"contestants": contestants, "floor": floor, "measured": "2026-11-22T12:00:00"}


def test_the_page_of_train_steps_says_ratios_floor_and_growth(tmp_path: Path) -> None:
    small, large = (Row(f"topk-{f}", "topk", d_in=768, d_sae=f) for f in (6144, 24576))
    results = [
        _result(small, 0.4, saelens=1.2, dictionary_learning=2.0),
        _result(large, 2.5, saelens=6.0),
        _result(Row("clt-4", "clt", d_in=768, d_sae=64, sites=4), 0.1),
    ]
    page = "\n".join(training.page(results, tmp_path))
    assert "| topk-6144 | 2,048 x 768 -> 6,144, k 32 | 400.0 (5,120 tokens/s) | 1,200.0 | 2,000.0 | **3.00**" in page
    assert "150.0 + 50.0 = 200.0 | 50% |" in page
    assert "| clt-4 | 2,048 x 4 x 768 -> 64, k 32 | 100.0 (20,480 tokens/s) | - | - | no peer |" in page
    assert "| width | topk-6144 | topk-24576 | 400.0 | 2,500.0 | 2.50 |" in page  # (2.5 / 0.4) ^ (1 / 2)
    assert {path.name for path in tmp_path.iterdir()} == {"ratios.png", "growth.png"}

    figures = {(f["what"], f["row"]): f for f in training.figures(results)}
    assert not render.reached(figures["topk: times the faster peer", "topk-6144"])
    assert not render.reached(figures["share of the floor", "topk-24576"])
    assert render.reached(figures["cores busy, of 2", "topk-6144"])
    assert training_result.faster_peer(results[0]) == "saelens"


def test_wrong_words_are_refused_and_the_list_needs_no_peers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "device", lambda: ("cpu", "no accelerator"))
    assert command.main(["--list"]) == 0
    assert "training      topk-6144\n" in capsys.readouterr().out
    assert command.main(["--rows=nothing", "--list"]) == 2
    with pytest.raises(SystemExit):
        command.parse(["--rounds=0"])
