"""A decoder whose residual stream has mean 0, as TransformerLens makes it by `center_writing_weights`."""

from typing import Any

import jax
import jax.numpy as jnp

from saejax.core.errors import ConfigError
from saejax.lm.conventions import DecoderConfig, ParameterPath, tree_of

# What is added to the residual stream; d_model is the last axis of each.
_WRITES = ("W_E", "W_pos", "W_O", "b_O", "W_out", "b_out")


def centre_writes(config: DecoderConfig, params: dict[str, Any]) -> tuple[DecoderConfig, dict[str, Any]]:
    """W <- W - mean over d_model of all that writes: the residual stream x becomes x - mean(x) at every hook point.

    The logits stay, because every LayerNorm subtracts the mean. An unembedding that was tied is an array of its own
    afterwards. `params` is emptied, so that no two models are in memory.

    Raises:
        ConfigError: a model with other norms, or with one behind what is added.
    """
    if config.norm != "layer" or not config.pre_norms or config.post_norms:
        raise ConfigError(
            "lm.center_writing_weights subtracts a mean that every LayerNorm subtracts again, and this model has other "
            "norms: its logits would change. Set it to false."
        )
    if config.tied_embeddings:
        config, params = config.untied(), params | {"W_U": params["W_E"].T}

    def leaf(path: ParameterPath, _: Any) -> jax.Array:
        owner: Any = params
        for part in path[:-1]:
            owner = owner[part]
        value = owner.pop(path[-1])
        if path[-1] not in _WRITES:
            return jnp.asarray(value)
        exact = value.astype(jnp.float32)
        return (exact - exact.mean(-1, keepdims=True)).astype(value.dtype)

    return config, tree_of(config, leaf)
