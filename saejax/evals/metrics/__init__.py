"""Metrics that are means over tokens: one file of this folder each, which is found by itself.

Each is in eval.json with its interval, in documents.npz and in the report, and two dictionaries are compared by it.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

# (activations [B, D], reconstructions [B, D], latents) -> float32 [B]. Pure.
OfTokens = Callable[[jax.Array, jax.Array, Any], jax.Array]


class TokenMetric(NamedTuple):
    """A number of each token, and its better side: "higher", "lower", or "" where it has none."""

    of_tokens: OfTokens
    better: str


TOKEN_METRICS: dict[str, TokenMetric] = {}


def token_metric(better: str = "") -> Callable[[OfTokens], OfTokens]:
    """Decorator: the function's name becomes a metric, its mean over the evaluated tokens."""

    def register(function: OfTokens) -> OfTokens:
        TOKEN_METRICS[function.__name__] = TokenMetric(function, better)
        return function

    return register


for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")
