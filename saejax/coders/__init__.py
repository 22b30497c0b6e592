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
from saejax.coders.parts import SPARSITIES, TERMS, import_entry_points, register_sparsity, register_term
from saejax.coders.recipes import RECIPES
from saejax.coders.sites import Sites
from saejax.coders.sparsity.base import Sparsity
from saejax.coders.term import Term
from saejax.coders.topologies import TOPOLOGIES
from saejax.coders.topology import Topology
from saejax.coders.transcoder import SkipTranscoder, Transcoder

__all__ = [
    "RECIPES",
    "SPARSITIES",
    "TERMS",
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
    "Sparsity",
    "Term",
    "Topology",
    "Transcoder",
    "bias_for_rate",
    "build",
    "first_rate",
    "register_sparsity",
    "register_term",
]

import_entry_points()
