"""The settings of the reconstruction's summand of the loss: which error, and of which parts of the coder."""

import dataclasses

from saejax.coders.error import RECONSTRUCTIONS, Mse
from saejax.coders.nested import Hierarchical, Matryoshka
from saejax.coders.ramp import At
from saejax.core.errors import ConfigError
from saejax.core.settings import Settings, setting


@dataclasses.dataclass(frozen=True)
class ReconstructionSettings(Settings, section="coder"):
    """Settings of the reconstruction's error."""

    reconstruction: str = setting(
        "", "fvu (variance unexplained) or mse (sum over the width).", choices=RECONSTRUCTIONS, base="fvu"
    )
    prefixes: tuple[float, ...] = setting(
        (),
        "Matryoshka: the loss is the mean over the first n latents, for each n here (a count, or a share of the "
        "latents where at most 1); rising, and ending with all latents. Empty: only all latents.",
        low=0,
    )
    hierarchical_every: int | None = setting(
        None,
        "HierarchicalTopK: the loss is the mean over the j largest latents, for j = k, k - n, k - 2 n, ... with n this "
        "number: 1 takes every j. 0: only k.",
        low=0,
        base=0,
    )

    def term(self, at: At) -> Mse | Matryoshka | Hierarchical:
        """The reconstruction's summand of the loss.

        Raises:
            ConfigError: prefixes that do not nest, or both kinds of parts.
        """
        error = RECONSTRUCTIONS[self.reconstruction]()
        if self.prefixes and self.hierarchical_every:
            raise ConfigError(
                "coder.prefixes and coder.hierarchical_every both say which parts of a reconstruction the loss is a "
                "mean over; leave prefixes empty, or set hierarchical_every to 0."
            )
        if self.hierarchical_every:
            return Hierarchical(error=error, every=self.hierarchical_every)
        return Matryoshka(error=error, prefixes=self.counts(at.width)) if self.prefixes else error

    def counts(self, width: int) -> tuple[int, ...]:
        """The prefixes as numbers of latents.

        Raises:
            ConfigError: they do not rise, or do not end with all latents.
        """
        counts = tuple(round(p * width) if p <= 1 else int(p) for p in self.prefixes)
        rising = all(a < b for a, b in zip((0, *counts), counts, strict=False))
        if not rising or counts[-1] != width:
            raise ConfigError(
                f"coder.prefixes {self.prefixes} are {counts} of {width} latents; they must rise and end with {width} "
                "(or 1.0), so that each contains the one before."
            )
        return counts
