"""Encoders of x and of x - b_dec: the same coder with another b_enc."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def centred(params: Mapping[str, Any], sign: int) -> dict[str, Any]:
    """b_enc + sign * b_dec W_enc, so that an encoder of x - b_dec (sign 1) or of x (sign -1) does the same.

    The gate's two biases move alike: b_mag by exp(r_mag) times as much. Computed in float64.
    """
    shift_F = sign * (params["b_dec"].astype(np.float64) @ params["W_enc"].astype(np.float64))
    moved = dict(params) | {"b_enc": (params["b_enc"] + shift_F).astype(np.float32)}
    if "b_mag" in params:
        scale_F = np.exp(params["r_mag"].astype(np.float64))
        moved["b_mag"] = (params["b_mag"] + scale_F * shift_F).astype(np.float32)
    return moved
