"""Compiled programs are kept for the next process: whole ones alone, within bounds, and where nobody else can write."""

import os
import subprocess
import sys
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from saejax.core import compiled
from saejax.core.lease import lease

_PROGRAM = """
import os, signal, sys
from saejax.core.compiled import keep_programs
if sys.argv[1] == "late":  # JAX is there before it can be told by the environment
    import jax
session = keep_programs()
import jax, jax.monitoring
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.jit(lambda x: x * 3 + 1)(2.0)
print(session is not None, len(hits))
sys.stdout.flush()
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _run(how: str, folder: Path, **environment: str) -> list[str]:
    env = os.environ | {"SAEJAX_COMPILED": str(folder)} | environment
    env.pop("JAX_COMPILATION_CACHE_DIR")
    done = subprocess.run([sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, check=False, env=env)
    assert done.returncode in (0, -9) and not done.stderr, done.stderr
    return done.stdout.split()


def test_the_next_process_reads_what_one_compiled_even_if_it_was_killed(tmp_path: Path) -> None:
    assert _run("killed", tmp_path) == ["True", "0"]
    assert _run("late", tmp_path) == ["True", "1"]
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.glob("*-cache"))) == 1 and not list(folder.glob("session-*"))
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """() -> (what `keep_programs` returns, what it does at the end), without JAX; (folder of programs)"""
    ends: list = []
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("SAEJAX_COMPILED", str(tmp_path))
    monkeypatch.setattr(compiled, "_jax_has_one", lambda: False)
    monkeypatch.setattr(compiled, "_tell_jax", lambda session: None)
    monkeypatch.setattr(compiled.atexit, "register", lambda function, *given: ends.append(lambda: function(*given)))

    def once():
        session = compiled.keep_programs()
        return session, ends.pop() if session else None

    yield once


def _write(folder: Path, name: str, size: int = 100, whole: bool = True, age: float = 0) -> Path:
    path = folder / f"{name}-cache"
    raw = zlib.compress(os.urandom(size))
    path.write_bytes(raw if whole else raw[:-9])
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def _names(folder: Path) -> set[str]:
    return {path.name.removesuffix("-cache") for path in folder.glob("*-cache")}


def test_whole_programs_of_living_and_ended_processes_are_shared(begin) -> None:
    first, end = begin()
    _write(first, "a")
    _write(first, "torn", whole=False)
    second, end_second = begin()  # while the first one lives
    assert _names(second) == {"a"} and first.is_dir()
    _write(first, "b")
    end()
    end_second()
    third, _ = begin()
    assert _names(third) == {"a", "b"} and not first.exists() and not second.exists()


def test_folders_of_dead_processes_are_removed_and_their_programs_kept(begin, tmp_path: Path) -> None:
    first, end = begin()
    end()
    dead = first.parent / "session-dead"
    dead.mkdir()
    _write(dead, "a")
    with lease(dead):
        second, _ = begin()
        assert dead.is_dir() and _names(second) == {"a"}
    begin()
    assert not dead.exists()


def test_the_oldest_programs_go_where_there_are_too_many_or_too_large_ones(begin, monkeypatch) -> None:
    first, _ = begin()
    folder = first.parent
    for age in range(1, 7):
        _write(folder, str(age), size=1000, age=100 * age)
    monkeypatch.setattr(compiled, "MOST", 5)
    assert _names(begin()[0]) == {"1", "2", "3", "4", "5"}
    monkeypatch.setattr(compiled, "LARGEST", 2500)
    assert _names(begin()[0]) == _names(folder) == {"1", "2"}


@pytest.mark.parametrize("fault", ["others may write", "no folder", "turned off", "JAX has its own"])
def test_where_nothing_is_kept(begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    first, _ = begin()
    if fault == "others may write":
        first.parent.chmod(0o777)
    elif fault == "no folder":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("SAEJAX_COMPILED", str(tmp_path / "file"))
    elif fault == "turned off":
        monkeypatch.setenv("SAEJAX_COMPILED", "0")
    else:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    assert begin() == (None, None)


def test_jax_keeps_a_torn_program_for_ever(tmp_path: Path) -> None:
    """As long as it does, saejax.core.compiled is needed: this fails once JAX's own cache is enough."""
    from jax._src.lru_cache import LRUCache

    cache = LRUCache(str(tmp_path), max_size=-1)
    cache.put("a", b"whole")
    (tmp_path / "a-cache").write_bytes(b"who")  # as a process leaves it that is killed while it writes
    cache.put("a", b"whole")
    assert cache.get("a") == b"who"
    bounded = LRUCache(str(tmp_path / "bounded"), max_size=100)
    bounded.put("a", b"whole")
    (tmp_path / "bounded" / "a-atime").unlink()  # killed between the entry and its time
    if jax.__version_info__ < (0, 12):  # later ones take the entry that has no time
        with pytest.raises(FileNotFoundError):
            bounded.put("b", b"whole")


def test_the_clock_of_compilation_runs_while_a_program_is_compiled_and_only_then() -> None:
    clock = compiled.compile_clock()
    program = jax.jit(lambda x: (x @ x).sum() * 3.25)
    x, before = jnp.ones((3, 3)), clock()
    started = time.perf_counter()
    program(x)
    compiling, passed = clock() - before, time.perf_counter() - started
    assert 0 < compiling < passed
    program(x)
    assert clock() == before + compiling
    assert compiled.compile_clock() is clock  # one listener, however many ask
