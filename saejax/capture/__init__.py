"""L4: text through the language model, activations at hook points into a store."""

from saejax.capture.capture import CaptureConfig, Captured, capture, store_identity

__all__ = ["CaptureConfig", "Captured", "capture", "store_identity"]
