"""Selection of the tokens of a batch that are stored."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

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
    shape = packed.tokens.shape
    rows = {name: value.reshape(*shape, -1) for name, value in values.items()}
    front_RS, massive_RS = config.sinks.among(rows, keep.reshape(shape), packed.positions)
    for name, sinks_RS in (("dropped_first", front_RS), ("dropped_massive", massive_RS)):
        counters[name] = int(sinks_RS.sum())
        keep &= ~sinks_RS.ravel()
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
