"""The dictionaries that the words of --sae mean, and their names."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from saejax.core.errors import ConfigError
from saejax.interop import dictionaries_below
from saejax.runs import Run

# Of runs below a folder that is given: a sweep's members lie one or two down.
_LEVELS_BELOW = 3
_MOST_LETTERS = 120


def dictionaries(words: Sequence[str]) -> dict[str, str]:
    """{name: path or hub id} of what was given: each word one of them, or several with commas between.

    A folder that is no dictionary stands for all that are below it. The name is the last part of the path, with as
    many parts before it as tell it from the others.

    Raises:
        ConfigError: nothing was given.
    """
    places = [part.strip() for word in words for part in ([word] if Path(word).exists() else word.split(","))]
    sources = list(dict.fromkeys(source for word in places if word for source in _places_of(word)))
    if not sources:
        raise ConfigError("--sae is empty; give a run, a folder, a file or a hub id, as in --sae=runs/quickstart.")
    return dict(zip(_names(sources), sources, strict=True))


def _places_of(word: str) -> list[str]:
    path = Path(word)
    if Run(path).exists:
        return [word]
    runs = list(_runs(path, _LEVELS_BELOW))
    others = [place for place in dictionaries_below(path) if not any(run in place.parents for run in runs)]
    return [str(place) for place in (*runs, *others)] or [word]  # a hub id, or what `load` has an error for


def _runs(folder: Path, depth: int) -> Iterator[Path]:
    """The runs below a folder, in alphabetical order, none within another."""
    inside = sorted(folder.iterdir()) if depth and folder.is_dir() else []
    for path in inside:
        if Run(path).checkpoints.is_dir() and Run(path).exists:
            yield path
        elif not path.name.startswith(".") and not path.is_symlink():
            yield from _runs(path, depth - 1)


def _names(sources: Sequence[str]) -> list[str]:
    """A folder's name for each, all different."""
    parts = [Path(s).resolve().parts[1:] if Path(s).exists() else Path(s).parts for s in sources]
    # A file is called like all others of its kind, its folder is not.
    lengths = [2 if Path(s).is_file() else 1 for s in sources]

    def names() -> list[str]:
        joined = ("-".join(path[-n:]) for path, n in zip(parts, lengths, strict=True))
        return [re.sub(r"[^\w.-]+", "-", name).strip("-.")[-_MOST_LETTERS:] or "dictionary" for name in joined]

    for _ in range(max(map(len, parts))):
        now = names()
        lengths = [n + (now.count(name) > 1) for n, name in zip(lengths, now, strict=True)]
    return distinct(names())


def distinct(names: Sequence[str]) -> list[str]:
    """The names, with a number behind those that others have too; no two are equal."""
    unlike: list[str] = []
    for i, name in enumerate(names):
        candidate, number = name, i
        while names.count(name) > 1 and (candidate in names or candidate in unlike):
            candidate, number = f"{name}-{number}", number + 1
        unlike.append(candidate)
    return unlike
