"""One job on disk: what was asked, each attempt at it, the log. All that is known of a job is here, whoever asks.

    job.json         what to run, once and for all
    asked.json       how often it was asked for (a continued job is asked for again), and whether it was cancelled
    attempts.json    each attempt: when, by which process, with which code it ended
    experiment.py    the settings, as the commands read them
    log.txt          all that the commands print
    records/         of each command, as of every job's task (saejax.plan.jobs.task)

The runner of an attempt holds the folder's lease. So a job is alive where its lease is held: a number in a file may by
now be another process's.
"""

import dataclasses
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saejax.core.errors import EXIT_PREEMPTED, DataError
from saejax.core.files import opened, read_bounded, read_object, stamp, value_of, write_json
from saejax.core.lease import held
from saejax.plan.jobs.processes import left_of

LOG, EXPERIMENT = "log.txt", "experiment.py"
_JOB, _ASKED, _ATTEMPTS = "job.json", "asked.json", "attempts.json"
_LARGEST = 1 << 20
# A training's own messages are short; of a log that is longer than this, the last line is not looked for further back.
_TAIL = 4096
_PIECE = 1 << 18
_NUMBER, _NONE = (int, float), type(None)
ENDED = ("done", "failed", "stopped")


@dataclasses.dataclass(frozen=True)
class View:
    """A job as it is now.

    Attributes:
        name, run: the run's name below the runs folder; `run` only once the run's folder is there.
        state: queued, starting, running, done, failed or stopped (saved; it can continue).
        code: of the last attempt, where it has ended.
        started, ended, seconds: of the last attempt, in seconds (since 1970).
        pid: of its runner, while it runs.
        words: of each command.
        last: the last line of the log.
    """

    id: str
    command: str
    name: str
    sweep: bool
    state: str
    code: int | None
    created: float
    started: float | None
    ended: float | None
    seconds: float | None
    pid: int | None
    words: list[list[str]]
    run: str | None
    log_bytes: int
    can_continue: bool
    last: str


def new_id() -> str:
    """Ids of later jobs sort after those of earlier ones."""
    now = time.time()
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{int(now % 1 * 1_000_000):06d}-{secrets.token_hex(3)}"


def is_id(text: str) -> bool:
    return re.fullmatch(r"[0-9]{8}-[0-9]{6}-[0-9]{6}-[0-9a-f]{6}", text) is not None


@dataclasses.dataclass(frozen=True)
class Job:
    """A job's folder."""

    path: Path

    def write(self, command: str, name: str, commands: Sequence[Sequence[str]], here: Path) -> None:
        """Make it a job that waits. `commands` are run one after the other in the folder `here`."""
        content = {"command": command, "name": name, "commands": [list(words) for words in commands], "here": str(here)}
        self.ask(1)
        # With this file it is a job.
        write_json(self.path / _JOB, content | {"created": time.time()})

    @property
    def content(self) -> dict[str, Any]:
        """What job.json says.

        Raises:
            DataError: it is missing or damaged.
        """
        content = read_object(self.path / _JOB, _LARGEST)
        words = content.get("commands")
        listed = isinstance(words, list) and all(isinstance(one, list) for one in words)
        if not listed or not _has(content, command=str, name=str, here=str, created=_NUMBER):
            raise DataError(f"{self.path / _JOB} is damaged; delete the folder.")
        return content

    def asked(self) -> tuple[int, bool]:
        """(number of the attempt that is asked for, whether it was cancelled).

        Raises:
            DataError: the file is missing or damaged.
        """
        content = read_object(self.path / _ASKED, _LARGEST)
        if not _has(content, number=int):
            raise DataError(f"{self.path / _ASKED} is damaged; delete the folder.")
        return content["number"], bool(content.get("cancelled"))

    def ask(self, number: int, cancelled: bool = False) -> None:
        """Ask for attempt `number`, or for its end."""
        write_json(self.path / _ASKED, {"number": number, "cancelled": cancelled})

    def attempts(self) -> list[dict[str, Any]]:
        """{number, pid, started, ended, code} of each attempt; the last two are null until its runner has ended it.

        Raises:
            DataError: the record is damaged.
        """
        if not (self.path / _ATTEMPTS).is_file():
            return []
        content = value_of(self.path / _ATTEMPTS, read_bounded(self.path / _ATTEMPTS, _LARGEST))
        kinds: dict[str, Any] = {
            "number": int,
            "pid": int,
            "started": _NUMBER,
            "ended": (*_NUMBER, _NONE),
            "code": (int, _NONE),
        }
        if not isinstance(content, list) or not all(
            _has(one, **kinds) and 0 <= one["pid"] < 1 << 31 for one in content
        ):
            raise DataError(f"{self.path / _ATTEMPTS} is damaged; delete it, and the job counts as not begun.")
        return content

    def record(self, attempts: list[dict[str, Any]]) -> None:
        write_json(self.path / _ATTEMPTS, attempts)

    def alive(self) -> bool:
        """Whether a runner works at it, or what a killed runner had started."""
        return held(self.path) is not None or bool(self._left_behind())

    def view(self, runs: Path, starting: bool = False) -> View:
        """The job as it is now. `starting`: its runner is being started.

        Raises:
            DataError: a damaged file.
        """
        content = self.content
        # Twice, where the first look finds an attempt that begins: it is written by a runner that holds the lease.
        for _ in range(2):
            # Before the files: a runner that ends in between has written its code.
            alive = self.alive()
            (number, cancelled), attempts = self.asked(), self.attempts()
            last = attempts[-1] if attempts and attempts[-1]["number"] >= number else None
            code = None if last is None else last["code"]
            if last is None or code is not None or alive:
                break
        state = _state(last, cancelled, alive, starting)
        if last is None and cancelled:
            code = EXIT_PREEMPTED
        started, ended = (last or {}).get("started"), (last or {}).get("ended")
        run = runs / content["name"]
        sweep = content["command"] == "sweep"
        return View(
            id=self.path.name,
            command=content["command"],
            name=content["name"],
            sweep=sweep,
            state=state,
            code=code,
            created=content["created"],
            started=started,
            ended=ended,
            seconds=None if started is None else (ended or (time.time() if state == "running" else started)) - started,
            pid=last["pid"] if last and state == "running" else None,
            words=content["commands"],
            run=content["name"] if run.is_dir() and not sweep else None,
            log_bytes=self.log_bytes(),
            can_continue=state in ("failed", "stopped"),
            last=self._last_line(),
        )

    def signature(self) -> tuple[Any, ...]:
        """Equal as long as nothing that is written of the job has changed."""
        return tuple(stamp(self.path / name) for name in (_ASKED, _ATTEMPTS, LOG))

    def tell_to_end(self) -> bool:
        """SIGTERM to all processes of the attempt that runs; False where none does."""
        attempts = self.attempts()
        if not attempts:
            return False
        pid = int(attempts[-1]["pid"])
        ours = held(self.path) == f"pid {pid} on {socket.gethostname()}" or self._left_behind()
        if ours:
            os.killpg(pid, signal.SIGTERM)
        return bool(ours)

    def log_bytes(self) -> int:
        known = stamp(self.path / LOG)
        return known.size if known else 0

    def log(self, at: int, most: int = _PIECE) -> tuple[str, int]:
        """(text of the log from byte `at` on, at most `most` bytes of it, where the next piece begins)."""
        try:
            with opened(self.path / LOG) as handle:
                handle.seek(at)
                raw = handle.read(most)
        except FileNotFoundError:
            raw = b""
        except OSError as error:
            raise DataError(f"{self.path / LOG} cannot be read: {error.strerror}.") from None
        # A letter of several bytes whose rest is still to come stays for the next piece.
        for back in range(1, min(4, len(raw) + 1)):
            byte = raw[-back]
            if byte >= 0xC0:
                wanted = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
                raw = raw[:-back] if wanted > back else raw
                break
            if byte < 0x80:
                break
        return raw.decode(errors="replace"), at + len(raw)

    def _last_line(self) -> str:
        text, _ = self.log(max(0, self.log_bytes() - _TAIL), _TAIL)
        return next((line.strip()[:300] for line in reversed(re.split(r"[\r\n]+", text)) if line.strip()), "")

    def _left_behind(self) -> list[int]:
        """Processes that an attempt started, and that go on although its runner was killed."""
        attempts = self.attempts()
        if not attempts or attempts[-1]["code"] is not None:
            return []
        return left_of(int(attempts[-1]["pid"]), self.path)


def _has(content: Any, **kinds: type | tuple[type, ...]) -> bool:
    """Whether it is an object that has each of the keys, with values of these very types."""
    return isinstance(content, dict) and all(
        key in content and type(content[key]) in (kind if isinstance(kind, tuple) else (kind,))
        for key, kind in kinds.items()
    )


def _state(last: dict[str, Any] | None, cancelled: bool, alive: bool, starting: bool) -> str:
    if last is None:
        return "stopped" if cancelled else "starting" if starting or alive else "queued"
    if last["code"] is None:
        return "running" if alive else "failed"
    return "done" if last["code"] == 0 else "stopped" if last["code"] == EXIT_PREEMPTED else "failed"
