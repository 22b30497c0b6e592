"""Where b_enc starts, so that every latent fires on the same share of tokens. (Anthropic, January 2025)"""

from typing import Any

import jax
import jax.numpy as jnp

from saejax.coders.coder import Coder


def bias_for_rate(coder: Coder, params: dict[str, Any], x: jax.Array, rate: float) -> dict[str, Any]:
    """Parameters with b_enc moved so that each latent's pre-activation exceeds its threshold on `rate` of the tokens.

    b_enc += theta - q,   q the (1 - rate) quantile of pre over the tokens x;  theta is 0 where none is learned.
    """
    pre = coder.topology.pre_activations(params, x)
    quantile = jnp.quantile(pre, 1 - rate, axis=0)
    theta = params.get("threshold", jnp.zeros_like(quantile))
    return params | {"b_enc": params["b_enc"] + theta - quantile}
