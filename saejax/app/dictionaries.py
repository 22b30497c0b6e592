"""Which dictionaries the words of --sae mean, and what each is called."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from saejax.core.errors import ConfigError, DataError
from saejax.trained import is_saved

# Folders below one that is given: a sweep's members lie one down, published collections (layer, width, L0) three.
_DEPTH = 4
_LONGEST = 120


def dictionaries(words: Sequence[str]) -> dict[str, str]:
    """{name: path or hub id} of what was given: each word one of them, or several with commas between.

    A folder that is no dictionary stands for all that are below it. The name is the last part of the path, with as
    many parts before it as tell it from the others.

    Raises:
        ConfigError: nothing was given.
        DataError: a folder that holds none.
    """
    given = [part.strip() for word in words for part in ([word] if Path(word).exists() else word.split(","))]
    sources = list(dict.fromkeys(source for word in given if word for source in _of(word)))
    if not sources:
        raise ConfigError("--sae is empty; give a run, a folder, a file or a hub id, as in --sae=runs/quickstart.")
    return dict(zip(_names(sources), sources, strict=True))


def _of(word: str) -> list[str]:
    path = Path(word)
    if not path.is_dir() or _is_dictionary(path):
        return [word]  # one, or what `load` has an error for
    if not (below := [str(found) for found in _below(path, _DEPTH)]):
        raise DataError(f"{word} holds no dictionary: no run (config.json, checkpoints) and no saved coder.")
    return below


def _is_dictionary(folder: Path) -> bool:
    return is_saved(folder) or (folder / "config.json").is_file()


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """The dictionaries below a folder, in alphabetical order, none within another."""
    for path in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        if _is_dictionary(path):
            yield path
        elif depth > 1:
            yield from _below(path, depth - 1)


def _names(sources: Sequence[str]) -> list[str]:
    """A folder's name for each, all different."""
    parts = [Path(s).resolve().parts[1:] if Path(s).exists() else Path(s).parts for s in sources]
    # A file is called like all others of its kind, its folder is not.
    taken = [2 if Path(s).is_file() else 1 for s in sources]

    def names() -> list[str]:
        joined = ("-".join(own[-n:]) for own, n in zip(parts, taken, strict=True))
        return [re.sub(r"[^\w.-]+", "-", name).strip("-.")[-_LONGEST:] or "dictionary" for name in joined]

    for _ in range(max(map(len, parts))):
        now = names()
        taken = [n + (now.count(name) > 1) for n, name in zip(taken, now, strict=True)]
    now = names()
    return [name if now.count(name) == 1 else f"{name}-{i}" for i, name in enumerate(now)]
