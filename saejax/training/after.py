"""The L0 of the coder for after training beside that of the one that was trained, where they are two.

They are two where a followed threshold stands for a selection over the batch, or averaged weights for those trained.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from saejax.coders import Coder, Sites
from saejax.training.state import TrainState

L0s = dict[str, jax.Array]
# Tokens that are looked at. Of 4,096 with an L0 of 4 or more the mean is known to 2 %.
_TOKENS = 4096


def compare(coder: Coder, sites: Sites, tokens: int) -> Callable[[TrainState, Mapping[str, jax.Array]], L0s]:
    """(state, {hook point: [B, D] as stored}) -> {"l0_in_training", "l0"}: L0 of the coder as it trains and afterwards.

    Both of the same tokens: the first 4,096 of the batch, or `tokens`, those that training looks at together, where
    these are fewer. Pure.
    """
    rows = min(tokens, _TOKENS)

    def both(state: TrainState, arrays: Mapping[str, jax.Array]) -> L0s:
        x = sites.batch({name: value[:rows] for name, value in arrays.items()})["x"].astype(jnp.float32)
        afterwards, params = coder.inference(state.evaluated(), state.stats)
        return {"l0_in_training": coder.encode(state.params, x).l0(), "l0": afterwards.encode(params, x).l0()}

    return both


def can_differ(coder: Coder, state: TrainState) -> bool:
    """The coder for after training can be another than the one that is trained."""
    return bool(coder.sparsity.statistics()) or bool(state.averaged)
