"""L3: the language model being studied, in JAX, watched and edited at named hook points."""

from saejax.lm.conventions import logical_axes, shard_params
from saejax.lm.listing import HookList, list_hook_points
from saejax.lm.model import EMBEDDED, LanguageModel, LMConfig, load_lm, load_tokenizer
from saejax.lm.points import HOOK_NAMES, HookPoint

__all__ = [
    "EMBEDDED",
    "HOOK_NAMES",
    "HookList",
    "HookPoint",
    "LMConfig",
    "LanguageModel",
    "list_hook_points",
    "load_lm",
    "load_tokenizer",
    "logical_axes",
    "shard_params",
]
