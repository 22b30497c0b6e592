"""L3: the language model being studied, in JAX, watched and edited at named hook points."""

from saejax.lm.model import HOOK_NAMES, LanguageModel, LMConfig, load_lm
from saejax.lm.parameters import logical_axes, shard_params

__all__ = ["HOOK_NAMES", "LMConfig", "LanguageModel", "load_lm", "logical_axes", "shard_params"]
