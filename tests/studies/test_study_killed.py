"""Studies in processes of their own, killed in every phase and run again."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest
from tiny import SMALLER, one_device

COMMAND = (sys.executable, "-u", "-m", "saejax", "study", "--config=study_quickstart:tiny", *SMALLER)
KINDS = (".csv", ".html", ".json", ".jsonl")
# What a run says when it is in a phase, and the longest that it is let go on from there.
PHASES = (
    *(("study: phase 0", 0.3), ("study: phase 1", 1.0), ("study: phases 2", 2.0), ("capture heldout", 2.0)),
    *(("train: clt", 8.0), ("gates:", 3.0), ("study: phase 4", 5.0), ("graphs of quote", 0.0)),
    *(("study: phase 5", 3.0), ("interventions of bracket", 1.0), ("study: phase 6", 0.7)),
)


def start(folder: Path) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(COMMAND, cwd=folder, env=one_device(), **pipes)  # type: ignore[call-overload, no-any-return]


def until(output: IO[str], word: str) -> str:
    """What was said up to the line that begins with `word`; all of it where there is none."""
    said = ""
    for line in output:
        said += line
        if line.startswith(word):
            break
    return said


def results(folder: Path) -> dict[str, bytes]:
    study = folder / "runs" / "study-quickstart-tiny" / "study"
    return {str(p.relative_to(study)): p.read_bytes() for p in sorted(study.rglob("*")) if p.suffix in KINDS}


def written(folder: Path) -> dict[Path, int]:
    """When each graph, and the last checkpoint of a training, was written."""
    run = folder / "runs" / "study-quickstart-tiny"
    found = [*run.glob("study/graphs/*/*.npz"), *run.glob("checkpoints/128/meta/metadata")]
    return {path: path.stat().st_mtime_ns for path in found}


@pytest.mark.soak
def test_kills_in_every_phase_leave_no_trace(tmp_path: Path) -> None:
    """SIGKILL at a random moment of each phase; tables and pages are bitwise those of an undisturbed run."""
    rng, folder = random.Random(16), tmp_path / "killed"
    with start(tmp_path / "whole") as whole:
        said, _ = whole.communicate(timeout=600)
    assert "study: runs/study-quickstart-tiny/study/study.html" in said, said[-2000:]
    killed = []
    for word, longest in PHASES:
        before, rows = written(folder), results(folder)
        with start(folder) as process:
            assert process.stdout is not None
            said = until(process.stdout, word)
            time.sleep(rng.uniform(0, longest))
            process.send_signal(signal.SIGKILL)
        killed.append((word, process.returncode))
        after = written(folder)
        assert {path: after.get(path) for path in before} == before, "a graph or a training was made twice"
        now = results(folder)
        for name, raw in rows.items():
            if name.endswith(".csv"):  # but for a block that was cut
                kept = raw[: raw.rfind(b"\n") + 1]
                assert now[name].startswith(kept) or kept.startswith(now[name]), name
    assert sum(code == -signal.SIGKILL for _, code in killed) >= len(PHASES) - 2, killed
    with start(folder) as last:
        said, _ = last.communicate(timeout=600)
    assert last.returncode == whole.returncode, said[-2000:]
    ours, theirs = results(folder), results(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


@pytest.mark.soak
@pytest.mark.parametrize("word", ["study: phase 1", "study: phase 4"])
def test_ctrl_c_says_how_to_go_on(word: str, tmp_path: Path) -> None:
    with start(tmp_path / "one") as process:
        assert process.stdout is not None
        until(process.stdout, word)
        os.kill(process.pid, signal.SIGINT)
        said = process.stdout.read()
    assert process.returncode == 130
    assert said.rstrip().splitlines()[-1] == "interrupted; the same command continues where it was"
    assert "Traceback" not in said
