"""A tiny language model with trained coders of every kind, and rows of two texts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.trained import Origin, TrainedCoder
from tiny.by_hand import HOOK, SIDES, coder_of, random_params, sites_of, tiny_lm

R, S, F = 3, 7, 40
TOKENS = np.random.default_rng(2).integers(0, 60, (R, S)).astype(np.int32)
OTHERS = np.random.default_rng(3).integers(0, 60, (R, S)).astype(np.int32)
LM = dataclasses.replace(tiny_lm(), params=jax.tree.map(jnp.asarray, tiny_lm().params))


def dictionary(topology: str = "autoencoder", sparsity: str = "topk", **origin: Any) -> TrainedCoder:
    reads, writes = SIDES.get(topology, ((HOOK,), (HOOK,)))
    coder = coder_of(topology, sparsity, reads, writes, F)
    own, params = coder.inference(random_params(coder), {name: np.float32(0.1) for name in coder.init_stats()})
    params = {name: np.asarray(value) for name, value in params.items()}
    return TrainedCoder(own, params, sites_of(coder, reads, writes), Origin(**origin))
