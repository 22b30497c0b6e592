"""Which coders are at a path, of whatever format."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from saejax.core.errors import DataError
from saejax.trained import FORMATS, TrainedCoder, is_saved

# Collections on the hub are folders of layers of widths of sparsities: four levels, thousands of entries.
_DEPTH, _MOST = 4, 20_000


def read(path: str | os.PathLike[str], hook_points: Sequence[str] = ()) -> TrainedCoder:
    """The one coder at a path, of any format but saejax's own run folders.

    Args:
        hook_points: (what it reads,) or (reads, writes), where the files do not say.

    Raises:
        DataError: none there, several (they are named), or a damaged file.
    """
    path = Path(path)
    if is_saved(path):
        return TrainedCoder.from_folder(path)
    for format in FORMATS.values():
        places = format.here(path)
        if len(places) == 1:
            return format.read(places[0], hook_points)
        if places:
            raise _several(path, places)
    if not path.exists():
        raise DataError(f"{path} does not exist. Give a run, a folder with a dictionary, or hf://owner/name.")
    if inside := found(path):
        raise _several(path, inside)
    known = ", ".join(format.title for format in FORMATS.values())
    raise DataError(
        f"{path} is neither a run (config.json of saejax), a saved coder (saejax.json), nor a dictionary of {known}. "
        "`saejax formats` says what their files are called."
    )


def found(path: str | os.PathLike[str]) -> list[Path]:
    """All coders at or below a path, each as a place that `read` takes; saved coders and foreign ones, not runs."""
    return list(_search(Path(path), _DEPTH, [_MOST]))


def _search(path: Path, depth: int, left: list[int]) -> Iterator[Path]:
    if is_saved(path):
        yield path
        return
    for format in FORMATS.values():
        if places := format.here(path):
            yield from places
            return
    if not depth or not path.is_dir():
        return
    try:
        inside = sorted(path.iterdir())
    except OSError:
        return
    for entry in inside:
        left[0] -= 1
        if left[0] < 0:
            return
        if not entry.name.startswith(".") and not entry.is_symlink() and entry.is_dir():
            yield from _search(entry, depth - 1, left)


def _several(path: Path, places: Sequence[Path]) -> DataError:
    some = ", ".join(map(str, places[:5])) + (", ..." if len(places) > 5 else "")
    return DataError(f"{path} holds {len(places)} dictionaries. Give one of them: {some}.")
