"""Every door to a training of a coder, each as a function of an experiment, and what comes out just before step 1."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import saejax
from saejax.app.experiment import Experiment
from saejax.app.stages import run_train
from saejax.app.sweep.config import SweepConfig
from saejax.app.sweep.run import run_sweep
from saejax.app.truth import run_truth
from saejax.app.workspace import Workspace
from saejax.coders import Coder
from saejax.plans.devices import device
from saejax.plans.estimate import estimates
from saejax.plans.preflight import run_preflight
from saejax.store import StoreLayout, StoreWriter
from saejax.training import TrainConfig, TrainState
from tiny import D_IN, replaced, tiny_experiment

ROWS, WINDOW = 1024, 32


class Enough(Exception):
    """A training was about to begin."""


@dataclasses.dataclass
class Seen:
    """Coders that were asked for parameters, and the state at step 0 of the training that was about to begin.

    With `at_once` the first coder is enough.
    """

    coders: list[Coder] = dataclasses.field(default_factory=list)
    states: list[TrainState] = dataclasses.field(default_factory=list)
    at_once: bool = False


def watched(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Every training ends before it compiles its step."""
    found, asked = Seen(), Coder.init

    def init(self: Coder, key: jax.Array) -> Any:
        found.coders.append(self)
        if found.at_once:
            raise Enough
        return asked(self, key)

    def begun(programs: Any) -> None:
        for program in programs:
            state = program.start()
            found.states.append(program.member(state, 0))
        raise Enough

    monkeypatch.setattr(Coder, "init", init)
    monkeypatch.setattr("saejax.training.loop._restored", begun)
    return found


def write_stores(folder: Path) -> None:
    """Stores of 1,024 and 256 activations in documents of 32 tokens."""
    for split, rows, seed in (("train", ROWS, 0), ("heldout", 256, 1)):
        rng, at = np.random.default_rng(seed), np.arange(rows, dtype=np.int32)
        x = (rng.normal(size=(rows, D_IN)) + np.linspace(0, 3, D_IN)).astype(np.float32)
        tokens = {"token_id": at, "document": at // WINDOW, "position": at % WINDOW}
        how: dict[str, Any] = {"layout": StoreLayout(shard_rows=256, chunk_rows=32), "seed": seed}
        identity = {"imported": f"doors {split}"}
        path = folder / "stores" / "doors" / split
        with StoreWriter.open(path, identity=identity, hook_points={"h": D_IN}, n_tokens=rows, **how) as writer:
            writer.append({"h": x}, tokens, cursor={"batch": 0})
            writer.finish()


def made(folder: Path, **sections: dict[str, Any]) -> Experiment:
    """A TopK of 64 latents for the stores, with every other number that the settings leave open."""
    coder = {"preset": "topk", "d_sae": 64, "k": 4, "dead_after_tokens": 0, "matmul_dtype": "float32"}
    usual = TrainConfig()
    train = {"tokens": 40 * 128, "batch_size": 128, "lr": 1e-3}
    train |= {"checkpoint_every": usual.checkpoint_every, "validate_every": usual.validate_every}
    top = {"name": "run", "store": "doors", "hook_point": "h", "seed": 3}
    sections = {"lm": {"model": ""}} | sections
    sections["coder"], sections["train"] = coder | sections.get("coder", {}), train | sections.get("train", {})
    return tiny_experiment(folder, top=top | sections.pop("top", {}), **sections)


def of_door(folder: Path, tmp_path: Path, **sections: dict[str, Any]) -> Experiment:
    """The experiment in a folder for runs of its own, with a small world."""
    world = {"n_features": 32, "d_in": D_IN, "roots": 4, "orthogonal_steps": 5, "p_min": 0.02, "score_samples": 500}
    sections = {"truth": world} | sections
    top = {"runs_dir": str(tmp_path / "runs")} | sections.pop("top", {})
    return made(folder, top=top, **sections)


def for_door(door: str, e: Experiment) -> Experiment:
    """Planted activations have a name of their own."""
    return dataclasses.replace(e, hook_point="") if door == "truth" else e


# --- the doors -------------------------------------------------------------------------------------------------


def stage(e: Experiment) -> None:
    run_train(Workspace(e))


def told(e: Experiment) -> dict[str, Any]:
    parts = e.coder, e.train
    return {f.name: getattr(part, f.name) for part in parts for f in dataclasses.fields(part)} | {"progress": False}


def given(e: Experiment, run: bool = False, **more: Any) -> None:
    """`saejax.train` on the store, told every setting that an experiment has."""
    how = told(e) | {"seed": e.seed, "mesh": e.parallel.mesh, "run": e.run_dir if run else None}
    saejax.train(e.store_dir("train"), **how | more)


def given_run(e: Experiment) -> None:
    given(e, run=True, heldout=e.store_dir("heldout"))


def sweep(e: Experiment) -> None:
    run_sweep(Workspace(dataclasses.replace(e, sweep=SweepConfig(seeds=(e.seed,)))))


def truth(e: Experiment) -> None:
    run_truth(e)


def preflight(e: Experiment) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saejax.plans.preflight.disk_speed", lambda *_: (1e9, 1e9))
        run_preflight(Workspace(e), ())


def plan(e: Experiment) -> None:
    estimates(e, device("h100"), 1)


DOORS: dict[str, Callable[[Experiment], None]] = {
    "stage": stage,
    "saejax.train": given,
    "saejax.train(run=)": given_run,
    "sweep": sweep,
    "truth": truth,
    "preflight": preflight,
}


# --- doors that lack something ---------------------------------------------------------------------------------


class Untouched:
    """An iterable that nobody may begin to read."""

    def __iter__(self) -> Iterator[np.ndarray]:
        raise AssertionError("read")


def iterated(e: Experiment) -> None:
    saejax.train(Untouched(), run=e.run_dir, heldout=e.store_dir("heldout"), **told(e))


def from_model(e: Experiment) -> Experiment:
    e = dataclasses.replace(e, hook_point="", lm=dataclasses.replace(e.lm, model="demo"))
    return replaced(e, "capture", into="training")


def streamed(e: Experiment) -> None:
    run_train(Workspace(from_model(e)))


def streamed_sweep(e: Experiment) -> None:
    sweep(from_model(e))


def streamed_plan(e: Experiment) -> None:
    plan(from_model(e))
