"""Feature absorption and splitting on a probe's direction, by the definitions of arXiv 2409.14507 and SAEBench.

Shape letters: B words, F latents. p is the unit direction of a linear probe for a property that all B words have, act =
x . p, proj_f = z_f (W_dec_f . p), cos_f = cos(W_dec_f, p); main are the latents that stand for the property.

SAEBench writes z_f cos_f, which is proj_f for its decoder rows of length 1; here rows may have any length.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_FIRES = 1e-8
_LEAST_COS_FULL, _LEAST_COS, _LEAST_SHARE = 0.025, 0.1, 0.4
_ABSORBERS = 3


class Absorbed(NamedTuple):
    """Of each word: `fraction` [B], between 0 and 1, and `full` bool [B]."""

    fraction: np.ndarray
    full: np.ndarray


def absorbed(
    z_BF: np.ndarray, x_BD: np.ndarray, W_dec_FD: np.ndarray, p_D: np.ndarray, main: Sequence[int]
) -> Absorbed:
    """How much of the probe's projection other latents carry in place of the main ones.

    With a the sum of the (at most 3) largest proj_f > 0 of latents that are not main and have cos_f >= 0.1, and m the
    sum of proj_f of the main ones:

        fraction = 0                      if m >= act or a / act < 0.4
                 = 1                      else if m <= 0
                 = c / (c + m)            else, with c = min(a, act - m)

    full: no main latent fires (z_f < 1e-8), and the latent with the largest proj_f has cos_f >= 0.025 and proj_f / act
    >= 0.4, act not negative.
    """
    p_D = p_D.astype(np.float64) / np.linalg.norm(p_D)
    onto_F = W_dec_FD.astype(np.float64) @ p_D
    cos_F = onto_F / np.maximum(np.linalg.norm(W_dec_FD.astype(np.float64), axis=1), 1e-12)
    proj_BF, act_B = z_BF * onto_F[None], x_BD.astype(np.float64) @ p_D
    chosen = np.zeros(len(onto_F), bool)
    chosen[list(main)] = True
    main_B = proj_BF[:, chosen].sum(1)
    candidates_BF = np.where(((cos_F >= _LEAST_COS) & ~chosen)[None], np.maximum(proj_BF, 0), 0)
    others_B = np.sort(candidates_BF, axis=1)[:, -_ABSORBERS:].sum(1)
    safe_B = np.where(act_B == 0, np.finfo(np.float64).tiny, act_B)
    with np.errstate(over="ignore"):  # of an act of 0, whose fraction is 0 or 1
        none_B = (main_B >= act_B) | (others_B / safe_B < _LEAST_SHARE)
    carried_B = np.minimum(others_B, act_B - main_B)
    whole_B = np.where(carried_B + main_B == 0, 1.0, carried_B + main_B)
    part_B = np.where(main_B <= 0, 1.0, np.clip(carried_B / whole_B, 0, 1))
    top_B = proj_BF.argmax(1)
    top_proj_B = proj_BF[np.arange(len(top_B)), top_B]
    silent_B = (z_BF[:, chosen] < _FIRES).all(1)
    aligned_B = (cos_F[top_B] >= _LEAST_COS_FULL) & (act_B >= 0) & (top_proj_B >= _LEAST_SHARE * act_B)
    return Absorbed(np.where(none_B, 0.0, part_B), silent_B & aligned_B)


def splits(f1_K: Sequence[float], gain: float) -> int:
    """How many latents share a property: the last k in 1, 2, ... before F1 rises by no more than `gain` over k - 1."""
    best, k = -np.inf, 0
    for score in f1_K:
        if not score > best + gain:
            break
        best, k = score, k + 1
    return k
