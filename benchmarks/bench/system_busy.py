"""Whether a training keeps all cores busy: a real `saejax train` on a store, watched from its first step on."""

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.bench.frame import LeftOut, Result, Told
from benchmarks.bench.markdown import table
from benchmarks.bench.system_rows import Row, imported_store, of_caches, timed

ROWS = (Row("busy-topk", "topk", quick=False), Row("busy-batchtopk", "batchtopk", quick=False))

_D_IN, _D_SAE, _K, _BATCH, _STORED = 384, 3072, 32, 2048, 65_536
# About a minute on two cores, and a third of that.
_STEPS, _FEW = 300, 100


def run(row: Row, told: Told) -> Result:
    """Seconds that its threads computed over seconds of the clock, from the first step to the end of the process."""
    if not os.path.isdir("/proc/self/task"):
        raise LeftOut("only Linux says what each thread does")
    stores, runs = told.folder / "stores", told.folder / "runs"
    caches = of_caches(told.folder, str(told.folder / "busy-compiled"))
    imported_store(told.folder, "busy", _D_IN, _STORED, caches)
    steps = _FEW if told.quick else _STEPS
    settings = {
        **{
            "name": row.name,
            "store": "busy",
            "hook_point": "x",
            "lm.model": "",
            "stores_dir": stores,
            "runs_dir": runs,
        },
        **{"coder.preset": row.preset, "coder.d_sae": _D_SAE, "coder.k": _K, "train.validate_every": 0},
        **{"train.batch_size": _BATCH, "train.tokens": steps * _BATCH},
    }
    command = [sys.executable, "-m", "saejax", "train", "--config=quickstart"]
    watch = Watch(runs / row.name / "metrics.jsonl")
    whole = timed(
        [*command, *(f"--config.{name}={value}" for name, value in settings.items())], caches, meanwhile=watch
    )
    wait = [json.loads(line).get("train/data_wait") for line in watch.metrics.read_text().splitlines()]
    waited = [share for share in wait if share is not None][-1]
    use = watch.use()
    work, cores = use["user"] + use["system"], len(os.sched_getaffinity(0))
    busy, system = work / use["real"], use["system"] / work
    return {
        "steps": steps,
        "whole": whole,
        "training": use,
        "runnable": watch.shares(cores),
        "data_wait": waited,
        "figures": [
            # The aim of two cores, as a share of those there are.
            {"what": "cores busy in a training, share", "value": busy / cores, "aim": 1.85 / 2, "better": "more"},
            {"what": "system's share of a training", "value": system, "aim": 0.05, "better": "less"},
        ],
    }


class Watch:
    """What the threads of a process do, from the first row of its metrics on.

    Seconds that a thread computed hang on what else the machine does. How many threads would compute if they could
    (they run or wait for a core) does not, so both are counted.
    """

    def __init__(self, metrics: Path):
        self.metrics = metrics
        self.began: tuple[float, float, float] | None = None
        self.ended = (0.0, 0.0, 0.0)
        self.counts: Counter[int] = Counter()

    def __call__(self, pid: int) -> None:
        if self.began is None and not (self.metrics.exists() and self.metrics.stat().st_size):
            return
        try:
            now, runnable = _seconds(pid), _runnable(pid)
        except (OSError, IndexError):  # it has just ended
            return
        self.began = self.began or now
        self.ended = now
        self.counts[runnable] += 1

    def use(self) -> dict[str, float]:
        if self.began is None:
            raise RuntimeError("it ended before its first row of metrics was seen")
        return dict(
            zip(("real", "user", "system"), (b - a for a, b in zip(self.began, self.ended, strict=True)), strict=True)
        )

    def shares(self, most: int) -> dict[str, float]:
        """{threads that would compute: share of the time}; `most` for all above."""
        found: Counter[int] = Counter()
        for runnable, count in self.counts.items():
            found[min(most, runnable)] += count
        return {str(runnable): count / found.total() for runnable, count in sorted(found.items())}


def _seconds(pid: int) -> tuple[float, float, float]:
    """The clock, and what all threads of a process used in user and in system, also those that have ended."""
    words = _words(Path(f"/proc/{pid}/stat"))
    tick = os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), int(words[11]) / tick, int(words[12]) / tick


def _runnable(pid: int) -> int:
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += _words(task / "stat")[0] == "R"
        except OSError:  # a thread that has just ended
            continue
    return found


def _words(stat: Path) -> list[str]:
    """The words of a stat file behind the command's name, which may hold anything."""
    return stat.read_text(errors="replace").rpartition(")")[2].split()


def lines(results: list[Result]) -> list[str]:
    rows = []
    for r in results:
        use = r["training"]
        work = use["user"] + use["system"]
        rows.append(
            [
                r["row"],
                f"{use['real']:.1f}",
                f"{use['user']:.1f}",
                f"{use['system']:.1f}",
                f"{work / use['real']:.2f}",
                f"{use['system'] / work:.1%}",
                ", ".join(f"{n}: {share:.0%}" for n, share in r["runnable"].items()),
                f"{r['data_wait']:.1%}",
            ]
        )
    heading = (
        "",
        "seconds",
        "user",
        "system",
        "cores busy",
        "system's share",
        "threads that would compute",
        "data wait",
    )
    return [
        f"busy-*: `saejax train` of {_D_IN} -> {_D_SAE:,}, k {_K}, batch {_BATCH:,} on a store of {_STORED:,} rows,",
        "from its first step to its end. Threads that would compute run or wait for a core, whatever others do.",
        "",
        *table(heading, rows),
    ]
