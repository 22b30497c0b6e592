"""L6: what the latents stand for: where they are active, the tokens they promote, and what models say of them."""

from saejax.analysis.endpoint import Endpoint
from saejax.analysis.explaining import explain
from saejax.analysis.features import ReportConfig, collect_features
from saejax.analysis.passages import FeaturePassages, Passage, feature_passages
from saejax.analysis.scan import Scan, scan_latents
from saejax.analysis.scoring import Score, score

__all__ = [
    "Endpoint",
    "FeaturePassages",
    "Passage",
    "ReportConfig",
    "Scan",
    "Score",
    "collect_features",
    "explain",
    "feature_passages",
    "scan_latents",
    "score",
]
