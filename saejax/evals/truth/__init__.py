"""A known truth: worlds whose features are planted, their samples, and dictionaries scored against them.

from saejax.evals.truth import World, plant, score

planted = plant(World(n_features=1024, d_in=256))
sae = saejax.train(planted.rows(200_000), "batchtopk", k=12, d_sae=512)
score(sae, planted).figures["mcc"]
"""

from saejax.evals.truth.planted import Planted, plant
from saejax.evals.truth.scores import Scores, score, score_samples
from saejax.evals.truth.source import NAME, PlantedBatches, heldout
from saejax.evals.truth.world import Means, Spreads, World

__all__ = [
    "NAME",
    "Means",
    "Planted",
    "PlantedBatches",
    "Scores",
    "Spreads",
    "World",
    "heldout",
    "plant",
    "score",
    "score_samples",
]
