"""Which learning rate fits best: TopK at several rates, by the number of latents, of steps, and the batch.

    (the activations: as benchmarks/quality/run.py says)
    python -m benchmarks.quality.rates

Each training is a line of rates.jsonl beside this file; what is there already is not run again. Then rates.md is made.
"""

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks.quality.ours import train_ours
from benchmarks.quality.sets import SETS, DataSet
from saejax.training import TrainConfig
from saejax.training.optim import usual_rate

HERE = Path(__file__).parent
LINES, TABLE = HERE / "rates.jsonl", HERE / "rates.md"
SHORT, MIDDLE, LONG = 256_000, 1_024_000, 4_096_000

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to train of which the best rate is asked; `rates` stand around it."""

    data: DataSet
    k: int
    rates: tuple[float, ...]

    @property
    def label(self) -> tuple[Any, ...]:
        d = self.data
        return (d.name, d.d_sae, self.k, d.batch, d.steps)

    def usual(self) -> float:
        config = TrainConfig(tokens=self.data.tokens, batch_size=self.data.batch)
        return usual_rate(config, self.data.d_in, self.data.d_sae)


def _case(name: str, k: int, rates: tuple[float, ...], **changes: Any) -> Case:
    return Case(dataclasses.replace(SETS[name], **changes), k, rates)


_MIDDLE, _ALL, _HIGH = (3.2e-3, 1e-2, 3.2e-2), (1e-3, 3.2e-3, 1e-2, 3.2e-2), (3.2e-3, 1e-2, 3.2e-2, 1e-1)
CASES = (
    _case("demo", 24, _ALL, tokens=SHORT, batch=256),
    _case("demo", 24, _HIGH, tokens=SHORT),
    _case("demo", 24, _ALL, tokens=MIDDLE, batch=256),
    _case("demo", 24, _ALL, tokens=MIDDLE),
    _case("demo", 24, _HIGH, tokens=MIDDLE, batch=4096),
    _case("demo", 24, _MIDDLE, tokens=LONG),
    _case("demo", 6, _ALL, tokens=MIDDLE),
    _case("demo", 96, _ALL, tokens=MIDDLE),
    _case("demo", 24, _HIGH, tokens=MIDDLE, d_sae=256),
    _case("demo", 24, _MIDDLE, tokens=MIDDLE, d_sae=4096),
    _case("encoder", 24, (2e-3, 5e-3, 1.2e-2), d_sae=512),
)

HEAD = """# Which learning rate fits best

`python -m benchmarks.quality.rates`: {date}, 2 CPU cores, 24 GB, no GPU. TopK with the defaults, one seed. At each
rate: FVE on held-out rows, and latents that are silent there. Best: the top of the parabola through the best rate and
its neighbours, over log rate; in brackets, the best rate that was tried where it is the first or the last. train.lr=0:
what it takes. Lost: how far below the best FVE it is by that parabola.

"""


def table(rows: list[Row]) -> Iterator[str]:
    yield "| data | latents | k | batch | steps | rate: FVE, dead | best | train.lr=0 | lost |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for case in CASES:
        mine = sorted((row for row in rows if tuple(row["label"]) == case.label), key=lambda row: row["lr"])
        if len(mine) < 3:
            continue
        tried = ", ".join(f"{row['lr']:g}: {row['fve']:.4f} {row['dead']:.0%}" for row in mine)
        best, lost = _best(mine, case.usual())
        names = (case.data.title, f"{case.data.d_sae:,}", case.k, case.data.batch, f"{case.data.steps:,}")
        yield f"| {' | '.join(map(str, names))} | {tried} | {best} | {case.usual():g} | {lost} |"


def _best(rows: list[Row], usual: float) -> tuple[str, str]:
    x, y = np.log([row["lr"] for row in rows]), np.array([row["fve"] for row in rows])
    middle = int(np.clip(y.argmax(), 1, len(y) - 2))
    parabola = np.polyfit(x[middle - 1 : middle + 2], y[middle - 1 : middle + 2], 2)
    if parabola[0] >= 0 or y.argmax() != middle:
        return f"({np.exp(x[y.argmax()]):.2g})", "-"
    top = -parabola[1] / 2 / parabola[0]
    return f"{np.exp(top):.2g}", f"{np.polyval(parabola, top) - np.polyval(parabola, np.log(usual)):.4f}"


def read() -> list[Row]:
    return [json.loads(line) for line in LINES.read_text(encoding="utf-8").splitlines()] if LINES.exists() else []


def train_all(stores: str) -> None:
    """Every training that is not there."""
    there = {(*row["label"], row["lr"]) for row in read()}
    for case in CASES:
        case.data.prepare(stores)
        for lr in case.rates:
            if (*case.label, lr) in there:
                continue
            found, _, seconds = train_ours(case.data, {"preset": "topk", "k": case.k}, {"lr": lr}, 0)
            row = {"label": case.label, "lr": lr, "date": time.strftime("%Y-%m-%d")}
            row |= {name: round(value, 6) for name, value in found.figures().items()}
            with LINES.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(row, f"{seconds:.1f} s", flush=True)


_STORES = flags.DEFINE_string("stores", "stores", "The folder of the captured activations.")
_ONLY_TABLE = flags.DEFINE_bool("only_table", False, "Train nothing; make the table again.")


def main(_: list[str]) -> None:
    if not _ONLY_TABLE.value:
        train_all(_STORES.value)
    rows = read()
    dates = sorted({row["date"] for row in rows})
    text = "\n".join(table(rows))
    date = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    TABLE.write_text(HEAD.format(date=date) + text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    app.run(main)
