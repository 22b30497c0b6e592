"""Twelve coders as one sweep, and the same twelve as twelve commands."""

import itertools
import sys
from typing import Any

from benchmarks.bench.frame import Result, Told
from benchmarks.bench.markdown import table
from benchmarks.bench.system_rows import Row, imported_store, of_caches, ratio, timed

ROWS = (Row("sweep-12", "topk", quick=False),)

_D_IN, _STORED, _BATCH, _STEPS = 128, 65_536, 2048, 100
_SEEDS, _LRS = (0, 1, 2, 3), (1e-3, 2e-3, 4e-3)


def run(row: Row, told: Told) -> Result:
    """Both once to compile, then in turn: what is compared is the work and the starts, not the compiler."""
    stores, runs = told.folder / "stores", told.folder / "sweep-runs"
    caches = of_caches(told.folder, str(told.folder / "sweep-compiled"))
    imported_store(told.folder, "sweep", _D_IN, _STORED, caches)
    settings = {
        **{"store": "sweep", "hook_point": "x", "lm.model": "", "stores_dir": stores, "coder.preset": row.preset},
        **{"coder.d_sae": 1024, "coder.k": 16, "train.batch_size": _BATCH, "train.tokens": _STEPS * _BATCH},
        **{"train.validate_every": 0},
    }

    def seconds(command: str, turn: str, **more: Any) -> float:
        given = {**settings, "name": command, "runs_dir": runs / turn, **more}
        words = [f"--config.{key.replace('__', '.')}={value}" for key, value in given.items()]
        return timed([sys.executable, "-m", "saejax", command, "--config=quickstart", *words], caches)["real"]

    def sweep(turn: str) -> float:
        seeds, lrs = (",".join(map(str, values)) for values in (_SEEDS, _LRS))
        return seconds("sweep", turn, sweep__seeds=seeds, sweep__lrs=lrs)

    def alone(turn: str, n: int | None = None) -> float:
        pairs = list(itertools.product(_SEEDS, _LRS))[:n]
        return sum(
            seconds("train", turn, name=f"{seed}-{i}", seed=seed, train__lr=lr) for i, (seed, lr) in enumerate(pairs)
        )

    sweep("first"), alone("first", 1)
    found: dict[str, list[float]] = {"one sweep": [], "twelve commands": []}
    for turn in range(min(told.rounds, 2)):
        found["one sweep"].append(sweep(str(turn)))
        found["twelve commands"].append(alone(str(turn)))
    over = ratio(found["twelve commands"], found["one sweep"])
    figure = {"what": "twelve trainings over one sweep of them", "value": over, "aim": 1.5, "better": "more"}
    return {"found": found, "figures": [figure]}


def lines(results: list[Result]) -> list[str]:
    rows = [[name, ", ".join(f"{s:.1f}" for s in seconds)] for r in results for name, seconds in r["found"].items()]
    return [
        f"sweep-12: {len(_SEEDS)} seeds times {len(_LRS)} rates of TopK {_D_IN} -> 1,024,",
        f"{_STEPS} steps of {_BATCH:,}. `saejax sweep` trains, validates and compares, the twelve `saejax train` only",
        "train. All programs are compiled already.",
        "",
        *table(("", "seconds of each round"), rows),
    ]
