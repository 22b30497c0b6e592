"""One run at length: what its report would show, read anew while it trains."""

import os
from pathlib import Path
from typing import Any

from saejax.report.read import read_run
from saejax.report.summary import summarise

# Of all pages of a run those that are shown, and how deep they may lie.
_MOST_PAGES = 200
_DEPTH = 4


def described(folder: Path) -> dict[str, Any]:
    """{"summary": as the report has it, "at": the bytes of metrics.jsonl that its curves are made of}.

    The features are left out: they have addresses of their own.
    """
    at = whole_rows(folder / "metrics.jsonl")
    run = read_run(folder, features=False)
    summary = summarise(run)
    return {"summary": summary | {"has_features": (folder / "features.json.gz").is_file()}, "at": at}


def curves(folder: Path) -> dict[str, Any]:
    """{quantity: {"steps", "values"}} of a run."""
    return described(folder)["summary"]["curves"]


def whole_rows(path: Path) -> int:
    """Bytes up to the end of the last whole line; 0 where there is no file."""
    try:
        with path.open("rb") as handle:
            end = handle.seek(0, os.SEEK_END)
            while end > 0:
                start = max(0, end - 4096)
                handle.seek(start)
                if (found := handle.read(end - start).rfind(b"\n")) >= 0:
                    return start + found + 1
                end = start
    except OSError:
        pass
    return 0


def pages(root: Path, folder: Path) -> list[dict[str, str]]:
    """[{title, name}] of the HTML files of a run or a sweep, the nearest first; `name` is the place below `root`."""
    found: list[Path] = []
    level = [folder]
    for _ in range(_DEPTH):
        inner: list[Path] = []
        for one in level:
            entries = sorted(one.iterdir()) if one.is_dir() else []
            found += [path for path in entries if path.suffix == ".html" and path.name[0] != "." and path.is_file()]
            inner += [path for path in entries if path.is_dir() and path.name[0] != "." and not path.is_symlink()]
        level = [path for path in inner if path.name != "checkpoints"]
    return [
        {"title": path.relative_to(folder).with_suffix("").as_posix(), "name": path.relative_to(root).as_posix()}
        for path in found[:_MOST_PAGES]
    ]
