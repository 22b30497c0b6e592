"""The topologies by name."""

from saejax.coders.autoencoder import Autoencoder
from saejax.coders.cross_layer import CausalCrosscoder, CrossLayerTranscoder, SkipCrossLayerTranscoder
from saejax.coders.crosscoder import Crosscoder
from saejax.coders.layernorm import LayerNormAutoencoder
from saejax.coders.topology import Topology
from saejax.coders.transcoder import SkipTranscoder, Transcoder

TOPOLOGIES: dict[str, type[Topology]] = {
    "autoencoder": Autoencoder,
    "transcoder": Transcoder,
    "skip_transcoder": SkipTranscoder,
    "crosscoder": Crosscoder,
    "clt": CrossLayerTranscoder,
    "skip_clt": SkipCrossLayerTranscoder,
    "layernorm_autoencoder": LayerNormAutoencoder,
    "causal_crosscoder": CausalCrosscoder,
}
