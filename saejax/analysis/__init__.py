"""L5: what the latents stand for: their top-activating passages and the tokens they promote."""

from saejax.analysis.features import ReportConfig, collect_features

__all__ = ["ReportConfig", "collect_features"]
