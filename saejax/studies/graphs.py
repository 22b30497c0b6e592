"""Phase 4: a graph for each of a behaviour's first prompts, and which features they share.

share of a feature in a graph = its influence / that of all features        mean share: over the behaviour's graphs
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from saejax.app.study_config import StudyConfig
from saejax.attribution import AttributionConfig, Graph, attribute
from saejax.attribution.influence import influence
from saejax.core.progress import Progress
from saejax.lm import LanguageModel
from saejax.studies.baseline import Prompts
from saejax.studies.effects import Group
from saejax.trained import TrainedCoder

FEATURE_COLUMNS = ("behaviour", "layer", "latent", "mean_share", "prompts", "mean_activation")


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature over a behaviour's graphs: its place among their layers and its number there, its mean share of the
    influence, the number of graphs that have it, and the mean over these of its largest activation.
    """

    layer: int
    latent: int
    share: float
    prompts: int
    activation: float


def make_graphs(
    lm: LanguageModel,
    dictionaries: Sequence[TrainedCoder],
    behaviour: str,
    prompts: Prompts,
    count: int,
    config: AttributionConfig,
    folder: Path,
) -> list[Graph]:
    """The graphs of the first `count` clean prompts, each with both answers among its logits; kept in `folder`."""
    count = min(count, len(prompts.pairs))
    paths = [folder / f"{i}.npz" for i in range(count)]
    graphs = []
    with Progress(f"graphs of {behaviour}", count, sum(path.is_file() for path in paths), unit="graphs") as progress:
        for i, path in enumerate(paths):
            if path.is_file():
                graphs.append(Graph.load(path))
                continue
            tokens = prompts.clean[i, : prompts.last[i] + 1]
            answers = [int(prompts.right[i]), int(prompts.wrong[i])]

            def rows(done: int, total: int) -> None:
                progress.advance(0, rows=f"{done:,} of {total:,}")

            rows_folder = folder / f"{i}.rows"
            graph = attribute(lm, dictionaries, tokens, config, folder=rows_folder, answers=answers, progress=rows)
            graph.save(path)
            graphs.append(graph)
            progress.advance(1)
    return graphs


def merged(graphs: Sequence[Graph]) -> list[Feature]:
    """All features of the graphs, those with the largest mean share first."""
    values: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for graph in graphs:
        shares = influence(graph)[graph.parts["features"]]
        shares = shares / max(shares.sum(), 1e-30)
        here: dict[tuple[int, int], tuple[float, float]] = {}
        for (layer, _, latent), share, activation in zip(
            graph.features.tolist(), shares, graph.activations, strict=True
        ):
            before = here.get((layer, latent), (0.0, 0.0))
            here[layer, latent] = (before[0] + float(share), max(before[1], float(activation)))
        for key, value in here.items():
            values.setdefault(key, []).append(value)
    features = [
        Feature(*key, sum(s for s, _ in seen) / len(graphs), len(seen), float(np.mean([a for _, a in seen])))
        for key, seen in values.items()
    ]
    return sorted(features, key=lambda f: (-f.share, f.layer, f.latent))


def groups(features: Sequence[Feature], c: StudyConfig, of_layer: Mapping[int, tuple[str, int]]) -> list[Group]:
    """The features of each layer, `group_size` at a time in the order of their share; the groups with the most of it.

    Features of a single graph are left out where there are several graphs: they belong to a prompt, not to a behaviour.

    Args:
        of_layer: layer -> (name of its dictionary, number of its latent 0).
    """
    least = min(2, c.graphs)
    by_layer: dict[int, list[Feature]] = {}
    for feature in features:
        if feature.prompts >= least:
            by_layer.setdefault(feature.layer, []).append(feature)
    ranked: list[tuple[float, Group]] = []
    for layer, members in sorted(by_layer.items()):
        name, first = of_layer[layer]
        for i in range(len(members) // c.group_size):
            part = members[i * c.group_size : (i + 1) * c.group_size]
            latents = tuple(first + feature.latent for feature in part)
            ranked.append((sum(feature.share for feature in part), Group(f"L{layer}.{i + 1}", name, layer, latents)))
    ranked.sort(key=lambda pair: -pair[0])
    return [group for _, group in ranked[: c.groups]]
