"""One pass over held-out text: reconstruction, sparsity and what the language model loses."""

import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.capture import ALL_TOKENS, Sinks, finite
from saejax.coders import Coder, Sites
from saejax.core.errors import DataError
from saejax.core.notebook import html_table
from saejax.core.progress import Progress
from saejax.core.settings import Settings, setting
from saejax.evals.breakdown import ReadText
from saejax.evals.in_turn import edits_in_turn, has_turns
from saejax.evals.intervals import Documents
from saejax.evals.reconstruction import (
    Reconstruction,
    batch_sums,
    decoder_gram_rms,
    density_histogram,
    joined_sums,
    token_sums,
)
from saejax.evals.resampled import CoderSums, Slots, TextSums
from saejax.evals.similarity import CoActivation, cosine_histogram, firing
from saejax.evals.splice import Clean, instead, splice_metrics, spliced, unspliced, zeroed
from saejax.lm.forward import Model, compiled
from saejax.text import PackedRows, Packer
from saejax.trained import TrainedCoder

# Metrics that are also given of all tokens, the sinks among them.
WITH_SINKS = ("fve", "l0", "loss_recovered")
# What is looked at first.
_FIRST = ("l0", "fve", "loss_recovered", "kl", "dead_fraction")


@dataclasses.dataclass(frozen=True)
class EvalConfig(Settings, section="eval"):
    """Evaluation on held-out text."""

    tokens: int = setting(
        262_144,
        "Held-out activations to evaluate on: whole batches until there are so many, or the text runs out.",
        low=1,
        high=math.inf,
    )
    batch_rows: int = setting(
        16,
        "Packed rows in a forward pass. The language model runs once over each; from where the dictionary reads or "
        "writes first twice more, four times where there are sinks; once or twice more for a dictionary whose groups "
        "write several places.",
        low=1,
    )


@dataclasses.dataclass(frozen=True, repr=False)
class Evaluated:
    """The results.

    Attributes:
        metrics: {"l0", "fve", "loss_recovered", "kl", "dead_fraction", ...: value}.
        documents: sums of each, for intervals.
        density: histogram of how often latents fire.
        non_finite: tokens whose activation is NaN or infinite, or after which the model predicts NaN; in no metric.
        breakdown: figures by position, frequency and source of the tokens.
        cosine, coactivation: histograms of each latent's largest |cos| with another, of what they write, and largest
            Jaccard index, of when they fire.
    """

    metrics: dict[str, float]
    density: dict[str, Any]
    tokens: int
    seconds: float
    non_finite: int
    documents: Documents
    breakdown: dict[str, Any]
    cosine: dict[str, Any]
    coactivation: dict[str, Any]

    @property
    def intervals(self) -> dict[str, list[float] | None]:
        """{metric: [low, high]}, of 95 %, by the bootstrap over documents; None where there are too few."""
        return self.documents.intervals

    def __repr__(self) -> str:
        figures = ", ".join(f"{name} {self.metrics[name]:.4g}" for name in _FIRST if name in self.metrics)
        return f"Evaluated({self.tokens:,} tokens: {figures})"

    def _repr_html_(self) -> str:
        names = [*(name for name in _FIRST if name in self.metrics), *sorted(self.metrics.keys() - set(_FIRST))]
        rows = {}
        for name in names:
            between = self.intervals.get(name)
            rows[name] = [f"{self.metrics[name]:.4g}", f"{between[0]:.4g} to {between[1]:.4g}" if between else ""]
        return html_table(f"{self.tokens:,} tokens", rows, ("value", "95 % interval"))


def evaluate(sae: TrainedCoder, lm: Model, packer: Packer, config: EvalConfig, sinks: Sinks = ALL_TOKENS) -> Evaluated:
    """Evaluate a coder on the held-out split, without sampling: the first tokens of it.

    The metrics are those of `Reconstruction` over all that is written (the sites' dimensions side by side, the latents
    of all groups together), of `splice`, and gram_rms: `decoder_gram_rms` of all that a latent writes, root mean square
    over the groups. For several sites also `fve/<hook point>` of each. Where the text has sinks also `sinks`, their
    share of the tokens, and of `WITH_SINKS` the same with the sinks counted and replaced.

    Args:
        sae: with the model's own names for its hook points (`TrainedCoder.at`).
        sinks: those of the capture. They are neither counted nor replaced.
    """
    return evaluate_together([sae], lm, packer, config, sinks)[0]


def evaluate_together(
    saes: Sequence[TrainedCoder], lm: Model, packer: Packer, config: EvalConfig, sinks: Sinks = ALL_TOKENS
) -> list[Evaluated]:
    """`evaluate` of coders that read and write the same hook points, with the same metrics to the last bit.

    What the model does without them is computed once: of n coders n + 2 forward passes of a batch, not 3 n; 2 n + 3 of
    one with sinks. Of `in_turn` each has one more, with sinks two. The weights of all are in memory together.
    """
    (sites,) = {sae.sites for sae in saes}

    # Compiled before the clock starts.
    blank = _arrays(packer.blank(config.batch_rows))
    run = compiled(lm, clean_run(lm, sites, sinks), lm.params, blank)
    clean = run(lm.params, blank)[1]
    parts = [_Part(sae, lm, clean, blank, config) for sae in saes]
    with_sinks = _WithSinks(lm, sites)
    totals: dict[str, float] = {}
    with tempfile.TemporaryFile() as file, Progress("evaluate", config.tokens) as progress:
        read = ReadText(packer, config.batch_rows, config.tokens)
        text = TextSums(read.breakdowns, read.n_groups, file)
        for packed, codes in read.batches():
            n_kept, arrays = int(packed.keep.sum()), _arrays(packed)
            sums, clean = run(lm.params, arrays)
            _add(totals, sums)
            keep, losses = np.asarray(clean["keep"]).ravel(), _by_token(clean["losses"])
            _add(totals, {name: losses[name].sum(dtype=np.float64) for name in losses if name != "predicted"})
            whole = with_sinks.add(clean, arrays, bool(sums["sinks"]))
            slots = text.add(packed, codes, _written_values(sites, clean["captured"]), keep, losses)
            for part in parts:
                part.add(clean, arrays, slots, keep, whole)
            progress.advance(n_kept)
            if progress.tokens >= config.tokens:
                break
        if progress.tokens and not parts[0].n_tokens:
            raise DataError(
                f"Not one of {progress.tokens:,} held-out tokens has finite activations: the model overflows. Set "
                "lm.dtype=float32, or look at its weights."
            )
        if not totals.get("predicted") or not progress.tokens:
            raise DataError("There is no held-out text. Raise text.heldout_fraction or give more documents.")
        results = [part.evaluated(totals, text, with_sinks.totals) for part in parts]
        seconds = progress.seconds / len(parts)
        return [dataclasses.replace(result, seconds=seconds) for result in results]


def clean_run(lm: Model, sites: Sites, sinks: Sinks) -> Callable[[Any, dict[str, jax.Array]], Any]:
    """(model's parameters, packed rows) -> (sums, what every coder of these sites needs of them). Pure."""

    def alone(lm_params: Any, packed: dict[str, jax.Array]) -> Any:
        def keep(captured: dict[str, jax.Array]) -> jax.Array:
            return sinks.without(captured, packed["keep"], packed["positions"])

        sums, clean = unspliced(lm, lm_params, sites, keep, packed)
        clean["with_sinks"] = packed["keep"] & finite(clean["captured"])
        bad = (packed["keep"] & ~clean["with_sinks"]).sum()
        left_out = (clean["with_sinks"] & ~clean["keep"]).sum()
        return sums | {"non_finite": sums["unpredicted"] + bad, "sinks": left_out}, clean

    return alone


def spliced_run(lm: Model, coder: Coder, sites: Sites) -> Callable[[Any, Any, Clean, dict[str, jax.Array]], Any]:
    """(coder's parameters, model's, what `clean_run` gave, packed rows) -> (sums of reconstruction, `token_sums` [B],
    the latents `firing`, the splice's losses [R, S - 1], y - y_hat [B, R], 0 for tokens that are not kept). Pure.
    """
    names = _sides(sites)

    def batch(params: Any, lm_params: Any, clean: Clean, packed: dict[str, jax.Array]) -> Any:
        captured = clean["captured"]
        seen = sites.batch({name: value.reshape(-1, value.shape[-1]) for name, value in captured.items()})

        def block(x: jax.Array, y: jax.Array, keep_B: jax.Array) -> tuple[Any, Any]:
            latents = coder.encode(params, x)
            y_hat = coder.decode(params, latents, x)
            flat = latents.flat()
            whole = (y.reshape(len(keep_B), -1), y_hat.reshape(len(keep_B), -1), flat, keep_B)
            tokens, sums = token_sums(*whole), {"all": batch_sums(*whole)}
            sums |= {name: batch_sums(y[:, i], y_hat[:, i], flat, keep_B) for i, name in enumerate(names[1:])}
            return (y_hat, tokens, firing(flat)), sums

        (y_hat, tokens, bits), sums = _in_blocks(block, (seen["x"], seen["y"], clean["keep"].ravel()), coder.few_tokens)
        sides = [y_hat[:, i] for i in range(len(sites.writes))] if sites.stacked else [y_hat]
        rows = packed["tokens"].shape
        values = {name: side.reshape(*rows, -1) for name, side in zip(sites.writes, sides, strict=True)}
        losses = spliced(lm, lm_params, sites, instead(values), clean, packed)
        if has_turns(coder, sites, lm):
            edits = edits_in_turn(coder, params, sites, functools.partial(_of_blocks, coder.few_tokens))
            in_turn = spliced(lm, lm_params, sites, edits, clean, packed)
            losses |= {f"{name}_in_turn": value for name, value in in_turn.items()}
        error = (seen["y"] - y_hat).astype(jnp.float32).reshape(len(y_hat), -1)
        return sums, tokens, bits, losses, jnp.where(clean["keep"].reshape(-1, 1), error, 0)

    return batch


def _sides(sites: Sites) -> tuple[str, ...]:
    """Names of metrics' parts: all sites together, and each of several."""
    return ("all", *sites.writes) if sites.stacked else ("all",)


class _WithSinks:
    """The model with zeros at all tokens, sinks too: a forward pass for each batch that has some.

    Attributes:
        totals: the sum of "ce_zero", where there is a loss.
    """

    def __init__(self, lm: Model, sites: Sites):
        self._lm, self._zeroed = lm, functools.partial(zeroed, lm, sites)
        self._run: Callable[..., Any] | None = None
        self.totals: dict[str, float] = {}

    def add(self, clean: Clean, packed: dict[str, jax.Array], some: bool) -> Clean | None:
        """`clean` of a batch with its sinks among the tokens to keep; None where it has none."""
        whole = clean | {"keep": clean["with_sinks"]}
        losses = clean["losses"]
        if "ce_zero" in losses:
            if some:
                self._run = self._run or compiled(self._lm, self._zeroed, self._lm.params, whole, packed)
                losses = losses | {"ce_zero": self._run(self._lm.params, whole, packed)}
            _add(self.totals, {"ce_zero": np.asarray(losses["ce_zero"]).sum(dtype=np.float64)})
        return whole if some else None


class _Part:
    """One coder's part of an evaluation: its program, and its sums so far."""

    def __init__(self, sae: TrainedCoder, lm: Model, clean: Clean, packed: dict[str, jax.Array], config: EvalConfig):
        # On the device once, not again with every batch.
        self._sae, self._lm, self._weights = sae, lm, jax.device_put(dict(sae.params))
        self._names = _sides(sae.sites)
        self._reconstructions = {name: Reconstruction() for name in self._names}
        self._totals: dict[str, float] = {}
        self._with_sinks, self._totals_with_sinks = Reconstruction(), dict[str, float]()
        self._run = compiled(lm, spliced_run(lm, sae.coder, sae.sites), self._weights, lm.params, clean, packed)
        self._resampled = CoderSums()
        self._together = CoActivation(sae.n_latents, packed["tokens"].size, config.tokens)

    def add(
        self, clean: Clean, packed: dict[str, jax.Array], slots: Slots, keep_B: np.ndarray, whole: Clean | None
    ) -> None:
        """Add a batch; `whole` is `clean` with its sinks among the tokens to keep, None where it has none."""
        sums, tokens, bits, losses, error_BR = self._run(self._weights, self._lm.params, clean, packed)
        by_token = _by_token(losses)
        _add(self._totals, _summed(losses))
        for name, part in sums.items():
            self._reconstructions[name].add(part)
        self._resampled.add(slots, error_BR, keep_B, {**tokens, **by_token})
        self._together.add(np.asarray(bits), keep_B)
        if whole is not None:
            sums, _, _, losses, _ = self._run(self._weights, self._lm.params, whole, packed)
        self._with_sinks.add(sums["all"])
        _add(self._totals_with_sinks, _summed(losses))

    @property
    def n_tokens(self) -> int:
        return int(self._reconstructions["all"].sums["n"])

    def evaluated(self, totals: dict[str, float], text: TextSums, zeros_with_sinks: dict[str, float]) -> Evaluated:
        whole, n_tokens = self._reconstructions["all"], self.n_tokens
        metrics = whole.metrics() | {name: float(v) for name, v in splice_metrics(totals | self._totals).items()}
        metrics |= {f"fve/{name}": self._reconstructions[name].metrics()["fve"] for name in self._names[1:]}
        if totals["sinks"]:
            losses = splice_metrics(totals | zeros_with_sinks | self._totals_with_sinks)
            of_all = self._with_sinks.metrics() | {name: float(value) for name, value in losses.items()}
            metrics["sinks"] = totals["sinks"] / float(self._with_sinks.sums["n"])
            metrics |= {f"{name}_with_sinks": of_all[name] for name in WITH_SINKS if name in of_all}
        decoders = self._sae.coder.topology.decoder_rows(self._weights)
        metrics["gram_rms"] = float(np.sqrt(np.mean(np.square([decoder_gram_rms(np.asarray(d)) for d in decoders]))))
        documents, breakdown = self._resampled.against(text, self._sae.sites.writes, metrics, whole)
        return Evaluated(
            metrics,
            density_histogram(whole.counts, n_tokens),
            n_tokens,
            0.0,
            int(totals["non_finite"]),
            documents,
            breakdown,
            cosine_histogram(decoders.tables),
            self._together.histogram(),
        )


def _add(totals: dict[str, float], sums: Any) -> None:
    for name, value in jax.device_get(sums).items():
        totals[name] = totals.get(name, 0.0) + float(value)


def _summed(losses: Mapping[str, jax.Array]) -> dict[str, float]:
    return {name: np.asarray(value).sum(dtype=np.float64) for name, value in losses.items()}


def _in_blocks(function: Callable[..., tuple[Any, Any]], arrays: tuple[jax.Array, ...], most: int) -> tuple[Any, Any]:
    """(rows, {name: sums}) = function(*arrays) with at most so many rows at once, which rows of zeros fill up."""
    n = len(arrays[0])
    if n <= most:
        return function(*arrays)
    count = -(-n // most)
    size = -(-n // count)
    blocks = [
        jnp.pad(a, ((0, count * size - n), *[(0, 0)] * (a.ndim - 1))).reshape(count, size, *a.shape[1:]) for a in arrays
    ]
    rows, sums = jax.lax.map(lambda block: function(*block), blocks)
    joined = jax.tree.map(lambda row: row.reshape(-1, *row.shape[2:])[:n], rows)
    return joined, {name: joined_sums(of_blocks) for name, of_blocks in sums.items()}


def _of_blocks(most: int, function: Callable[[jax.Array], jax.Array], x_BD: jax.Array) -> jax.Array:
    y_BR, _ = _in_blocks(lambda block_BD: (function(block_BD), {}), (x_BD,), most)
    return y_BR


def _arrays(packed: PackedRows) -> dict[str, jax.Array]:
    return {name: jnp.asarray(getattr(packed, name)) for name in ("tokens", "positions", "segments", "keep")}


@functools.partial(jax.jit, static_argnums=0)
def _written_values(sites: Sites, captured: dict[str, jax.Array]) -> jax.Array:
    """All that the sites write, side by side, float32 [B, R]."""
    flat = {name: value.reshape(-1, value.shape[-1]) for name, value in captured.items()}
    y = sites.batch(flat)["y"]
    return y.reshape(len(y), -1).astype(jnp.float32)


def _by_token(losses: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """{name: [B]} of {name: [R, S - 1]}: the loss of a next token belongs to the token before it."""
    return {name: np.pad(np.asarray(value), ((0, 0), (0, 1))).ravel() for name, value in losses.items()}
