"""The runs of a folder as they are now: state, progress, figures. Read from their files alone, whoever writes them."""

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from saejax.app.experiment import Experiment, read_experiment
from saejax.app.sweep.members import sparsity_of
from saejax.app.training_folders import as_begun
from saejax.checkpoints import Checkpoints
from saejax.coders import TOPOLOGIES, CoderConfig
from saejax.core.errors import SaejaxError
from saejax.core.files import stamp
from saejax.core.lease import LOCK
from saejax.jobs.progress import seconds_left
from saejax.reports.evaluation import failed_of
from saejax.reports.read import read_evaluation
from saejax.runs import Reading, Run, Sweep
from saejax.runs.folder import FIRST, RESERVED
from saejax.runs.state import state_of, state_of_sweep
from saejax.store.files import StoreFiles
from saejax.store.manifest import read_manifest

_DEPTH = 4
# What stands in the place of a coder's preset where a run trains a latent prefix.
PREFIX = "prefix"
_FILES = (Run.config, Run.metrics, Run.evaluation, Run.features, Run.page, Run.attempts)
# A name has one unit wherever it stands: a training counts the latents that are "dead", and here their share is shown.
_OF_EVAL = ("l0", "fve", "dead_fraction")
_OF_ROWS = ("l0", "fve", "dead", "loss")
_OF_MEMBER = (
    *("name", "preset", "d_sae", "k", "l0", "fve", "fve_with_sinks", "dead_fraction"),
    *("step", "steps", "state", "updated"),
)


@dataclasses.dataclass
class Runs:
    """All runs below a folder, each read again only when its files have changed."""

    root: Path
    _kept: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = dataclasses.field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """Every run, those that moved last first."""
        names = {name: sweep for name, sweep in _walk(self.root, self.root, _DEPTH) if name != sweep}
        self._kept = {name: kept for name, kept in self._kept.items() if name in names}
        rows = [self.row(name, sweep) for name, sweep in names.items()]
        return sorted(rows, key=lambda row: (-row["updated"], row["name"]))

    def row(self, name: str, sweep: str | None = None) -> dict[str, Any]:
        """One run in a few figures. What its files do not say is None."""
        run = Run(self.root / name)
        sweep = sweep or self._sweep_of(run)
        files = (stamp(run.path / file) for file in (*_FILES, LOCK, Run.checkpoints))
        signature = (sweep, *files)
        before = self._kept.get(name)
        if before is None or before[0] != signature:
            before = self._kept[name] = (signature, _run_row(run, name, sweep))
        row, reading = before[1], Reading()
        of = Sweep(self.root / sweep) if sweep else None
        # Where nobody can be asked who holds the lease, nobody does.
        state = reading.of(lambda: state_of(run, row, of), "") or state_of(run, row, free=True)
        return row | {"state": state, "error": reading.error(row["error"])}

    def state(self, name: str) -> str:
        """The state of one run, in a word."""
        return str(self.row(name)["state"])

    def sweeps(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Every sweep, with its members' rows as they are now."""
        sweeps = []
        for name in sorted(name for name, sweep in _walk(self.root, self.root, _DEPTH) if name == sweep):
            members = [
                {key: row[key] for key in _OF_MEMBER} | {"label": row["name"].removeprefix(f"{name}/")}
                for row in rows
                if row["sweep"] == name
            ]
            state = state_of_sweep([member["state"] for member in members])
            sweeps.append({"name": name, "state": state, "members": members})
        return sweeps

    def _sweep_of(self, run: Run) -> str | None:
        above = (path for path in run.path.parents if self.root in path.parents and Sweep(path).exists)
        return next((path.relative_to(self.root).as_posix() for path in above), None)


def _walk(root: Path, folder: Path, depth: int, sweep: str | None = None) -> Iterator[tuple[str, str | None]]:
    """(name, its sweep or None) of all runs below a folder, their attempts too; a sweep is of itself."""
    for path in _folders(folder):
        name = path.relative_to(root).as_posix()
        if Sweep(path).exists:
            yield name, name
            yield from _walk(root, path, depth - 1, name) if depth > 1 else ()
        elif Run(path).exists:
            yield name, sweep
            for inner in map(Run, _folders(path)):
                if inner.is_attempt and inner.exists:
                    yield inner.path.relative_to(root).as_posix(), sweep
        elif depth > 1:
            yield from _walk(root, path, depth - 1, sweep)


def is_shown(folder: Path) -> bool:
    """It has a page: a run, or a dictionary that was evaluated in a run's folder."""
    return Run(folder).exists or Run(folder).is_dictionary


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name[0] != "." and entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [folder / name for name in sorted(names) if name not in RESERVED]


def _run_row(run: Run, name: str, sweep: str | None) -> dict[str, Any]:
    """The row of a run, without its state."""
    reading = Reading()
    config = reading.of(lambda: _of_config(run), dict.fromkeys(_OF_CONFIG))
    no_rows: dict[str, float | None] = {}
    last = reading.of(run.last_row, no_rows)
    evaluation = reading.of(lambda: read_evaluation(run.path), None)
    gates = (evaluation or {}).get("gates")
    step = last.get("step")
    finished = bool(step and config["steps"] and (step >= config["steps"] or _stopped_early(run, last)))
    if evaluation is not None:
        config["d_sae"] = evaluation.get("d_sae") or config["d_sae"]
    no_steps: list[Path] = []
    steps = reading.of(lambda: list(run.checkpoints.iterdir()) if run.checkpoints.is_dir() else [], no_steps)
    saved = any(path.name.isdigit() for path in steps)
    above = Run(run.path.parent) if run.is_attempt else run
    attempts = reading.of(above.read_attempts, None)
    kept = run.path.name if run.is_attempt else FIRST
    return {
        "name": name,
        "sweep": sweep,
        **config,
        "step": step,
        "finished": finished,
        "tokens": last.get("tokens"),
        "tokens_per_second": last.get("train/tokens_per_second"),
        **_figures((evaluation or {}).get("metrics") or {}, last, config["d_sae"]),
        "gates_passed": None if gates is None else sum(bool(gate.get("passed")) for gate in gates),
        "gates_total": None if gates is None else len(gates),
        "failed_gates": failed_of(gates or []),
        "evaluated_at": None if evaluation is None else evaluation.get("step"),
        "has_features": run.features.is_file(),
        "has_report": run.page.is_file(),
        "has_checkpoint": saved,
        "has_coder": saved and config["preset"] != PREFIX,
        "attempts": len(attempts["attempts"]) if attempts else 0,
        "kept": attempts is None or attempts["kept"] == kept,
        "evaluated": tuple(reading.of(run.dictionaries, [])),
        "updated": max((known.mtime_ns for file in _FILES if (known := stamp(run.path / file))), default=0) / 1e9,
        "seconds_left": None if finished else seconds_left(config["tokens_total"], last),
        "error": reading.error(),
    }


_OF_CONFIG = ("preset", "model", "hook_point", "d_sae", "k", "steps", "tokens_total")


def _of_config(run: Run) -> dict[str, Any]:
    """The figures that config.json holds.

    Raises:
        DataError, OSError: it cannot be read.
    """
    nothing = dict.fromkeys(_OF_CONFIG)
    e = as_begun(read_experiment(run.config))
    training = {"steps": e.train.steps, "tokens_total": e.train.steps * e.train.batch_size}
    if e.prefix.source:
        models = ", ".join(filter(None, (e.lm.model, e.prefix.second)))
        return nothing | {"preset": PREFIX, "model": models, **training}
    coder = e.coder.resolved()
    hook_point = e.hook_point or ", ".join(e.reads or e.capture.hook_points)
    sizes = {"d_sae": _latents(e, coder), "k": sparsity_of(e)}
    return nothing | {"preset": coder.preset, "model": e.lm.model, "hook_point": hook_point, **sizes, **training}


def _latents(e: Experiment, coder: CoderConfig) -> int | None:
    """All latents of a coder, as its evaluation counts them; None where the configuration alone does not tell."""
    topology = TOPOLOGIES[coder.topology]
    usual = (e.hook_point,) if e.hook_point or not (topology.stacked and topology.tied) else e.capture.hook_points
    reads = e.reads or usual
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
    figures = {name: last.get(f"val/{name}", last.get(f"train/{name}")) for name in _OF_ROWS}
    dead = figures.pop("dead")
    figures["dead_fraction"] = dead / n_latents if n_latents and dead is not None else None
    figures["fve_with_sinks"] = metrics.get("fve_with_sinks")  # an evaluation alone meets any
    return figures | {name: metrics[name] for name in _OF_EVAL if metrics.get(name) is not None}


def _stopped_early(run: Run, last: Mapping[str, Any]) -> bool:
    """The training ended by its own rule (train.early_stop_patience), as its newest checkpoint says."""
    if "time/seconds" not in last:  # no session of it has ended
        return False
    try:
        with Checkpoints(run.checkpoints) as checkpoints:
            newest = checkpoints.latest()
            return newest is not None and bool(checkpoints.restore_numpy(newest, names=())[1].get("stopped_early"))
    except (SaejaxError, OSError):
        return False
