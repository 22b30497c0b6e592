"""What a source is: an ordered stream of documents that can be entered at any index, split once and for all.

Every source is split into `train` and `heldout` by a hash of the document's group, so that the
evaluation text of a run was never captured for its training, whatever the order or the amount read.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from saejax.core.errors import ConfigError

SPLITS = ("train", "heldout")


@dataclasses.dataclass(frozen=True)
class Document:
    """One text. `index` is its place in the whole source, `name` says where it came from."""

    index: int
    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class Source:
    """An ordered collection of documents.

    Attributes:
        identity: JSON description of the text, part of a store's identity.
        rows: given a start index, yields (index, name, group, text) for every index from there on.
        heldout_fraction: share of the groups that belongs to `heldout`.
    """

    identity: dict[str, Any]
    rows: Callable[[int], Iterator[tuple[int, str, str, str]]]
    heldout_fraction: float

    def documents(self, split: str, start: int = 0) -> Iterator[Document]:
        """The documents of a split, in order, from source index `start` on."""
        if split not in SPLITS:
            raise ConfigError(f"There is no split {split!r}; choose one of {', '.join(SPLITS)}.")
        for index, name, group, text in self.rows(start):
            if (hash_fraction(group) < self.heldout_fraction) == (split == "heldout") and text.strip():
                yield Document(index, name, text)


def hash_fraction(group: str) -> float:
    """A number in [0, 1) that depends on the group's name alone."""
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big") / 2**64
