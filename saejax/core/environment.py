"""environment.json: enough about a run's machine, versions and command to run it again."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from typing import Any

import jax

_PACKAGES = (
    "saejax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "tensorstore",
    "transformers",
    "ml-collections",
    "numpy",
)


def describe() -> dict[str, Any]:
    """Versions, devices, git commit and command line of this process."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "devices": [str(d.device_kind) for d in jax.devices()],
        "processes": jax.process_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "git": _git_commit(),
        "command": [os.path.basename(sys.executable), *sys.argv],
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Commit of the source tree saejax runs from, with `+` when it has uncommitted changes; None outside git."""
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        commit, status = (_git(here, *words) for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "-uno")))
    except (OSError, subprocess.TimeoutExpired):
        return None
    return commit.stdout.strip() + ("+" if status.stdout.strip() else "") if commit.returncode == 0 else None


def _git(folder: str, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, timeout=10, check=False)
