"""The attribution graph of one prompt: rows of the logits, then of the features that matter most, chunk by chunk.

Which features get a row is decided on the way: every few chunks those without one are ranked by their influence on the
logits through the rows there are, as in circuit-tracer 0.5. What no row says is never held: a graph of all active
features of a long prompt would be larger than any memory.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from saejax.attribution.chunks import Chunks, rows_folder
from saejax.attribution.graph import LARGEST, Graph
from saejax.attribution.layers import at_model
from saejax.attribution.local import LocalModel, checked_tokens
from saejax.attribution.settings import AttributionConfig
from saejax.core.errors import DataError
from saejax.lm import LanguageModel
from saejax.runs.made import digest
from saejax.trained import TrainedCoder


def attribute(
    lm: LanguageModel,
    dictionaries: Sequence[TrainedCoder],
    tokens: Sequence[int] | np.ndarray,
    config: AttributionConfig = AttributionConfig(),  # noqa: B008 - frozen
    mesh: Mesh | None = None,
    folder: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    answers: Sequence[int] = (),
) -> Graph:
    """Direct effects between active features, errors, tokens and logits of one prompt, attention and norms frozen.

    A weight is what a source adds to a target: to the pre-activation x W_enc + b_enc of a feature, or to a logit
    (before a cap, where the model has one) less the mean of all logits. What is frozen, and what is not:
    `attribution.frozen`. An edge starts with what a source writes (its activation times its decoder row at each layer,
    an error's vector, a token's embedding) and ends where the next dictionary writes: through a skip connection it goes
    on.

    Args:
        dictionaries: transcoders of single layers, cross-layer transcoders or autoencoders, each hook point written by
            one. For circuit-tracer's graphs every MLP has one; the derivative of an MLP without is taken at the prompt.
        tokens: ids of the prompt, with the model's own bos in front if it was trained with one (`config.silent`).
        mesh: targets over "data", features over "latent"; default one device.
        folder: where rows are kept when they are done. A graph that was stopped goes on from there and ends bitwise as
            it would have.
        progress: called with (rows done, rows in all) after each chunk.
        answers: tokens whose logits are nodes, whatever their probability.

    Raises:
        ConfigError: a model that is not JAX's, dictionaries that do not go together or have no hook point there.
        DataError: a prompt or a dictionary that is not this model's, no active feature, a folder of another graph; or
            a graph whose matrix is larger than 32 GiB.
    """
    saes = at_model(lm, dictionaries)
    tokens_S = checked_tokens(lm, tokens, config)
    decided = decided_by(lm, saes, tokens_S, config, answers)
    folder = None if folder is None else rows_folder(folder, decided)
    local = LocalModel(lm, saes, tokens_S, config, mesh, answers)
    n_chosen = min(config.max_features or len(local.features), len(local.features))
    n_rows = n_chosen + len(local.logits)
    n_nodes = n_rows + local.n_errors + local.n_tokens
    if (size := 4 * n_rows * n_nodes) > LARGEST:  # refused before hours of rows
        raise DataError(
            f"The graph would have {n_nodes:,} nodes, {local.n_errors:,} of them errors, and {size / 1e9:,.0f} GB of "
            f"weights. Shorten the prompt of {local.n_tokens:,} tokens, or lower attribution.max_features."
        )
    rows = Chunks(local, config, folder)
    for targets in _targets(local, rows, n_chosen, config):
        for start in range(0, len(targets), config.chunk):
            rows.add(targets[start : start + config.chunk])
            if progress is not None:
                progress(len(rows), n_rows)
    chosen = rows.features()
    return Graph(
        tokens_S,
        tuple(lm.tokenizer.token_strings(tokens_S.tolist())),
        tuple(layer.write for layer in local.layers),
        local.features[chosen],
        local.activations[chosen],
        local.logits,
        local.probabilities,
        rows.weights(),
        {
            "model": str(lm.identity["model"]),
            "dictionaries": ", ".join(sae.origin.source or repr(sae) for sae in saes),
            "sha256": digest(decided["model"], decided["dictionaries"]),
            "prompt": lm.tokenizer.decode(tokens_S.tolist()),
        },
    )


def _targets(local: LocalModel, rows: Chunks, left: int, config: AttributionConfig) -> Iterator[np.ndarray]:
    """The logits, then `left` features: those of some chunks at once, by the rows that are there then."""
    yield local.n_sources + np.arange(len(local.logits))
    if left == len(local.features):
        yield np.arange(left)
        return
    while left:
        best = rows.best(min(left, config.rank_every * config.chunk))
        left -= len(best)
        yield best


def _digest_of_fields(config: Any) -> str:
    """sha256 of what decides a model, in whichever order its dataclass has the fields."""
    return digest(sorted((f.name, getattr(config, f.name)) for f in dataclasses.fields(config) if f.compare))


def decided_by(
    lm: LanguageModel,
    saes: Sequence[TrainedCoder],
    tokens: Sequence[int] | np.ndarray,
    config: AttributionConfig,
    answers: Sequence[int] = (),
) -> dict[str, Any]:
    """The arguments of `attribute` that decide the rows of a graph, by their content, as JSON."""
    weights = (
        {} if "weights_sha256" in lm.identity else {"weights": digest(*map(np.asarray, jax.tree.leaves(lm.params)))}
    )
    return {
        "format": 1,
        "model": json.loads(json.dumps(lm.identity)) | {"config": _digest_of_fields(lm.config)} | weights,
        "dictionaries": [sae.fingerprint() for sae in saes],
        "prompt": np.asarray(tokens).tolist(),
        "settings": dataclasses.asdict(config),
        "answers": sorted(map(int, answers)),
    }
