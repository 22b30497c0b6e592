"""Cosine similarity of activations and reconstructions."""

from typing import Any

import jax
import jax.numpy as jnp

from saejax.evals.metrics import token_metric


@token_metric(better="higher")
def cosine(x_BD: jax.Array, x_hat_BD: jax.Array, latents: Any) -> jax.Array:
    """<x, x_hat> / (||x|| ||x_hat||)"""
    norms_B = jnp.linalg.norm(x_BD, axis=1) * jnp.linalg.norm(x_hat_BD, axis=1)
    return (x_BD * x_hat_BD).sum(-1) / jnp.maximum(norms_B, 1e-12)
