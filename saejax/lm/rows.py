"""Packed rows as what a foreign model takes: three ways of keeping documents apart, the fastest first.

    packed   the rows as they are, with a 4-D mask [R, 1, S, S] and the positions
    padded   one document a row, padded on the right, with a 2-D mask [R, S]
    equal    documents of one length together, without any mask: right for every model

Shape letters: R packed rows, S their length, B rows of a chunk, T its length.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from saejax.core.errors import DataError


def check_rows(name: str, ids: Any) -> None:
    """Refuses an array (a traced one too) whose type and shape are not those of rows of ids."""
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
        raise DataError(f"{name} are {ids.dtype} {list(ids.shape)}; they must be rows of integers [rows, tokens].")


def check_ids(name: str, ids: np.ndarray, limit: int) -> None:
    """Refuses what indexing would clamp into its range silently."""
    check_rows(name, ids)
    wrong = np.argwhere((ids < 0) | (ids >= limit))
    if len(wrong):
        row, column = wrong[0].tolist()
        raise DataError(f"{name}[{row}, {column}] is {ids[row, column]}; the model has {name} 0 to {limit - 1}.")


def check_length(what: str, tokens: int, most: int) -> None:
    """Refuses more tokens than a model of the context `most` reads."""
    if tokens > most:
        raise DataError(f"{what} {tokens} tokens; the model reads {most}. Give a piece of it.")


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Rows that go through the model at once.

    Attributes:
        tokens: int64 [B, T].
        at: int64 [B, T], where each token is among the R S tokens of the packed rows; -1 for padding.
        mask: None; bool [B, T], false at padding; or bool [B, 1, T, T], true where attention may look.
        positions: None (the model counts) or int64 [B, T].
    """

    tokens: np.ndarray
    at: np.ndarray
    mask: np.ndarray | None = None
    positions: np.ndarray | None = None


def packed(tokens_RS: np.ndarray, positions_RS: np.ndarray, segments_RS: np.ndarray, causal: bool) -> Iterator[Chunk]:
    """One chunk of the rows that hold a document: attention within equal segments, and causal where the model is."""
    there_RS = segments_RS >= 0
    used_R = there_RS.any(1)
    if not used_R.any():
        return
    segments_RS, there_RS, length = segments_RS[used_R], there_RS[used_R], tokens_RS.shape[1]
    mask_RSS = segments_RS[:, :, None] == segments_RS[:, None, :]
    if causal:
        mask_RSS = mask_RSS & np.tri(length, dtype=bool)[None]
    at_RS = np.where(there_RS, np.arange(tokens_RS.size).reshape(tokens_RS.shape)[used_R], -1)
    positions_RS = np.where(there_RS, positions_RS[used_R], 0)
    yield Chunk(tokens_RS[used_R].astype(np.int64), at_RS, mask_RSS[:, None], positions_RS.astype(np.int64))


def padded(tokens_RS: np.ndarray, positions_RS: np.ndarray, segments_RS: np.ndarray, causal: bool) -> Iterator[Chunk]:
    """Chunks of at most R documents of about the same length, filled up on the right with the documents' own start."""
    places = sorted(_document_places(segments_RS), key=len)
    flat = tokens_RS.ravel()
    for start in range(0, len(places), len(tokens_RS)):
        part = places[start : start + len(tokens_RS)]
        at_BT = np.full((len(part), len(part[-1])), -1)
        for i, place in enumerate(part):
            at_BT[i, : len(place)] = place
        # A token of the text itself is an id that every model has.
        yield Chunk(np.where(at_BT >= 0, flat[at_BT], flat[at_BT[:, :1]]).astype(np.int64), at_BT, at_BT >= 0)


def equal(tokens_RS: np.ndarray, positions_RS: np.ndarray, segments_RS: np.ndarray, causal: bool) -> Iterator[Chunk]:
    """Chunks of at most R documents of one length."""
    by_length: dict[int, list[np.ndarray]] = {}
    for place in _document_places(segments_RS):
        by_length.setdefault(len(place), []).append(place)
    for places in by_length.values():
        for start in range(0, len(places), len(tokens_RS)):
            at_BT = np.stack(places[start : start + len(tokens_RS)])
            yield Chunk(tokens_RS.ravel()[at_BT].astype(np.int64), at_BT)


Way = Callable[[np.ndarray, np.ndarray, np.ndarray, bool], Iterator[Chunk]]
WAYS: dict[str, Way] = {"packed": packed, "padded": padded, "equal": equal}


def is_longer(segments_RS: np.ndarray, length: int) -> np.ndarray:
    """True for tokens of documents of more than `length` tokens, bool [R, S]."""
    longer_RS = np.zeros(segments_RS.shape, bool)
    for place in _document_places(segments_RS):
        longer_RS.ravel()[place] = len(place) > length
    return longer_RS


def _document_places(segments_RS: np.ndarray) -> list[np.ndarray]:
    """For each document in the rows: where its tokens are among all R S."""
    places = []
    for row, segments_S in enumerate(segments_RS):
        bounds = [0, *(np.flatnonzero(np.diff(segments_S)) + 1).tolist(), len(segments_S)]
        for start, stop in itertools.pairwise(bounds):
            if segments_S[start] >= 0:
                places.append(row * len(segments_S) + np.arange(start, stop))
    return places
