"""A graph's prediction of an ablation: the linear effect of features that are taken away, through all others.

    d_t = sum_s w_ts d_s / f_t        of a feature; d = -1 of those taken away, whose own inputs no longer matter
    dz_v = sum_s w_vs d_s             of a logit, less the mean of all logits

d is the share of a node's activation that is added: w_ts is what s adds at its whole activation. Attention patterns and
norms stay as they are, every feature stays active, and no other one begins to fire: what a measurement has beyond it.
(As circuit-tracer's influence, with signs and without normalisation.)

Shape letters: N nodes, A features, V logits, P predictions.
"""

from collections.abc import Sequence

import numpy as np

from saejax.attribution.graph import Graph
from saejax.core.errors import DataError


def predicted(graph: Graph, taken: Sequence[Sequence[int]]) -> np.ndarray:
    """Change of each logit, float64 [P, V], when a set of features is set to 0, for each of P sets.

    Args:
        taken: sets of places in `graph.features`.

    Raises:
        DataError: a place that is no feature.
    """
    A = graph.n_features
    d_PA = np.zeros((len(taken), A))
    for p, places in enumerate(taken):
        if wrong := [place for place in places if not 0 <= place < A]:
            raise DataError(f"The graph has no feature {wrong[0]}; it has {A}.")
        d_PA[p, list(places)] = -1
    gone_PA = d_PA != 0
    own_AA = graph.weights[:A, :A].astype(np.float64) / graph.activations[:, None]
    # Effects go from layer to layer: as many rounds as there are layers, and one finds nothing new.
    for _ in range(len(graph.hook_points) + 1):
        new_PA = np.where(gone_PA, -1, d_PA @ own_AA.T)
        if np.array_equal(new_PA, d_PA):
            break
        d_PA = new_PA
    return d_PA @ graph.weights[A:, :A].astype(np.float64).T
