"""Experiments and activations small enough for tests."""

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from saejax.app.experiment import Experiment, default_config, experiment
from saejax.store import StoreLayout, StoreWriter
from saejax.store.layout import BF16
from saejax.training import Outcome, Setup, TrainConfig, program_of_one, put_on, run_loop
from saejax.training.watch import Watch

ROOT = Path(__file__).resolve().parents[2]


def one_device() -> dict[str, str]:
    """The environment of a process that sees this checkout and one device, and compiles as the tests do."""
    flags = re.sub(r"(device_count)=\d+", r"\1=1", os.environ["XLA_FLAGS"])
    return os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}


D_IN = 16
# quickstart:tiny smaller still, with batches of `few` products, and a checkpoint often enough to be killed between two.
SMALLER = (
    "--config.capture.tokens=8000",
    "--config.capture.heldout_tokens=1024",
    "--config.capture.shard_rows=2048",
    "--config.train.batch_size=64",
    "--config.train.tokens=8192",
    "--config.train.checkpoint_every=20",
    "--config.eval.tokens=800",
    "--config.eval.batch_rows=4",
    "--config.report.tokens=800",
    "--config.report.batch_rows=4",
)


def tiny_experiment(folder: Path, **sections: dict[str, Any]) -> Experiment:
    """The demo model and corpus, a few thousand activations, a few dozen steps; all below `folder`.

    `sections` override keys: tiny_experiment(folder, train={"lr": 1.0}); top-level keys go in `top`.
    """
    c = default_config()
    c.name, c.runs_dir, c.stores_dir = "tiny", str(folder / "runs"), str(folder / "stores")
    # One device, whatever the test process has: the tests of several devices say so.
    c.parallel.mesh = (1, 1)
    c.text.context_length = 64
    c.capture.hook_points = ("blocks.1.resid_post", "blocks.0.mlp_out")
    c.capture.update(tokens=3000, heldout_tokens=600, batch_rows=8, shard_rows=1024, chunk_rows=64)
    c.coder.update(d_sae=256, k=8, dead_after_tokens=2000, matmul_dtype="float32")
    c.train.update(tokens=40 * 128, batch_size=128, lr=1e-3, checkpoint_every=10, validate_every=10, log_every=2)
    c.eval.update(tokens=500, batch_rows=4)
    c.report.update(tokens=500, batch_rows=4)
    c.update(sections.pop("top", {}))
    for section, values in sections.items():
        c[section].update(values)
    return experiment(c)


def planted_store(path: Path, rows: int = 4096, seed: int = 0, shard_rows: int = 1024) -> None:
    """A store with hook point `h` of width 16: sparse positive combinations of 32 fixed directions, and a mean."""
    directions = np.random.default_rng(99).normal(size=(32, D_IN))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    rng = np.random.default_rng(seed)
    codes = (rng.random((rows, 32)) < 0.1) * rng.exponential(2.0, (rows, 32))
    x = codes @ directions + 0.5
    tokens = {name: np.arange(rows, dtype=np.int32) for name in ("token_id", "document", "position")}
    layout = StoreLayout(shard_rows=shard_rows, chunk_rows=64)
    with StoreWriter.open(
        path, identity={"imported": f"planted {seed}"}, hook_points={"h": D_IN}, n_tokens=rows, layout=layout, seed=seed
    ) as writer:
        writer.append({"h": x.astype(np.float32)}, tokens, cursor={"batch": 0})
        writer.finish()


def planted_experiment(folder: Path, name: str, **train: Any) -> Experiment:
    """`tiny_experiment` of 40 steps on planted stores below `folder`: no language model, and little to compile."""
    for split, rows, seed in (("train", 4096, 0), ("heldout", 600, 1)):
        if not (folder / "stores" / "planted" / split).exists():
            planted_store(folder / "stores" / "planted" / split, rows, seed)
    return tiny_experiment(
        folder,
        top={"name": name, "store": "planted", "hook_point": "h"},
        lm={"model": ""},
        coder={"preset": "standard", "d_sae": 64},
        train=train,
    )


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a traced program (`jax.make_jaxpr(f)(...)`), those of loops, branches and calls too."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield from equations(inner)


def products(jaxpr: Any) -> list[tuple[str, Any]]:
    """(dtype of the operands, precision asked for) of every matrix product of a traced program."""
    found = []
    for equation in equations(jaxpr):
        if equation.primitive.name == "dot_general":
            (dtype,) = {str(operand.aval.dtype) for operand in equation.invars}
            precision = equation.params["precision"]
            found.append((dtype, precision and precision[0]))
    return found


@dataclasses.dataclass
class Stream:
    """A `BatchSource` of what a function gives: start step -> batches."""

    iterate: Callable[[int], Any]
    epoch_rows: int
    dtype: Any = BF16
    hook_points: Any = None
    batch_size: int = 0
    statistics: Any = None
    whole_batch_at: Any = None

    def places(self, step: int) -> dict[str, np.ndarray]:
        return {}


def train_alone(
    config: TrainConfig,
    coder: Any,
    mesh: Any,
    batches: Callable[[int], Any],
    sites: Any,
    prepare: Callable[[Any], Any],
    epoch_rows: int,
    seed: int,
    validate: Callable[[Any, Any], dict[str, float]] | None,
    writers: Any,
    checkpoints: Any,
    meta: dict[str, Any],
    watches: Sequence[Watch] = (),
    **how: Any,
) -> Outcome:
    """A session of training one coder, without stores or run folders."""
    program = program_of_one(coder, config, sites, prepare, mesh, seed=seed, checkpoints=checkpoints, meta=meta, **how)
    setup = Setup(
        programs=[program],
        batches=Stream(batches, epoch_rows),
        put=put_on(mesh, config.batch_size, sites.hook_points),
        validate=validate and (lambda states: {"": validate(states[0].evaluated(), states[0].stats)}),
        writers={"": writers},
        mesh=mesh,
        watches=watches,
    )
    return run_loop(config, setup)


def fill(
    writer: StoreWriter,
    batch: Callable[[int], tuple[dict[str, np.ndarray], dict[str, np.ndarray]]],
    size: int,
    available: int,
    stop_after: int | None,
) -> bool:
    """Write batches of `size` rows from where the writer is, until it is full or the text ends at `available`.

    True if it was finished, False if it was left after `stop_after` batches.
    """
    index, taken = (writer.resume or {"batch": 0})["batch"], 0
    while not writer.full and index * size < available:
        if taken == stop_after:
            return False
        activations, tokens = batch(index)
        keep = slice(min(size, available - index * size))
        writer.append(
            {name: rows[keep] for name, rows in activations.items()},
            {name: rows[keep] for name, rows in tokens.items()},
            cursor={"batch": index},
            counters={"seen": size, "batches": 1},
        )
        index, taken = index + 1, taken + 1
    writer.finish()
    return True


def replaced(e: Experiment, section: str, **values: Any) -> Experiment:
    return dataclasses.replace(e, **{section: dataclasses.replace(getattr(e, section), **values)})
