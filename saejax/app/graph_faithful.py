"""Is a graph faithful to the model's steps? What a dictionary skips, beside transcoders of single layers."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saejax.attribution import AttributionConfig, Graph, attribute
from saejax.attribution.influence import path_length, scores
from saejax.attribution.layers import at_model, layers_of
from saejax.attribution.skipping import response_errors, skipped
from saejax.core.errors import ConfigError
from saejax.lm import LanguageModel
from saejax.trained import TrainedCoder


@dataclasses.dataclass(frozen=True)
class Faithful:
    """Measures of one set of dictionaries on a prompt.

    Attributes:
        name: of the dictionaries.
        replacement, completeness: scores of the graph.
        path: mean edges from a token to a logit (`path_length`).
        skipped: share of the influence that earlier features have in place of an MLP's own; `skipped_by_layer` [L].
        errors: [L], of `response_errors`: how far a weaker feature's effect is from the model's.
    """

    name: str
    replacement: float
    completeness: float
    path: float
    skipped: float
    skipped_by_layer: tuple[float, ...]
    errors: tuple[float, ...]

    @property
    def error(self) -> float:
        """The mean of the layers' errors, but for the first: nothing is before it."""
        return float(np.mean(self.errors[1:])) if len(self.errors) > 1 else 0.0


def faithfulness(
    lm: LanguageModel,
    saes: Sequence[TrainedCoder],
    graph: Graph,
    config: AttributionConfig,
    beside: Sequence[TrainedCoder] = (),
    folder: Path | None = None,
) -> dict[str, Any]:
    """{"layers": hook points, "rows": of `Faithful`, as JSON}: of these dictionaries, then of those beside them.

    A cross-layer transcoder can stand for two steps of the model by one of its own, where transcoders of single layers
    cannot. (Lange et al. 2026, OpenReview 8sE1yCPnbR: compare the circuits of both on the same prompt)

    Args:
        folder: for the rows of the graph of those beside.

    Raises:
        ConfigError: those beside write elsewhere.
    """
    rows = [_measured(lm, saes, graph, config)]
    if beside:
        other = at_model(lm, beside)
        if (writes := tuple(layer.write for layer in layers_of(lm, other))) != graph.hook_points:
            raise ConfigError(
                f"--beside writes {', '.join(writes)}, and the graph is of {', '.join(graph.hook_points)}: give one "
                "transcoder for each of these."
            )
        rows.append(_measured(lm, other, attribute(lm, other, graph.tokens, config, folder=folder), config))
    shown = [dataclasses.asdict(row) | {"error": row.error} for row in rows]
    return {"layers": list(graph.hook_points), "rows": shown}


def _measured(lm: LanguageModel, saes: Sequence[TrainedCoder], graph: Graph, config: AttributionConfig) -> Faithful:
    across = any(len(layer.reaches) > 1 for layer in layers_of(lm, saes))
    skips = skipped(lm, saes, graph, config) if across else None
    return Faithful(
        graph.names["dictionaries"],
        *scores(graph),
        path_length(graph),
        skips.share if skips else 0.0,
        tuple(map(float, skips.shares)) if skips else (0.0,) * len(graph.hook_points),
        tuple(map(float, response_errors(lm, saes, graph.tokens, silent=config.silent))),
    )
