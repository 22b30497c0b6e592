"""Up to which length documents may share a forward pass where rotary frequencies follow the longest of them.

In LongRoPE and dynamic NTK a document has other values beside a longer one. A few tokens show it: the frequencies are
those of the largest position, so seven tokens at late positions do to their neighbours what a long document does.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from saejax.lm.rows import Chunk
from saejax.lm.torch_hooks.hooks import REFUSALS, result_of

# Rounding between two ways of batching may change a token's values by this much, relative to their norm: at most and
# at least.
MOST = {"float32": 1e-3, "bfloat16": 3e-2}
LEAST = {"float32": 2e-6, "bfloat16": 8e-3}
ROUNDING = {"float32": 1e-5, "bfloat16": 8e-3}


def difference(one: np.ndarray, two: np.ndarray) -> float:
    """Largest ||a - b|| / ||b|| of all tokens; infinity where there is NaN."""
    norm = np.linalg.norm(two, axis=-1)
    error = np.linalg.norm(one - two, axis=-1) / np.maximum(norm, np.finfo(np.float32).tiny)
    return float(np.nan_to_num(error, nan=np.inf).max())


# Kinds of rotary positions, as transformers calls them: those that follow no length, and those that do.
_FIXED = ("default", "linear", "llama3", "proportional", "yarn")
_FOLLOWING = ("dynamic", "longrope", "su")
# The length of a model whose files name none; a position as late may be in no table.
UNBOUNDED = 2**20


def longest_mixed(module: Any, config: Any, tokens_T: np.ndarray, length: int, dtype: str) -> int:
    """Tokens of documents that may share a forward pass; a longer one shares it with documents of its own length.

    It is `length` where frequencies follow no length, and 0 where it cannot be seen from which length on they do.
    `config` is of the text model, or None; `tokens_T` are any tokens, a few.
    """
    named, kinds = _lengths_and_kinds(config)
    follows = any(kind in _FOLLOWING for kind in kinds)
    # Where a configuration says nothing, a difference may come from what a batch does to sums, as in experts'.
    tolerance = LEAST[dtype] if follows else MOST[dtype]

    def stays(short: int, long: int) -> bool:
        """A document of `short` tokens has the same values beside its equal and beside one of `long` tokens."""
        return difference(*(_beside(module, tokens_T, short, other) for other in (long, short))) <= tolerance

    if length >= UNBOUNDED or not _takes_positions(module, tokens_T):
        return length if all(kind in _FIXED for kind in kinds) else 0
    few = len(tokens_T)
    if not follows and all(stays(short, length) for short in {few, max(few, length // 2), *named} if short <= length):
        return length
    # The first length that is named: a later one may only seem to stay, in bfloat16.
    first = min([n for n in named if n > 1] + [length])
    return first if all(stays(short, first) for short in (min(few, first), max(1, first // 2))) else 0


def _beside(module: Any, tokens_T: np.ndarray, own: int, other: int) -> np.ndarray:
    """Values of tokens at positions from 0 to own - 1, in a pass with as many at positions from 0 to other - 1."""
    positions = np.stack([np.linspace(0, n - 1, len(tokens_T)).astype(np.int64) for n in (own, other)])
    tokens = np.stack([tokens_T] * 2)
    # Beside a mask, transformers takes no jump of the positions for a border between documents.
    return result_of(module, Chunk(tokens, np.zeros_like(tokens), np.ones_like(tokens, bool), positions))[0]


def _takes_positions(module: Any, tokens_T: np.ndarray) -> bool:
    """True where other positions give other values."""
    try:
        one, two = (_beside(module, tokens_T, own, len(tokens_T)) for own in (len(tokens_T), 1))
    except REFUSALS:
        return False
    return not np.array_equal(one, two)


def _lengths_and_kinds(config: Any) -> tuple[list[int], list[str]]:
    """(lengths at which frequencies may change, kinds of rotary positions) that a configuration names."""
    try:
        settings = config.to_dict()
    except AttributeError:  # none of transformers
        return [], []
    lengths = [n for name, n in _walk(settings) if name.endswith("max_position_embeddings") and type(n) is int]
    ropes = {name: value for name, value in settings.items() if name.startswith("rope_")}
    return lengths, [kind for name, kind in _walk(ropes) if name in ("rope_type", "type") and isinstance(kind, str)]


def _walk(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, str(key))
    else:
        yield name, value
