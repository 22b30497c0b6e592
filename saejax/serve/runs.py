"""The runs of a folder as they are now: state, progress, figures. Read from their files alone, whoever writes them."""

import dataclasses
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from saejax.app.attempts import is_attempt, read_record
from saejax.app.evaluated import is_evaluated
from saejax.app.experiment import RESERVED, Experiment, read_experiment
from saejax.app.left_open import as_begun
from saejax.app.loading import is_run
from saejax.app.records import SWEEP
from saejax.app.sweep.members import Member
from saejax.checkpoints import Checkpoints
from saejax.coders import TOPOLOGIES, CoderConfig
from saejax.core.errors import SaejaxError
from saejax.core.files import read_bounded, stamp
from saejax.core.lease import LOCK, held
from saejax.core.metrics import last_rows
from saejax.report.evaluation import failed_of
from saejax.report.read import read_evaluation
from saejax.store.files import StoreFiles
from saejax.store.manifest import read_manifest

# A run that another machine writes shows its life by its rows alone.
_QUIET = 60.0  # seconds
_DEPTH = 4
# What stands in the place of a coder's preset where a run trains a latent prefix.
PREFIX = "prefix"
_FILES = ("config.json", "metrics.jsonl", "eval.json", "features.json.gz", "report.html", "attempts.json", LOCK)
# A name has one unit wherever it stands: a training counts the latents that are "dead", and here their share is shown.
_OF_EVAL = ("l0", "fve", "dead_fraction")
_OF_ROWS = ("l0", "fve", "dead", "loss")
_LONGEST_LOCK = 4096

T = TypeVar("T")


class _Reading:
    """Reads the files of one run: of one that is damaged the error is kept in `errors`, and the others are read."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def of(self, read: Callable[[], T], nothing: T) -> T:
        """What `read` returns, or `nothing` where a file is damaged or may not be read."""
        try:
            return read()
        except (SaejaxError, OSError) as error:
            self.errors.append(str(error))
            return nothing

    def said(self, before: str | None = None) -> str | None:
        """The errors in one line; None without any."""
        return " ".join(dict.fromkeys(filter(None, (before, *self.errors)))) or None


@dataclasses.dataclass
class Runs:
    """All runs below a folder, each read again only when its files have changed."""

    root: Path
    _kept: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = dataclasses.field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """Every run, those that moved last first."""
        names = dict(_found(self.root, self.root, _DEPTH))
        self._kept = {name: kept for name, kept in self._kept.items() if name in names}
        rows = [self.row(name, sweep) for name, sweep in names.items()]
        return sorted(rows, key=lambda row: (-row["updated"], row["name"]))

    def row(self, name: str, sweep: str | None = None) -> dict[str, Any]:
        """One run in a few figures. What its files do not say is None."""
        folder = self.root / name
        sweep = sweep or _sweep_of(self.root, folder)
        signature = (sweep, *(stamp(folder / file) for file in _FILES), stamp(folder / "checkpoints"))
        before = self._kept.get(name)
        if before is None or before[0] != signature:
            before = self._kept[name] = (signature, _described(self.root, folder, name, sweep))
        row, reading = before[1], _Reading()
        # Where nobody can be asked who holds the lease, nobody does.
        state = reading.of(lambda: state_of(folder, row, self.root), "") or state_of(folder, row, self.root, free=True)
        return row | {"state": state, "error": reading.said(row["error"])}

    def state(self, name: str) -> str:
        """The state of one run, in a word."""
        return str(self.row(name)["state"])

    def sweeps(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Every sweep, with its members' rows as they are now."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in _sweeps(self.root, self.root, _DEPTH)}
        for row in rows:
            if row["sweep"] in found:
                found[row["sweep"]].append(row)
        return [
            {"name": name, "state": _together([row["state"] for row in own]), "members": _members(name, own)}
            for name, own in sorted(found.items())
        ]


def state_of(folder: Path, row: Mapping[str, Any], root: Path, free: bool = False) -> str:
    """waiting, running, stopped, trained, evaluated, or failed where a gate failed.

    Args:
        free: nobody writes it; else the leases are asked.

    Raises:
        DataError: a lease's file cannot be read.
    """
    of_sweep = row["sweep"] and not row["evaluated_at"]
    if not free and (is_written(folder) or (of_sweep and is_written(root / row["sweep"]))):
        return "running"
    if row["gates_total"] is not None:
        return "failed" if row["failed_gates"] else "evaluated"
    if row["finished"]:
        return "trained"
    if row["step"] and not free and _elsewhere(folder) and time.time() - row["updated"] < _QUIET:
        return "running"
    return "stopped" if row["step"] or row["has_checkpoint"] else "waiting"


def is_written(folder: Path) -> bool:
    """Whether a process of this machine holds the folder's lease."""
    return held(folder) is not None


def _elsewhere(folder: Path) -> bool:
    """Whether another machine held the lease last."""
    if not os.path.lexists(folder / LOCK):
        return False
    match = re.search(r" on (\S+)", read_bounded(folder / LOCK, _LONGEST_LOCK).decode(errors="replace"))
    return match is not None and match[1] != platform.node()


def _found(root: Path, folder: Path, depth: int, sweep: str | None = None) -> Iterator[tuple[str, str | None]]:
    """(name, its sweep or None) of all runs below a folder, their attempts too."""
    for path in _folders(folder):
        name = path.relative_to(root).as_posix()
        if is_listed(path) and not (path / SWEEP).is_file():
            yield name, sweep
            for inner in _folders(path):
                if is_attempt(inner) and is_listed(inner):
                    yield inner.relative_to(root).as_posix(), sweep
        elif depth > 1:
            yield from _found(root, path, depth - 1, name if (path / SWEEP).is_file() else sweep)


def is_listed(folder: Path) -> bool:
    """Whether it is a run, or would be one if its config.json could be read: that is said, and not passed over."""
    config = folder / "config.json"
    return is_run(folder) or (os.path.lexists(config) and not config.is_file())


def is_shown(folder: Path) -> bool:
    """Whether it has a page: a run, or a dictionary that was evaluated in a run's folder."""
    return is_listed(folder) or is_evaluated(folder)


def _sweeps(root: Path, folder: Path, depth: int) -> Iterator[str]:
    for path in _folders(folder):
        if (path / SWEEP).is_file():
            yield path.relative_to(root).as_posix()
        elif depth > 1 and not is_listed(path):
            yield from _sweeps(root, path, depth - 1)


def _sweep_of(root: Path, folder: Path) -> str | None:
    above = next((path for path in folder.parents if root in path.parents and (path / SWEEP).is_file()), None)
    return above.relative_to(root).as_posix() if above else None


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [one.name for one in entries if one.name[0] != "." and one.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [folder / name for name in sorted(names) if name not in RESERVED]


def _described(root: Path, folder: Path, name: str, sweep: str | None) -> dict[str, Any]:
    """What the files of a run say, without its state."""
    reading = _Reading()
    config = reading.of(lambda: _of_config(folder), dict.fromkeys(_OF_CONFIG))
    no_rows: dict[str, float | None] = {}
    last = reading.of(lambda: last_rows(folder / "metrics.jsonl"), no_rows)
    evaluation = reading.of(lambda: read_evaluation(folder), None)
    gates = (evaluation or {}).get("gates")
    passed, failed = sum(bool(gate.get("passed")) for gate in gates or []), failed_of(gates or [])
    step = last.get("step")
    finished = bool(step and config["steps"] and (step >= config["steps"] or _stopped_early(folder, last)))
    if evaluation is not None:
        config["d_sae"] = evaluation.get("d_sae") or config["d_sae"]
    saved = reading.of(lambda: _is_saved(folder / "checkpoints"), False)
    attempts = reading.of(lambda: _attempts(folder), _NO_ATTEMPTS)
    return {
        "name": name,
        "sweep": sweep,
        **config,
        "step": step,
        "finished": finished,
        "tokens": last.get("tokens"),
        "tokens_per_second": last.get("train/tokens_per_second"),
        **_figures((evaluation or {}).get("metrics") or {}, last, config["d_sae"]),
        "gates_passed": None if gates is None else passed,
        "gates_total": None if gates is None else len(gates),
        "failed_gates": failed,
        "evaluated_at": None if evaluation is None else evaluation.get("step"),
        "has_features": (folder / "features.json.gz").is_file(),
        "has_report": (folder / "report.html").is_file(),
        "has_checkpoint": saved,
        "has_coder": saved and config["preset"] != PREFIX,
        **attempts,
        "evaluated": reading.of(lambda: _evaluated(folder), _NO_NAMES),
        "updated": _updated(folder),
        "seconds_left": None if finished else _left(config["tokens_total"], last),
        "error": reading.said(),
    }


_OF_CONFIG = ("preset", "model", "hook_point", "d_sae", "k", "steps", "tokens_total")


def _of_config(folder: Path) -> dict[str, Any]:
    """What config.json says of the run.

    Raises:
        DataError, OSError: it cannot be read.
    """
    nothing = dict.fromkeys(_OF_CONFIG)
    e = as_begun(read_experiment(folder / "config.json"))
    training = {"steps": e.train.steps, "tokens_total": e.train.steps * e.train.batch_size}
    if e.prefix.source:
        models = ", ".join(filter(None, (e.lm.model, e.prefix.second)))
        return nothing | {"preset": PREFIX, "model": models, **training}
    coder = e.coder.resolved()
    hook_point = e.hook_point or ", ".join(e.reads or e.capture.hook_points)
    sizes = {"d_sae": _latents(e, coder), "k": Member("", e, e, 1.0).k}
    return nothing | {"preset": coder.preset, "model": e.lm.model, "hook_point": hook_point, **sizes, **training}


def _latents(e: Experiment, coder: CoderConfig) -> int | None:
    """All latents of a coder, as its evaluation counts them; None where the configuration alone does not tell."""
    topology = TOPOLOGIES[coder.topology]
    own = (e.hook_point,) if e.hook_point or not (topology.stacked and topology.tied) else e.capture.hook_points
    reads = e.reads or own
    width = coder.d_sae or _wide(e, coder.expansion or 0)
    shape = topology(d_in=1, d_sae=width or 0, sites=len(reads)).latent_shape
    # How many a pattern stands for the model decides.
    counted = len(shape) == 1 or not any(sign in name for name in reads for sign in "*{")
    return math.prod(shape) or None if counted else None


def _wide(e: Experiment, expansion: int) -> int | None:
    """Latents of a coder that is so many times as wide as what it reads, where the run's store is here."""
    if "://" in e.stores_dir or (manifest := read_manifest(StoreFiles(e.store_dir("train")))) is None:
        return None
    widths = manifest.header.hook_points
    reads = (*(name for name in (e.hook_point, *e.reads) if name), *widths)
    return next((expansion * widths[name] for name in reads if name in widths), None)


def _figures(metrics: Mapping[str, Any], last: Mapping[str, Any], n_latents: int | None) -> dict[str, Any]:
    """Of the evaluation, else of the last validation, else of the last row of the training."""
    found = {name: last.get(f"val/{name}", last.get(f"train/{name}")) for name in _OF_ROWS}
    dead = found.pop("dead")
    found["dead_fraction"] = dead / n_latents if n_latents and dead is not None else None
    return found | {name: metrics[name] for name in _OF_EVAL if metrics.get(name) is not None}


def _stopped_early(folder: Path, last: Mapping[str, Any]) -> bool:
    """Whether the training ended by its own rule (train.early_stop_patience), as its newest checkpoint says."""
    if "time/seconds" not in last:  # no session of it has ended
        return False
    try:
        with Checkpoints(folder / "checkpoints") as checkpoints:
            newest = checkpoints.latest()
            return newest is not None and bool(checkpoints.restore_numpy(newest, names=())[1].get("stopped_early"))
    except (SaejaxError, OSError):
        return False


def _left(wanted: int | None, last: Mapping[str, Any]) -> float | None:
    """Seconds for what is left of the activations at the last pace; None where it is not known."""
    tokens, rate = map(last.get, ("tokens", "train/tokens_per_second"))
    return max(0, wanted - tokens) / rate if wanted and tokens and rate else None


_NO_NAMES: tuple[str, ...] = ()
_NO_ATTEMPTS = {"attempts": 0, "kept": True}


def _attempts(folder: Path) -> dict[str, Any]:
    above = folder.parent if is_attempt(folder) else folder
    record = read_record(above)
    if record is None:
        return _NO_ATTEMPTS
    own = folder.name if is_attempt(folder) else "attempt-0"
    return {"attempts": len(record.attempts), "kept": record.kept == own}


def _is_saved(checkpoints: Path) -> bool:
    return checkpoints.is_dir() and any(one.name.isdigit() for one in checkpoints.iterdir())


def _evaluated(folder: Path) -> tuple[str, ...]:
    """Names of the dictionaries that `saejax evaluate --sae` evaluated in this run's folder."""
    inner = folder / "evaluated"
    return tuple(sorted(path.name for path in inner.iterdir() if is_evaluated(path))) if inner.is_dir() else ()


def _updated(folder: Path) -> float:
    """When one of its files changed last, in seconds since 1970."""
    found = [known for name in _FILES if name != LOCK and (known := stamp(folder / name))]
    return max((known.mtime_ns for known in found), default=0) / 1e9


def _members(sweep: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = ("name", "preset", "d_sae", "k", "l0", "fve", "dead_fraction", "step", "steps", "state", "updated")
    return [{key: row[key] for key in kept} | {"label": row["name"].removeprefix(f"{sweep}/")} for row in rows]


def _together(states: list[str]) -> str:
    for state in ("running", "stopped", "waiting", "failed"):
        if state in states:
            return state
    return "trained" if "trained" in states else "evaluated" if states else "waiting"
