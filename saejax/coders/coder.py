"""A coder = topology x sparsity x losses, as pure functions of (params, batch, stats, step)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from saejax.coders.autoencoder import Autoencoder
from saejax.coders.latents import Latents
from saejax.coders.losses import Context, Term, squared_error, total_variance
from saejax.coders.sparsity import Sparsity

Params = dict[str, Any]
Stats = dict[str, jax.Array]
Metrics = dict[str, jax.Array]

# Where the counter of tokens since a latent fired stops, so that it cannot overflow int32.
LONG_AGO = 2**30


@dataclasses.dataclass(frozen=True)
class Coder:
    """A sparse dictionary.

    Attributes:
        topology: which hook points it reads and writes, and its parameters.
        sparsity: pre-activations -> latents.
        terms: the loss is the sum of weight x term.
        unit_decoder: decoder rows have length 1 after every step.
        dead_after_tokens: a latent is dead when it has not fired for this many tokens.
    """

    topology: Autoencoder
    sparsity: Sparsity
    terms: tuple[Term, ...]
    unit_decoder: bool
    dead_after_tokens: int

    def init(self, key: jax.Array, b_dec: jax.Array | None = None) -> Params:
        """Fresh parameters, a plain dict of float32 arrays; b_dec [D] starts at the data's mean if given."""
        params = nn.meta.unbox(self.topology.init(key)["params"])
        return params if b_dec is None else params | {"b_dec": jnp.asarray(b_dec, jnp.float32)}

    def init_stats(self) -> Stats:
        """tokens_since_fired: int32 [F]."""
        return {"tokens_since_fired": jnp.zeros(self.topology.d_sae, jnp.int32)}

    def logical_axes(self) -> dict[str, tuple[str | None, ...]]:
        """{name of a parameter or statistic: logical axis of each of its dimensions}."""
        boxed = jax.eval_shape(self.topology.init, jax.random.key(0))["params"]
        axes = {name: tuple(leaf.names) for name, leaf in boxed.items()}
        return axes | {"tokens_since_fired": ("latent",)}

    def encode(self, params: Params, x_BD: jax.Array) -> Latents:
        """Latents of x [B, D]; differentiable in params and x."""
        pre_BF = self.topology.pre_activations(params, x_BD)
        return self.sparsity(pre_BF, lambda indices_BK: jnp.take_along_axis(pre_BF, indices_BK, axis=1))

    def decode(self, params: Params, latents: Latents) -> jax.Array:
        """Reconstruction [B, D] of latents."""
        return self.topology.decode(params, latents)

    def loss(
        self, params: Params, batch: dict[str, jax.Array], stats: Stats, step: jax.Array
    ) -> tuple[jax.Array, tuple[Metrics, Stats]]:
        """(loss, (metrics, new stats)) of a batch {x: [B, D], y: [B, D]}; y is x for an autoencoder.

        Pure: statistics come in and go out. Dead latents are those dead before this batch.
        """
        x_BD, y_BD = (batch[name].astype(jnp.float32) for name in ("x", "y"))
        dead_F = stats["tokens_since_fired"] >= self.dead_after_tokens
        pre_BF, keep = self._pre_and_keep(params, x_BD)
        latents = self.sparsity(pre_BF, keep)
        y_hat_BD = self.topology.decode(params, latents)
        context = Context(self.topology, params, x_BD, y_BD, y_hat_BD, pre_BF, latents, dead_F, step)
        values = {term.name: term(context) for term in self.terms}
        loss = sum((term.weight(step) * values[term.name] for term in self.terms), start=jnp.float32(0))

        fired_F = latents.fired()
        since_F = jnp.where(fired_F, 0, jnp.minimum(stats["tokens_since_fired"] + x_BD.shape[0], LONG_AGO))
        metrics = values | {
            "loss": loss,
            "fve": 1 - squared_error(y_BD, y_hat_BD) / total_variance(y_BD),
            "l0": latents.active().sum(-1).mean(dtype=jnp.float32),
            "dead": dead_F.sum(),
        }
        return loss, (metrics, {"tokens_since_fired": since_F})

    def _pre_and_keep(self, params: Params, x_BD: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
        """Pre-activations, and their differentiable selection. Sparse activations need no dense gradient."""
        pre_BF = self.topology.pre_activations(params, x_BD)
        if not self.sparsity.sparse:
            return pre_BF, lambda indices_BK: jnp.take_along_axis(pre_BF, indices_BK, axis=1)
        pre_BF = jax.lax.stop_gradient(pre_BF)
        return pre_BF, lambda indices_BK: self.topology.kept(params, x_BD, pre_BF, indices_BK)

    def project_gradients(self, params: Params, grads: Params) -> Params:
        """With a unit decoder: removes from each decoder row's gradient its part along the row."""
        if not self.unit_decoder:
            return grads
        W_FD, g_FD = params["W_dec"], grads["W_dec"]
        along_F1 = (W_FD * g_FD).sum(-1, keepdims=True) / jnp.square(W_FD).sum(-1, keepdims=True)
        return grads | {"W_dec": g_FD - along_F1 * W_FD}

    def constrain(self, params: Params) -> Params:
        """With a unit decoder: every decoder row back to length 1. Called after each update."""
        if not self.unit_decoder:
            return params
        W_FD = params["W_dec"]
        return params | {"W_dec": W_FD / jnp.linalg.norm(W_FD, axis=1, keepdims=True)}
