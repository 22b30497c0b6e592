"""The train step: one pure function, whatever the coder and however it is spread over devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from saejax.coders import Coder
from saejax.parallel import batch_sharding, replicated
from saejax.train.state import TrainState

Step = Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]]


def make_step(coder: Coder, optimizer: optax.GradientTransformation, schedule: optax.Schedule, scale: float) -> Step:
    """(state, x [B, D] as stored) -> (state, metrics), not yet compiled.

    gradient -> part along unit decoder rows removed -> clip, Adam -> decoder rows back to length 1.
    """

    def step(state: TrainState, x_BD: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        x_BD = x_BD.astype(jnp.float32) * scale
        gradient = jax.value_and_grad(coder.loss, has_aux=True)
        batch = {"x": x_BD, "y": x_BD}
        (_, (metrics, stats)), grads = gradient(state.params, batch, state.stats, state.step)
        grads = coder.project_gradients(state.params, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = coder.constrain(optax.apply_updates(state.params, updates))
        metrics = metrics | {"grad_norm": optax.tree.norm(grads), "lr": schedule(state.step)}
        return TrainState(state.step + 1, params, opt_state, stats), metrics

    return step


def compile_step(step: Step, abstract: TrainState, mesh: Mesh) -> Step:
    """`step` under jit over the mesh: state sharded as it was born, rows over "data", old state donated."""
    shardings: Any = jax.tree.map(lambda s: s.sharding, abstract)
    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=(shardings, replicated(mesh)),
    )
