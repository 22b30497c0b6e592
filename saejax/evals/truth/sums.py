"""What a block of samples says of a dictionary, in numbers that add up, and the figures that follow from totals."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.evals.centred import about_zero, centred_sums, variance

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
        of: `feature` [F], `latent` [N] and, for absorption, `parent`, `child` [P] and `shares` [P] of a `Pairing`.
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


def resampled(t: Totals, weights_RK: np.ndarray) -> Totals:
    """Totals of R samples of K blocks, block k taken weights[r, k] times."""
    return {name: np.tensordot(weights_RK, value, axes=(1, 0)) for name, value in t.items()}
