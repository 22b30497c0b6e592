"""A row of a store in words: its ids, its norms, and the text around it where the tokenizer is here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from saejax.core.errors import DataError
from saejax.store import StoreReader
from saejax.text import Tokenizer

_CONTEXT = 6


def sampled_row(reader: StoreReader, row: int, tokenizer: Tokenizer | None) -> str:
    """One row as a line: its place, its ids, ||x|| of each hook point, and its text."""
    values = {name: array[0] for name, array in reader.rows(row, row + 1, metadata=True).items()}
    ids = ", ".join(f"{name} {int(values[name])}" for name in ("token_id", "document", "position"))
    norms = [f"{name} {np.linalg.norm(values[name].astype(np.float64)):.4g}" for name in reader.hook_points]
    line = f"row {row}: {ids}, norm {', '.join(norms)}"
    if tokenizer is None:
        return line
    before, token, after = (_as_literal(tokenizer, ids) for ids in token_context(reader, row, _CONTEXT))
    return f"{line}, text {before} [{token}] {after}"


def token_context(reader: StoreReader, row: int, reach: int) -> tuple[list[int], list[int], list[int]]:
    """Token ids (before, [own], after) of a stored row: up to `reach` on each side that are in the store.

    Neighbours are the rows that came next to it in the capture, of the same document, at positions one lower or higher
    each; the run ends where a token was not stored (bos, special tokens, the border of a piece).
    """
    starts = reader.shard_starts
    shard = _shard_at(starts, row)
    centre = int(starts[shard] + np.flatnonzero(reader.stream_places(shard) == row - starts[shard])[0])
    low, high = max(0, centre - reach), min(reader.n_tokens, centre + reach + 1)
    first_shard, last_shard = _shard_at(starts, low), _shard_at(starts, high - 1)
    places = [starts[s] + reader.stream_places(s) for s in range(first_shard, last_shard + 1)]
    at = np.concatenate(places)[low - starts[first_shard] : high - starts[first_shard]].tolist()
    pieces = [(place, place + 1) for place in at]
    token, document, position = (
        np.concatenate(list(reader.read_pieces(name, pieces))).astype(np.int64)
        for name in ("token_id", "document", "position")
    )
    at_row = centre - low
    offset = np.arange(low, high) - centre
    fits = (document == document[at_row]) & (position == position[at_row] + offset)
    ends = np.flatnonzero(~fits)
    first, stop = ends[ends < at_row].max(initial=-1) + 1, ends[ends > at_row].min(initial=len(at))
    return token[first:at_row].tolist(), [int(token[at_row])], token[at_row + 1 : stop].tolist()


def _shard_at(starts: np.ndarray, row: int) -> int:
    return int(np.searchsorted(starts, row, "right")) - 1


def find_tokenizer(identity: Mapping[str, Any], folder: str = "") -> tuple[Tokenizer | None, str]:
    """(the tokenizer of a store's model, "") or (None, why there is none); nothing is downloaded.

    Looked for in `folder`, else in the embedded model or in the local folder that the identity names. One with another
    sha256 than the identity's would show wrong text, and is not used.
    """
    lm = identity.get("lm", {})
    model = lm.get("model", "")
    place = folder or (str(Path(__file__).parents[1] / "lm" / model) if model in _EMBEDDED else model)
    if not place:
        return None, "ids only: the store does not say of which model it is; --tokenizer=FOLDER names a tokenizer"
    try:
        tokenizer = Tokenizer.from_folder(Path(place))
    except DataError as error:
        if folder:
            raise
        return None, f"ids only: the tokenizer of {model!r} is not here ({error}); --tokenizer=FOLDER names it"
    if tokenizer.sha256 != lm.get("tokenizer_sha256", tokenizer.sha256):
        return None, f"ids only: {place} has another tokenizer than the one the store was made with"
    return tokenizer, ""


# Named here and not asked of saejax.lm: looking at rows loads no jax.
_EMBEDDED = ("demo", "recall")


def _as_literal(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text as a Python literal, because it may hold line breaks and control characters; -1 and such are unknown."""
    known = all(0 <= i <= tokenizer.largest_id for i in ids)
    return repr(tokenizer.decode_inside(ids)) if known else f"(unknown ids {ids})"
