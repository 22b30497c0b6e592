"""Passages of a scan that say what a latent is: some to explain it by, others to judge the explanation by."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
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
    peaks = scan.peaks(feature)
    n = min(shown + judged, len(peaks))
    chosen = peaks[np.linspace(0, len(peaks) - 1, n).round().astype(int)] if n else peaks
    n_judged = n * judged // (shown + judged)
    # Spread evenly over the chosen ones; the strongest of all is shown.
    for_judge = np.arange(1, n + 1) * n_judged // max(n, 1) > np.arange(n) * n_judged // max(n, 1)
    silent = _silent(scan, feature, int(for_judge.sum()), before, after)

    def cut(entries: Iterable[int]) -> tuple[Passage, ...]:
        passages = []
        for row, peak, start, stop in (scan.window(entry, before, after) for entry in entries):
            tokens = token_strings(scan.tokens[row, start:stop].tolist())
            activations = scan.activations(feature, row)[start:stop].tolist()
            passages.append(Passage(tuple(tokens), tuple(activations), peak - start))
        return tuple(passages)

    largest = float(abs(scan.value[peaks[0]])) if n else 0.0
    return FeaturePassages(feature, largest, cut(chosen[~for_judge]), cut(chosen[for_judge]), cut(silent))


def _silent(scan: Scan, feature: int, count: int, before: int, after: int) -> list[int]:
    """At most `count` entries of other latents around which this one is silent."""
    windows: list[tuple[int, int, int]] = []
    entries: list[int] = []
    for entry in np.random.default_rng(feature).integers(len(scan.latent), size=20 * count).tolist():
        if len(entries) == count:
            break
        row, _, start, stop = scan.window(entry, before, after)
        overlaps = any(row == other and start < end and begin < stop for other, begin, end in windows)
        if not overlaps and not scan.activations(feature, row)[start:stop].any():
            windows.append((row, start, stop))
            entries.append(entry)
    return entries
