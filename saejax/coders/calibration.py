"""The start of b_enc at which every latent fires on the same share of tokens. (Anthropic, January 2025)"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from saejax.coders.coder import Coder
from saejax.coders.config import CoderConfig


def first_rate(config: CoderConfig, coder: Coder) -> float:
    """The share of tokens on which each latent is to fire at the start, at most a half; 0 leaves b_enc at 0.

    `firing_rate_init`, or where thresholds are drawn to `target_l0` what makes `target_l0_start` times as many fire.
    From b_enc = 0 half of all latents fire, and in falling from there to the target most die.
    """
    c = config.resolved()
    if c.firing_rate_init or not c.target_l0_coefficient:
        return float(c.firing_rate_init)
    return float(min(c.target_l0_start * c.target_l0 / math.prod(coder.topology.latent_shape), 0.5))


def bias_for_rate(coder: Coder, params: dict[str, Any], x: jax.Array, rate: float) -> dict[str, Any]:
    """Parameters with b_enc moved so that each latent's pre-activation exceeds its threshold on `rate` of the tokens.

    b_enc += theta - q,   q the (1 - rate) quantile of pre over the tokens x;  theta is 0 where none is learned.
    """
    pre = coder.topology.pre_activations(params, x)
    quantile = jnp.quantile(pre, 1 - rate, axis=0)
    theta = params.get("threshold", jnp.zeros_like(quantile))
    return params | {"b_enc": params["b_enc"] + theta - quantile}
