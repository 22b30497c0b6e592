"""Find and read dictionaries at a path, of whatever format."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from saejax.core.errors import DataError
from saejax.core.places import what_is
from saejax.trained import FORMATS, Format, TrainedCoder, is_saved

# Collections on the hub are folders of layers of widths of sparsities: four levels, thousands of entries.
_DEPTH, _MOST = 4, 20_000


def load_dictionary(path: str | os.PathLike[str], hook_points: Sequence[str] = ()) -> TrainedCoder:
    """The one coder at a path, of any format but saejax's own run folders.

    Args:
        hook_points: (what it reads,) or (reads, writes), where the files do not say.
    """
    path = Path(path)
    try:
        if is_saved(path):
            return TrainedCoder.from_folder(path)
        format, places = _here(path)
        there = path.exists()
    except OSError as error:  # no right to look into it, or no name that a file can have
        raise DataError(f"{str(path)[:200]} cannot be read: {error.strerror}.") from None
    if format and len(places) == 1:
        return format.read(places[0], hook_points)
    if places:
        raise _several(path, places)
    if not there:
        raise DataError(f"{path} does not exist. Give a run, a folder with a dictionary, or hf://owner/name.")
    if below := dictionaries_below(path):
        raise _several(path, below)
    known = ", ".join(format.title for format in FORMATS.values())
    raise DataError(
        f"{path} is neither a run (config.json of saejax), a saved coder (saejax.json), nor a dictionary of {known}: "
        f"{what_is(path)}. `saejax formats` says what their files are called."
    )


def dictionaries_below(path: str | os.PathLike[str]) -> list[Path]:
    """All coders at or below a path, saved and foreign ones, as `load_dictionary` takes them; no runs."""
    return list(_search(Path(path), _DEPTH, [_MOST]))


def _here(path: Path) -> tuple[Format | None, list[Path]]:
    """The first format that finds coders at a path, and their places. Raises OSError."""
    for format in FORMATS.values():
        if places := format.here(path):
            return format, places
    return None, []


def _search(path: Path, depth: int, left: list[int]) -> Iterator[Path]:
    entries: list[os.DirEntry[str]] = []
    try:
        if path.is_dir():
            with os.scandir(path) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        if len(folders) < len(entries) or path.is_file():  # every format has a file in its folder
            places = [path] if is_saved(path) else _here(path)[1]
            if places:
                yield from places
                return
    except OSError:
        return
    left[0] -= len(entries)
    for name in folders if depth else []:
        if left[0] >= 0 and not name.startswith("."):
            yield from _search(path / name, depth - 1, left)


def _several(path: Path, places: Sequence[Path]) -> DataError:
    some = ", ".join(map(str, places[:5])) + (", ..." if len(places) > 5 else "")
    return DataError(f"{path} holds {len(places)} dictionaries. Give one of them: {some}.")
