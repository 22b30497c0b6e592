"""Where a peer is ahead: each cell, the peer's figures, and what was tried there.

    (the activations and the peers' lines: as benchmarks/quality/run.py says)
    python -m benchmarks.quality.behind [--sets=truth] [--minutes=20]

The default and each try are trained with one seed, then the default and the best try with all. Each training is a line
of behind.jsonl beside this file; what is there already is not run again. Then behind.md is made.
"""

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks.quality import runs
from benchmarks.quality.changes import At, Setting, aligned
from benchmarks.quality.ours import Hooks
from benchmarks.quality.sets import SETS, variance_of
from benchmarks.quality.table import NAMES, figures_at, rows_of

HERE = Path(__file__).parent
LINES, TABLE = HERE / "behind.jsonl", HERE / "behind.md"
SEEDS = (0, 1, 2)
# So many trainings search for the L0 of a penalised family.
_MOST = 6
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Cell:
    """A family at an L0 on a data set; `worst` is the figure in which saejax is furthest behind."""

    data: str
    family: str
    l0: int
    worst: str

    @property
    def name(self) -> str:
        return f"{self.data}, {self.family}, L0 {self.l0}"


CELLS = (
    Cell("truth", "jumprelu", 24, "f1"),
    Cell("truth", "gated", 24, "mcc"),
    Cell("truth", "standard", 24, "mcc"),
    Cell("truth_large", "topk", 16, "f1"),
    Cell("truth_large", "topk", 32, "f1"),
    Cell("truth_large", "batchtopk", 16, "f1"),
    Cell("truth_large", "batchtopk", 32, "f1"),
    Cell("encoder", "topk", 12, "fve"),
    Cell("encoder", "batchtopk", 48, "fve"),
    Cell("encoder", "standard", 12, "fve"),
)
DEFAULT = "default"


def tries(cell: Cell) -> dict[str, Setting]:
    """{what it is called: a setting}: the default, then others."""

    family = cell.family

    def of(hooks: Hooks | None = None, train: Row | None = None, **coder: Any) -> Setting:
        return Setting(coder, train or {}, hooks=hooks, preset=family)

    found = {DEFAULT: of()}
    if family in ("topk", "batchtopk"):
        found |= {
            "no centre": of(encoder_centre=False),
            "b2 0.999": of(train={"b2": 0.999}),
            "b_enc at the same rate": of(train={"b_enc_rate": 1.0}),
            "k falls from 3 k over half": dataclasses.replace(of(), falls_from=3.0, falls_over=0.5),
            "Multi-TopK": of(multi_topk_coefficient=0.125),
            "rate 0.003": of(train={"lr": 3e-3}),
            "rate 0.01": of(train={"lr": 1e-2}),
            "b_enc at five times the rate": of(train={"b_enc_rate": 5.0}),
            "averaged weights": of(train={"ema_decay": 0.99}),
            "aligned": of(Hooks(after=aligned)),
        }
        if cell.worst == "f1":
            found["b_enc at ten times the rate"] = of(train={"b_enc_rate": 10.0})
            found["aligned, b_enc at ten times the rate"] = of(Hooks(after=aligned), {"b_enc_rate": 10.0})
    elif family == "jumprelu":
        found |= {
            "rate 0.001": of(train={"lr": 1e-3}),
            "no Lift": of(lift_coefficient=0.0),
            "with the centre": of(encoder_centre=True),
            "a window of 0.03": of(bandwidth=0.03),
            "thresholds from 0.1": of(threshold_init=0.1),
            "no AuxK": of(auxk_coefficient=0.0),
            "a tenth to rise": of(sparsity_warmup_fraction=0.1),
            "the encoder looks once more": of(lista_steps=1),
            "aligned": of(Hooks(after=aligned)),
            "aligned, looks once more": of(Hooks(after=aligned), lista_steps=1),
            "looks once more, with the centre": of(lista_steps=1, encoder_centre=True),
            "aligned, looks once more, with the centre": of(Hooks(after=aligned), lista_steps=1, encoder_centre=True),
        }
    else:
        found |= {
            "rate 0.01": of(train={"lr": 1e-2}),
            "no Lift": of(lift_coefficient=0.0),
            "no centre": of(encoder_centre=False),
            "b2 0.999": of(train={"b2": 0.999}),
            "b_enc at the same rate": of(train={"b_enc_rate": 1.0}),
            "a fifth to rise": of(sparsity_warmup_fraction=0.2),
        }
        if family == "gated":
            found |= {
                "a twentieth to rise": of(sparsity_warmup_fraction=0.05),
                "a twentieth to rise, rate 0.01": of(train={"lr": 1e-2}, sparsity_warmup_fraction=0.05),
                "free rows": of(unit_decoder_every=0, decoder_norm=0.1),
                "aligned": of(Hooks(after=aligned)),
            }
        else:
            found["rows of length 1"] = of(unit_decoder_every=1)
    return found


def jobs(cell: Cell) -> Iterator[tuple[str, int]]:
    """(what, seed): everything with the first seed, then the default and the best try with the others."""
    every = tries(cell)
    yield from ((what, SEEDS[0]) for what in every)
    for seed in SEEDS[1:]:
        yield from ((what, seed) for what in (DEFAULT, best(read(), cell)))


def best(rows: list[Row], cell: Cell) -> str:
    """The try that has the largest figure where saejax is behind, of those with an FVE near the peer's or above."""
    first = {row["what"]: row for row in rows if row["cell"] == cell.name and row["seed"] == SEEDS[0]}
    least = _mean(ahead(cell)[1], "fve") - 0.002
    near = [what for what, row in first.items() if what != DEFAULT and at_target(row, cell) >= least]
    return max(near or set(first) - {DEFAULT}, key=lambda what: figure(first[what], cell, cell.worst))


def at_target(row: Row, cell: Cell) -> float:
    return runs.at_target(row | {"set": cell.data, "target": cell.l0}, runs.read())


def figure(row: Row, cell: Cell, name: str) -> float:
    return at_target(row, cell) if name == "fve" else float(row[name])


def train(cell: Cell, what: str, seed: int) -> Row:
    """The line of a training; of a penalised family the nearest of a search for its L0."""
    data, setting = SETS[cell.data], tries(cell)[what]

    def at(l1: float) -> Row:
        return setting.train_on(data, seed, At(cell.l0, 0.0, {cell.family: l1} if l1 else {})) | {"l1": l1}

    first = _first_l1(cell, what)
    row = runs.search(at, cell.l0, first, _MOST) if first else at(0.0)
    return {"cell": cell.name, "what": what, "seed": seed, "date": time.strftime("%Y-%m-%d")} | row


def _first_l1(cell: Cell, what: str) -> float:
    """Where the search begins: what met the L0 before; 0 of a family that is told its L0."""
    if cell.family not in runs.PENALISED:
        return 0.0
    for of in (what, DEFAULT):
        if known := [row["l1"] for row in read() if (row["cell"], row["what"]) == (cell.name, of)]:
            return float(known[0])
    ours = (cell.data, cell.family, "saejax", cell.l0)
    lines = [row for row in runs.read() if (row["set"], row["family"], row["trainer"], row["target"]) == ours]
    return float(min(lines, key=lambda row: abs(math.log(row["l0"] / cell.l0)))["l1"])


def ahead(cell: Cell) -> tuple[str, list[Row]]:
    """The peer whose `worst` figure is the largest, and its seeds at the cell's L0 as the comparison has them."""
    variance_G = variance_of(SETS[cell.data])
    rows = [row for row in runs.read() if (row["set"], row["family"]) == (cell.data, cell.family)]
    sides: dict[str, list[Row]] = {}
    for trainer, name in list(zip(runs.TRAINERS, NAMES, strict=True))[1:]:
        if found := figures_at(rows_of(rows, trainer), variance_G, cell.l0):
            fve_S = 1 - found.error.sum(1) / variance_G.sum()
            of_seeds = {"fve": fve_S, "l0": np.full(len(fve_S), cell.l0)} | found.of_seeds
            sides[name] = [{k: float(v[i]) for k, v in of_seeds.items()} for i in range(len(fve_S))]
    return max(sides.items(), key=lambda side: _mean(side[1], cell.worst))


def _mean(rows: list[Row], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def read() -> list[Row]:
    return [json.loads(line) for line in LINES.read_text(encoding="utf-8").splitlines()] if LINES.exists() else []


HEAD = """# Where a peer is ahead

`python -m benchmarks.quality.behind`: {date}, 2 CPU cores, 24 GB, no GPU. The cells of the comparison in which an
interval says that a peer is ahead, but for matryoshka at L0 8 of the larger truth ([a k that falls](changes.md)).

First stands the peer that is ahead, by the lines of [the comparison](../../docs/quality.md). Then saejax's default and
each try with one seed, the default and the best try with {seeds}. Means; in brackets the standard deviation. FVE is
brought to the L0 that was asked for, along the slope of the set's topk. A try is best by the figure in bold, of those
whose FVE is at most 0.002 below the peer's; where the tries were added one after the other, an earlier best one has all
seeds too.

The settings: rate `train.lr`; b_enc at n times the rate `train.b_enc_rate`; averaged weights `train.ema_decay=0.99`; k
falls from 3 k over half `coder.k_start`, `coder.k_anneal_fraction=0.5`; Multi-TopK
`coder.multi_topk_coefficient=0.125`; looks once more `coder.lista_steps=1`; centre `coder.encoder_centre`; a part of
the training to rise `coder.sparsity_warmup_fraction`; window `coder.bandwidth`; thresholds `coder.threshold_init`; no
Lift, no AuxK `coder.lift_coefficient=0`, `coder.auxk_coefficient=0`; rows `coder.unit_decoder_every`. Aligned training
(arXiv:2605.18629) is no setting: it lowers FVE on models' layers ([changes](changes.md)).
"""


def table(rows: list[Row]) -> str:
    """Markdown: a table for each cell."""
    text = ""
    for cell in CELLS:
        mine = [row for row in rows if row["cell"] == cell.name]
        if not mine:
            continue
        names: list[str] = [name for name in ("fve", "mcc", "f1") if name in mine[0]]
        heads = [f"**{name.upper()}**" if name == cell.worst else name.upper() for name in names]
        text += f"\n## {SETS[cell.data].title}: {cell.family}, L0 {cell.l0}\n\n"
        text += f"| trained by | seeds | L0 | {' | '.join(heads)} | dead |\n|---|---|---|{'---|' * len(names)}---|\n"
        name, peers = ahead(cell)
        text += _line(name, peers, cell, names)
        for what in dict.fromkeys(row["what"] for row in mine):
            text += _line(f"saejax, {what}", [row for row in mine if row["what"] == what], cell, names)
    return text


def _line(what: str, rows: list[Row], cell: Cell, names: list[str]) -> str:
    cells = []
    for name in names:
        of = [figure(row, cell, name) for row in rows]
        cells.append(f"{np.mean(of):.4f}" + f" ({np.std(of, ddof=1):.4f})" * (len(of) > 1))
    about = [what, str(len(rows)), f"{_mean(rows, 'l0'):.1f}"]
    return f"| {' | '.join([*about, *cells])} | {_mean(rows, 'dead'):.1%} |\n"


def main(_: list[str]) -> None:
    said = flags.FLAGS  # the flags of changes.py
    ends = time.monotonic() + 60 * said.minutes
    for cell in CELLS:
        if cell.data not in said.sets:
            continue
        SETS[cell.data].prepare(said.stores)
        for what, seed in jobs(cell):
            if (cell.name, what, seed) in {(row["cell"], row["what"], row["seed"]) for row in read()}:
                continue
            if time.monotonic() > ends:
                break
            row = train(cell, what, seed)
            with LINES.open("a", encoding="utf-8") as file:
                file.write(json.dumps({name: value for name, value in row.items() if name != "error"}) + "\n")
            print(*(f"{name}={value}" for name, value in row.items() if name != "error"), flush=True)
    rows = read()
    dates = sorted({row["date"] for row in rows})
    head = HEAD.format(date=" to ".join(dict.fromkeys((dates[0], dates[-1]))), seeds=len(SEEDS))
    TABLE.write_text(head + table(rows), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    app.run(main)
