"""Activations that are at hand: arrays as rows that can be read by number, and iterators as batches."""

import copy
import hashlib
import json
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from saejax.core.arrays import as_array
from saejax.core.errors import ConfigError, DataError
from saejax.store.layout import BF16, StoreLayout
from saejax.store.statistics import Statistics, moments, sums_of, zero_sums

# float64 has no place on most accelerators, and activations have none of its digits.
_KEPT_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(BF16))
_CHUNK_ROWS = 64
_HASHED_ROWS = 1 << 16

Block = dict[str, np.ndarray]


def checked(name: str, array: Any) -> np.ndarray:
    """A floating-point array [N, d] as numpy, not copied where it is one already.

    Raises:
        DataError: it has another shape or kind.
    """
    rows = np.asarray(as_array(array, name))
    if rows.ndim != 2 or not rows.shape[1]:
        raise DataError(f"{name} has shape {rows.shape}; give activations as [N, d], one row for each token.")
    floating = rows.dtype == BF16 or np.issubdtype(rows.dtype, np.floating)
    if not floating:
        kinds = ", ".join(kind.name for kind in (*_KEPT_DTYPES, np.dtype(np.float64)))
        raise DataError(f"{name} has dtype {rows.dtype}; give activations in a floating-point type ({kinds}).")
    return rows


class ArrayRows:
    """Row-aligned arrays [N, d] as a `RowSource`. They may be memory maps: nothing is copied as a whole.

    Attributes:
        fingerprint: sha256 of names, shapes, types and every byte, row after row, whatever the size.

    Raises:
        DataError: arrays of another shape or kind, of different lengths, without a row, or with NaN or infinity.
    """

    layout = StoreLayout(shard_rows=_CHUNK_ROWS, chunk_rows=_CHUNK_ROWS)

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = {name: checked(name, array) for name, array in arrays.items()}
        lengths = {name: len(array) for name, array in self._arrays.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"The arrays must have one row for each token, in one order; they have {lengths} rows.")
        self.n_tokens = next(iter(lengths.values()))
        if not self.n_tokens:
            raise DataError(f"There is not one activation to train on: {', '.join(lengths)} has no rows.")
        self.hook_points = {name: array.shape[1] for name, array in self._arrays.items()}
        kinds = {array.dtype for array in self._arrays.values()}
        self.dtype = kinds.pop() if len(kinds) == 1 and kinds <= set(_KEPT_DTYPES) else np.dtype(np.float32)
        self.statistics, content = {}, {}
        for name, array in self._arrays.items():
            self.statistics[name], digest = _looked_through(name, array)
            content[name] = [str(array.dtype), list(array.shape), digest]
        self.fingerprint = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def only(self, names: Sequence[str]) -> "ArrayRows":
        narrower = copy.copy(self)
        narrower._arrays = {name: self._arrays[name] for name in names}
        narrower.hook_points = {name: self.hook_points[name] for name in names}
        return narrower

    def read_pieces(self, name: str, pieces: Sequence[tuple[int, int]]) -> Iterator[np.ndarray]:
        return (self._arrays[name][low:high].astype(self.dtype, copy=False) for low, high in pieces)

    def rows(self, start: int, stop: int) -> Block:
        return {name: array[start:stop].astype(self.dtype, copy=False) for name, array in self._arrays.items()}


def _looked_through(name: str, array: np.ndarray) -> tuple[Statistics, str]:
    """(moments, sha256 of the bytes in the order of the rows) in one pass, the digest in a thread beside."""
    sums, digest = zero_sums(array.shape[1]), hashlib.sha256()
    with ThreadPoolExecutor(1) as beside:
        for start in range(0, len(array), _HASHED_ROWS):
            piece = np.ascontiguousarray(array[start : start + _HASHED_ROWS])
            hashed = beside.submit(digest.update, piece.view(np.uint8).data)
            part = sums_of(piece)
            if not np.isfinite(part.squared_norms):
                finite = np.isfinite(np.asarray(piece, np.float64)).all(1)
                at = f"row {start + int(np.argmin(finite))}" if not finite.all() else f"the rows from {start} on"
                raise DataError(f"{name} holds NaN or infinity (first: {at}). Leave such rows out.")
            sums = sums + part
            hashed.result()
    return moments(sums), digest.hexdigest()


class IteratedBatches:
    """Items of an iterable, in its order, as batches of one size. A `BatchSource` that is iterated once.

    An iterable that can begin again (a list, a data loader) does so when it ends. A training that continues passes over
    what it has seen, so the iterable must give the same activations each time. It may write each item into the memory
    of the one before: what is kept while the next is made is a copy.

    Args:
        items: arrays [n, d], or {hook point: array}; n may vary.
        name: the hook point of arrays without a name.
        batch_size: B.
        first_rows: rows at the beginning that the statistics are taken from.

    Raises:
        DataError: it gives nothing, or arrays that do not fit each other.
    """

    def __init__(self, items: Iterable[Any], name: str, batch_size: int, first_rows: int) -> None:
        self._items, self._name, self.batch_size = items, name, batch_size
        self._begun = False
        self._blocks = self._endless()
        self._seen: deque[Block] = deque()
        count = 0
        while (block := next(self._blocks, None)) is not None:
            count += _length(block)
            enough = count >= max(first_rows, batch_size)
            self._seen.append(block if enough else _copied(block))
            if enough:
                break
        if not count:
            raise DataError("The iterator gave not one activation to train on.")
        if count < batch_size:
            raise DataError(f"The iterator ended after {count:,} activations, less than a batch of {batch_size:,}.")
        seen = concatenated(list(self._seen))
        rows = ArrayRows(seen)
        self.hook_points, self.statistics, self.dtype = rows.hook_points, rows.statistics, rows.dtype
        self.fingerprint = rows.fingerprint
        self.epoch_rows = count
        self._first = {name: values[:batch_size].astype(self.dtype) for name, values in seen.items()}

    def iterate(self, start_step: int = 0) -> Generator[Block]:
        """The batches from `start_step` on; those before it are read and passed over.

        Raises:
            ConfigError: asked for a second time.
            DataError: the iterator ends.
        """
        if self._begun:
            raise ConfigError("An iterator is read once. Make a new one for another training.")
        self._begun = True
        skip, wait, have, step = start_step * self.batch_size, deque[Block](), 0, start_step
        while (block := self._seen.popleft() if self._seen else next(self._blocks, None)) is not None:
            n = _length(block)
            if skip >= n:
                skip -= n
                continue
            wait.append({name: values[skip:].astype(self.dtype, copy=False) for name, values in block.items()})
            have, skip = have + n - skip, 0
            while have >= self.batch_size:
                yield self._taken(wait)
                have, step = have - self.batch_size, step + 1
            if wait:  # the rest of this item; those before it are copies already
                wait.append(_copied(wait.pop()))
        raise DataError(
            f"The iterator ended after {step * self.batch_size + have:,} activations, and training wants more. Lower "
            "`tokens`, or give an iterable that can begin again."
        )

    def whole_batch_at(self, step: int) -> Block:
        if step:
            raise ConfigError(f"step={step}: of an iterator only the first batch can be asked for.")
        return self._first

    def places(self, step: int) -> dict[str, np.ndarray]:
        return {}

    def _taken(self, wait: deque[Block]) -> Block:
        """The next batch, taken from the front of what waits."""
        pieces, wanted = [], self.batch_size
        while wanted:
            block = wait.popleft()
            if (n := _length(block)) > wanted:
                wait.appendleft({name: values[wanted:] for name, values in block.items()})
                block = {name: values[:wanted] for name, values in block.items()}
            pieces.append(block)
            wanted -= min(n, wanted)
        return _copied(pieces[0]) if len(pieces) == 1 else concatenated(pieces)

    def _endless(self) -> Iterator[Block]:
        widths: dict[str, int] = {}
        for item in self._again():
            block = {
                str(name): checked(str(name), array)
                for name, array in (item if isinstance(item, Mapping) else {self._name: item}).items()
            }
            these = {name: values.shape[1] for name, values in block.items()}
            widths = widths or these
            if these != widths or len({len(values) for values in block.values()}) != 1:
                shapes = {name: values.shape for name, values in block.items()}
                raise DataError(
                    f"The iterator gave {shapes}; every batch must have the hook points and widths {widths}, with "
                    "one row for each token."
                )
            if _length(block):
                yield block

    def _again(self) -> Iterator[Any]:
        """The items, and again from the beginning where that is possible and there is any."""
        some = True
        while some:
            some, iterator = False, iter(self._items)
            for item in iterator:
                some = iterator is not self._items
                yield item


def _copied(block: Block) -> Block:
    return {name: values.copy() for name, values in block.items()}


def concatenated(blocks: Sequence[Block]) -> Block:
    """The rows of the blocks one after the other; of a single block itself."""
    if len(blocks) == 1:
        return blocks[0]
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _length(block: Block) -> int:
    return len(next(iter(block.values())))
