"""Selection of the tokens of a batch that are stored."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.capture.config import CaptureConfig
from saejax.core.errors import DataError
from saejax.text import PackedRows, Packer


def stored(
    config: CaptureConfig, packed: PackedRows, activations: Mapping[str, Any], finite: Any
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, int]]:
    """(numbers of the tokens to store, ascending; all activations {hook point: [N, d]}; how many are not, and why).

    Args:
        activations: hook point -> [N, d], of a forward pass of the batch.
        finite: bool [N].

    Raises:
        DataError: activations to be stored are not finite, and the policy is `abort`.
    """
    keep, counters = wanted(config, packed)
    bad = keep & ~np.asarray(finite)
    if bad.any() and config.non_finite == "abort":
        row, position = divmod(int(np.flatnonzero(bad)[0]), packed.tokens.shape[1])
        raise DataError(
            f"NaN or infinity in the activations of {int(bad.sum())} tokens (first: document "
            f"{packed.documents[row, position]}, position {packed.positions[row, position]}). Nothing of this batch "
            "is stored. Check lm.dtype and the weights, or set capture.non_finite=drop to leave such tokens out."
        )
    counters["dropped_non_finite"] = int(bad.sum())
    keep &= ~bad
    values = {name: np.asarray(value) for name, value in activations.items()}
    if config.max_norm_ratio:
        far = outliers(values, keep, config.max_norm_ratio)
        counters["dropped_outliers"] = int(far.sum())
        keep &= ~far
    return np.flatnonzero(keep), values, counters


def wanted(config: CaptureConfig, packed: PackedRows) -> tuple[np.ndarray, dict[str, int]]:
    """(which tokens are to be stored as far as the text says, bool [R S]; how many are not, and why)."""
    keep = packed.keep
    counters = {"special_or_padding": int((~keep).sum())}
    filters = {}
    if config.last_tokens:
        filters["before_last_tokens"] = (packed.to_end >= 0) & (packed.to_end < config.last_tokens)
    if config.drop_ids:
        filters["dropped_ids"] = ~np.isin(packed.tokens, config.drop_ids)
    for name, passes in filters.items():
        counters[name] = int((keep & ~passes).sum())
        keep = keep & passes
    return keep.ravel().copy(), counters


def near(activations: Mapping[str, jax.Array], keep_RS: jax.Array, ratio: float) -> jax.Array:
    """The tokens to keep that are `finite` and not `outliers` among those; pure.

    Activations are {hook point: [R, S, d]}; a ratio of 0 leaves outliers in.
    """
    candidates_RS = keep_RS & finite(activations)
    return candidates_RS & ~outliers(activations, candidates_RS, ratio) if ratio else candidates_RS


def outliers(activations: Mapping[str, Any], candidates: Any, ratio: float) -> Any:
    """||x_n|| > ratio median_m ||x_m|| at any hook point, the median over the candidates m; bool, false for the others.

    Such tokens are few in most models, usually the first of a text, and so far out that they decide a mean squared
    error by themselves. A median of zero filters nothing.

    Args:
        activations: hook point -> [..., d].
        candidates: bool [...], NumPy's (norms are then float64) or JAX's (float32; pure).
    """
    xp: Any = np if isinstance(candidates, np.ndarray) else jnp
    far = xp.zeros_like(candidates)
    if xp is np and not candidates.any():
        return far  # NumPy warns of a median of nothing
    for x in activations.values():
        squares = xp.square(xp.where(candidates[..., None], x.astype(np.float32), 0))
        norms = xp.sqrt(squares.sum(-1, dtype=np.float64 if xp is np else np.float32))
        usual = xp.nanmedian(xp.where(candidates, norms, np.nan))
        far = far | (candidates & (usual > 0) & (norms > ratio * usual))
    return far


def finite(activations: Mapping[str, jax.Array]) -> jax.Array:
    """Mask of tokens that are finite at every hook point: {hook point: [..., d]} -> bool [...]. Pure."""
    return functools.reduce(jnp.logical_and, (jnp.isfinite(x).all(-1) for x in activations.values()))


@dataclasses.dataclass(frozen=True)
class SelectingPacker(Packer):
    """A packer whose rows keep only the tokens that a capture with `selection` would store, as far as the text says."""

    selection: CaptureConfig | None = None

    def batches(
        self, split: str, rows: int, start: dict[str, int] | None = None, pad_last: bool = True
    ) -> Iterator[PackedRows]:
        for packed in super().batches(split, rows, start, pad_last):
            if self.selection is None:
                yield packed
            else:
                keep = wanted(self.selection, packed)[0].reshape(packed.keep.shape)
                yield dataclasses.replace(packed, keep=keep)
