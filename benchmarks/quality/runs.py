"""Which trainings the comparison is made of, and one of them: a line of results.jsonl each."""

import dataclasses
import functools
import json
import math
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.peers.measure import Measured
from benchmarks.quality.ours import train_ours
from benchmarks.quality.sets import DataSet

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
PEERS = "build/peers-venv/bin/python"
TRAINERS = ("saejax", "saelens", "dictionary_learning")
PREFIXES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
# What a latent must be silent for to be dead, as shares of the training: peers are given the better one.
DEAD_SHARES = (0.1, 0.01)
# Families whose L0 follows from a penalty: where its search begins, by trainer.
PENALISED = {"standard": (5.0, 5.0, 0.1), "gated": (5.0, 1.0, 0.1)}
# FVE of a training that is made again for its dictionary is that of its line within this: machines round differently.
# Of 54 the largest difference was 0.0036, of a peer at its highest rate.
_AGAIN = 0.005
# An L0 is met within this ratio, or the search ends after so many trainings: of rates that are tried, of the best.
_NEAR, _TRY, _MOST = 0.1, 3, 6

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        target: the L0 that is asked for.
        l1: of a penalised family; else 0.
        lr: None is saejax's default.
        dead_share: None is saejax's default.
    """

    data: DataSet
    family: str
    trainer: str
    target: int
    seed: int
    lr: float | None
    dead_share: float | None = None
    l1: float = 0.0

    def key(self) -> tuple[Any, ...]:
        strength = round(self.l1, 6) if self.family in PENALISED else self.target
        return (self.data.name, self.family, self.trainer, strength, self.seed, self.lr, self.dead_share)

    def train(self) -> Row:
        """The training's line."""
        started = time.strftime("%Y-%m-%d")
        found, rows_FD, seconds = self._ours() if self.trainer == "saejax" else self._peers()
        row: Row = {"key": list(self.key()), "set": self.data.name, "family": self.family, "trainer": self.trainer}
        row |= {"target": self.target, "seed": self.seed, "lr": self.lr, "dead_share": self.dead_share, "l1": self.l1}
        row |= {name: round(value, 6) for name, value in found.figures().items()}
        if found.latents is not None and found.y_hat is not None:
            scores = self.data.scores(rows_FD, found.latents, found.y_hat).figures
            wanted = ("mcc", "f1", "precision", "recall", "uniqueness", "absorption", "shrinkage")
            row |= {name: round(scores[name], 6) for name in wanted}
        by_group = {"error": found.error, "kept": found.kept}
        where = machine()
        row |= {"machine": where} if where else {}
        return row | {"date": started, "seconds": round(seconds, 1)} | {k: _short(v) for k, v in by_group.items()}

    def _ours(self) -> tuple[Measured, np.ndarray, float]:
        coder: Row = {"preset": self.family, "k": self.target, "target_l0": float(self.target)}
        if self.family in PENALISED:
            coder = {"preset": self.family, "l1_coefficient": self.l1}
        if self.family == "matryoshka":
            coder["prefixes"] = PREFIXES
        if self.dead_share is not None:
            coder["dead_after_tokens"] = round(self.dead_share * self.data.tokens)
        rate = {} if self.lr is None else {"lr": self.lr}
        return train_ours(self.data, coder, rate, self.seed, save=self.data.dictionary(self.key()))

    def _peers(self) -> tuple[Measured, np.ndarray, float]:
        folder, data = self.data.folder, self.data
        out, sums = (folder / f"peer-{os.getpid()}.{end}" for end in ("jsonl", "npz"))
        options = {
            "peer": self.trainer,
            "family": self.family,
            "k": self.target,
            "l1": self.l1,
            "d-sae": data.d_sae,
            "tokens": data.tokens,
            "batch-size": data.batch,
            "lr": self.lr,
            "dead-after": round((self.dead_share or 0) * data.tokens),
            "seed": self.seed,
            "activations": folder / "A.npy",
            "order": data.order(self.seed),
            "heldout": folder / "H.npy",
            "groups-of": folder / "groups.npy",
            "out": out,
            "sums": sums,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        words += ["--groups", *map(str, PREFIXES)] if self.family == "matryoshka" else []
        words += [] if data.store else ["--keep"]
        words += ["--save", str(kept)] if (kept := data.dictionary(self.key())) else []
        _ask(shlex.join(words))
        line, arrays = json.loads(out.read_text(encoding="utf-8").splitlines()[-1]), dict(np.load(sums))
        out.unlink()
        sums.unlink()
        rows_FD = arrays.pop("decoder")
        return Measured(**arrays), rows_FD, line["seconds"]


def dictionary_of(data: DataSet, row: Row) -> Path:
    """The folder of a line's dictionary. Where this machine does not have it, it is trained again.

    Raises:
        RuntimeError: then its FVE is another than the line's; the dictionary is removed.
    """
    folder = data.dictionary(row["key"])
    assert folder is not None, f"dictionaries of {data.name} are not kept"
    if not folder.exists():
        data.prepare()
        names = ("family", "trainer", "target", "seed", "lr", "dead_share", "l1")
        again = Run(data, **{name: row[name] for name in names}).train()
        print(*row["key"], f"trained again: fve={again['fve']} of {row['fve']}, {again['seconds']} s", flush=True)
        if abs(again["fve"] - row["fve"]) > _AGAIN:
            shutil.rmtree(folder)  # or the next call would take it unseen
            raise RuntimeError(f"{folder}: FVE is {again['fve']}, and {RESULTS} says {row['fve']}")
    return folder


def _ask(line: str) -> None:
    """Lets the peers' process train; it lives as long as this one, for importing a peer takes seconds."""
    process = _peers()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    for answer in process.stdout:
        if answer == "done\n":
            return
        if answer.startswith("error "):
            break
    raise RuntimeError(f"{PEERS} train_peers.py {line}\n{answer}")


@functools.cache
def _peers() -> subprocess.Popen[str]:
    command = [PEERS, "-W", "ignore", str(HERE.parent / "peers" / "train_peers.py"), "--lines"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)


@functools.cache
def machine() -> str:
    """The card that everybody trains on; "" where there is none."""
    device = jax.devices()[0]
    return "" if device.platform == "cpu" else device.device_kind


def _short(values: np.ndarray) -> list[float]:
    """Seven digits."""
    return [float(f"{value:.7g}") for value in values]


def read(path: Path = RESULTS) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


class Results:
    """The lines that are there, and new ones."""

    def __init__(self, path: Path = RESULTS):
        self._path, self.rows = path, read(path)

    def of(self, run: Run) -> Row:
        """The line of a training, which is trained where it is not there."""
        key = list(run.key())
        for row in self.rows:
            if row["key"] == key:
                return row
        row = run.train()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        shown = (
            "set",
            "family",
            "trainer",
            "target",
            "seed",
            "lr",
            "dead_share",
            "l1",
            "l0",
            "fve",
            "dead",
            "mcc",
            "f1",
        )
        print(*(f"{name}={row[name]}" for name in (*shown, "seconds") if name in row), flush=True)
        return row

    def near(self, run: Run, most: int) -> Row:
        """The line of a training whose L0 is near the target: of a penalised family the best of a search over l1, of
        `most` trainings. The search begins with what is known of other targets, then of other rates."""
        if run.family not in PENALISED:
            return self.of(run)
        points = self._points(run, ("seed", "lr", "dead_share"))
        others = self._points(run, ("seed",))
        first = PENALISED[run.family][TRAINERS.index(run.trainer)]
        first = math.exp(_root([(x, y) for x, y, _ in others])) if others else first
        return search(lambda l1: self.of(dataclasses.replace(run, l1=l1)), run.target, first, most, points)

    def _points(self, run: Run, alike: Sequence[str]) -> list[tuple[float, float, Row]]:
        """What is known of a set, a family and a trainer, where what is named is the run's."""
        names = ("family", "trainer", *alike)
        mine = [row for row in self.rows if row["set"] == run.data.name]
        return [_point(row, run.target) for row in mine if all(row[name] == getattr(run, name) for name in names)]


def search(
    train: Callable[[float], Row], target: int, first: float, most: int, known: Sequence[tuple[float, float, Row]] = ()
) -> Row:
    """The line whose L0 is nearest to the target, of `known` ones (`_point`) and up to `most` trainings at other l1."""
    points = list(known)
    for _ in range(most):
        if points and min(abs(y) for _, y, _ in points) < _NEAR:
            break
        l1 = math.exp(_root([(x, y) for x, y, _ in points])) if points else first
        points.append(_point(train(float(f"{l1:.4g}")), target))
    return min(points, key=lambda point: abs(point[1]))[2]


def _point(row: Row, target: int) -> tuple[float, float, Row]:
    return math.log(row["l1"]), math.log(max(row["l0"], 1e-3) / target), row


def _root(points: list[tuple[float, float]]) -> float:
    """Where log(L0 / target) over log l1 crosses 0, as far as is known: straight between the nearest points on both
    sides, and not too near to either, for L0 may jump there; else along the two nearest, or with slope -1 from one."""
    over, under = ([point for point in points if (point[1] > 0) == wanted] for wanted in (True, False))
    if over and under:
        (x0, y0), (x1, y1) = (min(side, key=lambda point: abs(point[1])) for side in (over, under))
        return x0 + float(np.clip(y0 / (y0 - y1), 0.2, 0.8)) * (x1 - x0)
    (x, y), *others = sorted(points, key=lambda point: abs(point[1]))
    slope = -1.0
    if others and others[0][0] != x:
        slope = min((others[0][1] - y) / (others[0][0] - x), -0.3)
    return x - float(np.clip(y / slope, -2.0, 2.0))


def compare(results: Results, data: DataSet, family: str, trainers: Sequence[str] = TRAINERS) -> Iterator[Row]:
    """Every training of a family: rates (and what counts as dead) by the first seed, then all seeds at every L0: the
    peers with the best of them, saejax with its defaults."""
    for trainer in trainers:
        searched = _searched(results, data, family, trainer)
        lr, share = (None, None) if trainer == "saejax" else searched
        targets = list(data.l0s)
        for target in targets:
            first = results.near(Run(data, family, trainer, target, 0, lr, share), _MOST)
            for seed in data.seeds:
                yield results.of(Run(data, family, trainer, target, seed, lr, share, first["l1"]))
            # The table asks for what lies between: where an end is missed, what is missing is asked for besides.
            missed = math.log(max(first["l0"], 1e-3) / target) * {data.l0s[0]: 1, data.l0s[-1]: -1}.get(target, 0)
            if family not in PENALISED and missed > _NEAR:
                targets.append(round(target**2 / first["l0"]))


def _searched(results: Results, data: DataSet, family: str, trainer: str) -> tuple[float, float | None]:
    """The rate that fits best, then of peers with an AuxK what counts as dead, by the first seed at the middle L0."""
    middle = data.l0s[1]
    told = trainer == "saejax" or family in PENALISED
    shares: tuple[float | None, ...] = (None,) if told else DEAD_SHARES

    def tried(lr: float, share: float | None) -> Row:
        return results.near(Run(data, family, trainer, middle, 0, lr, share), _TRY)

    best = best_of([tried(lr, shares[0]) for lr in data.rates], results.rows)
    best = best_of([tried(best["lr"], share) for share in shares], results.rows)
    return best["lr"], best["dead_share"]


def best_of(tried: list[Row], rows: list[Row]) -> Row:
    """The line with the largest FVE at the L0 that was asked for."""
    return max(tried, key=lambda row: at_target(row, rows))


def at_target(row: Row, rows: list[Row]) -> float:
    """FVE brought to the L0 that was asked for, along the slope of the data set's topk."""
    return float(row["fve"] - slope_of(rows, row["set"]) * math.log(max(row["l0"], 1e-3) / row["target"]))


def slope_of(rows: list[Row], data: str) -> float:
    """dFVE / dlog L0 between topk's least and largest k, the best of each; 0 while they are not there."""
    best: dict[int, float] = {}
    for row in rows:
        if (row["set"], row["family"]) == (data, "topk"):
            best[row["target"]] = max(row["fve"], best.get(row["target"], -1.0))
    if len(best) < 2:
        return 0.0
    low, high = min(best), max(best)
    return (best[high] - best[low]) / math.log(high / low)
