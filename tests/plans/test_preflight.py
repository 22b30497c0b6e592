"""`saejax preflight`: what passes, what fails with its remedy, and that nothing stays behind."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import jax
import pytest
from tiny import one_device, planted_experiment, replaced, tiny_experiment
from tiny.decoders import saved
from tiny.families import random_model

from saejax.app.experiment import Experiment
from saejax.app.workspace import Workspace
from saejax.core.amounts import size, span
from saejax.core.errors import ConfigError
from saejax.core.files import write_json
from saejax.plans import preflight, trial
from saejax.plans.preflight import Check, checks_table, is_out_of_memory, run_preflight
from saejax.store import StoreLayout

ROOM = ("memory", "disk, read", "free space, runs")


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The disk is tried, but the verdict is on these speeds (bytes/s), not on how busy the machine of the tests is."""
    speeds = {"write": 1e9, "read": 1e9}

    def tried(*args: Any) -> tuple[float, float]:
        assert min(trial.disk_speed(*args)) > 0
        return speeds["write"], speeds["read"]

    monkeypatch.setattr(preflight, "disk_speed", tried)
    return speeds


@dataclasses.dataclass(frozen=True)
class Stage:
    """An estimate as the plan gives it."""

    stage: str
    device_bytes: float = 3e9
    host_bytes: float = 2e9
    disk_bytes: float = 5e9
    seconds: float = 7200.0


def found(e: Experiment, capsys: pytest.CaptureFixture[str], *estimates: Stage) -> tuple[int, dict[str, str], str]:
    """(exit code, {check: its line}, the whole table)."""
    capsys.readouterr()
    code = run_preflight(Workspace(e), estimates)
    text = capsys.readouterr().out.partition("\n\n")[2]
    lines = [line.strip() for line in text.splitlines()[2:] if line.startswith("  ") and not line.startswith("   ")]
    return code, {line.partition("  ")[0]: line for line in lines}, text


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def easy(e: Experiment, **gates: Any) -> Experiment:
    """With a bar for R2 that a few steps reach."""
    return dataclasses.replace(e, gates=dataclasses.replace(e.gates, **({"r2": 0.0} | gates)))


@pytest.mark.ci
def test_all_stages_are_tried_and_nothing_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    e = easy(tiny_experiment(tmp_path))
    code, lines, text = found(e, capsys, Stage("capture"), Stage("train"))
    assert code == 0 and "preflight: ready" in text and files(tmp_path) == []
    wanted = ["versions", "devices", "settings", "free space, stores", "one prompt, one layer", "ten prompts"]
    assert list(lines) == [*wanted, "disk, write", "training", "training, speed", *ROOM]
    assert all(line.endswith("pass") for line in lines.values())
    assert (
        "5 GB" in lines["free space, stores"] and "2 h" in lines["training, speed"] and "device 3 GB" in lines["memory"]
    )
    assert "tokens/s" in lines["ten prompts"] and "R2 " in lines["training"] and "R2 > 0" in lines["training"]


def test_a_disk_slower_than_the_model_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], disk: dict[str, float]
) -> None:
    disk["write"] = 1.0
    code, lines, text = found(easy(tiny_experiment(tmp_path)), capsys)
    assert code == 1 and lines["disk, write"].endswith("FAIL") and "The capture would wait for the disk" in text
    assert "1 B/s" in lines["disk, write"] and lines["training"].endswith("not tried")


def test_a_store_that_is_there_is_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a language model, and with a bar that no coder reaches."""
    e = planted_experiment(tmp_path, "planted")
    before = files(tmp_path)
    code, lines, text = found(easy(e, r2=2.0), capsys)
    assert code == 1 and "ten prompts" not in lines and lines["training"].endswith("FAIL")
    assert "After 40 of 40 steps R2 is not above gates.r2. Raise coder.k" in text
    assert "preflight: training: not ready" in text
    assert files(tmp_path) == before


def test_what_cannot_be_is_said_before_anything_is_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    e = easy(planted_experiment(tmp_path, "planted"))
    many = replaced(e, "parallel", mesh=(64, 1))
    code, lines, text = found(many, capsys)
    assert code == 1 and lines["devices"].endswith("FAIL") and "parallel.mesh=64,1 needs 64 devices" in text
    assert lines["training"].endswith("not tried")
    odd = replaced(replaced(e, "parallel", mesh=(1, 8)), "coder", d_sae=60)
    code, lines, text = found(odd, capsys)
    assert code == 1 and lines["settings"].endswith("FAIL") and "60" in text
    missing = replaced(tiny_experiment(tmp_path), "lm", model=str(tmp_path / "nowhere"))
    code, lines, text = found(missing, capsys)
    assert code == 1 and lines["settings"].endswith("FAIL") and "nowhere" in text


def test_a_full_disk_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    e = easy(planted_experiment(tmp_path, "planted"))
    little = types.SimpleNamespace(total=10**9, used=10**9 - 1000, free=1000)
    monkeypatch.setattr(preflight, "shutil", types.SimpleNamespace(disk_usage=lambda path: little))
    code, lines, text = found(e, capsys)
    assert code == 1 and lines["free space, runs"].endswith("FAIL") and "lower train.keep_checkpoints" in text
    # 3,000 and 600 rows of two hook points of width 128 at two bytes, and 12 bytes of tokens.
    check = preflight._stores_space(Workspace(tiny_experiment(tmp_path / "other")), None)
    assert not check.passed and "capture.dtype=int8" in check.remedy
    rows = (3000 + 600) * (2 * 128 * 2 + 12)
    assert rows < float(check.needed.split()[0]) * 1e6 < 1.1 * rows, check.needed


def test_another_version_than_the_run_s(tmp_path: Path) -> None:
    e = tiny_experiment(tmp_path)
    write_json(e.run_dir / "environment.json", {"packages": {"jax": "0.0.1", "jaxlib": jax.__version__}})
    check = preflight._versions(e)
    assert (
        check.passed is False and "was begun with jax 0.0.1: install" in check.remedy and "jaxlib" not in check.remedy
    )


def test_no_memory_left_is_a_check_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trying = preflight._Preflight(Workspace(tiny_experiment(tmp_path)), {})

    def full() -> Check:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    assert not trying.add("training", full) and "train.batch_size" in trying.checks[0].remedy
    assert is_out_of_memory(RuntimeError("CUDA out of memory.")) and is_out_of_memory(MemoryError())

    def broken() -> Check:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        trying.add("training", broken)


@pytest.mark.parametrize("url", [False, True])
def test_the_disk_is_tried_and_left_as_it_was(tmp_path: Path, url: bool) -> None:
    where = tmp_path / "not" / "there"
    if url:
        where.mkdir(parents=True)
    with trial.temporary(f"file://{where}" if url else str(where)) as folder:
        wrote, read = trial.disk_speed(folder, {"h": 16384}, StoreLayout(1024, 64))
        assert wrote > 1e5 and read > 1e5
        assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) > 60e6
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert url or files(tmp_path) == []
    with pytest.raises(KeyboardInterrupt), trial.temporary(str(where)):
        raise KeyboardInterrupt
    assert url or files(tmp_path) == []


def test_a_signal_during_the_training_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training's own handler takes Ctrl-C; the trial is then over, and nothing of it stays."""
    e = easy(planted_experiment(tmp_path, "planted"), r2=2.0)
    before, unsaved = files(tmp_path), trial.Unsaved

    def interrupted(writers: list[Any]) -> Any:
        looks = writers[0]
        write = looks.write
        looks.write = lambda step, row: (write(step, row), os.kill(os.getpid(), signal.SIGINT) if step == 3 else None)
        return unsaved(writers)

    monkeypatch.setattr(trial, "Unsaved", interrupted)
    assert run_preflight(Workspace(e)) == 75
    assert files(tmp_path) == before


def test_a_table_lines_up_and_says_what_to_do() -> None:
    checks = [Check("a", "1 GB", True, "2 GB"), Check("long name", "0", False, remedy="Do this.\nThen that.")]
    text = checks_table(checks)
    assert text.splitlines()[2:] == [
        "  a          1 GB   2 GB    pass",
        "  long name  0              FAIL",
        "      Do this.",
        "      Then that.",
    ]
    assert "plan" not in text and "plan" in checks_table([Check("a", "1", None, planned="2")])
    assert [size(n) for n in (0, 999, 1234, 1.5e9, 9.99e13)] == ["0 B", "999 B", "1.23 kB", "1.5 GB", "99.9 TB"]
    assert [span(s) for s in (1.234, 90, 600, 36000)] == ["1.23 s", "90 s", "10 min", "10 h"]


def test_several_processes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="saejax preflight"):
        run_preflight(Workspace(replaced(tiny_experiment(tmp_path), "parallel", processes="0/2")))


@pytest.mark.ci
def test_a_model_in_pytorch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="models in PyTorch need it: pip install 'saejax[torch]'")
    pytest.importorskip("transformers")
    (tmp_path / "model").mkdir()
    lm = {"model": str(saved(random_model("qwen2"), tmp_path / "model")), "backend": "torch"}
    sections: Any = {"lm": lm, "text": {"context_length": 32}, "capture": {"hook_points": ("blocks.1.resid_post",)}}
    e = easy(tiny_experiment(tmp_path / "work", **sections))
    _, lines, text = found(e, capsys)
    # Of random weights there may be nothing to learn.
    assert {name for name, line in lines.items() if not line.endswith("pass")} <= {"training"}, text
    assert "R2 " in lines["training"] and files(tmp_path / "work") == []


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_moment_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "saejax", "preflight", "--config=quickstart:tiny", "--config.gates.r2=2"]
    for seconds in (0, 5, 10, 15):
        with subprocess.Popen(command, cwd=tmp_path, env=one_device(), stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline()  # before it, Python itself is at its start
            time.sleep(seconds)
            os.kill(process.pid, number)
            process.communicate(timeout=120)
        assert process.returncode in (75, 130, 1)
        assert files(tmp_path) == []
