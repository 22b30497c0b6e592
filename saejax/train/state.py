"""The training state and its birth, already sharded."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from saejax.coders import Coder
from saejax.core.rng import stream
from saejax.parallel import tree_shardings


@flax.struct.dataclass
class TrainState:
    """All that training carries from step to step. No keys: randomness is a function of (seed, name, step)."""

    step: jax.Array
    params: Any
    opt_state: Any
    stats: Any


def make_init(coder: Coder, optimizer: optax.GradientTransformation, seed: int, b_dec: np.ndarray) -> Any:
    """() -> TrainState, to be compiled (or only shaped) by the caller."""

    def init() -> TrainState:
        params = coder.init(stream(seed, "init"), jnp.asarray(b_dec, jnp.float32))
        return TrainState(jnp.int32(0), params, optimizer.init(params), coder.init_stats())

    return init


def abstract_state(coder: Coder, init: Any, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state: parameters, moments and statistics by their logical axes."""
    shapes = jax.eval_shape(init)
    shardings = tree_shardings(mesh, shapes, coder.logical_axes())
    return jax.tree.map(lambda s, sh: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sh), shapes, shardings)


def init_state(init: Any, abstract: TrainState) -> TrainState:
    """The state at step 0, born with the shardings of `abstract`."""
    return jax.jit(init, out_shardings=jax.tree.map(lambda s: s.sharding, abstract))()
