"""Phase 5, single features: each taken away where it stands, against what its graph predicts.

predicted = change of z_right - z_wrong by the graph's linear effects, through all other features
measured  = the same of the model with the feature set to 0 at that token
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from saejax.attribution import Graph
from saejax.attribution.influence import influence
from saejax.attribution.prediction import predicted
from saejax.core.progress import Progress
from saejax.interventions import Change, Interventions, zero
from saejax.studies.baseline import Prompts
from saejax.studies.effects import in_blocks, run_blocks
from saejax.studies.table import Table

SINGLE_COLUMNS = ("behaviour", "pair", "layer", "latent", "position", "activation", "predicted", "measured")
_FEATURES_AT_ONCE = 16


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


def measure_singles(
    inside: Interventions,
    behaviour: str,
    prompts: Prompts,
    graphs: Sequence[Graph],
    table: Table,
    most: int,
    of_layer: Mapping[int, tuple[str, int]],
) -> None:
    """Fill the table: the `most` features of each graph with the largest influence. Rows that are there are kept.

    `prompts` are pairs whose first ones the graphs are of.
    """
    chosen = [single for i, graph in enumerate(graphs) for single in _most_influential(i, graph, prompts, most)]

    def program(single: _Single) -> str:
        return of_layer[single.node[0]][0]

    order = list(dict.fromkeys(map(program, chosen)))  # dictionary by dictionary
    blocks = in_blocks(sorted(chosen, key=lambda single: order.index(program(single))), _FEATURES_AT_ONCE, program)
    whole = table.keep([len(block) for block in blocks])
    if whole == len(blocks):
        return
    some = prompts.first(len(graphs))
    clean = np.asarray(some.difference(inside.run(some.clean).logits))
    done = sum(map(len, blocks[:whole]))
    with Progress(f"single features of {behaviour}", len(chosen), done, unit="features") as progress:
        change_of = functools.partial(_change, shape=some.clean.shape, of_layer=of_layer)
        results = run_blocks(inside, some.clean, blocks[whole:], program, change_of, some.difference, _FEATURES_AT_ONCE)
        for block, values in results:
            table.extend(
                (behaviour, single.pair, layer, latent, position, single.graph.activations[single.place],
                 single.predicted, value[single.pair] - clean[single.pair])
                for single, value in zip(block, values, strict=False)
                for layer, position, latent in [single.node]
            )  # fmt: skip
            progress.advance(len(block))


def _most_influential(pair: int, graph: Graph, prompts: Prompts, most: int) -> list[_Single]:
    order = np.argsort(-influence(graph)[graph.parts["features"]], kind="stable")[:most]
    right, wrong = (graph.logits.tolist().index(int(token[pair])) for token in (prompts.right, prompts.wrong))
    change = predicted(graph, [[int(place)] for place in order])
    return [_Single(pair, graph, int(p), float(z[right] - z[wrong])) for p, z in zip(order, change, strict=True)]


def _change(single: _Single, shape: tuple[int, ...], of_layer: Mapping[int, tuple[str, int]]) -> dict[str, Change]:
    layer, position, latent = single.node
    at = np.zeros(shape, bool)
    at[single.pair, position] = True
    name, first = of_layer[layer]
    return {name: zero(first + latent, at)}
