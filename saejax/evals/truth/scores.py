"""A dictionary scored against a known truth: figures with bootstrap intervals, and what each feature and latent does.

Precision, recall, F1, accuracy, shrinkage, explained variance, MCC and uniqueness are those of SAELens'
`eval_sae_on_synthetic_data`; absorption is ours, after Chanin et al., arXiv 2409.14507.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from saejax.core.bootstrap import middle
from saejax.core.errors import DataError
from saejax.core.progress import Progress
from saejax.core.rng import stream
from saejax.evals.truth.pairing import Pairing, pair
from saejax.evals.truth.planted import Planted
from saejax.evals.truth.sums import Totals, block_sums, classified, figures, resampled, stacked
from saejax.trained import TrainedCoder

# Bootstrap samples, and so many of them at a time.
_RESAMPLES, _AT_A_TIME = 1_000, 50
_BLOCKS = 100


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a dictionary is worth where the truth is known.

    Attributes:
        n_samples: fresh samples that it was scored on.
        figures: {name: value}; docs/truth.md defines each.
        intervals: {name: (low, high)}, 95 %, of those that depend on the samples.
        features: {name: [N]}: rate of firing, cosine and number of the best latent, its precision, recall and F1.
        latents: {name: [F]}: rate, cosine and number of the best feature, precision, recall, F1.
        families: parents and children where absorption can be seen.
    """

    n_samples: int
    figures: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    features: dict[str, np.ndarray]
    latents: dict[str, np.ndarray]
    families: int

    def to_json(self) -> dict[str, Any]:
        """As truth.json has it."""
        finite = {name: value if math.isfinite(value) else None for name, value in self.figures.items()}
        rows = {
            who: {name: [round(v, 6) for v in value.tolist()] for name, value in getattr(self, who).items()}
            for who in ("features", "latents")
        }
        intervals = {name: list(ends) for name, ends in self.intervals.items()}
        about = {"n_samples": self.n_samples, "families": self.families}
        return about | {"figures": finite, "intervals": intervals} | rows


def score(sae: TrainedCoder, planted: Planted, n_samples: int = 100_000, shown: bool = False) -> Scores:
    """Score a dictionary on fresh samples of a world: the same ones for every dictionary.

    Args:
        sae: reads and writes activations [D] of the world's width.
        planted: the truth.
        n_samples: taken in 100 blocks; the last of them are left out where it is no multiple of 100.
        shown: whether a progress bar is.

    Raises:
        DataError: the dictionary has another width, or reads several hook points.
    """
    t, d_in = sae.coder.topology, planted.world.d_in
    if t.in_shape != (d_in,) or t.out_shape != (d_in,) or len(t.latent_shape) != 1:
        raise DataError(
            f"{sae} reads {t.in_shape} and writes {t.out_shape}; the world's activations are ({d_in},). Score it on a "
            "world of its width (--config.truth.d_in), and a coder of one hook point."
        )
    pairing = pair(np.asarray(sae.params["W_dec"]), planted.directions, planted.hierarchy.pairs())
    size, of = max(1, n_samples // _BLOCKS), _on_device(pairing)
    params = jax.device_put(dict(sae.params))

    @jax.jit
    def sums(params: Any, of: Any, x_BD: jax.Array, a_BN: jax.Array) -> Any:
        latents = sae.coder.encode(params, x_BD)
        return block_sums(latents.dense(), a_BN, x_BD, sae.coder.decode(params, latents, x_BD), of)

    blocks = []
    with Progress("truth", size * _BLOCKS, shown=shown, unit="samples") as progress:
        for number in range(_BLOCKS):
            x_BD, a_BN = planted.sample(stream(planted.world.seed, "truth.score", number), size)
            blocks.append(jax.device_get(sums(params, of, x_BD, a_BN)))
            progress.advance(size)
    return scored(stacked(blocks), pairing)


def score_samples(
    rows_FD: np.ndarray, planted: Planted, blocks: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]
) -> Scores:
    """`score` of what somebody else encoded: of each block of samples x [B, D], true magnitudes [B, N], latents [B, F]
    and reconstructions [B, D]. `rows_FD` are the decoder's rows; blocks are of one size, and there are two or more.
    """
    pairing = pair(rows_FD, planted.directions, planted.hierarchy.pairs())
    of, sums = _on_device(pairing), jax.jit(block_sums)
    return scored(stacked([jax.device_get(sums(z, a, x, y_hat, of)) for x, a, z, y_hat in blocks]), pairing)


def scored(of_blocks: Totals, pairing: Pairing) -> Scores:
    """The scores that follow from the sums of blocks, [K, ...] each, and from the decoder."""
    of = jax.device_get(_on_device(pairing))
    total = {name: value.sum(0) for name, value in of_blocks.items()}
    values = {name: float(value) for name, value in figures(total, of).items()}
    intervals = _intervals(of_blocks, of)
    if not len(pairing.families):
        values["absorption"] = float("nan")
        del intervals["absorption"]
    n = total["n"]
    of_features = classified(total["both_N"], total["fires"][pairing.latent], total["true"], n)
    of_latents = classified(total["both_F"], total["fires"], total["true"][pairing.feature], n)
    return Scores(
        int(n),
        {"mcc": pairing.mcc, "uniqueness": pairing.uniqueness} | values,
        intervals,
        {"rate": total["true"] / n, "cosine": pairing.feature_cosine, "latent": pairing.latent} | of_features,
        {"rate": total["fires"] / n, "cosine": pairing.latent_cosine, "feature": pairing.feature} | of_latents,
        len(pairing.families),
    )


def _intervals(of_blocks: Totals, of: dict[str, np.ndarray]) -> dict[str, tuple[float, float]]:
    """Percentile intervals over blocks that are drawn with replacement.

    None of `dead`: who fires in no sample is silent in every resample, and more are.
    """
    k, drawn = len(of_blocks["n"]), np.random.default_rng(0)
    weights_RK = drawn.multinomial(k, np.full(k, 1 / k), _RESAMPLES).astype(np.float64)
    parts = [figures(resampled(of_blocks, some), of) for some in np.split(weights_RK, _RESAMPLES // _AT_A_TIME)]
    return {name: middle(np.concatenate([part[name] for part in parts])) for name in parts[0] if name != "dead"}


def _on_device(pairing: Pairing) -> dict[str, jax.Array]:
    """What `block_sums` is told of the pairing."""
    parent_P, child_P = pairing.families.T
    arrays = {"feature": pairing.feature, "latent": pairing.latent, "parent": parent_P, "child": child_P}
    on = {name: jax.numpy.asarray(value, np.int32) for name, value in arrays.items()}
    return on | {"shares": jax.numpy.asarray(pairing.shares)}
