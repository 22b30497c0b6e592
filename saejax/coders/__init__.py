"""L3: sparse dictionaries as products of topology, sparsity and losses."""

from saejax.coders.build import build
from saejax.coders.coder import Coder
from saejax.coders.config import CoderConfig
from saejax.coders.cross_layer import (
    CausalCrosscoder,
    CrossLayerTranscoder,
    PerLayerAutoencoder,
    PerLayerTranscoder,
    SkipCrossLayerTranscoder,
)
from saejax.coders.latents import Latents
from saejax.coders.parts import SPARSITIES, TERMS, import_entry_points, register_sparsity, register_term
from saejax.coders.recipes import RECIPES
from saejax.coders.sites import Sites
from saejax.coders.sparsity.base import Sparsity
from saejax.coders.term import Term
from saejax.coders.topologies import TOPOLOGIES, Autoencoder, Crosscoder, LayerNormAutoencoder, SkipTranscoder
from saejax.coders.topology import Topology, Transcoder

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
    "PerLayerAutoencoder",
    "PerLayerTranscoder",
    "Sites",
    "SkipCrossLayerTranscoder",
    "SkipTranscoder",
    "Sparsity",
    "Term",
    "Topology",
    "Transcoder",
    "build",
    "register_sparsity",
    "register_term",
]

import_entry_points()
