"""Which tokens of a batch are stored."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from saejax.core.errors import DataError
from saejax.text import PackedRows, Packer


class Selection(Protocol):
    """The part of `CaptureConfig` that decides it."""

    @property
    def non_finite(self) -> str: ...
    @property
    def last_tokens(self) -> int: ...
    @property
    def drop_ids(self) -> tuple[int, ...]: ...
    @property
    def max_norm_ratio(self) -> float: ...


def stored(
    config: Selection, packed: PackedRows, activations: Mapping[str, Any], finite: Any
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


def wanted(config: Selection, packed: PackedRows) -> tuple[np.ndarray, dict[str, int]]:
    """(which tokens are to be stored as far as the text says, bool [R S]; how many are not, and why)."""
    keep = packed.keep
    counters = {"special_or_padding": int((~keep).sum())}
    filters = {}
    if config.last_tokens:
        filters["before_last_tokens"] = last_of_document(packed, config.last_tokens)
    if config.drop_ids:
        filters["dropped_ids"] = ~np.isin(packed.tokens, config.drop_ids)
    for name, passes in filters.items():
        counters[name] = int((keep & ~passes).sum())
        keep = keep & passes
    return keep.ravel().copy(), counters


def last_of_document(packed: PackedRows, k: int) -> np.ndarray:
    """Whether a token is one of the last k ordinary ones of its document, bool [R, S]."""
    return (packed.to_end >= 0) & (packed.to_end < k)


def outliers(activations_ND: Mapping[str, np.ndarray], candidates_N: np.ndarray, ratio: float) -> np.ndarray:
    """||x_n|| > ratio median_m ||x_m|| at any hook point, the median over the candidates m; bool [N].

    Such tokens are few in most models, usually the first of a text, and so far out that they decide a mean squared
    error by themselves. A median of zero filters nothing.
    """
    found_N = np.zeros(len(candidates_N), bool)
    if not candidates_N.any():
        return found_N
    for x_ND in activations_ND.values():
        norms_N = np.sqrt(np.square(x_ND[candidates_N].astype(np.float32)).sum(-1, dtype=np.float64))
        usual = float(np.median(norms_N))
        if usual > 0:
            found_N[candidates_N] |= norms_N > ratio * usual
    return found_N


def near(activations: Mapping[str, jax.Array], keep_RS: jax.Array, ratio: float) -> jax.Array:
    """The tokens to keep that are `finite` and not `outliers` among those; pure.

    Activations are {hook point: [R, S, d]}; a ratio of 0 leaves outliers in.
    """
    candidates_RS = keep_RS & finite(activations)
    found_RS = candidates_RS
    for x_RSD in activations.values() if ratio else ():
        norms_RS = jnp.linalg.norm(x_RSD.astype(jnp.float32), axis=-1)
        usual = jnp.nanmedian(jnp.where(candidates_RS, norms_RS, jnp.nan))
        found_RS &= (norms_RS <= ratio * usual) | ~(usual > 0)
    return found_RS


def finite(activations: Mapping[str, jax.Array]) -> jax.Array:
    """Whether a token's activations are finite at every hook point: {hook point: [..., d]} -> bool [...]. Pure."""
    return functools.reduce(jnp.logical_and, (jnp.isfinite(x).all(-1) for x in activations.values()))


@dataclasses.dataclass(frozen=True)
class SelectingPacker(Packer):
    """A packer whose rows keep only the tokens that a capture with `selection` would store, as far as the text says."""

    selection: Selection | None = None

    def batches(
        self, split: str, rows: int, start: dict[str, int] | None = None, pad_last: bool = True
    ) -> Iterator[PackedRows]:
        for packed in super().batches(split, rows, start, pad_last):
            if self.selection is None:
                yield packed
            else:
                keep = wanted(self.selection, packed)[0].reshape(packed.keep.shape)
                yield dataclasses.replace(packed, keep=keep)
