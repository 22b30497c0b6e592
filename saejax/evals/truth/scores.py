"""A dictionary scored against a known truth: figures with bootstrap intervals, and what each feature and latent does.

Precision, recall, F1, accuracy, shrinkage, explained variance, MCC and uniqueness are those of SAELens'
`eval_sae_on_synthetic_data`; absorption is ours, after Chanin et al., arXiv 2409.14507.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.core.bootstrap import middle
from saejax.core.errors import DataError
from saejax.core.notebook import html_table
from saejax.core.progress import Progress
from saejax.core.rng import stream
from saejax.evals.centred import about_zero, centred_sums, variance
from saejax.evals.similarity import cosines, matched
from saejax.evals.truth.planted import Planted
from saejax.trained import TrainedCoder

# Absorption is looked for where parent and child have latents of their own: best |cos| at least this.
_FOUND = 0.5
# A child's latent has the parent's direction if its share beside the child's is at least this.
_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class Pairing:
    """The decoder's rows beside the features.

    Attributes:
        feature: int64 [F], each latent's best feature: the one of the largest |cos|.
        latent: int64 [N], each feature's best latent.
        latent_cosine, feature_cosine: float64 [F], [N], those |cos|.
        mcc: mean |cos| of the best one-to-one pairs, as many as there are latents or features, whichever are fewer.
        uniqueness: different best features over latents.
        families: int64 [P, 2], features (parent, child) where absorption can be seen.
        shares: bool [P]: the child's latent has the parent's direction.
    """

    feature: np.ndarray
    latent: np.ndarray
    latent_cosine: np.ndarray
    feature_cosine: np.ndarray
    mcc: float
    uniqueness: float
    families: np.ndarray
    shares: np.ndarray

    @property
    def places(self) -> dict[str, np.ndarray]:
        """`feature` [F], `latent` [N] and, for absorption, `parent`, `child` [P], int32; and `shares`."""
        parent_P, child_P = self.families.T
        of = {"feature": self.feature, "latent": self.latent, "parent": parent_P, "child": child_P}
        return {name: value.astype(np.int32) for name, value in of.items()} | {"shares": self.shares}


def pair(W_dec_FD: np.ndarray, directions_ND: np.ndarray, families_P2: np.ndarray) -> Pairing:
    """Pair a decoder's rows with the true directions.

    Args:
        families_P2: (parent, child) of every child. Kept are those whose best latents are two, each with |cos| >= 0.5
            to its feature. Whether the child's latent w has the parent's direction d_p beside the child's d_c: least
            squares w / |w| = +-(alpha d_c + beta d_p) gives beta >= 0.1.
    """
    similar_FN = cosines(W_dec_FD, directions_ND)
    feature_F, latent_N = similar_FN.argmax(1), similar_FN.argmax(0)
    feature_cosine_N = similar_FN[latent_N, np.arange(len(latent_N))].astype(np.float64)
    parent_P, child_P = families_P2.T
    found_P = np.minimum(feature_cosine_N[parent_P], feature_cosine_N[child_P]) >= _FOUND
    kept_P2 = families_P2[found_P & (latent_N[parent_P] != latent_N[child_P])]
    return Pairing(
        feature_F,
        latent_N,
        similar_FN[np.arange(len(feature_F)), feature_F].astype(np.float64),
        feature_cosine_N,
        float(matched(similar_FN).mean()),
        len(np.unique(feature_F)) / len(feature_F),
        kept_P2,
        parents_share(np.asarray(W_dec_FD, np.float64)[latent_N[kept_P2[:, 1]]], directions_ND, kept_P2) >= _SHARE,
    )


def parents_share(rows_PD: np.ndarray, directions_ND: np.ndarray, families_P2: np.ndarray) -> np.ndarray:
    """beta [P] of w / |w| = +-(alpha d_child + beta d_parent) by least squares, with the sign of alpha >= 0."""
    rows_PD = rows_PD / np.maximum(np.linalg.norm(rows_PD, axis=1, keepdims=True), 1e-12)
    parent_PD, child_PD = (np.asarray(directions_ND, np.float64)[families_P2[:, i]] for i in (0, 1))
    c_P, w_child_P, w_parent_P = (
        np.einsum("pd,pd->p", *two) for two in ((parent_PD, child_PD), (rows_PD, child_PD), (rows_PD, parent_PD))
    )
    rest_P = np.maximum(1 - np.square(c_P), 1e-12)
    alpha_P, beta_P = (w_child_P - c_P * w_parent_P) / rest_P, (w_parent_P - c_P * w_child_P) / rest_P
    return beta_P * np.where(alpha_P < 0, -1, 1)


# Activations shorter than this have no shrinkage.
_SHORT = 1e-6

# {name: [..., what it is of]}; the axes in front are those of blocks or of bootstrap samples.
Totals = dict[str, np.ndarray]


def block_sums(
    z_BF: jax.Array, a_BN: jax.Array, x_BD: jax.Array, x_hat_BD: jax.Array, of: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Counts and sums over the samples of a block. Pure.

    Args:
        z_BF: latents; they fire where they are not 0.
        a_BN: true magnitudes; features fire where they are above 0.
        x_BD, x_hat_BD: activations and reconstructions.
        of: `Pairing.places`.
    """
    fires_BF, true_BN = z_BF != 0, a_BN > 0
    norm_B, norm_hat_B = jnp.linalg.norm(x_BD, axis=1), jnp.linalg.norm(x_hat_BD, axis=1)
    long_B = norm_B > _SHORT
    parents_fire_BP, childs_fire_BP = (fires_BF[:, of["latent"][of[who]]] for who in ("parent", "child"))
    absorbed_BP = true_BN[:, of["child"]] & childs_fire_BP & ~parents_fire_BP & of["shares"][None]
    return {
        "n": jnp.asarray(len(x_BD), jnp.float32),
        "fires": fires_BF.sum(0),
        "true": true_BN.sum(0),
        "both_F": (fires_BF & true_BN[:, of["feature"]]).sum(0),
        "both_N": (fires_BF[:, of["latent"]] & true_BN).sum(0),
        "absorbed": absorbed_BP.sum(0),
        **dict(zip(("x_at", "x", "x2"), centred_sums(x_BD, jnp.ones(len(x_BD), bool)), strict=True)),
        "e2": jnp.square(x_BD - x_hat_BD).sum(),
        "ratio": jnp.where(long_B, norm_hat_B / jnp.where(long_B, norm_B, 1), 0).sum(),
        "long": long_B.sum(),
    }


def figures(t: Totals, of: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The figures that hold of totals; each has the totals' axes in front."""
    n = t["n"]
    latents = classified(t["both_F"], t["fires"], t["true"][..., of["feature"]], n)
    features = classified(t["both_N"], t["fires"][..., of["latent"]], t["true"], n)
    return {
        "l0": t["fires"].sum(-1) / n,
        "true_l0": t["true"].sum(-1) / n,
        "dead": (t["fires"] == 0).sum(-1),
        "shrinkage": t["ratio"] / np.maximum(t["long"], 1),
        "fve": 1 - t["e2"] / n / variance(n, t["x"], t["x2"]).sum(-1),
        **{name: value.mean(-1) for name, value in latents.items()},
        **{f"feature_{name}": value.mean(-1) for name, value in features.items()},
        "absorption": _share(t["absorbed"].sum(-1), t["true"][..., of["child"]].sum(-1)),
    }


def classified(both: np.ndarray, said: np.ndarray, is_: np.ndarray, n: np.ndarray) -> dict[str, np.ndarray]:
    """Each latent as a detector of its feature, [..., F], of counts: both fire, the latent fires, the feature does.

    precision = both / said, recall = both / is, F1 = their harmonic mean, accuracy = 1 - (said + is - 2 both) / n; what
    is divided by 0 is 0.
    """
    precision, recall = _share(both, said), _share(both, is_)
    return {
        "precision": precision,
        "recall": recall,
        "f1": _share(2 * precision * recall, precision + recall),
        "accuracy": 1 - (said + is_ - 2 * both) / n[..., None],
    }


def _share(part: np.ndarray, whole: Any) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros(np.shape(part)), where=np.asarray(whole) > 0)


def stacked(blocks: list[Any]) -> Totals:
    """Sums of blocks as float64 arrays with an axis of blocks in front, those of x about 0."""
    hosts = jax.device_get(blocks)
    t = {name: np.stack([np.asarray(host[name], np.float64) for host in hosts]) for name in hosts[0]}
    t["x"], t["x2"] = about_zero(t["n"], t.pop("x_at"), t["x"], t["x2"])
    return t


# Bootstrap samples, and so many of them at a time.
_RESAMPLES, _AT_A_TIME = 1_000, 50
_BLOCKS = 100


@dataclasses.dataclass(frozen=True)
class Scores:
    """The worth of a dictionary where the truth is known.

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

    def __repr__(self) -> str:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        return f"{self.n_samples:,} samples: {figures}"

    def _repr_html_(self) -> str:
        ends = {name: " to ".join(f"{end:.4g}" for end in pair) for name, pair in self.intervals.items()}
        rows = {name: (f"{value:.4g}", ends.get(name, "")) for name, value in self.figures.items()}
        return html_table(f"{self.n_samples:,} samples", rows, ("value", "95 % interval"))

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
    size = max(1, n_samples // _BLOCKS)
    params, of = jax.device_put((dict(sae.params), pairing.places))

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
    of, sums = jax.device_put(pairing.places), jax.jit(block_sums)
    return scored(stacked([jax.device_get(sums(z, a, x, y_hat, of)) for x, a, z, y_hat in blocks]), pairing)


def scored(of_blocks: Totals, pairing: Pairing) -> Scores:
    """The scores that follow from the sums of blocks, [K, ...] each, and from the decoder."""
    of = pairing.places
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
    parts = []
    for some_RK in np.split(weights_RK, _RESAMPLES // _AT_A_TIME):
        totals = {name: np.tensordot(some_RK, value, axes=(1, 0)) for name, value in of_blocks.items()}
        parts.append(figures(totals, of))
    return {name: middle(np.concatenate([part[name] for part in parts])) for name in parts[0] if name != "dead"}
