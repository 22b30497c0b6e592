"""Hook points by range: a few names for many."""

import re
from collections.abc import Iterable, Mapping
from typing import Protocol

from saejax.core.errors import ConfigError

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class Named(Protocol):
    """The part of a language model, or of a pair, that names need."""

    def hook_points(self) -> Mapping[str, int]: ...

    def hook_point(self, name: str) -> str: ...


def expand_hook_points(names: Iterable[str], lm: Named) -> tuple[str, ...]:
    """The canonical names behind `names`, in the order given and each once.

    `blocks.{0..5}.resid_post` stands for blocks 0 to 5, both included; `blocks.*.mlp_out` for every block there is,
    from the first to the last. Several in one name vary the last one fastest.

    Raises:
        ConfigError: a range that runs backwards, or a hook point that does not exist.
    """
    known = tuple(lm.hook_points())
    return tuple(dict.fromkeys(lm.hook_point(written) for name in names for written in _expanded(name, known)))


def _expanded(name: str, known: tuple[str, ...]) -> list[str]:
    match = _RANGE.search(name)
    if match:
        first, last = int(match[1]), int(match[2])
        if last < first:
            raise ConfigError(f"The hook points {name!r} run from {first} down to {last}; give the smaller one first.")
        numbers = [str(i) for i in range(first, last + 1)]
        start, end = match.span()
    elif "*" in name:
        start = name.index("*")
        end = start + 1
        here = re.compile(re.escape(name[:start]) + r"(\d+)\.")
        numbers = [str(i) for i in sorted({int(m[1]) for m in map(here.match, known) if m})]
        if not numbers:
            raise ConfigError(f"There are no hook points {name!r}: nothing is numbered after {name[:start]!r}.")
    else:
        return [name]
    return [one for number in numbers for one in _expanded(name[:start] + number + name[end:], known)]
