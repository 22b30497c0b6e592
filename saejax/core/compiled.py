"""Compiled programs that a process leaves for the next: XLA needs seconds for a train step, reading it back a fraction.

JAX's persistent compilation cache does the reading and writing, in place and not atomically. Of 60 processes that were
killed while they put entries of 200 kB, 57 left a torn one (JAX 0.10.2, 2026-11-25). A torn entry gives no wrong
number and no crash, but JAX never writes it again: every later process warns, and compiles that program anew. With
`jax_compilation_cache_max_size` a process that is killed between an entry and its time makes every later write fail.
(tests/core/test_compiled.py shows both, and fails when this module is no longer needed.)

So each process has a folder of its own, a session, with hard links to all programs there are. What it adds is checked
and linked among them when it ends, or when another starts.
"""

import atexit
import contextlib
import functools
import hashlib
import importlib
import os
import platform
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from saejax.core.errors import SaejaxError
from saejax.core.lease import lease
from saejax.core.places import user_cache

VARIABLE = "SAEJAX_COMPILED"
LARGEST, MOST = 512 << 20, 1024  # bytes and programs that are kept
_SESSION = "session-"
_WORTH_KEEPING = 0.1  # seconds of compilation


def keep_programs() -> Path | None:
    """Let JAX read compiled programs from the user's cache folder and add to it; the session's folder, or None.

    Environment SAEJAX_COMPILED names another folder, and SAEJAX_COMPILED=0 keeps nothing. Whoever has told JAX of a
    cache (JAX_COMPILATION_CACHE_DIR) keeps theirs. Nothing is kept either where the folder cannot be written, or where
    others may write into it: programs are code. Kinds of CPU have a folder each, because programs are made for one.
    The oldest programs go first, those of the last use where the file system records it.
    """
    if os.environ.get(VARIABLE) == "0" or os.environ.get("JAX_COMPILATION_CACHE_DIR") or _jax_has_one():
        return None
    held = contextlib.ExitStack()
    try:
        folder = _folder() / _machine()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        known = folder.stat()
        if known.st_uid != os.getuid() or known.st_mode & 0o022:
            return None
        _tidy(folder)
        session = Path(tempfile.mkdtemp(prefix=_SESSION, dir=folder))
        held.enter_context(lease(session))
        for program in _programs(folder):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                os.link(program, session / program.name)
    except (OSError, RuntimeError, SaejaxError):  # a RuntimeError: no home. A cache is no reason not to work
        held.close()
        return None
    atexit.register(_leave, folder, session, held, os.getpid())
    _tell_jax(session)
    return session


def _leave(folder: Path, session: Path, held: contextlib.ExitStack, pid: int) -> None:
    """At the process's end: its new programs to the others, its folder away."""
    if os.getpid() != pid:  # a fork of it
        return
    with contextlib.suppress(OSError):
        _collect(session, folder)
    shutil.rmtree(session, ignore_errors=True)
    held.close()


@functools.cache
def compile_clock() -> Callable[[], float]:
    """() -> seconds in which this process compiled programs, or read kept ones, since the clock was first asked for."""
    from jax import monitoring  # here: `keep_programs` comes before JAX

    spent = [0.0]

    def heard(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            spent[0] += duration_secs

    monitoring.register_event_duration_secs_listener(heard)
    return lambda: spent[0]


def _tidy(folder: Path) -> None:
    """Take what sessions have added, remove those whose process is gone, and what is too much."""
    for session in folder.glob(f"{_SESSION}*"):
        with contextlib.suppress(OSError, SaejaxError):  # a BusyError: its process lives
            _collect(session, folder)
            with lease(session):
                _collect(session, folder)  # what came in between
                shutil.rmtree(session, ignore_errors=True)
    stats = {program: program.stat() for program in _programs(folder)}
    size = sum(known.st_size for known in stats.values())
    for program, known in sorted(stats.items(), key=lambda item: max(item[1].st_mtime, item[1].st_atime)):
        if size <= LARGEST and len(stats) <= MOST:
            break
        program.unlink(missing_ok=True)
        size -= known.st_size
        del stats[program]


def _collect(session: Path, folder: Path) -> None:
    """Link the whole programs of a session into the folder, each durable before it has its name there."""
    for program in _programs(session):
        if not (folder / program.name).exists() and _is_whole(program):
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.link(program, folder / program.name)


def _is_whole(program: Path) -> bool:
    """True if all of a program is on disk, as its compression tells."""
    if program.stat().st_size > LARGEST:
        return False
    with program.open("rb") as handle:
        raw = handle.read()
        os.fsync(handle.fileno())
    try:
        if raw[:4] == b"\x28\xb5\x2f\xfd":
            importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "zstandard").decompress(raw)
        else:
            zlib.decompress(raw)
    except Exception:  # each library has its own kinds; whatever cannot be read is not kept
        return False
    return True


def _programs(folder: Path) -> Iterator[Path]:
    return (path for path in list(folder.glob("*-cache")) if path.is_file())


def _folder() -> Path:
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().absolute()
    return user_cache() / "compiled"


def _machine() -> str:
    """A name for the kind of CPU: programs of one kind may hold instructions that another does not know."""
    known = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        known += sorted(set(re.findall(r"^(?:model name|flags|Features)\s*:.*$", text, re.MULTILINE)))
    return f"{platform.machine()}-{hashlib.sha256(' '.join(known).encode()).hexdigest()[:12]}"


def _jax_has_one() -> bool:
    return "jax" in sys.modules and bool(sys.modules["jax"].config.jax_compilation_cache_dir)


def _tell_jax(session: Path) -> None:
    """JAX reads its environment when it is imported; afterwards it is told."""
    settings = {
        "jax_compilation_cache_dir": str(session),
        "jax_persistent_cache_min_compile_time_secs": _WORTH_KEEPING,
        # XLA's caches of its own would lie in the session's folder, whose name then decided a program's key.
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    if "jax" in sys.modules:
        for name, value in settings.items():
            sys.modules["jax"].config.update(name, value)
    else:
        os.environ.update({name.upper(): str(value) for name, value in settings.items()})
