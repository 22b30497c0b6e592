"""One run at length: what its report would show, read anew while it trains."""

import dataclasses
import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from saejax.core.files import Stamp, opened, stamp
from saejax.core.metrics import LARGEST_METRICS
from saejax.reports.read import FILES, read_run
from saejax.reports.summary import summarise
from saejax.runs import Run

# Of all pages of a run those that are shown, and how deep they may lie.
_MOST_PAGES = 200
_PAGE_DEPTH = 4
_MOST_DESCRIBED = 32
_PAUSE = 20  # times as long as it took


@dataclasses.dataclass(frozen=True)
class _Made:
    """The description of a run's files, from which of them, when, and how long it took (seconds)."""

    content: dict[str, Any]
    files: tuple[Stamp | None, ...]
    metrics: Stamp | None
    at: float
    took: float


class Descriptions:
    """Descriptions of runs, made again where a file has changed.

    The rows of a long training take seconds to read. A page that follows them by its socket needs no newer curves, so
    for metrics.jsonl alone a run is read again only so often that it takes a twentieth of a core.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Path, _Made] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, folder: Path) -> dict[str, Any]:
        """{"summary": as the report has it, "at": the bytes of metrics.jsonl that its curves are made of}.

        The features are left out: they have addresses of their own.

        Raises:
            DataError: it is no run, or a file of it is damaged.
        """
        with self._lock:
            files = tuple(stamp(folder / name) for name in (*FILES, Run.features) if name != Run.metrics)
            metrics, now = stamp(Run(folder).metrics), time.monotonic()
            made = self._kept.get(folder)
            same = made is not None and made.files == files
            if made is None or not same or (made.metrics != metrics and now - made.at > _PAUSE * made.took):
                content = _describe(folder)
                made = _Made(content, files, metrics, now, time.monotonic() - now)
                self._kept[folder] = made
            self._kept.move_to_end(folder)
            while len(self._kept) > _MOST_DESCRIBED:
                self._kept.popitem(last=False)
            return made.content

    def curves(self, folder: Path) -> dict[str, Any]:
        """{quantity: {"steps", "values"}} of a run."""
        return self.of(folder)["summary"]["curves"]


def _describe(folder: Path) -> dict[str, Any]:
    at = whole_rows(Run(folder).metrics)
    summary = summarise(read_run(folder, features=False))
    return {"summary": summary | {"has_features": Run(folder).features.is_file()}, "at": at}


def whole_rows(path: Path) -> int:
    """Bytes up to the end of the last whole line; 0 where there is no file."""
    try:
        with opened(path) as handle:
            end = handle.seek(0, os.SEEK_END)
            while 0 < end <= LARGEST_METRICS:
                start = max(0, end - 4096)
                handle.seek(start)
                if (last := handle.read(end - start).rfind(b"\n")) >= 0:
                    return start + last + 1
                end = start
    except OSError:
        pass
    return 0


def pages(root: Path, folder: Path) -> list[dict[str, str]]:
    """[{title, name}] of the HTML files of a run or a sweep, the nearest first; `name` is the place below `root`."""
    paths: list[Path] = []
    level = [folder]
    for _ in range(_PAGE_DEPTH):
        inner: list[Path] = []
        for above in level:
            entries = sorted(above.iterdir()) if above.is_dir() else []
            paths += [path for path in entries if path.suffix == ".html" and path.name[0] != "." and path.is_file()]
            inner += [path for path in entries if path.is_dir() and path.name[0] != "." and not path.is_symlink()]
        level = [path for path in inner if path.name != Run.checkpoints]
    return [
        {"title": path.relative_to(folder).with_suffix("").as_posix(), "name": path.relative_to(root).as_posix()}
        for path in paths[:_MOST_PAGES]
    ]
