"""Rows that fit on the GPU, and results on their way from it to numpy."""

from collections.abc import Callable
from typing import Any

import numpy as np

from saejax.core.arrays import as_array
from saejax.core.errors import DataError


def find_batch_rows(attempt: Callable[[int], object], start: int) -> int:
    """The largest of start, start / 2, ... with which `attempt` does not run out of memory."""
    rows = start
    while rows:
        try:
            attempt(rows)
            return rows
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        # Only here, where the failed attempt's tensors are no longer held by its traceback.
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        rows //= 2
    raise DataError("The GPU has no memory for a single row. Lower text.context_length, or set lm.dtype=bfloat16.")


def out_of_memory(error: RuntimeError) -> bool:
    return type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error)


class _OnItsWay:
    """An array that is being copied from the GPU; numpy waits for it."""

    def __init__(self, value: Any):
        import torch

        self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._host.copy_(value, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._done.synchronize()
        return np.asarray(as_array(self._host), dtype)


def to_host(value: Any) -> Any:
    return _OnItsWay(value) if value.is_cuda else as_array(value)
