"""One pass over held-out text: reconstruction, sparsity and what the language model loses."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.capture import finite, near
from saejax.coders import Latents
from saejax.core.errors import DataError
from saejax.core.progress import Progress
from saejax.core.settings import Settings, setting
from saejax.evals.reconstruction import Reconstruction, batch_sums, decoder_gram_rms, density_histogram
from saejax.evals.splice import splice_metrics, splice_sums
from saejax.lm.forward import Model, compiled
from saejax.text import PackedRows, Packer
from saejax.trained import TrainedCoder


@dataclasses.dataclass(frozen=True)
class EvalConfig(Settings, section="eval"):
    """Evaluation on held-out text."""

    tokens: int = setting(
        262_144,
        "Held-out activations to evaluate on: whole batches until there are so many, or the text runs out.",
        low=1,
        high=math.inf,
    )
    batch_rows: int = setting(16, "Packed rows in a forward pass (each runs the language model three times).", low=1)


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """Metrics by name, the density histogram, and how much was evaluated how fast.

    `non_finite` counts what is in no metric: tokens whose activation is NaN or infinite, and tokens after which the
    model predicts NaN.
    """

    metrics: dict[str, float]
    density: dict[str, Any]
    tokens: int
    seconds: float
    non_finite: int


def evaluate(
    sae: TrainedCoder, lm: Model, packer: Packer, config: EvalConfig, max_norm_ratio: float = 0.0
) -> Evaluated:
    """Evaluate a coder on the held-out split, without sampling: the first tokens of it.

    The metrics are those of `Reconstruction` over all that is written (the sites' dimensions side by side, the latents
    of all groups together), of `splice`, and gram_rms: `decoder_gram_rms` of all that a latent writes, root mean square
    over the groups. For several sites also `fve/<hook point>` of each.

    Args:
        sae: with the model's own names for its hook points (`TrainedCoder.at`).
        max_norm_ratio: that of the capture: tokens which it would have dropped (by the median of batches of
            config.batch_rows here) are neither counted nor replaced.

    Raises:
        DataError: no held-out text, or nothing in it but special tokens, or activations that are all not finite.
    """
    coder, sites, weights = sae.coder, sae.sites, dict(sae.params)
    names = ("all", *sites.writes) if sites.stacked else ("all",)
    reconstructions = {name: Reconstruction() for name in names}
    totals: dict[str, float] = {}
    b_dec = jnp.asarray(weights["b_dec"], jnp.float32)

    def batch(params: Any, lm_params: Any, packed: dict[str, jax.Array]) -> Any:
        parts: dict[str, Any] = {}
        bad: dict[str, jax.Array] = {}

        def reconstruct(captured: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
            keep_RS = near(captured, packed["keep"], max_norm_ratio)
            rows = packed["tokens"].shape
            seen = sites.batch({name: value.reshape(-1, value.shape[-1]) for name, value in captured.items()})

            def block(x: jax.Array, y: jax.Array, keep_B: jax.Array) -> tuple[jax.Array, Any]:
                latents = coder.encode(params, x)
                y_hat = coder.decode(params, latents, x)
                return y_hat, _sums(names, y, y_hat, latents.flat(), keep_B, b_dec)

            y_hat, sums = _in_blocks(block, (seen["x"], seen["y"], keep_RS.ravel()), coder.few_tokens)
            parts.update(sums)
            bad["activations"] = (packed["keep"] & ~finite(captured)).sum()
            sides = [y_hat[:, i] for i in range(len(sites.writes))] if sites.stacked else [y_hat]
            return {name: side.reshape(*rows, -1) for name, side in zip(sites.writes, sides, strict=True)}, keep_RS

        sums, _ = splice_sums(lm, lm_params, sites, reconstruct, packed)
        return sums | {"non_finite": sums["unpredicted"] + bad["activations"]}, parts

    # Compiled before the clock starts.
    run = compiled(lm, batch, weights, lm.params, _arrays(packer.blank(config.batch_rows)))
    with Progress("evaluate", config.tokens) as progress:
        for packed in packer.batches("heldout", config.batch_rows):
            kept = int(packed.keep.sum())
            sums, parts = run(weights, lm.params, _arrays(packed))
            for name, value in jax.device_get(sums).items():
                totals[name] = totals.get(name, 0.0) + float(value)
            for name, part in parts.items():
                reconstructions[name].add(part)
            progress.advance(kept)
            if progress.tokens >= config.tokens:
                break
        reconstruction = reconstructions.pop("all")
        if progress.tokens and not reconstruction.sums["n"]:
            raise DataError(
                f"Not one of {progress.tokens:,} held-out tokens has finite activations: the model overflows. Set "
                "lm.dtype=float32, or look at its weights."
            )
        if not totals.get("predicted") or not progress.tokens:
            raise DataError("There is no held-out text. Raise text.heldout_fraction or give more documents.")
        metrics = reconstruction.metrics() | splice_metrics(totals)
        metrics |= {f"fve/{name}": site.metrics()["fve"] for name, site in reconstructions.items()}
        gram = [decoder_gram_rms(np.asarray(rows)) for rows in coder.topology.decoder_rows(weights)]
        metrics["gram_rms"] = float(np.sqrt(np.mean(np.square(gram))))
        n_tokens = int(reconstruction.sums["n"])
        density = density_histogram(reconstruction.counts, n_tokens)
        return Evaluated(metrics, density, n_tokens, progress.seconds, int(totals["non_finite"]))


def _in_blocks(
    function: Callable[..., tuple[jax.Array, Any]], arrays: tuple[jax.Array, ...], most: int
) -> tuple[jax.Array, Any]:
    """(rows, sums) = function(*arrays) with at most so many rows at once; sums are added up, rows of zeros fill up."""
    n = len(arrays[0])
    if n <= most:
        return function(*arrays)
    count = -(-n // most)
    size = -(-n // count)
    blocks = [
        jnp.pad(a, ((0, count * size - n), *[(0, 0)] * (a.ndim - 1))).reshape(count, size, *a.shape[1:]) for a in arrays
    ]
    rows, sums = jax.lax.map(lambda block: function(*block), blocks)
    return rows.reshape(-1, *rows.shape[2:])[:n], jax.tree.map(lambda s: s.sum(0), sums)


def _sums(
    names: tuple[str, ...], y: jax.Array, y_hat: jax.Array, latents: Latents, keep_B: jax.Array, shift: jax.Array
) -> dict[str, Any]:
    """The sums of `batch_sums` for all sites together, and for each of several."""
    n = len(keep_B)
    parts = {"all": batch_sums(y.reshape(n, -1), y_hat.reshape(n, -1), latents, keep_B, shift.ravel())}
    for i, name in enumerate(names[1:]):
        parts[name] = batch_sums(y[:, i], y_hat[:, i], latents, keep_B, shift[i])
    return parts


def _arrays(packed: PackedRows) -> dict[str, jax.Array]:
    return {name: jnp.asarray(getattr(packed, name)) for name in ("tokens", "positions", "segments", "keep")}
