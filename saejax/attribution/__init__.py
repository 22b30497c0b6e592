"""L6: which features act on which, and on the next token, within one prompt."""

from saejax.attribution.build import attribute
from saejax.attribution.graph import Graph
from saejax.attribution.settings import AttributionConfig

__all__ = ["AttributionConfig", "Graph", "attribute"]
