"""notes.jsonl: the last row of an id counts, an answered note survives kill -9, and many may write at a time."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny import one_device

from saejax.core.errors import BusyError, ConfigError, DataError
from saejax.core.lease import lease
from saejax.serve.features import notes
from saejax.serve.features.notes import NOTES, read_notes, save_note

# Saves notes of rising numbers, and says each number when it is saved.
_SAVING = """
import sys
from pathlib import Path
from saejax.serve.features.notes import save_note
first = int(sys.argv[2])
for number in range(first, first + 100_000):
    save_note(Path(sys.argv[1]), number, f"label {number}", "x" * 3000)
    print(number, flush=True)
"""


def test_the_last_row_of_a_feature_counts(tmp_path: Path) -> None:
    assert read_notes(tmp_path / "nothing") == {}
    rng, want = random.Random(1), {}
    for step in range(200):
        feature, label = rng.randrange(20), rng.choice(["", "über <b>", "two"])
        saved = save_note(tmp_path, feature, label, "" if step % 3 else f"line\n{step}")
        assert saved["label"] == label and abs(saved["time"] - time.time()) < 60
        want.pop(feature, None)
        if saved["label"] or saved["note"]:
            want[feature] = saved
    assert read_notes(tmp_path) == want
    assert list(read_notes(tmp_path)) == list(want)
    assert len((tmp_path / NOTES).read_bytes().splitlines()) == 200


def test_a_note_is_of_a_dictionary_and_not_of_its_folder(tmp_path: Path) -> None:
    """`--redo` may put another dictionary into the folder, whose feature 7 stands for something else."""
    save_note(tmp_path, 3, "before any evaluation", "")
    for dictionary in ("a" * 64, "b" * 64):
        (tmp_path / "eval.json").write_text(json.dumps({"sha256": dictionary}))
        assert list(read_notes(tmp_path)) == [3]
        save_note(tmp_path, 7, f"of {dictionary[0]}", "")
    save_note(tmp_path, 7, "", "")
    assert list(read_notes(tmp_path)) == [3]
    (tmp_path / "eval.json").write_text(json.dumps({"sha256": "a" * 64}))
    assert read_notes(tmp_path)[7]["label"] == "of a"
    (tmp_path / "eval.json").write_text("null")  # damaged: of no dictionary that is known
    assert list(read_notes(tmp_path)) == [3]


@pytest.mark.parametrize("torn", [b'{"id": 5, "label": "to', b'{"id": 5, "label": "\xc3', b"\0\0\0"])
def test_a_torn_last_line_is_ignored_and_mended(torn: bytes, tmp_path: Path) -> None:
    save_note(tmp_path, 1, "one", "")
    with (tmp_path / NOTES).open("ab") as handle:
        handle.write(torn)
    assert list(read_notes(tmp_path)) == [1]
    save_note(tmp_path, 2, "two", "")
    assert list(read_notes(tmp_path)) == [1, 2] and torn not in (tmp_path / NOTES).read_bytes()


def test_a_last_line_without_its_end_stays(tmp_path: Path) -> None:
    save_note(tmp_path, 1, "one", "")
    path = tmp_path / NOTES
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert list(read_notes(tmp_path)) == [1]
    save_note(tmp_path, 2, "two", "")
    assert list(read_notes(tmp_path)) == [1, 2]


@pytest.mark.parametrize("line", ["no JSON", "[]", '{"id": true, "label": "", "note": "", "time": 1}', '{"id": 1}'])
def test_another_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    save_note(tmp_path, 1, "one", "")
    with (tmp_path / NOTES).open("a") as handle:
        handle.write(line + "\n")
    save_note(tmp_path, 2, "two", "")
    with pytest.raises(DataError, match=rf"{NOTES}, line 2 is damaged.*Remove that line"):
        read_notes(tmp_path)


def test_what_is_too_long_is_refused(tmp_path: Path) -> None:
    save_note(tmp_path, 1, "l" * 200, "n" * 10_000)
    for given, match in (
        ((1, "l" * 201, ""), "The label has 201 characters"),
        ((1, "", "n" * 10_001), "The note has 10,001 characters"),
        ((1, "two\nlines", ""), "several lines"),
        ((-1, "", ""), "no feature"),
        ((1 << 31, "", ""), "no feature"),
    ):
        with pytest.raises(ConfigError, match=match):
            save_note(tmp_path, *given)
    assert list(read_notes(tmp_path)) == [1]


def test_a_training_that_holds_the_run_keeps_nobody_from_a_note(tmp_path: Path) -> None:
    with lease(tmp_path):
        save_note(tmp_path, 1, "one", "")
    assert list(read_notes(tmp_path)) == [1]


def test_whoever_holds_the_file_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "_PATIENCE", 0.1)
    with notes._held(tmp_path), pytest.raises(BusyError, match="being written by others"):
        save_note(tmp_path, 1, "one", "")
    save_note(tmp_path, 1, "one", "")


def test_threads_and_processes_write_whole_lines(tmp_path: Path) -> None:
    with _saving(tmp_path, 1000) as process, ThreadPoolExecutor(4) as pool:
        _answered(process, 3)
        list(pool.map(lambda number: save_note(tmp_path, number, f"label {number}", ""), range(60)))
        process.kill()
        process.wait()
        process.communicate()
    found = read_notes(tmp_path)
    assert set(range(60)) <= set(found) and all(f"label {n}" == note["label"] for n, note in found.items())


@pytest.mark.ci
def test_every_answered_note_is_there_after_kill_9(tmp_path: Path) -> None:
    rng, saved = random.Random(7), set()
    for round_ in range(6):
        with _saving(tmp_path, 1000 * round_) as process:
            said = _answered(process, 1)
            time.sleep(rng.uniform(0.0, 0.05))
            os.kill(process.pid, signal.SIGKILL)
            said += process.communicate()[0]
        # A line that was not said to its end may be of a note that was saved.
        saved |= {int(number) for number in said.split("\n")[:-1]}
        assert saved <= set(read_notes(tmp_path))
    save_note(tmp_path, 999_999, "last", "")
    found = read_notes(tmp_path)
    assert saved | {999_999} <= set(found) and len(saved) >= 6
    for line in (tmp_path / NOTES).read_bytes().splitlines():
        assert json.loads(line)["time"] > 0


def _saving(folder: Path, first: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", _SAVING, str(folder), str(first)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=one_device())


def _answered(process: subprocess.Popen[str], count: int) -> str:
    assert process.stdout is not None
    return "".join(process.stdout.readline() for _ in range(count))
