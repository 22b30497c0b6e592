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

from saejax.attribution.graph import LARGEST, Graph
from saejax.attribution.kept import Chunk, Kept, OnDisk
from saejax.attribution.layers import at_model
from saejax.attribution.local import LocalModel, checked_tokens, local_model
from saejax.attribution.settings import AttributionConfig
from saejax.core.errors import DataError
from saejax.lm import LanguageModel
from saejax.parallel import ParallelConfig, make_mesh
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
    mesh = make_mesh(ParallelConfig((1, 1)), jax.local_devices()) if mesh is None else mesh
    decided = decided_by(lm, saes, tokens_S, config, answers)
    disk = None if folder is None else OnDisk.open(folder, decided)
    local = local_model(lm, saes, tokens_S, config, mesh, answers)
    _check_size(local, config)
    rows = Kept(local.features[:, 0], local.n_sources, local.probabilities)
    n_rows = len(local.logits) + _n_chosen(local, config)
    for number, targets in enumerate(_chunks(local, rows, config)):
        rows.chunks.append(_chunk(local, config, disk, number, targets))
        if progress is not None:
            progress(sum(map(len, rows.chunks)), n_rows)
    names = {
        "model": str(lm.identity["model"]),
        "dictionaries": ", ".join(sae.origin.source or repr(sae) for sae in saes),
        "sha256": digest(decided["model"], decided["dictionaries"]),
        "prompt": lm.tokenizer.decode(tokens_S.tolist()),
    }
    strings = tuple(lm.tokenizer.token_strings(tokens_S.tolist()))
    return _graph(local, rows, tokens_S, strings, names)


def _check_size(local: LocalModel, config: AttributionConfig) -> None:
    """Refuse, before hours of rows, a graph whose weights nobody can hold."""
    n_rows = _n_chosen(local, config) + len(local.logits)
    n_nodes = n_rows + local.n_errors + local.n_tokens
    if (size := 4 * n_rows * n_nodes) > LARGEST:
        raise DataError(
            f"The graph would have {n_nodes:,} nodes, {local.n_errors:,} of them errors, and {size / 1e9:,.0f} GB of "
            f"weights. Shorten the prompt of {local.n_tokens:,} tokens, or lower attribution.max_features."
        )


def _n_chosen(local: LocalModel, config: AttributionConfig) -> int:
    return min(config.max_features or len(local.features), len(local.features))


def _chunks(local: LocalModel, kept: Kept, config: AttributionConfig) -> Iterator[np.ndarray]:
    """Targets chunk by chunk: the logits, then features; each is asked for when the rows before it are kept."""
    yield from _in_chunks(local.n_sources + np.arange(len(local.logits)), config.chunk)
    left = _n_chosen(local, config)
    if left == len(local.features):
        yield from _in_chunks(np.arange(left), config.chunk)
        return
    while left:
        best = kept.best(min(left, config.rank_every * config.chunk))
        left -= len(best)
        yield from _in_chunks(best, config.chunk)


def _in_chunks(targets: np.ndarray, size: int) -> list[np.ndarray]:
    return [targets[start : start + size] for start in range(0, len(targets), size)]


def _chunk(
    local: LocalModel, config: AttributionConfig, disk: OnDisk | None, number: int, targets: np.ndarray
) -> Chunk:
    n_features = len(local.features)
    n_others = local.n_errors + local.n_tokens
    if disk is not None and (done := disk.read(number, targets, n_features, n_others, config.row_features)):
        return done
    chunk = Chunk.of(targets, local.rows(targets, config.chunk), n_features, config.row_features)
    if disk is not None:
        disk.write(number, chunk)
    return chunk


def _graph(
    local: LocalModel, kept: Kept, tokens_S: np.ndarray, strings: tuple[str, ...], names: dict[str, str]
) -> Graph:
    targets = np.concatenate([chunk.targets for chunk in kept.chunks])
    chosen = np.sort(targets[targets < len(local.features)])
    n_others, k = local.n_errors + local.n_tokens, len(local.logits)
    weights = kept.weights(np.r_[chosen, local.n_sources + np.arange(k)], chosen, n_others + k)
    return Graph(
        tokens_S,
        strings,
        tuple(layer.write for layer in local.layers),
        local.features[chosen],
        local.activations[chosen],
        local.logits,
        local.probabilities,
        weights,
        names,
    )


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
        "model": json.loads(json.dumps(lm.identity)) | {"config": digest(lm.config)} | weights,
        "dictionaries": [sae.fingerprint() for sae in saes],
        "prompt": np.asarray(tokens).tolist(),
        "settings": dataclasses.asdict(config),
        "answers": sorted(map(int, answers)),
    }
