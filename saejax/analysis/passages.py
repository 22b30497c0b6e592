"""Passages of a scan that say what a latent is: some to explain it by, others to judge the explanation by."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from itertools import groupby

import numpy as np

from saejax.analysis.scan import Scan

# A token counts as one of a passage's strong ones from this share of its largest activation on (delphi's).
STRONG = 0.3
MARKS = ("<<", ">>")


@dataclasses.dataclass(frozen=True)
class Passage:
    """A few consecutive tokens of held-out text.

    Attributes:
        tokens: as they read in the text.
        activations: of the latent at each; 0 where it is silent.
        peak: the place of the token that the passage was cut around.
    """

    tokens: tuple[str, ...]
    activations: tuple[float, ...]
    peak: int

    @property
    def strong(self) -> frozenset[int]:
        """The places with at least `STRONG` of the passage's largest |activation|; none where the latent is silent."""
        largest = max(map(abs, self.activations))
        return frozenset(i for i, a in enumerate(self.activations) if a and abs(a) >= STRONG * largest)

    def text(self, marked: Collection[int] = ()) -> str:
        """The passage, with each run of marked tokens as <<run>>."""
        parts = groupby(range(len(self.tokens)), lambda i: i in marked)
        runs = [(inside, "".join(self.tokens[i] for i in places)) for inside, places in parts]
        return "".join(run.join(MARKS) if inside else run for inside, run in runs)


@dataclasses.dataclass(frozen=True)
class FeaturePassages:
    """Passages of a latent, to explain it by and to judge by.

    Attributes:
        feature: its number.
        largest: its largest |activation| in the scan.
        shown: active passages, for the explainer.
        active: others, for the judge; from all over the activation range, as the shown ones are.
        random: passages in which it is silent, as many as `active` where the scan has them.
    """

    feature: int
    largest: float
    shown: tuple[Passage, ...]
    active: tuple[Passage, ...]
    random: tuple[Passage, ...]


def peaks_of(scan: Scan, feature: int) -> np.ndarray:
    """The entries of the scan where a latent is strongest in their packed rows, falling by |value|: [rows]."""
    first, stop = np.searchsorted(scan.latent, [feature, feature + 1])
    _, first_of_row = np.unique(scan.row[first:stop], return_index=True)
    return np.sort(first_of_row) + first


def feature_passages(
    scan: Scan,
    feature: int,
    token_strings: Callable[[list[int]], Sequence[str]],
    shown: int,
    judged: int,
    before: int,
    after: int,
) -> FeaturePassages:
    """`shown` and `judged` passages of a latent, and `judged` random ones; fewer of each where the scan has fewer.

    Active passages are evenly spaced in the order of their peaks, one of each packed row at most, and dealt in turn, so
    that both groups have strong and weak ones and no text is in both. Random ones are cut around tokens drawn by the
    latent's number, do not overlap, and none of their tokens activates the latent. The same scan gives the same.
    """
    peaks = peaks_of(scan, feature)
    n = min(shown + judged, len(peaks))
    chosen = peaks[np.linspace(0, len(peaks) - 1, n).round().astype(int)] if n else peaks
    n_judged = n * judged // (shown + judged)
    # Spread evenly over the chosen ones; the strongest of all is shown.
    for_judge = np.arange(1, n + 1) * n_judged // max(n, 1) > np.arange(n) * n_judged // max(n, 1)
    cutter = _Cutter(scan, feature, token_strings, before, after)
    active = [cutter.passage(entry) for entry in chosen[for_judge]]
    return FeaturePassages(
        feature,
        float(abs(scan.value[peaks[0]])) if n else 0.0,
        tuple(cutter.passage(entry) for entry in chosen[~for_judge]),
        tuple(active),
        tuple(cutter.silent(len(active))),
    )


class _Cutter:
    """Cuts passages out of a scan's rows, each within its piece of a document, with one latent's activations."""

    def __init__(
        self, scan: Scan, feature: int, strings: Callable[[list[int]], Sequence[str]], before: int, after: int
    ):
        first, stop = np.searchsorted(scan.latent, [feature, feature + 1])
        self._scan, self._feature, self._strings = scan, feature, strings
        self._before, self._after = before, after
        self._row, self._place, self._value = (a[first:stop] for a in (scan.row, scan.position, scan.value))

    def passage(self, entry: int) -> Passage:
        row, peak, start, stop = self._window(entry)
        here = self._within(row, start, stop)
        activations = np.zeros(stop - start)
        activations[self._place[here] - start] = self._value[here]
        tokens = self._strings(self._scan.tokens[row, start:stop].tolist())
        return Passage(tuple(tokens), tuple(activations.tolist()), peak - start)

    def silent(self, count: int) -> list[Passage]:
        """At most `count` passages around tokens of which some latent is active, but nowhere in them this one."""
        taken: list[tuple[int, int, int]] = []
        passages: list[Passage] = []
        for entry in np.random.default_rng(self._feature).integers(len(self._scan.latent), size=20 * count):
            if len(passages) == count:
                break
            row, _, start, stop = self._window(entry)
            overlaps = any(row == other and start < end and begin < stop for other, begin, end in taken)
            if not overlaps and not len(self._within(row, start, stop)):
                taken.append((row, start, stop))
                passages.append(self.passage(entry))
        return passages

    def _window(self, entry: int) -> tuple[int, int, int, int]:
        """(row, peak, start, stop)."""
        row, peak = int(self._scan.row[entry]), int(self._scan.position[entry])
        piece = np.flatnonzero(self._scan.segments[row] == self._scan.segments[row, peak])
        return row, peak, int(max(piece[0], peak - self._before)), int(min(piece[-1], peak + self._after)) + 1

    def _within(self, row: int, start: int, stop: int) -> np.ndarray:
        return np.flatnonzero((self._row == row) & (self._place >= start) & (self._place < stop))
