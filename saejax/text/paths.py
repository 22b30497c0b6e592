"""Files that the entries of `text.paths` stand for, and a warning about what of a folder is left out."""

import itertools
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from saejax.core.errors import ConfigError, DataError

_PLAIN = (".txt", ".jsonl", ".json", ".csv", ".tsv")
COMPRESSED = (".gz", ".zst")
ENDINGS = (*_PLAIN, ".parquet", *(plain + packed for plain in _PLAIN for packed in COMPRESSED))
_TAKEN = f"{', '.join(_PLAIN)} (and {' and '.join(COMPRESSED)} of these), .parquet"

_REMEDIES = {
    **dict.fromkeys((".xls", ".xlsx"), "write tables as .csv, .tsv, .jsonl or .parquet"),
    **dict.fromkeys((".gz", ".zst"), "name what is compressed by its kind, as .jsonl.gz"),
    **dict.fromkeys((".bz2", ".xz", ".zip"), "unpack what is compressed, or compress it as .gz or .zst"),
}


def ending(path: Path) -> str:
    """The kind that a file is read as, by its name: x.TXT is text, x.jsonl.gz compressed lines."""
    last, before = path.suffix.lower(), path.with_suffix("").suffix.lower() if path.suffix else ""
    return before + last if last in COMPRESSED and before in _PLAIN else last


def kind_of(path: Path) -> str:
    """Its ending without that of a compression."""
    return next((plain for plain in _PLAIN if ending(path).startswith(f"{plain}.")), ending(path))


def files_of(patterns: Iterable[str]) -> list[Path]:
    """The files behind all entries of `text.paths`, in order: by their real paths each once. Raises as `_expand`."""
    by_path: dict[str, Path] = {}
    for path in itertools.chain.from_iterable(map(_expand, patterns)):
        by_path.setdefault(os.path.realpath(path), path)
    return list(by_path.values())


def _expand(pattern: str) -> list[Path]:
    """Files behind one entry of `text.paths`: a file, a folder (its text files), or a glob pattern.

    What a folder holds besides is left out, with a warning. Hidden files that are no text are not spoken of.

    Raises:
        ConfigError: no path and no pattern.
        DataError: no text file there, or a file that is named and cannot be read.
    """
    others: list[Path] = []
    try:
        path = Path(pattern).expanduser()
        if path.is_file():
            files = [path]
        elif path.is_dir():
            there = sorted(p for p in path.rglob("*") if p.is_file())
            files = [p for p in there if ending(p) in ENDINGS]
            hidden = {p for p in there if any(part.startswith(".") for part in p.relative_to(path).parts)}
            others = [p for p in there if ending(p) not in ENDINGS and p not in hidden]
        else:
            anchor = Path(path.anchor) if path.is_absolute() else Path()
            files = sorted(p for p in anchor.glob(str(path.relative_to(path.anchor))) if p.is_file())
    except (OSError, ValueError, RuntimeError) as error:  # too long a name, ** within a name, no such user's home
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"text.paths holds {short(repr(pattern))}, which is no path and no pattern ({why}). Give a file, a folder "
            "or a glob pattern."
        ) from None
    if not files:
        raise DataError(
            f"No text file at {short(repr(pattern))} (text.paths). Give a file, a folder or a glob pattern."
            + (f" {_left_out(others)}" if others else "")
        )
    for p in files:
        if any("\ud800" <= letter <= "\udfff" for letter in p.name):  # bytes that are no UTF-8 are lone surrogates
            raise DataError(
                f"{shown(p)}: the name of this file is not UTF-8. Rename it, or leave it out of text.paths."
            )
        if ending(p) not in ENDINGS:
            remedy = f" Or {_REMEDIES[ending(p)]}." if ending(p) in _REMEDIES else ""
            raise DataError(f"{shown(p)}: cannot read {p.suffix!r} files; text.paths takes {_TAKEN}.{remedy}")
    if others:
        warnings.warn(f"text.paths, {short(repr(pattern))}: {_left_out(others)}", stacklevel=2)
    return files


def _left_out(others: Sequence[Path]) -> str:
    """A warning: how many files of which endings are not read, and what to do about it."""
    counts = Counter(ending(path) or "without an ending" for path in others)
    kinds = ", ".join(f"{count} {short(repr(kind).strip(chr(39)))}" for kind, count in counts.most_common(4))
    more = ", ..." if len(counts) > 4 else ""
    remedies = [remedy for remedy in dict.fromkeys(_REMEDIES.get(kind, "") for kind in counts) if remedy]
    hint = f" To read them, {'; '.join(remedies)}." if remedies else ""
    plural = "files are" if len(others) > 1 else "file is"
    return f"{len(others)} {plural} not read ({kinds}{more}): it takes {_TAKEN}.{hint}"


def shown(path: Path) -> str:
    return str(path) if str(path).isprintable() else repr(str(path))


def short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text):,} characters)"
