"""L3: sparse dictionaries as products of topology, sparsity and losses."""

from saejax.coders.autoencoder import Autoencoder, fold_input_scale
from saejax.coders.coder import Coder
from saejax.coders.latents import Latents
from saejax.coders.presets import PRESETS, CoderConfig, build

__all__ = ["PRESETS", "Autoencoder", "Coder", "CoderConfig", "Latents", "build", "fold_input_scale"]
