"""L4: text through the language model, activations at hook points into a store."""

from saejax.capture.capture import CaptureConfig, Captured, capture, store_identity
from saejax.capture.hook_points import expand_hook_points

__all__ = ["CaptureConfig", "Captured", "capture", "expand_hook_points", "store_identity"]
