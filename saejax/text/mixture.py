"""Several sources as one, by weights: which source gives a document depends on (seed, index) alone.

The indices are cut into periods of 4096. Within a period source c takes a fixed number q_c of places, its weight's
share rounded so that the q_c add up to 4096; which places, an order drawn from (seed, period) says. So the number of
documents that source c gave before index i has a closed form, and the mixture is entered anywhere at no cost of its
own: at index i, source c is entered at q_c floor(i / 4096) and what the period's places before i add.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from saejax.core.errors import ConfigError
from saejax.text.documents import Source

_PERIOD = 4096


def mixed(sources: Sequence[Source], weights: Sequence[float], seed: int, heldout_fraction: float) -> Source:
    """The mixture of C sources; document `index` comes from a source that (seed, index) decides.

    A document belongs to the split it has in its own source. A source that has run out leaves its places empty: the
    others keep theirs, and the mixture ends with the last of them.

    Raises:
        ConfigError: a weight so small beside the others that its source would never be read.
    """
    quotas_C = quotas(weights)

    def rows(start: int) -> Iterator[tuple[int, str, str, str]]:
        period, offset = divmod(start, _PERIOD)
        turns = _turns(quotas_C, seed, period)
        begun_C = period * quotas_C + np.bincount(turns[:offset], minlength=len(sources))
        streams = {c: source.rows(int(begun_C[c])) for c, source in enumerate(sources)}
        while streams:
            for place in range(offset, _PERIOD):
                c = int(turns[place])
                if c not in streams:
                    continue
                row = next(streams[c], None)
                if row is None:
                    del streams[c]
                else:
                    yield (period * _PERIOD + place, *row[1:])
            period, offset = period + 1, 0
            turns = _turns(quotas_C, seed, period)

    identity = {
        "source": "mixture",
        "seed": seed,
        "places": quotas_C.tolist(),
        "sources": [source.identity for source in sources],
    }
    return Source(identity, rows, heldout_fraction)


def quotas(weights: Sequence[float]) -> np.ndarray:
    """Places of each source in a period, int64 [C]: the shares of the weights, by largest remainders.

    Raises:
        ConfigError: a source without a place.
    """
    shares_C = np.asarray(weights, np.float64) / np.sum(weights) * _PERIOD
    quotas_C = np.floor(shares_C).astype(np.int64)
    largest = np.argsort(quotas_C - shares_C, kind="stable")
    quotas_C[largest[: _PERIOD - int(quotas_C.sum())]] += 1
    if not quotas_C.all():
        c = int(np.argmin(quotas_C))
        raise ConfigError(
            f"text.sources[{c}].weight is {weights[c]}, less than one document in {_PERIOD} of the mixture; "
            "raise it, or leave the source out."
        )
    return quotas_C


def parts_of(identity: Mapping[str, Any], documents: Sequence[int] | np.ndarray) -> list[int]:
    """The source, in the mixture with this identity, of each of some documents."""
    quotas_C, sources = np.asarray(identity["places"]), []
    turns: dict[int, np.ndarray] = {}
    for index in documents:
        period, offset = divmod(int(index), _PERIOD)
        if period not in turns:
            turns = {period: _turns(quotas_C, identity["seed"], period)}
        sources.append(int(turns[period][offset]))
    return sources


def _turns(quotas_C: np.ndarray, seed: int, period: int) -> np.ndarray:
    """The source of each place of a period, int64 [4096]."""
    # Raw output and not Generator.permutation: numpy promises that a bit generator's numbers stay the same.
    drawn = np.random.Philox(np.random.SeedSequence((seed, period))).random_raw(_PERIOD)
    return np.repeat(np.arange(len(quotas_C)), quotas_C)[np.argsort(drawn, kind="stable")]
