"""Phase 5, single features: each taken away where it stands, against what its graph predicts.

predicted = change of z_right - z_wrong by the graph's linear effects, through all other features
measured  = the same of the model with the feature set to 0 at that token
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from saejax.attribution import Graph
from saejax.attribution.influence import influence
from saejax.attribution.prediction import predicted
from saejax.core.progress import Progress
from saejax.interventions import Change, Interventions, zero
from saejax.study.baseline import Prompts
from saejax.study.table import Table

COLUMNS = ("behaviour", "pair", "layer", "latent", "position", "activation", "predicted", "measured")
_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class _Single:
    """A feature of a graph: number of the graph, place among its features, and what it predicts."""

    pair: int
    graph: Graph
    place: int
    predicted: float

    @property
    def node(self) -> list[int]:
        """Layer, position, latent."""
        return self.graph.features[self.place].tolist()


def measure(
    inside: Interventions,
    behaviour: str,
    prompts: Prompts,
    graphs: Sequence[Graph],
    table: Table,
    most: int,
    of_layer: Mapping[int, tuple[str, int]],
) -> None:
    """Fill the table: the `most` features of each graph with the largest influence. What is there is kept.

    Args:
        prompts: pairs whose first ones the graphs are of.
        of_layer: layer of the graphs -> (name of its dictionary, number of its latent 0).
    """
    chosen = [single for i, graph in enumerate(graphs) for single in _chosen(i, graph, prompts, most)]
    blocks = list(_blocks(chosen, of_layer))
    whole = table.keep([len(block) for block in blocks])
    if whole == len(blocks):
        return
    some = prompts.first(len(graphs))
    clean = np.asarray(some.difference(inside.run(some.clean).logits))
    done = sum(map(len, blocks[:whole]))
    with Progress(f"single features of {behaviour}", len(chosen), done, unit="features") as progress:
        for name, following in itertools.groupby(blocks[whole:], lambda block: of_layer[block[0].node[0]][0]):
            alike = list(following)  # neighbours of one dictionary are one program
            changes = []
            for block in alike:
                made = [{name: _change(single, some.clean.shape, of_layer)} for single in block]
                changes += made + [made[-1]] * (_AT_ONCE - len(made))
            results = inside.blocks(some.clean, changes, some.difference, at_once=_AT_ONCE)
            for block, values in zip(alike, results, strict=True):
                table.extend(
                    (behaviour, one.pair, layer, latent, position, one.graph.activations[one.place], one.predicted,
                     value[one.pair] - clean[one.pair])
                    for one, value in zip(block, values, strict=False)
                    for layer, position, latent in [one.node]
                )  # fmt: skip
                progress.advance(len(block))


def _chosen(pair: int, graph: Graph, prompts: Prompts, most: int) -> list[_Single]:
    order = np.argsort(-influence(graph)[graph.parts["features"]], kind="stable")[:most]
    right, wrong = (graph.logits.tolist().index(int(token[pair])) for token in (prompts.right, prompts.wrong))
    change = predicted(graph, [[int(place)] for place in order])
    return [_Single(pair, graph, int(p), float(z[right] - z[wrong])) for p, z in zip(order, change, strict=True)]


def _blocks(chosen: Sequence[_Single], of_layer: Mapping[int, tuple[str, int]]) -> list[list[_Single]]:
    """Blocks of one dictionary each, dictionary by dictionary."""
    by_dictionary: dict[str, list[_Single]] = {}
    for single in chosen:
        by_dictionary.setdefault(of_layer[single.node[0]][0], []).append(single)
    return [chunk[i : i + _AT_ONCE] for chunk in by_dictionary.values() for i in range(0, len(chunk), _AT_ONCE)]


def _change(single: _Single, shape: tuple[int, ...], of_layer: Mapping[int, tuple[str, int]]) -> Change:
    layer, position, latent = single.node
    at = np.zeros(shape, bool)
    at[single.pair, position] = True
    return zero(of_layer[layer][1] + latent, at)
