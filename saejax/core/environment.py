"""environment.json: enough about a run's machine, versions and commands to run it again, and nothing about whose it is.

Its keys are those of the last session; `sessions` lists all of them, the oldest first, this one included.
"""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from saejax.core.errors import DataError
from saejax.core.files import read_json, write_json

# What computes, and what reads and writes: a run depends on each.
_PACKAGES = (
    *("saejax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "numpy", "ml-dtypes", "chex"),
    *("transformers", "tokenizers", "safetensors", "huggingface-hub", "datasets", "torch", "ml-collections", "absl-py"),
)

# What changes numbers or devices without standing on the command line.
_VARIABLES = (
    *("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION"),
    *("JAX_DEFAULT_PRNG_IMPL", "JAX_THREEFRY_PARTITIONABLE", "XLA_PYTHON_CLIENT_MEM_FRACTION", "NPROC"),
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", "SAEJAX_KEEP_MEMORY", "SAEJAX_COMPILED"),
)


def session_record(**more: Any) -> dict[str, Any]:
    """Versions, devices, git commit and command line of this process, and `more`. No names of machine or user."""
    script = sys.argv[0]
    if os.path.isabs(script) and not (near := os.path.relpath(script)).startswith(os.pardir):
        script = near  # the way to the current folder is nobody's business
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "devices": [str(d.device_kind) for d in jax.devices()],
        "processes": jax.process_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "git": _git_commit(),
        "command": [os.path.basename(sys.executable), script, *sys.argv[1:]],
        **more,
    }


def append_session(path: str | os.PathLike[str], session: dict[str, Any]) -> None:
    """Add a session to environment.json, made by `session_record`; a file that is damaged is begun anew."""
    sessions: list[Any] = []
    if Path(path).is_file():
        try:
            old = read_json(path)
            sessions = old["sessions"] if isinstance(old, dict) and isinstance(old.get("sessions"), list) else []
        except DataError:  # a record is no reason not to train
            sessions = []
    write_json(path, session | {"sessions": [*sessions, session]})


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Commit of the source tree saejax runs from, with `+` when it has uncommitted changes; None outside git.

    None too for an installed saejax in an environment below somebody's repository: that commit is not ours.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        ours = _git(here, "ls-files", "--error-unmatch", os.path.basename(__file__)).returncode == 0
        commit, status = (_git(here, *words) for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "-uno")))
    except (OSError, subprocess.TimeoutExpired):
        return None
    return commit.stdout.strip() + ("+" if status.stdout.strip() else "") if ours and commit.returncode == 0 else None


def _git(folder: str, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, timeout=10, check=False)
