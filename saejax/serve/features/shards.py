"""A token of a text in a store: its shard, its row, and what stands around it."""

import dataclasses
from pathlib import Path

import numpy as np

from saejax.store import StoreReader
from saejax.store.manifest import Manifest

_AROUND = 256  # rows on each side that are looked at


@dataclasses.dataclass(frozen=True)
class Passage:
    """A stored token and its neighbours in its piece of a document.

    Attributes:
        shard: by its number in the store's commits.
        row: of the store, as `StoreReader.rows` counts.
        tokens: {distance: token id}, of this token (0) and of those that are stored before and after it.
    """

    shard: int
    row: int
    tokens: dict[int, int]


def passages_at(path: Path, manifest: Manifest, document: int, position: int) -> list[Passage]:
    """The tokens of a document that stand at `position` of a piece of it; a long document has several pieces.

    Raises:
        DataError: the store is damaged.
    """
    reader, order = StoreReader.open(path), manifest.row_order
    passages = []
    for k, shard in enumerate(order.shards.tolist()):
        start, stop = int(order.starts[k]), int(order.starts[k + 1])
        stream = reader.stream_places(k)  # rows of a shard, in the order in which they came
        documents = reader.array_rows("document", start, stop)[stream]
        if manifest.header.parts == 1 and documents[0] > document:
            break  # documents come in order
        if not (documents == document).any():
            continue
        positions = reader.array_rows("position", start, stop)[stream]
        tokens = reader.array_rows("token_id", start, stop)[stream]
        for at in np.flatnonzero((documents == document) & (positions == position)).tolist():
            inside = _piece(documents, positions, at)
            around = {int(positions[i]) - position: int(tokens[i]) for i in inside}
            passages.append(Passage(shard, start + int(stream[at]), around))
    return passages


def _piece(documents: np.ndarray, positions: np.ndarray, at: int) -> range:
    """The rows around one that are of its piece: of its document, with positions that rise."""
    first = last = at
    while (
        first > max(0, at - _AROUND)
        and documents[first - 1] == documents[at]
        and positions[first - 1] < positions[first]
    ):
        first -= 1
    stop = min(len(documents) - 1, at + _AROUND)
    while last < stop and documents[last + 1] == documents[at] and positions[last + 1] > positions[last]:
        last += 1
    return range(first, last + 1)
