"""The embedded task `recall`: say one of six numbers of a record.

A context is `r = {"width": 41, "height": 17, ...}`, always with the same six names in the same order and each number
from 10 to 99; the question is one of the names, and the answer its number.
"""

from collections.abc import Iterable

import numpy as np

from saejax.prefix.records import Record

NAMES = ("width", "height", "depth", "speed", "count", "limit")
LOWEST, HIGHEST = 10, 99
_SPLITS = {"train": 0, "heldout": 1}


def recall_records(split: str, count: int, seed: int = 0) -> list[Record]:
    """`count` records of a split, a function of (split, count, seed); the first n are those of a smaller count."""
    rng = np.random.Generator(np.random.Philox(key=[seed, _SPLITS[split]]))
    records = []
    for _ in range(count):
        numbers = rng.integers(LOWEST, HIGHEST + 1, len(NAMES))
        name = int(rng.integers(len(NAMES)))
        context = written(zip(NAMES, numbers, strict=True))
        records.append(Record(context, NAMES[name], (str(numbers[name]),)))
    return records


def written(pairs: Iterable[tuple[str, int]]) -> str:
    """The context that holds these names and numbers."""
    return "r = {" + ", ".join(f'"{name}": {number}' for name, number in pairs) + "}\n"
