"""For every latent: passages that activate it, its activation histogram, the logits it promotes."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.analysis.scan import Scan, scan_latents
from saejax.capture import ALL_TOKENS, Sinks
from saejax.core.settings import Settings, setting
from saejax.kernels.dense import EXACT
from saejax.lm.forward import Model
from saejax.lm.pair import ModelPair
from saejax.text import Packer
from saejax.trained import TrainedCoder


@dataclasses.dataclass(frozen=True)
class ReportConfig(Settings, section="report"):
    """The content of the feature browser."""

    tokens: int = setting(262_144, "Held-out activations that are searched for examples.", low=1, high=math.inf)
    examples: int = setting(10, "Passages for each latent, the most activating ones.", low=1)
    quantiles: int = setting(
        5, "Equal parts of each latent's activation range, from which more passages are drawn; 0 for none.", low=0
    )
    quantile_examples: int = setting(2, "Passages drawn at random from each of these parts.", low=1)
    before: int = setting(16, "Tokens shown before a passage's peak.", low=0)
    after: int = setting(7, "Tokens shown after a passage's peak.", low=0)
    logits: int = setting(10, "Promoted and suppressed tokens shown for each latent.", low=1)
    histogram_bins: int = setting(20, "Bins of each latent's activation histogram.", low=1)
    max_features: int = setting(0, "At most so many latents, the first ones; 0 for all.", low=0)
    batch_rows: int = setting(32, "Packed rows in a forward pass.", low=1)


def collect_features(
    sae: TrainedCoder, lm: Model, packer: Packer, config: ReportConfig, sinks: Sinks = ALL_TOKENS, progress: bool = True
) -> tuple[dict[str, Any], int, float]:
    """(the content of features.sqlite, tokens scanned, seconds).

    `sae` has the model's own names for its hook points (`TrainedCoder.at`). The passages are of the held-out split; no
    two of a list come from the same packed row. The `sinks` are left out. Where a coder has groups (layers), latent f
    of group g is feature g F + f, and its entry has "layer": g. "quantiles" are the parts of (0, largest |activation|]
    that hold any, the highest first: {low, high, fraction: of the tokens scanned, those active within, examples: drawn
    at random, none that is among the most activating}.

    Raises:
        DataError: no held-out text, or nothing in it but special tokens.
    """
    coder, sites, width = sae.coder, sae.sites, sae.n_latents
    scan = scan_latents(sae, lm, packer, config.tokens, config.batch_rows, sinks, progress)
    shown = min(config.max_features or width, width)
    last = int(scan.documents.max())
    documents = itertools.takewhile(lambda document: document.index <= last, packer.source.documents("heldout"))
    names = {document.index: document.name for document in documents}
    top, bottom = _promoted(sae, lm, slice(0, shown), config.logits)
    strings = _TokenTable(lm)
    grouped, d_sae = len(coder.topology.latent_shape) > 1, coder.topology.d_sae
    features = []
    for i in range(shown):
        peaks = scan.peaks(i)[: config.examples].tolist()
        passages = partial(_passage, scan, i, names=names, strings=strings, config=config)
        features.append(
            _activity(scan, i, config)
            | ({"layer": i // d_sae} if grouped else {})
            | {
                "id": i,
                "top_logits": strings.pairs(*top[i]),
                "bottom_logits": strings.pairs(*bottom[i]),
                "examples": [passages(e) for e in peaks],
                "quantiles": [
                    {**within, "examples": [passages(e) for e in drawn]}
                    for within, drawn in _quantiles(scan, i, peaks, config)
                ],
            }
        )
    reads, writes = ", ".join(sites.reads), ", ".join(sites.writes)
    content = {
        "hook_point": reads if reads == writes else f"{reads} -> {writes}",
        "model": lm.identity["model"],
        "d_sae": width,
        "n_tokens": scan.n_tokens,
        "features": features,
        "vocab": strings.table,
    }
    return content, scan.n_tokens, scan.seconds


def _five_digits(value: float) -> float:
    """Five digits, wherever they stand: latents of some dictionaries are 0.0001, of others 10,000."""
    return float(f"{value:.5g}") if value else 0.0


def logits_of(sae: TrainedCoder, lm: Model, latent: int, count: int) -> tuple[list[Any], list[Any]]:
    """([[token, logit]] promoted most, suppressed most) of one latent, as `collect_features` gives them of all.

    `sae` has the model's own names for its hook points. Both are empty where a latent's way to the logits is not known.
    """
    group, latent = divmod(latent, sae.coder.topology.d_sae)
    (top,), (bottom,) = _promoted(sae, lm, slice(group, group + 1), count, slice(latent, latent + 1))
    strings = _TokenTable(lm)
    return strings.pairs(*top), strings.pairs(*bottom)


def _promoted(
    sae: TrainedCoder, lm: Model, part: slice, count: int, chosen: slice | None = None
) -> tuple[list[Any], list[Any]]:
    """`promoted_logits` of a part of `_into_residual`'s rows; of each none where that is not known."""
    added_FD = _into_residual(sae, lm, chosen)
    if added_FD is None:
        nothing: list[Any] = [((), ())] * (part.stop - part.start)
        return nothing, nothing
    # Rows go to the last site written: of two models, to the residual stream of the one that has it.
    writer = lm.owner(sae.sites.writes[-1]) if isinstance(lm, ModelPair) else lm
    return promoted_logits(writer, added_FD[part], count)


def _into_residual(sae: TrainedCoder, lm: Model, chosen: slice | None = None) -> np.ndarray | None:
    """[G F, D]: what a unit of each latent adds to the residual stream; None where that is not known of some site.

    Of each group's latents only those `chosen`, if any are.
    """
    groups, params = [], dict(sae.params)
    if chosen is not None:
        params |= sae.coder.topology.restrict(params, chosen)
    for written in sae.coder.topology.written(params):
        parts = [lm.into_residual(sae.sites.writes[site], np.asarray(rows)) for site, rows in written.items()]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        groups.append(np.sum(known, axis=0))
    return np.concatenate(groups)


def promoted_logits(lm: Model, rows_FD: np.ndarray, count: int) -> tuple[list[Any], list[Any]]:
    """For each row d: the `count` largest and smallest of (d * w_final) W_U, centred over the vocabulary.

    d is added to the residual stream (`Model.into_residual`). The direct path to the logits: final norm's scale without
    its division, other layers left out. A model that does not predict the next token, or reads its logits from vectors
    of another width, has none.

    Returns:
        (top, bottom), each a list of (token ids, values), one pair a row.
    """
    readout = lm.readout()
    if readout is None or rows_FD.shape[1] != len(readout[0]):
        nothing: list[Any] = [((), ()) for _ in rows_FD]
        return nothing, nothing
    scale_D, W_U_DV = readout
    W_U_DV = W_U_DV - W_U_DV.mean(1, keepdims=True)
    count = min(count, W_U_DV.shape[1])

    @jax.jit
    def extremes(part_FD: jax.Array) -> Any:
        logits_FV = jnp.matmul(part_FD * scale_D[None], W_U_DV, precision=EXACT)
        return jax.lax.top_k(logits_FV, count), jax.lax.top_k(-logits_FV, count)

    top, bottom = [], []
    for start in range(0, len(rows_FD), 512):
        (high, high_ids), (low, low_ids) = jax.device_get(extremes(jnp.asarray(rows_FD[start : start + 512])))
        top += list(zip(high_ids.tolist(), high.tolist(), strict=True))
        bottom += list(zip(low_ids.tolist(), (-low).tolist(), strict=True))
    return top, bottom


class _TokenTable:
    """Token ids numbered in order of appearance, with their strings; only tokens that are shown are kept."""

    def __init__(self, lm: Model):
        self._lm = lm
        self._index: dict[int, int] = {}
        self.table: list[str] = []

    def index(self, token: int) -> int:
        if token not in self._index:
            self._index[token] = len(self.table)
            self.table += self._lm.tokenizer.token_strings([token])
        return self._index[token]

    def pairs(self, tokens: Sequence[int], values: Sequence[float]) -> list[list[Any]]:
        """[[token's string, value]]"""
        return [[self.table[self.index(t)], _five_digits(v)] for t, v in zip(tokens, values, strict=True)]


def _activity(scan: Scan, latent: int, config: ReportConfig) -> dict[str, Any]:
    """Density, range and histogram of a latent's activations; "min" only where it has negative values (abs_topk)."""
    values = scan.value[scan.entries(latent)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    bounds = (min(low, 0.0), max(high, 0.0))
    counts, edges = np.histogram(values, config.histogram_bins, bounds if any(bounds) else (0.0, 1.0))
    signed = {"min": _five_digits(low)} if low < 0 else {}
    return signed | {
        "density": len(values) / scan.n_tokens,
        "max": _five_digits(high),
        "mean": _five_digits(values.mean()) if len(values) else 0.0,
        "histogram": {"edges": [_five_digits(e) for e in edges.tolist()], "counts": counts.tolist()},
    }


def _quantiles(
    scan: Scan, latent: int, shown: Sequence[int], config: ReportConfig
) -> Iterator[tuple[dict[str, float], list[int]]]:
    """({low, high, fraction}, entries drawn from it) for each part of the range that holds any, the highest first.

    The draw is a function of the latent's number: the same scan gives the same passages.
    """
    part = scan.entries(latent)
    sizes = np.abs(scan.value[part])  # falling
    if not len(sizes) or not config.quantiles:
        return
    edges = np.linspace(0, float(sizes[0]), config.quantiles + 1)
    # [stop[b], stop[b - 1]) are the entries of bin b, with edges[b] < |value| <= edges[b + 1].
    stops = [len(sizes), *np.searchsorted(-sizes, -edges[1:-1], side="left").tolist(), 0]
    rng = np.random.default_rng(latent)
    for b in reversed(range(config.quantiles)):
        inside = np.arange(stops[b + 1], stops[b]) + part.start
        if not len(inside):
            continue
        fresh = rng.permutation(np.setdiff1d(inside, shown))
        _, first_of_row = np.unique(scan.row[fresh], return_index=True)
        drawn = np.sort(fresh[np.sort(first_of_row)[: config.quantile_examples]])
        low, high = map(_five_digits, edges[b : b + 2])
        yield {"low": low, "high": high, "fraction": len(inside) / scan.n_tokens}, drawn.tolist()


def _passage(
    scan: Scan, latent: int, entry: int, *, names: dict[int, str], strings: _TokenTable, config: ReportConfig
) -> dict[str, Any]:
    """The tokens around an entry with the latent's value at each.

    `position` is the peak's place in its piece of the document, `peak` its place among the tokens shown. `index` is the
    document's number in the text, by which a store has it; names need not be different.
    """
    row, peak, start, stop = scan.window(entry, config.before, config.after)
    document = int(scan.documents[row, peak])
    return {
        "document": names.get(document, ""),
        "index": document,
        "position": int(scan.positions[row, peak]),
        "tokens": [strings.index(t) for t in scan.tokens[row, start:stop].tolist()],
        "activations": [_five_digits(a) for a in scan.activations(latent, row)[start:stop].tolist()],
        "peak": peak - start,
    }
