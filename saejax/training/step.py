"""The train step: one pure function, whatever the coder and however it is spread over devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from saejax.coders import Coder, Sites
from saejax.coders.term import total_variance
from saejax.kernels.batch import of_all_copies
from saejax.parallel import MODES, batch_sharding, replicated
from saejax.training.beside import Beside, added, sparsity_factor
from saejax.training.config import TrainConfig
from saejax.training.guard import judge
from saejax.training.optim import learning_rate_factor, next_average, steps_taken
from saejax.training.resample import resample
from saejax.training.state import Learnable, TrainState

Arrays = dict[str, jax.Array]
Hyper = dict[str, Any]
Moved = tuple[Any, Any, Any]  # parameters, optimizer state, averages
Step = Callable[[TrainState, Arrays, Hyper], tuple[TrainState, dict[str, jax.Array]]]


def default_hyper(seed: int) -> Hyper:
    """Inputs of a step beside state and batch: factors of the learning rate and of the sparsity weights, the seed.

    They are inputs, so that a sweep can run many values of them in one program. A factor of the learning rate is the
    same as another learning rate, but for schedule_free, whose averages depend on it. A sweep also says which of its
    members still train (`going`): the others stay as they are, to the bit.
    """
    return {"lr": jnp.float32(1), "sparsity": jnp.float32(1), "seed": jnp.uint32(seed)}


def make_step(
    coder: Coder,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: optax.Schedule,
    sites: Sites,
    config: TrainConfig,
    beside: Beside | None = None,
) -> Step:
    """(state, {hook point: [B, D] as stored}, hyper) -> (state, metrics), not yet compiled.

    gradient -> part along unit decoder rows removed -> clip, optimizer -> decoder rows back to length 1 -> average
    (nothing of it where loss or gradient is not finite, or the loss a spike) -> dead latents resampled, where due.

    The names of its parts (`jax.named_scope`, here and in `Coder`) are what a profile tells its operations apart by.
    """

    def step(state: TrainState, arrays: Arrays, hyper: Hyper) -> tuple[TrainState, dict[str, jax.Array]]:
        batch, sparsity = sites.batch(arrays), hyper["sparsity"]
        if beside is not None:
            sparsity = sparsity * sparsity_factor(beside, state.step)
        grads, metrics, stats = _gradients(coder, config, state, batch, sparsity)
        if beside is not None:
            of = coder.terms[0].name
            grads, metrics = added(beside, state, arrays, hyper["beside"], grads, metrics, of)
        after, metrics, ok = apply_gradients(coder, optimizer, schedule, config, state, hyper, (grads, metrics, stats))
        with jax.named_scope("resample"):
            return resample(coder, config, after, batch, hyper["seed"], ok), metrics

    return step


def apply_gradients(
    learner: Learnable,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: optax.Schedule,
    config: TrainConfig,
    state: TrainState,
    hyper: Hyper,
    gradients: tuple[Any, dict[str, jax.Array], Any],
) -> tuple[TrainState, dict[str, jax.Array], jax.Array]:
    """(the state after a step, its metrics, True where it was taken), whatever learns.

    Args:
        gradients: they, metrics with the loss, and statistics.
    """
    grads, metrics, stats = gradients
    with jax.named_scope("optimizer"):
        grads = learner.project_gradients(state.params, of_all_copies(grads))
        grad_norm = optax.tree.norm(grads)
        ok, recent = judge(config, state.recent, metrics["loss"], grad_norm)
        ok = ok & hyper.get("going", True)

        def moved() -> Moved:
            told = {"value": metrics["loss"], "norm": grad_norm}
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params, **told)
            updates = jax.tree.map(lambda update: update * hyper["lr"], updates)
            params = learner.constrain(optax.apply_updates(state.params, updates), state.step)
            averaged = next_average(config, state.averaged, params, opt_state, state.step)
            return params, opt_state, learner.constrain(averaged, state.step) if averaged else averaged

        # A branch, not a choice between two states: each matrix is read once less and written in place.
        still = state.params, state.opt_state, state.averaged
        params, opt_state, averaged = jax.lax.cond(ok, moved, lambda: still)
        rate = schedule(steps_taken(state.opt_state, state.step)) * hyper["lr"] * learning_rate_factor(opt_state)
        metrics = metrics | {"grad_norm": grad_norm, "lr": rate, "skipped": 1.0 - ok}
        stats = jax.tree.map(lambda new, old: jnp.where(ok, new, old), stats, state.stats)
        return TrainState(state.step + 1, params, opt_state, stats, averaged, recent), metrics, ok


def _gradients(
    coder: Coder, config: TrainConfig, state: TrainState, batch: dict[str, jax.Array], sparsity: jax.Array
) -> tuple[Any, dict[str, jax.Array], Any]:
    """(gradients, metrics, statistics) of a batch: means over its parts, statistics once for all of them."""
    parts, together = config.accumulate, config.neighbours
    variance = None if parts == 1 else total_variance(batch["y"])
    gradient = jax.value_and_grad(coder.loss_of_part, has_aux=True)

    def one(part: dict[str, jax.Array]) -> tuple[Any, Any]:
        """(what is averaged over the parts, what is added up)"""
        (_, (metrics, seen)), grads = gradient(state.params, part, state.stats, state.step, sparsity, variance)
        return (grads, metrics), seen

    def add(total: tuple[Any, Any], part: dict[str, jax.Array]) -> tuple[Any, None]:
        means, seen = one(part)
        means = jax.tree.map(lambda a: a / parts, means)
        return jax.tree.map(jnp.add, total, (means, seen)), None

    if parts == 1:
        (grads, metrics), seen = one(batch)
        return grads, metrics, coder.follow(state.stats, seen, state.step)

    # Windows w, w + parts, ...: each part then has rows of every device that the batch is spread over.
    split = {
        name: jnp.moveaxis(a.reshape(-1, parts, together, *a.shape[1:]), 1, 0).reshape(parts, -1, *a.shape[1:])
        for name, a in batch.items()
    }
    means, seen = jax.eval_shape(one, jax.tree.map(lambda a: a[0], split))
    # Means of counts are no counts.
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), means), jax.tree.map(jnp.zeros_like, seen)
    ((grads, metrics), seen), _ = jax.lax.scan(add, zeros, split)
    return grads, metrics, coder.follow(state.stats, seen, state.step)


def compile_step(step: Step, abstract: TrainState, mesh: Mesh, mode: str = "jit", hyper: Any = None) -> Step:
    """`step` for all devices of the mesh: state sharded as it was born, rows over "data", old state donated.

    Args:
        mode: one of `parallel.MODES`.
        hyper: shardings of what the step is told, where it is not whole on every device.
    """
    shardings: Any = jax.tree.map(lambda s: s.sharding, abstract)
    return jax.jit(
        MODES[mode](step, mesh),
        donate_argnums=0,
        in_shardings=(shardings, batch_sharding(mesh), hyper or replicated(mesh)),
        out_shardings=(shardings, replicated(mesh)),
    )
