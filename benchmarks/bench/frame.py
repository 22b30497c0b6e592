"""What the benchmark's sections share: rows, what a run is told, and the results on disk. The standard library alone.

A section is a module with

    NAME, TITLE                  its key in the JSON, its heading on the page
    rows(told) -> [row]          rows have a `name`, unlike every other section's, and `quick`: --quick measures it too
    run(row, told) -> dict       measures one row; JSON. "figures" in it: [{what, value, aim, better: more | less}]
    page(results, folder) -> [str]   the section's lines of RESULTS.md from the JSON alone; pictures go into folder
"""

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

Result = dict[str, Any]


class LeftOut(Exception):
    """A row that this machine cannot measure, and why."""


class Row(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def quick(self) -> bool: ...


class Section(Protocol):
    NAME: str
    TITLE: str
    rows: Callable[["Told"], Sequence[Any]]
    run: Callable[[Any, "Told"], Result]
    page: Callable[[list[Result], Path], list[str]]


@dataclasses.dataclass(frozen=True)
class Told:
    """What a run of the benchmark is told.

    Attributes:
        quick: few rows, few rounds.
        rounds: how often everybody has a turn.
        folder: for activations and stores; removed at the end.
        backend: jax.default_backend() of the workers: cpu or gpu. The driver itself never starts JAX.
        peers: Python of the peers' environment; None leaves the peers out.
    """

    quick: bool
    rounds: int
    folder: Path
    backend: str
    peers: Path | None


def chosen(
    sections: Iterable[Section], told: Told, rows: Sequence[str] = (), names: Sequence[str] = ()
) -> list[tuple[Section, Row]]:
    """(section, row) of all rows that are to be measured: those named, else those of the named sections.

    Raises:
        ValueError: a name that there is not.
    """
    sections = list(sections)
    known = [section.NAME for section in sections]
    if wrong := [name for name in names if name not in known]:
        raise ValueError(f"There is no section {', '.join(wrong)}; there are {', '.join(known)}.")
    all_rows = [(s, row) for s in sections if not names or s.NAME in names for row in s.rows(told)]
    there = [row.name for _, row in all_rows]
    if wrong := [name for name in rows if name not in there]:
        raise ValueError(f"There is no row {', '.join(wrong)}; there are {', '.join(there)}.")
    if rows:
        return [(s, row) for s, row in all_rows if row.name in rows]
    return [(s, row) for s, row in all_rows if row.quick or not told.quick]


def measure(
    wanted: Sequence[tuple[Section, Row]], told: Told, path: Path, about: dict[str, Any], minutes: float = math.inf
) -> bool:
    """Measures the rows one after the other; `path` holds those that are done at every moment.

    Results of other rows that `path` holds from this machine stay. No row begins after so many `minutes`. True if all
    were tried; False after Ctrl-C or where the time was up.
    """
    started = time.monotonic()
    document = read(path)
    if document.get("about", {}).get("machine") != about.get("machine"):
        document = {"results": []}  # figures of two machines do not belong on one page
    document["about"] = about
    for number, (section, row) in enumerate(wanted, 1):
        result: Result = {"section": section.NAME, "row": row.name}
        passed = (time.monotonic() - started) / 60
        if passed > minutes:
            print(f"{minutes:g} minutes are over; not begun: {', '.join(r.name for _, r in wanted[number - 1 :])}")
            return False
        print(f"[{number}/{len(wanted)}, {passed:.0f} min] {row.name}", flush=True)
        try:
            result |= section.run(row, told)
        except KeyboardInterrupt:
            print("stopped; what was measured is kept", flush=True)
            return False
        except LeftOut as why:
            result["left_out"] = str(why)
            print(f"  left out: {why}", flush=True)
        except Exception as e:  # one row that fails must not take the others with it
            traceback.print_exc()
            result["failed"] = " ".join(traceback.format_exception_only(e)[-1].split())[:500]
        result["measured"] = datetime.datetime.now().isoformat(timespec="seconds")
        result |= {"quick": told.quick, "command": about.get("command")}
        kept = [one for one in document["results"] if (one["section"], one["row"]) != (section.NAME, row.name)]
        document["results"] = [*kept, result]
        write(path, document)
    return True


def read(path: Path) -> dict[str, Any]:
    """The document that `measure` left, or an empty one."""
    if not path.exists():
        return {"about": {}, "results": []}
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, document: dict[str, Any]) -> None:
    """In one move: Ctrl-C leaves the old file or the new one."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def about_machine(device: str, command: str) -> dict[str, Any]:
    """Machine, versions, date and command, for the page's head."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    return {
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {_gigabytes():.0f} GB, {device}",
        "versions": {"python": platform.python_version(), **versions},
        "date": datetime.date.today().isoformat(),
        "load": round(os.getloadavg()[0], 1),
        "command": command,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            return next(line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _gigabytes() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
