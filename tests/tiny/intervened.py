"""A tiny language model with trained coders of every kind in it, and rows of two texts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.interventions import Interventions
from saejax.trained import Origin, TrainedCoder
from tiny.by_hand import HOOK, SIDES, coder_of, random_params, sites_of, tiny_lm

R, S, F = 3, 7, 40
TOKENS = np.random.default_rng(2).integers(0, 60, (R, S)).astype(np.int32)
OTHERS = np.random.default_rng(3).integers(0, 60, (R, S)).astype(np.int32)
LM = dataclasses.replace(tiny_lm(), params=jax.tree.map(jnp.asarray, tiny_lm().params))


def dictionary(topology: str = "autoencoder", sparsity: str = "relu", **origin: Any) -> TrainedCoder:
    reads, writes = SIDES.get(topology, ((HOOK,), (HOOK,)))
    coder = coder_of(topology, sparsity, reads, writes, F)
    own, params = coder.inference(random_params(coder), {name: np.float32(0.1) for name in coder.init_stats()})
    params = {name: np.asarray(value) for name, value in params.items()}
    return TrainedCoder(own, params, sites_of(coder, reads, writes), Origin(**origin))


@functools.cache
def inside(topology: str = "autoencoder") -> Interventions:
    """The model with `dictionary(topology)` under the name "sae". Tests that share it share its compiled programs."""
    return Interventions(LM, {"sae": dictionary(topology)})


LAST = "blocks.1.resid_post"


@functools.cache
def inside_at_the_end() -> Interventions:
    """At the last hook point; with the last norm held, logits are linear in what is written there."""
    coder = coder_of("autoencoder", "relu", (LAST,), (LAST,), F)
    return Interventions(LM, {"sae": TrainedCoder(coder, random_params(coder), sites_of(coder, (LAST,), (LAST,)))})
