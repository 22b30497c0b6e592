"""What every test runs on: eight virtual CPU devices, no network, no caches of this machine.

The environment is set before jax is imported, because jax reads it once; a test module must therefore not be
imported by anything that imported jax earlier (pytest imports this file first).
"""

from __future__ import annotations

import gc
import importlib.metadata
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could set eight CPU devices: look for a plugin")

N_DEVICES = 8

_HF_HOME = tempfile.mkdtemp(prefix="saejax-tests-hf-")
# Tests compile the same small programs again and again, and so do the processes that they start.
_COMPILED = tempfile.mkdtemp(prefix="saejax-tests-xla-")

_other_xla_flags = [
    flag
    for flag in os.environ.get("XLA_FLAGS", "").split()
    if not flag.startswith("--xla_force_host_platform_device_count")
]
# Most of the suite's time was XLA optimizing programs that then run for milliseconds. In the tests' own processes it
# does not: a train step compiles with a third of the work, and so do the commands that they start. All compile as users
# do with XLA_FLAGS="--xla_backend_optimization_level=3", as `make soak` runs them once.
if not any(flag.startswith("--xla_backend_optimization_level") for flag in _other_xla_flags):
    _other_xla_flags.append("--xla_backend_optimization_level=0")
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # one that does not know them stops at them
        # Two workers have the cores: a program in 32 parts, compiled by as many threads, is a tenth more work.
        _other_xla_flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
os.environ.update(
    # More threads than cores, so that the virtual devices' collectives cannot wait for each other for ever.
    NPROC="16",
    # PyTorch's threads wait for each other by spinning: beside another worker its small models took twice the time.
    OMP_NUM_THREADS="1",
    XLA_FLAGS=" ".join([*_other_xla_flags, f"--xla_force_host_platform_device_count={N_DEVICES}"]),
    JAX_PLATFORMS="cpu",
    # Nothing is downloaded, and nothing that this machine happens to have cached is found.
    HF_HOME=_HF_HOME,
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
)
for _name in ("HF_HUB_CACHE", "HF_TOKEN", "HUGGINGFACE_HUB_CACHE", "JAX_ENABLE_X64"):
    os.environ.pop(_name, None)
os.environ.update(JAX_COMPILATION_CACHE_DIR=_COMPILED, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.1")

import jax  # noqa: E402 - only now

jax.config.update("jax_numpy_rank_promotion", "raise")


# Seconds of each file, as `make test ARGS=--record-durations` wrote them. A file that is not there counts as quick.
_DURATIONS = Path(__file__).with_name("durations.json")
_SECONDS: dict[str, float] = json.loads(_DURATIONS.read_text())
# `make check` runs the quickest files, so many that they take this together: two minutes of two workers, without lint
# and what a worker needs to start.
_QUICK = 80.0


def _quick() -> frozenset[str]:
    names = sorted(_SECONDS, key=_SECONDS.__getitem__)
    sums = itertools.accumulate(_SECONDS[name] for name in names)
    return frozenset(name for name, together in zip(names, sums, strict=True) if together <= _QUICK)


def _recorded(path: Path) -> str:
    """The name of a test file in durations.json."""
    return path.relative_to(_DURATIONS.parents[1]).as_posix()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out files of many seconds, as `make check` does")
    parser.addoption("--record-durations", action="store_true", help="write this run's seconds to tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder())


class _Recorder:
    """Adds up what the tests of each file take, in whichever worker, and replaces what is recorded of those files."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        seconds = {**_SECONDS, **self.seconds}
        there = {name: round(n, 1) for name, n in sorted(seconds.items()) if (_DURATIONS.parents[1] / name).is_file()}
        _DURATIONS.write_text(json.dumps(there, indent=0) + "\n")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --quick, slow files are not even imported."""
    if not config.getoption("--quick") or not collection_path.match("test_*.py"):
        return None
    name = _recorded(collection_path)
    return True if name in _SECONDS and name not in _quick() else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of many seconds come first: workers take file after file, and none is to begin a long one at the end."""
    items.sort(key=lambda item: -_SECONDS.get(_recorded(item.path), 0.0))


@pytest.fixture
def by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of kept entries as large ones have them (`kernels.pairs`), not as small ones."""
    monkeypatch.setattr("saejax.kernels.pairs.FEW", 0)


@pytest.fixture(scope="session", autouse=True)
def _eight_devices() -> None:
    """Fails every test at once where the settings above did not take."""
    assert jax.device_count() == N_DEVICES, f"{jax.device_count()} devices: {jax.devices()}"


def pytest_collection_finish() -> None:
    """A trace makes thousands of objects that live on: looking through all there are, again and again, took a tenth."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_unconfigure() -> None:
    """Removes the folders made above, also after a session that ran no test."""
    shutil.rmtree(_HF_HOME, ignore_errors=True)
    shutil.rmtree(_COMPILED, ignore_errors=True)
