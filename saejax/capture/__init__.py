"""L4: text through the language model, activations at hook points into a store."""

from saejax.capture.capture import Captured, capture, store_identity
from saejax.capture.config import CaptureConfig
from saejax.capture.hook_points import Named, expand_hook_points
from saejax.capture.selection import SelectingPacker
from saejax.capture.sinks import ALL_TOKENS, Sinks, finite
from saejax.capture.stream import ActivationStream, Journal, stream_activations

__all__ = [
    "ALL_TOKENS",
    "ActivationStream",
    "CaptureConfig",
    "Captured",
    "Journal",
    "Named",
    "SelectingPacker",
    "Sinks",
    "capture",
    "expand_hook_points",
    "finite",
    "store_identity",
    "stream_activations",
]
