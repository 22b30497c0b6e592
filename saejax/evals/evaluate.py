"""One pass over held-out text: reconstruction, sparsity and what the language model loses."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.coders import Coder
from saejax.core.errors import ConfigError, DataError
from saejax.core.progress import Progress
from saejax.evals.reconstruction import Reconstruction, batch_sums, decoder_gram_rms, density_histogram
from saejax.evals.splice import splice_metrics, splice_sums
from saejax.lm import LanguageModel
from saejax.text import PackedRows, Packer


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out text.

    Attributes:
        tokens: held-out activations to evaluate on: whole batches until there are so many, or the text runs out.
        batch_rows: packed rows in a forward pass (each runs the language model three times).
    """

    tokens: int = 262_144
    batch_rows: int = 16

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.batch_rows < 1:
            raise ConfigError("eval.tokens and eval.batch_rows must be at least 1.")


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """Metrics by name, the density histogram, and how much was evaluated how fast."""

    metrics: dict[str, float]
    density: dict[str, Any]
    tokens: int
    seconds: float


def evaluate(
    coder: Coder, params: Any, lm: LanguageModel, packer: Packer, hook_point: str, config: EvalConfig
) -> Evaluated:
    """Evaluate `params` (for raw activations) on the held-out split, without sampling: the first tokens of it.

    The metrics are those of `Reconstruction`, of `splice` and `decoder_gram_rms`.

    Raises:
        DataError: no held-out text, or nothing in it but special tokens.
    """
    reconstruction = Reconstruction()
    totals: dict[str, float] = {}
    shift_D = jnp.asarray(params["b_dec"], jnp.float32)

    def batch(params: Any, lm_params: Any, packed: dict[str, jax.Array]) -> Any:
        def reconstruct(x_RSD: jax.Array) -> jax.Array:
            x_BD = x_RSD.reshape(-1, x_RSD.shape[-1]).astype(jnp.float32)
            return coder.decode(params, coder.encode(params, x_BD)).reshape(x_RSD.shape)

        sums, x_RSD = splice_sums(lm, lm_params, hook_point, reconstruct, packed)
        x_BD = x_RSD.reshape(-1, x_RSD.shape[-1])
        latents = coder.encode(params, x_BD)
        x_hat_BD = coder.decode(params, latents)
        return sums, batch_sums(x_BD, x_hat_BD, latents, packed["keep"].ravel(), shift_D)

    # Compiled before the clock starts.
    compiled = jax.jit(batch).lower(params, lm.params, _arrays(packer.blank(config.batch_rows))).compile()
    with Progress("evaluate", config.tokens) as progress:
        for packed in packer.batches("heldout", config.batch_rows):
            kept = int(packed.keep.sum())
            sums, parts = compiled(params, lm.params, _arrays(packed))
            for name, value in jax.device_get(sums).items():
                totals[name] = totals.get(name, 0.0) + float(value)
            reconstruction.add(parts)
            progress.advance(kept)
            if progress.tokens >= config.tokens:
                break
        if not totals.get("predicted") or not progress.tokens:
            raise DataError("There is no held-out text. Raise text.heldout_fraction or give more documents.")
        metrics = reconstruction.metrics() | splice_metrics(totals)
        metrics["gram_rms"] = decoder_gram_rms(np.asarray(params["W_dec"]))
        n_tokens = int(reconstruction.sums["n"])
        density = density_histogram(reconstruction.counts, n_tokens)
        return Evaluated(metrics, density, n_tokens, progress.seconds)


def _arrays(packed: PackedRows) -> dict[str, jax.Array]:
    return {name: jnp.asarray(getattr(packed, name)) for name in ("tokens", "positions", "segments", "keep")}
