"""Descriptions of a path that a function or command was given and does not take, with the one that takes it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from saejax.core.errors import ConfigError

# Of a run, of a language model, and of many dictionaries.
_CONFIG = "config.json"
_BEGINNING = 4096
_FILE_KINDS = {
    ".npy": 'an array of NumPy, which saejax.train takes as np.load("{0}", mmap_mode="r"); `saejax store import STORE '
    "{0} --hook_point=NAME` makes a store of it",
    ".npz": 'a file of arrays of NumPy, which saejax.train takes as np.load("{0}")["NAME"]',
    ".safetensors": "a file of tensors; `saejax store import STORE {0} --hook_point=NAME` makes a store of activations",
    ".parquet": "a file of columns; `saejax store import STORE {0} --hook_point=NAME` makes a store of activations",
    **dict.fromkeys((".pt", ".pth"), 'a file of PyTorch; saejax.train takes a tensor in it, as torch.load("{0}")'),
}


def as_place(value: Any, door: str, takes: str, remedy: str = "") -> str:
    """`value` as the text of a path or an id.

    Raises:
        ConfigError: it is of another kind; says what `door` takes, and the remedy.
    """
    if isinstance(value, str | os.PathLike) and isinstance(text := os.fspath(value), str):
        return text
    raise ConfigError(f"{door} takes {takes}; it was given {type_in_words(value)}.{remedy}")


def what_is(path: str | os.PathLike[str]) -> str:
    """Describe a path, as the end of a sentence that begins with it, with the function or command that takes it."""
    path = Path(path)
    try:
        if not path.exists():
            return "it does not exist"
        if not path.is_dir():
            return f"it is {_FILE_KINDS.get(path.suffix.lower(), 'a file').format(path)}"
        for is_kind, description in _FOLDERS:
            if is_kind(path):
                return f"it is {description.format(path)}"
        below = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
        for is_kind, description in _FOLDERS:
            if inside := next(filter(is_kind, below), None):
                return f"it is a folder, and {inside} in it is {description.format(inside)}"
        run = next((above for above in path.parents if _is_run(above)), None)
        if run is not None:
            return f'it is within the run {run}, whose dictionary is saejax.load("{run}", step=...)'
        return "it is a folder of other files" if any(path.iterdir()) else "it is an empty folder"
    except OSError as error:  # no right to look into it, or no name that a file can have
        return f"it cannot be looked at ({error.strerror})"


def is_run_config(path: Path) -> bool:
    """The file begins as the config.json of a run does; other projects' folders have files of this name too."""
    if not path.is_file():
        return False
    with path.open("rb") as handle:
        return b'"runs_dir"' in handle.read(_BEGINNING)


def _is_run(path: Path) -> bool:
    return is_run_config(path / _CONFIG)


# Whether a folder is one, and what is said of it.
_FOLDERS: tuple[tuple[Callable[[Path], bool], str], ...] = (
    (lambda path: (path / "manifest.json").is_file(), "a store of activations, which saejax.train reads"),
    (lambda path: (path / "commits").is_dir(), "a store without its manifest.json; the command that made it mends it"),
    (lambda path: (path / "saejax.json").is_file(), 'a dictionary, which saejax.load("{0}") reads'),
    (_is_run, 'a run, whose dictionary saejax.load("{0}") reads'),
    (lambda path: (path / _CONFIG).is_file(), 'what looks like a language model: saejax.load_lm("{0}")'),
)


def type_in_words(value: Any) -> str:
    if value is None:
        return "None"
    name = "array" if hasattr(value, "dtype") and hasattr(value, "shape") else type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def user_cache() -> Path:
    """The folder for what can be made again: `$XDG_CACHE_HOME/saejax`, usually `~/.cache/saejax`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "saejax"
