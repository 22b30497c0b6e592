"""The benchmark's section around the step: its commands are timed and watched, and its page is made of JSON."""

import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench import system, system_busy, system_capture, system_memory, system_rows
from benchmarks.bench.frame import Told
from benchmarks.bench.protocol import Worker, WorkerFailed, WorkerGone
from saejax.lm import load_lm

pytestmark = pytest.mark.ci

_TOLD = Told(quick=True, rounds=1, folder=Path("nowhere"), backend="cpu", peers=None)
_USE = {"real": 2.0, "user": 3.0, "system": 0.12}

# As the JSON has them, of a part each: row, result, what the page must say of it.
_RESULTS = [
    ("capture-gpt2", {"rates": {"saejax, capture": [1200.0, 1300.0, 1400.0]}, "read": 4096, "figures": []}, "1,300"),
    ("store-768", {"rows": 1000, "rates": {"memmap": [50.0]}, "share": 0.87, "figures": []}, "87%"),
    ("checkpoint-24576", {"bytes": 453_000_000, "seconds": {"torch.save": [1.0, 1.5]}}, "1.25 (1.00 to 1.50)"),
    ("first-step-clt", {"preset": "clt", "uses": {"cold": [_USE]}}, "3.12 (3.12 to 3.12)"),
    (
        "door-topk",
        {
            "about": {"d_in": 768, "d_sae": 6144},
            "seconds": {"alone": [0.25], "door": [0.3]},
            "figures": [{"value": 1.2}],
        },
        "| 250 (250 to 250) | 300 (300 to 300) | 1.20 |",
    ),
    ("sweep-12", {"found": {"one sweep": [20.0, 21.0], "twelve commands": [60.0, 63.0]}}, "20.0, 21.0"),
    (
        "widest-topk",
        {"limit": 20_000_000_000, "found": {"saejax": {"width": 294_912, "peak": 19_000_000_000, "tried": [49_152]}}},
        "| 294,912 | 19.0 |",
    ),
    ("pipeline-tiny", {"found": {"warm": _USE | {"stages": {"train": 1.25}}}}, "train 1.2"),
    (
        "busy-topk",
        {"training": _USE, "runnable": {"1": 0.4, "2": 0.6}, "data_wait": 0.011, "steps": 1, "figures": []},
        "| 1.56 | 3.8% | 1: 40%, 2: 60% | 1.1% |",
    ),
    (
        "waits-topk",
        {"found": dict.fromkeys(("seconds", "data", "put", "checkpoints", "main thread", "save"), 0.25), "figures": []},
        "| 25.0% | 250 |",
    ),
]


@pytest.mark.parametrize(("row", "result", "said"), _RESULTS)
def test_the_page_says_what_was_measured(row: str, result: dict[str, Any], said: str) -> None:
    page = "\n".join(system.page([{"row": row, **result}], Path("nowhere")))
    assert said in page and row.split("-")[0] in page


def test_each_row_belongs_to_one_part_and_what_a_cpu_alone_has_is_no_row_of_an_accelerator() -> None:
    names = [row.name for row in system.rows(_TOLD)]
    assert len(names) == len(set(names)) and {row for row, _, _ in _RESULTS} <= set(names)
    on_gpu = [row.name for row in system.rows(dataclasses.replace(_TOLD, backend="gpu"))]
    assert [name for name in names if name not in on_gpu] == ["busy-topk", "busy-batchtopk", "widest-topk"]


def test_a_command_is_timed_and_one_that_fails_is_named_with_its_last_line() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    use = system_rows.timed([sys.executable, "-c", burn], {})
    assert use["real"] >= use["user"] + use["system"] - 0.02 >= 0.25
    with pytest.raises(RuntimeError, match=r"ended with 3: the reason"):
        system_rows.timed([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], {})
    system_rows.timed([sys.executable, "-c", "raise SystemExit(1)"], {}, codes=(0, 1))


def test_a_training_is_watched_from_its_first_metrics_on(tmp_path: Path) -> None:
    watch = system_busy.Watch(tmp_path / "metrics.jsonl")
    with subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(0.01)"]) as process:
        watch(process.pid)
        with pytest.raises(RuntimeError, match="before its first row"):
            watch.use()
        watch.metrics.write_text("{}\n")
        for _ in range(5):
            watch(process.pid)
            time.sleep(0.02)
        process.kill()
    use = watch.use()
    assert use["real"] > 0.05 and use["user"] + use["system"] < use["real"]
    assert sum(watch.shares(2).values()) == pytest.approx(1)
    watch.counts.update({2: 5, 3: 10})
    assert watch.shares(2)["2"] >= 15 / 20 and "3" not in watch.shares(2)


def test_the_random_model_is_one_that_saejax_reads(tmp_path: Path) -> None:
    lm = load_lm(str(system_capture.gpt2(tmp_path / "model", width=24, layers=2, vocabulary=4096)))
    assert (lm.config.d_model, lm.config.n_layer) == (24, 2)


@pytest.mark.parametrize("most", [10, 48, 49, 55, 95, 96, 300])
def test_the_widest_is_found_by_doubling_and_halving(most: int) -> None:
    tried: list[int] = []

    def fits(width: int) -> bool:
        tried.append(width)
        return width <= most

    found = system_memory.widest(fits, first=48, halvings=3)
    assert found <= most and (found == 0) == (most < 48)
    # An eighth of what lies between a width and its double.
    assert most - found < max(1, found) / 8 or not found
    assert len(tried) == len(set(tried)) and found in [0, *tried]


def test_a_process_gets_no_more_memory_than_it_is_given() -> None:
    code = "from benchmarks.bench.protocol import serve\nserve({'take': lambda n: {'taken': len(bytearray(n))}})"
    with Worker("one", [sys.executable, "-c", code]) as worker:
        worker.limit_memory(200_000_000)
        assert worker.ask("take", n=1_000_000)["taken"] == 1_000_000
        with pytest.raises((WorkerFailed, WorkerGone)):
            worker.ask("take", n=400_000_000)


def test_a_ratio_is_that_of_each_round() -> None:
    assert system_rows.ratio([1.0, 20.0, 3.0], [2.0, 10.0, 6.0]) == 0.5
