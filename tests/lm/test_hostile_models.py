"""Model folders made to do harm: refused by name, soon, before memory is taken; no pickle, no foreign code."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import ROOT, one_device

from benchmarks.faults import models
from saejax.core.errors import DataError
from saejax.core.files import read_bounded


def opened(folder: Path, backend: str) -> dict[str, dict[str, Any]]:
    """{case: what the process said of it}, every case of benchmarks.faults.models in one process."""
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults.models", str(folder), backend],
        cwd=ROOT,
        env=one_device(),
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    results = [json.loads(line) for line in process.stdout.splitlines() if line.startswith('{"case"')]
    return {result["case"]: result for result in results}


@pytest.mark.parametrize("backend", ["jax", pytest.param("torch", marks=pytest.mark.soak)])
def test_every_hostile_folder_is_refused_without_taking_memory(backend: str, tmp_path: Path) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
    results = opened(tmp_path, backend)
    assert results.keys() == models.CASES.keys()
    assert [result for result in results.values() if not models.refused(result)] == []


def test_a_file_of_unknown_length_is_read_to_its_limit_only(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 100)
    assert read_bounded(tmp_path / "f", 100) == b"x" * 100
    with pytest.raises(DataError, match="f has 100 bytes; such a file has at most 99"):
        read_bounded(tmp_path / "f", 99)
    # Its size is given as 0, whatever is in it.
    with pytest.raises(DataError, match="such a file has at most 3"):
        read_bounded("/proc/self/status", 3)
    with pytest.raises(DataError, match="is not a file"):
        read_bounded("/dev/zero", 10)
