"""The training state and its birth, already sharded."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from saejax.coders import Coder
from saejax.core.rng import stream
from saejax.parallel import tree_shardings
from saejax.training.config import TrainConfig
from saejax.training.guard import start_losses
from saejax.training.optim import start_average
from saejax.training.warm_start import WarmStart


class Learnable(Protocol):
    """A `Coder`, or anything else with parameters and a loss."""

    def init(self, key: jax.Array) -> Any:
        """Fresh parameters."""

    def init_stats(self) -> Any:
        """Counts of training beside them; {} for none."""

    def logical_axes(self) -> Mapping[str, tuple[str | None, ...]]:
        """{name of a parameter or statistic: its logical axes}; what is not named is whole on every device."""

    def project_gradients(self, params: Any, grads: Any) -> Any:
        """The gradients that the optimizer gets."""

    def constrain(self, params: Any, step: jax.Array) -> Any:
        """The parameters after the optimizer."""


@flax.struct.dataclass
class TrainState:
    """All that training carries from step to step. No keys: randomness is a function of (seed, name, step).

    `averaged` are the weights that evaluation reads: {} where those are `params` themselves. `recent` are the losses
    by which spikes are known: {} where nobody asks.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    stats: Any
    averaged: Any
    recent: Any = dataclasses.field(default_factory=dict)

    def evaluated(self) -> Any:
        """The parameters that evaluation reads."""
        return self.averaged or self.params

    def to_items(self) -> dict[str, Any]:
        """The state as the items of a checkpoint."""
        named = {name: getattr(self, name) for name in ("params", "averaged", "opt_state", "stats")}
        return named | {"step": {"step": self.step} | self.recent}

    @classmethod
    def from_items(cls, items: dict[str, Any]) -> "TrainState":
        """Inverse of `to_items`."""
        recent = {name: value for name, value in items["step"].items() if name != "step"}
        named = {name: items[name] for name in ("params", "averaged", "opt_state", "stats")}
        return cls(step=items["step"]["step"], **named, recent=recent)


def make_init(
    learner: Learnable,
    optimizer: optax.GradientTransformation,
    config: TrainConfig,
    prepare: Callable[[Any], Any] = lambda params: params,
) -> Callable[..., TrainState]:
    """(seed, warm start or None, parameters if they are there) -> TrainState, for the caller to compile or only shape.

    `prepare` moves fresh parameters to the data.
    """

    def init(seed: Any, warm: WarmStart | None = None, made: Any = None) -> TrainState:
        params, stats = prepare(learner.init(stream(seed, "init"))), learner.init_stats()
        if warm is not None:
            assert isinstance(learner, Coder), "what starts from a coder is one"
            params, stats = warm.applied(learner, params, stats)
        params = params if made is None else made
        return TrainState(
            jnp.int32(0), params, optimizer.init(params), stats, start_average(config, params), start_losses(config)
        )

    return init


def abstract_state(learner: Learnable, init: Callable[..., TrainState], mesh: Mesh, fsdp: bool = False) -> TrainState:
    """Shapes, dtypes and shardings of the state: parameters, moments and statistics by their logical axes.

    With `fsdp` they are spread over "data" too (`parallel.mesh.sharding_of`).
    """
    shapes = jax.eval_shape(init, 0)
    shardings = tree_shardings(mesh, shapes, learner.logical_axes(), fsdp)
    return jax.tree.map(lambda s, sh: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sh), shapes, shardings)


def init_state(
    init: Callable[..., TrainState], seed: int, abstract: TrainState, warm: WarmStart | None = None
) -> TrainState:
    """The state at step 0, born with the shardings of `abstract`.

    The parameters come first: what is made on the way to them is gone by then, and the moments take its memory.
    """
    placed = jax.tree.map(lambda s: s.sharding, abstract)
    given = None if warm is None else warm.placed(abstract.params)
    first = jax.jit(lambda seed, warm: init(seed, warm).params, out_shardings=placed.params)
    params = jax.block_until_ready(first(seed, given))
    without = dataclasses.replace(placed, params=None)
    rest = jax.jit(lambda *given: dataclasses.replace(init(*given), params=None), out_shardings=without)
    return dataclasses.replace(rest(seed, given, params), params=params)
