"""Figures by where a token stands, how frequent it is, and where its document comes from."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from saejax.evals.intervals import resample_interval
from saejax.text import PackedRows, Packer, Source, parts_of

# Frequencies and sources are those of so many tokens: this much text is read before the first is evaluated.
_AHEAD = 1 << 22
_DECILES, _SOURCES, _POSITIONS = 10, 20, 32


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """One way to tell tokens apart: a group is `first` + its place in `labels`."""

    name: str
    first: int
    labels: tuple[str, ...]


class ReadText:
    """The batches to evaluate, and the groups of their tokens.

    Groups:
        position: how many tokens of its document the model sees before a token, in powers of two; bos is none of them.
            (A document that is longer than a row begins again in the next one: the model sees no more.)
        frequency: how often the token occurs in the evaluated text. The text's tokens are put in the order of their
            frequency and cut into ten parts; a part ends between two frequencies, so parts are not quite equal and
            there may be fewer than ten.
        source: the part of a mixture, or of the standard library the package, or the file; the 19 with the most tokens
            and "other". Left out where there is one, or where every document has its own.
    """

    def __init__(self, packer: Packer, rows: int, tokens: int):
        self._names: dict[int, str] = {}
        self._identity, self._in_front = packer.source.identity, len(packer.bos)
        packer = dataclasses.replace(packer, source=_listened(packer.source, self._names))
        self._rest, self._ahead, tokens_read = packer.batches("heldout", rows), list[PackedRows](), 0
        while tokens_read < min(tokens, _AHEAD) and (packed := next(self._rest, None)) is not None:
            self._ahead.append(packed)
            tokens_read += int(packed.keep.sum())
        positions = tuple(_range(1 << bit >> 1, (1 << bit) - 1) for bit in range(_POSITIONS))
        self._decile_V, deciles = self._frequencies()
        self._sources = self._most_frequent_sources()
        kinds = [("position", positions), ("frequency", deciles), ("source", tuple(self._sources))]
        firsts = np.cumsum([0, *(len(labels) for _, labels in kinds)]).tolist()
        self.breakdowns = [Breakdown(name, first, labels) for (name, labels), first in zip(kinds, firsts, strict=False)]
        self.n_groups = firsts[-1]

    def batches(self) -> Iterator[tuple[PackedRows, np.ndarray]]:
        """(a batch, a group of each breakdown for each of its B tokens, int32 [3, B], -1 for none)."""
        while self._ahead:
            packed = self._ahead.pop(0)
            yield packed, self._codes(packed)
        for packed in self._rest:
            yield packed, self._codes(packed)

    def _codes(self, packed: PackedRows) -> np.ndarray:
        position, frequency, source = self.breakdowns
        inside = packed.documents.ravel() >= 0
        before_B = packed.positions.ravel() - self._in_front
        # frexp's exponent is the number of bits.
        bits_B = np.frexp(before_B.astype(np.float64))[1]
        tokens_B = packed.tokens.ravel()
        known_B = tokens_B < len(self._decile_V)
        decile_B = np.where(known_B, self._decile_V[np.where(known_B, tokens_B, 0)], 0)
        source_B = np.full(len(inside), -1)
        if source.labels:
            numbers, number_B = np.unique(packed.documents.ravel()[inside], return_inverse=True)
            places = {label: place for place, label in enumerate(source.labels)}
            of_M = np.array([places.get(label, len(places) - 1) for label in self._labels(numbers)])
            source_B[inside] = of_M[number_B] + source.first
        position_B = np.where(before_B < 0, -1, bits_B + position.first)
        codes_KB = np.stack([position_B, decile_B + frequency.first, source_B])
        return np.where(inside[None], codes_KB, -1).astype(np.int32)

    def _frequencies(self) -> tuple[np.ndarray, tuple[str, ...]]:
        """(the part of each token of the vocabulary, int64 [V]; what the parts are called)."""
        tokens = [packed.tokens[packed.keep] for packed in self._ahead]
        count_V = np.bincount(np.concatenate(tokens)) if tokens else np.zeros(0, np.int64)
        if not count_V.any():
            return np.zeros(1, np.int64), ("",)
        counts, of_V = np.unique(count_V, return_inverse=True)
        share = np.bincount(of_V) * counts / count_V.sum()
        part = np.minimum(((np.cumsum(share) - share / 2) * _DECILES).astype(int), _DECILES - 1)
        part[counts == 0] = part[counts > 0].min()
        parts = np.unique(part)
        ends = [counts[(part == decile) & (counts > 0)] for decile in parts]
        labels = tuple(_range(int(of_part.min()), int(of_part.max())) for of_part in ends)
        return np.searchsorted(parts, part)[of_V], labels

    def _most_frequent_sources(self) -> list[str]:
        tokens: dict[str, int] = {}
        documents: dict[str, set[int]] = {}
        for packed in self._ahead:
            numbers, counts = np.unique(packed.documents[packed.keep], return_counts=True)
            for number, label, count in zip(numbers, self._labels(numbers), counts, strict=True):
                tokens[label] = tokens.get(label, 0) + int(count)
                documents.setdefault(label, set()).add(int(number))
        if len(tokens) < 2 or all(len(numbers_of_source) == 1 for numbers_of_source in documents.values()):
            return []
        order = sorted(tokens, key=lambda label: (-tokens[label], label))
        # What is read later may be of a source that was not seen yet.
        return [*order[: _SOURCES - 1], "other"]

    def _labels(self, numbers: np.ndarray) -> list[str]:
        """The source of each of some documents."""
        if self._identity.get("source") == "mixture":
            names = [_part_title(part) for part in self._identity["sources"]]
            names = [f"{name} ({c})" if names.count(name) > 1 else name for c, name in enumerate(names)]
            return [names[c] for c in parts_of(self._identity, numbers)]
        names = [self._names[int(number)] for number in numbers]
        if self._identity.get("source") == "stdlib":
            return [name.split("/")[0] if "/" in name else "single modules" for name in names]
        return [re.sub(r":\d+$", "", name) for name in names]


def _range(low: int, high: int) -> str:
    return f"{low}" if low >= high else f"{low}-{high}"


def _part_title(identity: Mapping[str, Any]) -> str:
    """The name of a part of a mixture."""
    files = identity.get("files", [])
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return str(identity.get("dataset") or (f"{files[0]}{more}" if files else identity.get("source", "text")))


def _listened(source: Source, names: dict[int, str]) -> Source:
    """The same source, which notes the names of the documents that it gives."""

    def rows(start: int) -> Iterator[tuple[int, str, str, str]]:
        for row in source.rows(start):
            names[row[0]] = row[1]
            yield row

    return dataclasses.replace(source, rows=rows)


def broken_down(
    breakdowns: Sequence[Breakdown], sums: Mapping[str, np.ndarray], variance_G: np.ndarray, documents_G: np.ndarray
) -> dict[str, Any]:
    """{breakdown: {"groups", "tokens", "documents", figure: values, "<figure>_interval": [low, high] each}}.

    Of each group, with the mean m of all evaluated tokens: fve = 1 - sum ||y - y_hat||^2 / sum ||y - m||^2, so that the
    groups' errors and variances add up to those of the whole. In a resample the variance of a group moves as that about
    the mean of the first batch does.

    Args:
        sums: {name: float64 [1 + W, G]}, the first row of the text as it is.
        variance_G: sum ||y - m||^2 over the group.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        tokens_G = sums["tokens"][0]
        variance_WG = sums["square"] / sums["square"][:1] * variance_G[None]
        figures = {"fve": 1 - sums["error2"] / variance_WG}
        if "ce_sae" in sums:
            lost_WG, all_WG = sums["ce_zero"] - sums["ce_sae"], sums["ce_zero"] - sums["ce_clean"]
            figures["loss_recovered"] = lost_WG / all_WG
        figures["l0"] = sums["l0"] / sums["tokens"]
    content = {}
    for breakdown in breakdowns:
        groups = [g for g in range(breakdown.first, breakdown.first + len(breakdown.labels)) if tokens_G[g]]
        table: dict[str, Any] = {
            "groups": [breakdown.labels[g - breakdown.first] for g in groups],
            "tokens": tokens_G[groups].astype(int).tolist(),
            "documents": documents_G[groups].astype(int).tolist(),
        }
        for name, values_WG in figures.items():
            table[name] = [value if math.isfinite(value) else None for value in values_WG[0, groups].tolist()]
            table[f"{name}_interval"] = [resample_interval(values_WG[1:, g], int(documents_G[g])) for g in groups]
        if groups:
            content[breakdown.name] = table
    return content
