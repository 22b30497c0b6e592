"""Rows as bytes: x_bd ~ scale_b q_bd with integers q from -127 to 127 and scale_b = max_d |x_bd| / 127 in float32.

What comes back is at most scale_b / 2 from x_bd, and then rounded to bfloat16. Rows that came back once are stored as
the same q and scale again: rounding moves scale q by at most 127 / 512 of a scale, which rounds to the same q. So a
store can be merged without a second loss.
"""

from collections.abc import Iterable

import numpy as np

from saejax.store.layout import BF16, scale_of

_QUANTIZED_ROWS = 256  # a piece in float32 stays in a core's cache


def quantized(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(q int8 [n, d], scale float32 [n]) of finite bfloat16 rows [n, d]; a row of zeros has scale 0."""
    q, scale = np.empty(rows.shape, np.int8), np.empty(len(rows), np.float32)
    for start in range(0, len(rows), _QUANTIZED_ROWS):
        piece = slice(start, start + _QUANTIZED_ROWS)
        x = rows[piece].astype(np.float32)
        largest = np.abs(x).max(axis=1) / np.float32(127)
        np.rint(np.divide(x, np.where(largest > 0, largest, 1)[:, None], out=x), out=x)
        q[piece], scale[piece] = x, largest
    return q, scale


def expanded(q: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """scale_b q_bd, computed in float32 and rounded to bfloat16 [n, d]."""
    rows = np.empty(q.shape, BF16)
    with np.errstate(over="ignore", invalid="ignore"):  # of a hostile scale alone
        for start in range(0, len(q), _QUANTIZED_ROWS):
            piece = slice(start, start + _QUANTIZED_ROWS)
            rows[piece] = q[piece] * scale[piece, None]
    return rows


def as_stored(rows: dict[str, np.ndarray], hook_points: Iterable[str], dtype: str) -> dict[str, np.ndarray]:
    """{array: its values} in a store of this dtype, of bfloat16 rows and int32 metadata."""
    if dtype != "int8":
        return rows
    stored = dict(rows)
    for name in hook_points:
        stored[name], stored[scale_of(name)] = quantized(rows[name])
    return stored


def as_read(stored: dict[str, np.ndarray], name: str) -> np.ndarray:
    """The rows of a hook point as readers get them."""
    values = stored[name]
    return expanded(values, stored[scale_of(name)]) if values.dtype == np.int8 else values
