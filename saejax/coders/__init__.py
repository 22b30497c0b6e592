"""L3: sparse dictionaries as products of topology, sparsity and losses."""

from saejax.coders.autoencoder import Autoencoder
from saejax.coders.build import build
from saejax.coders.calibration import bias_for_rate, first_rate
from saejax.coders.coder import Coder
from saejax.coders.config import CoderConfig
from saejax.coders.cross_layer import CausalCrosscoder, CrossLayerTranscoder, SkipCrossLayerTranscoder
from saejax.coders.crosscoder import Crosscoder
from saejax.coders.latents import Latents
from saejax.coders.layernorm import LayerNormAutoencoder
from saejax.coders.recipes import RECIPES
from saejax.coders.sites import Sites
from saejax.coders.sparsity import SPARSITIES
from saejax.coders.topologies import TOPOLOGIES, Topology
from saejax.coders.transcoder import SkipTranscoder, Transcoder

__all__ = [
    "RECIPES",
    "SPARSITIES",
    "TOPOLOGIES",
    "Autoencoder",
    "CausalCrosscoder",
    "Coder",
    "CoderConfig",
    "CrossLayerTranscoder",
    "Crosscoder",
    "Latents",
    "LayerNormAutoencoder",
    "Sites",
    "SkipCrossLayerTranscoder",
    "SkipTranscoder",
    "Topology",
    "Transcoder",
    "bias_for_rate",
    "build",
    "first_rate",
]
