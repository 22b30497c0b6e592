"""Skipped steps of a cross-layer transcoder: earlier features write for an MLP, in place of those that read it.

In the model only MLP m writes y_m, from what it reads. A cross-layer transcoder writes it in two parts,

    y_m = o_m + c_m + e_m + b_m       o_m = sum_f a_f W_dec,m->m     c_m = sum_{l < m} sum_f a_f W_dec,l->m

o_m by features of its own layer, c_m by features of layers below. The influence that passes through c_m goes from an
earlier feature to its target with no feature of layer m between: the graph leaves this MLP's step out. `skipped` says
how much that is. A skip may be what one wants, where the MLP makes an earlier feature louder and no more; then y_m
follows that feature in proportion. `response_errors` asks the model whether it does.

(Ameisen et al. 2025, "Circuit Tracing", on cross-layer features as repeated ones; LessWrong 6CS2NDmoLCFcEJMor 2026, on
steps that are skipped. The measures are saejax's own.)

Shape letters: L layers, S tokens, A active features, T targets, D width.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from saejax.attribution.graph import Graph
from saejax.attribution.influence import influence
from saejax.attribution.layers import at_model, layers_of
from saejax.attribution.local import LocalModel, checked_tokens
from saejax.attribution.settings import AttributionConfig
from saejax.core.errors import ConfigError, DataError
from saejax.lm import LanguageModel, decoder
from saejax.lm.conventions import DecoderConfig
from saejax.trained import TrainedCoder

_POSITIONS = 64  # encoded at once: all latents of so many tokens are dense for a moment


@dataclasses.dataclass(frozen=True)
class Skips:
    """Influence that passes through what features write, layer by layer.

    Attributes:
        early: float64 [L], through c_m, what features of layers below write there. own: [L], through o_m.
    """

    early: np.ndarray
    own: np.ndarray

    @property
    def shares(self) -> np.ndarray:
        """early / (early + own), float64 [L] in [0, 1]; 0 where nothing passes."""
        both = self.early + self.own
        return self.early / np.where(both == 0, 1, both)

    @property
    def share(self) -> float:
        """The same of all layers together."""
        return float(self.early.sum() / max((self.early + self.own).sum(), 1e-30))


def skipped(
    lm: LanguageModel,
    dictionaries: Sequence[TrainedCoder],
    graph: Graph,
    config: AttributionConfig = AttributionConfig(),  # noqa: B008 - frozen
    mesh: Mesh | None = None,
) -> Skips:
    """The influence of a prompt's graph that earlier features have in place of an MLP's own.

        early_m = sum_t h_t sum_s |effect of c_m at token s on target t|     own_m: the same of o_m
        h_t     = (influence_t + p_t) / sum of t's absolute inputs           as an edge's share of the influence

    c_m and o_m are one vector each at a token. Transcoders of single layers have c = 0 and so no skip. It costs as many
    rows again as the graph has features with influence.

    Raises:
        ConfigError, DataError: as `attribute`; or the graph is not of these dictionaries.
    """
    saes = at_model(lm, dictionaries)
    layers = layers_of(lm, saes)
    if tuple(layer.write for layer in layers) != graph.hook_points:
        raise DataError(f"The graph is of dictionaries at {graph.hook_points}; those given write elsewhere.")
    # Where only own writes are left, the error is e + c: c's effects are what it has more than the graph's own error.
    tokens_S, logits = checked_tokens(lm, graph.tokens, config), tuple(map(int, graph.logits))
    alone = LocalModel(lm, [_own_writes(sae) for sae in saes], tokens_S, config, mesh, logits)
    targets, rows = _targets(graph, alone)
    weight_N = influence(graph)
    weight_N[graph.parts["logits"]] += graph.probabilities
    share_R = weight_N[graph.targets] / np.maximum(np.abs(graph.weights).sum(1, dtype=np.float64), 1e-10)
    early_L, own_L = np.zeros((2, len(layers)))
    shape = (len(layers), len(graph.tokens))
    for start in range(0, len(targets), config.chunk):
        chunk = slice(start, start + config.chunk)
        rows_TN = alone.rows(targets[chunk], config.chunk).astype(np.float64)
        at_T = rows[chunk]
        share_T = share_R[at_T]
        own_TLS = np.zeros((len(at_T), *shape))
        np.add.at(own_TLS, (slice(None), *alone.features[:, :2].T), rows_TN[:, : len(alone.features)])
        errors_TLS = rows_TN[:, len(alone.features) :][:, : alone.n_errors].reshape(-1, *shape)
        early_TLS = errors_TLS - graph.weights[at_T, graph.parts["errors"]].reshape(-1, *shape)
        own_L += np.einsum("t,tls->l", share_T, np.abs(own_TLS))
        early_L += np.einsum("t,tls->l", share_T, np.abs(early_TLS))
    reached = {place for layer in layers for place in layer.reaches[1:]}
    return Skips(np.where([place in reached for place in range(len(layers))], early_L, 0), own_L)


def _own_writes(sae: TrainedCoder) -> TrainedCoder:
    """The dictionary without what its latents write beyond their own layer."""
    params = dict(sae.params)
    if len(sae.sites.writes) > 1:
        for name in sae.coder.topology.decoders:
            params[name] = np.array(params[name])
            params[name][:, 1:] = 0
    return dataclasses.replace(sae, params=params)


def _targets(graph: Graph, local: LocalModel) -> tuple[np.ndarray, np.ndarray]:
    """(local's numbers, the graph's rows) of the graph's features that have influence, and of its logits."""
    features = np.flatnonzero(influence(graph)[graph.parts["features"]])
    rows = np.r_[features, graph.n_features + np.arange(len(graph.logits))]
    return local.numbers(graph)[graph.targets[rows]], rows


def response_errors(
    lm: LanguageModel,
    dictionaries: Sequence[TrainedCoder],
    tokens: Sequence[int] | np.ndarray,
    cut: float = 0.5,
    silent: int = 1,
) -> np.ndarray:
    """Distance of each layer's dictionary from what the model does when all features before it are weaker, float64 [L].

        error_m = |d - d_hat| / |d|          over all tokens' vectors
        d       = MLP_m(x'_m) - MLP_m(x_m)
        d_hat   = o_m(x'_m) - o_m(x_m) - cut c_m

    x'_m is what layer m reads when `cut` of all that features have written to the layers below is taken away; attention
    patterns, norms' scales, errors and biases stay. A dictionary that is right about the step has 0, one that says that
    nothing happens has 1. 0 where nothing changes, as at the first layer.
    """
    if not 0 < cut <= 1:
        raise ConfigError(f"cut is {cut}; it must be above 0 and 1 at most.")
    saes = at_model(lm, dictionaries)
    writes = [layer.write for layer in layers_of(lm, saes)]
    tokens_S = jnp.asarray(checked_tokens(lm, tokens, AttributionConfig(silent=silent)))
    points = tuple({name: None for sae in saes for name in sae.sites.hook_points})
    clean = _seen(lm.config, lm.params, tokens_S, (*points, *lm.inner_points()), {})
    before = _parts_written(saes, clean, silent)
    weaker = {name: clean[name] - cut * (before[name].own + before[name].early) for name in writes}
    held = {name: clean[name] for name in lm.inner_points()}
    moved = _seen(lm.config, lm.params, tokens_S, points, held | weaker)
    after = _parts_written(saes, moved, silent)
    errors_L = np.zeros(len(writes))
    for place, name in enumerate(writes):
        d_SD = np.asarray(moved[name] - clean[name], np.float64)[silent:]
        d_hat_SD = after[name].own - before[name].own + after[name].rest - before[name].rest - cut * before[name].early
        gap, size = np.linalg.norm(d_SD - d_hat_SD[silent:]), np.linalg.norm(d_SD)
        errors_L[place] = gap / size if size else np.inf if gap else 0.0
    return errors_L


@functools.partial(jax.jit, static_argnums=(0, 3))
def _seen(
    config: DecoderConfig, params: Any, tokens_S: jax.Array, names: tuple[str, ...], given: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """{name: [S, ...] or [H, S, S]} as the model computes it; what comes after sees the `given` value instead."""
    seen: dict[str, jax.Array] = {}

    def edit(name: str, value: jax.Array) -> jax.Array:
        if name in names:
            seen[name] = value[0]
        return given[name][None] if name in given else value

    decoder.run(config, params, tokens_S[None], edits={n: functools.partial(edit, n) for n in {*names, *given}})
    return seen


class _Parts(NamedTuple):
    """A dictionary's parts where it writes, [S, D] each: o, c, and bias and skip connection."""

    own: np.ndarray
    early: np.ndarray
    rest: np.ndarray


def _parts_written(saes: Sequence[TrainedCoder], values: Mapping[str, jax.Array], silent: int) -> dict[str, _Parts]:
    found: dict[str, _Parts] = {}
    for sae in saes:
        alone, stacked = _own_writes(sae), sae.coder.topology.stacked
        x = np.stack([np.asarray(values[name], np.float32) for name in sae.sites.reads], axis=1)
        x = x if stacked else x[:, 0]
        blocks = []
        for start in range(0, len(x), _POSITIONS):
            rows = x[start : start + _POSITIONS]
            f = np.array(sae.encode(rows))
            f[: max(0, silent - start)] = 0
            blocks.append([np.asarray(one.decode(g, rows)) for one, g in ((sae, f), (alone, f), (sae, 0 * f))])
        parts = (np.concatenate(part) for part in zip(*blocks, strict=True))
        whole, own, rest = (part.reshape(len(x), len(sae.sites.writes), -1) for part in parts)
        for site, name in enumerate(sae.sites.writes):
            found[name] = _Parts(own[:, site] - rest[:, site], whole[:, site] - own[:, site], rest[:, site])
    return found
