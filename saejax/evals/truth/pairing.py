"""Which latent stands for which true feature, by the directions of the decoder alone."""

import dataclasses

import numpy as np

from saejax.evals.matching import cosines, match

# Absorption is looked for where parent and child have latents of their own: best |cos| at least this.
_FOUND = 0.5
# A child's latent has the parent's direction if its share beside the child's is at least this.
_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class Pairing:
    """What the decoder's rows have to do with the features.

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


def pair(W_dec_FD: np.ndarray, directions_ND: np.ndarray, families_P2: np.ndarray) -> Pairing:
    """Pair a decoder's rows with the true directions.

    Args:
        families_P2: (parent, child) of every child. Kept are those whose best latents are two, each with |cos| >= 0.5
            to its feature. Whether the child's latent w has the parent's direction d_p beside the child's d_c: least
            squares w / |w| = +-(alpha d_c + beta d_p) gives beta >= 0.1.
    """
    similar_FN = np.abs(cosines(W_dec_FD, directions_ND))
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
        match(W_dec_FD, directions_ND).mean,
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
