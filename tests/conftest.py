"""What every test runs on: eight virtual CPU devices, no network, no caches of this machine.

The environment is set before jax is imported, because jax reads it once; a test module must therefore not be
imported by anything that imported jax earlier (pytest imports this file first).
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import shutil
import sys
import tempfile

import pytest

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could set eight CPU devices: look for a plugin")

N_DEVICES = 8

_HF_HOME = tempfile.mkdtemp(prefix="saejax-tests-hf-")
# Tests compile the same small programs again and again, and so do the processes that they start.
_COMPILED = tempfile.mkdtemp(prefix="saejax-tests-xla-")
# Where servers that tests start keep their indexes of features.
_INDEXES = tempfile.mkdtemp(prefix="saejax-tests-indexes-")

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
    SAEJAX_INDEXES=_INDEXES,
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
)
for _name in (
    "HF_HUB_CACHE",
    "HF_TOKEN",
    "HUGGINGFACE_HUB_CACHE",
    "JAX_ENABLE_X64",
):
    os.environ.pop(_name, None)
os.environ.update(
    JAX_COMPILATION_CACHE_DIR=_COMPILED,
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.1",
)

import jax  # noqa: E402 - only now

jax.config.update("jax_numpy_rank_promotion", "raise")


# Files of more than a dozen CPU seconds, the longest first, as measured. A process that takes one of them last and
# alone leaves the others without work, and `make check` leaves them out. A file that is not named here counts as
# quick: --durations shows what has grown.
_SLOW = (
    *("pipeline", "conformance", "stages", "peers", "warm_start", "docs", "evaluate_any", "many_processes"),
    *("equality", "sweep", "coders", "first_latents", "wheel", "pairs", "sharded_selection", "torch_hooks", "planted"),
    *("study", "study_qwen", "recipe", "stream", "recovery", "resample", "foreign_stores", "train", "evals", "losses"),
    *("optim", "rows", "interventions", "generation", "store_tools", "model_configs", "coder_config", "configs"),
    *("hooks", "serve_texts", "guard", "families", "lm", "analysis", "graph", "retries"),
    *("config_fuzz", "parts", "store_faults", "explain", "bench", "profile", "kernels", "dead", "lowering", "segments"),
    *("object_store", "preflight", "jobs", "serve_client", "serve_page", "serve_features_page", "serve_jobs"),
    *("serve_live", "serve_guard", "prefix_command", "prefix_parts"),
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files are marked so, and come first."""
    places = {f"test_{name}": place for place, name in enumerate(_SLOW)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    for item in items:
        if item.path.stem in places:
            item.add_marker("slow")


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
    shutil.rmtree(_INDEXES, ignore_errors=True)
