"""A workload that is no coder: one object that makes itself ready, and `train` does the rest."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import Stream

from saejax.core.errors import ConfigError
from saejax.fit.learner import Ready, Tell, Unsaved
from saejax.fit.train import train
from saejax.parallel import ParallelConfig, Process, make_mesh
from saejax.training import Setup, TrainConfig, TrainState, put_on
from saejax.training.optim import make_optimizer, make_schedule
from saejax.training.program import program_on
from saejax.training.state import make_init
from saejax.training.step import apply_gradients

CONFIG = TrainConfig(batch_size=32, tokens=32 * 60, lr=0.1, schedule="constant", warmup_fraction=0.0, log_every=20)
SLOPE = np.array([2.0, -1.0, 0.5], np.float32)


@dataclasses.dataclass(frozen=True)
class Regression:
    """y = x w, by least squares: what is learnt, and a `Learner` of it."""

    refused: str = ""

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        return {"w": jnp.zeros(3)}

    def init_stats(self) -> dict[str, Any]:
        return {}

    def logical_axes(self) -> dict[str, tuple[str | None, ...]]:
        return {}

    def project_gradients(self, params: Any, grads: Any) -> Any:
        return grads

    def constrain(self, params: Any, step: jax.Array) -> Any:
        return params

    def ready(self, numbers: Mapping[str, Any], checkpoints: Sequence[Any], tell: Tell) -> Ready:
        if self.refused:
            raise ConfigError(self.refused)
        optimizer, schedule = make_optimizer(CONFIG), make_schedule(CONFIG)

        def loss(params: Any, batch: Any) -> jax.Array:
            return jnp.mean(jnp.square(batch["x"] @ params["w"] - batch["y"][:, 0]))

        def step(state: TrainState, batch: Any, hyper: Any) -> tuple[TrainState, dict[str, jax.Array]]:
            value, grads = jax.value_and_grad(loss)(state.params, batch)
            found = (grads, {"loss": value, "error": jnp.sqrt(value)}, {})
            after, metrics, _ = apply_gradients(self, optimizer, schedule, CONFIG, state, hyper, found)
            return after, metrics

        mesh, shapes = make_mesh(ParallelConfig((1, 1))), {"x": ((32, 3), np.float32), "y": ((32, 1), np.float32)}
        init = make_init(self, optimizer, CONFIG)
        program = program_on(mesh, self, step, init, lambda dtype: shapes, seed=0)
        put, figures = put_on(mesh, 32, list(shapes)), {"error": ".3f"}
        setup = Setup([program], Stream(batches, 32), put, mesh=mesh, unit="pairs", figures=figures, tell=tell)
        return Ready(CONFIG, setup, ["train: three slopes"])


def batches(step: int) -> Iterator[dict[str, np.ndarray]]:
    while True:
        x = np.random.default_rng(step).normal(size=(32, 3)).astype(np.float32)
        yield {"x": x, "y": (x @ SLOPE)[:, None]}
        step += 1


class Rows:
    """A `Writer` that keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self.rows.append((step, dict(row)))

    def close(self) -> None:
        """Nothing is open."""


def test_what_is_no_coder_trains_through_the_same_function() -> None:
    rows, lines = Rows(), list[str]()
    outcome = train(Regression(), Unsaved([rows]), Process(), lines.append, shown=False)
    assert outcome is not None and outcome.finished and outcome.step == 60
    assert not lines, "nothing is kept, and nothing is said"
    np.testing.assert_allclose(outcome.states[0].params["w"], SLOPE, atol=0.05)
    errors = [row["train/error"] for _, row in rows.rows if "train/error" in row]
    assert errors[-1] < 0.1 * errors[0]


def test_what_it_refuses_is_refused_before_anything_is_compiled() -> None:
    with pytest.raises(ConfigError, match="no slopes"):
        train(Regression("no slopes"), Unsaved(), Process(), print, shown=False)
