"""A source: an ordered stream of documents that can be entered at any index, split once and for all.

Every source is split into `train` and `heldout` by a hash of the document's group, whatever the order or the amount
read. The group of a file or row is its text, so equal texts are in one split wherever they stand, and no evaluation
text of a run was captured for its training. (That of a file of the standard library is its module.)
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

    def part(self, index: int, parts: int) -> "Source":
        """The documents i of this source with sha256(i) mod parts = index; the identity stays that of the whole.

        The parts are disjoint and their union is the source. The index is hashed, because it may say which kind of
        document it is: in a mixture, or in a file that alternates.

        Raises:
            ConfigError: not 0 <= index < parts.
        """
        if not 0 <= index < parts:
            raise ConfigError(f"There is no part {index} of {parts}; parts are numbered from 0.")
        if parts == 1:
            return self

        def rows(start: int) -> Iterator[tuple[int, str, str, str]]:
            return (row for row in self.rows(start) if _hash(f"part {row[0]}") % parts == index)

        return dataclasses.replace(self, rows=rows)


def hash_fraction(group: str) -> float:
    return _hash(group) / 2**64


def _hash(text: str) -> int:
    """The first 64 bits of sha256(text)."""
    # JSON can hold a lone surrogate, which strict UTF-8 cannot.
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:8], "big")
