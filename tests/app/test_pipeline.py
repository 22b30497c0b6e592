"""The whole way, in real processes: the first command, the second, kill -9, SIGTERM, the README's Python."""

import hashlib
import json
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from tiny import ROOT, SMALLER, one_device

import saejax
from saejax.checkpoints import Checkpoints
from saejax.training import EXIT_PREEMPTED

RUN, STORE = "runs/quickstart-tiny", "stores/quickstart-tiny"


def start(folder: Path, stage: str = "pipeline", *extra: str) -> subprocess.Popen[str]:
    """A launch script in a process of its own, with one device, its runs and stores in `folder`."""
    command = [sys.executable, "-m", f"launch.{stage}", "--config=configs/quickstart.py:tiny", *SMALLER, *extra]
    folders = [f"--config.runs_dir={folder / 'runs'}", f"--config.stores_dir={folder / 'stores'}"]
    return subprocess.Popen(
        [*command, *folders], cwd=ROOT, env=one_device(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    code, output = finish(start(folder))
    assert code == 0, output
    return folder, output


def test_the_first_command_works_and_ends_with_the_table(undisturbed: tuple[Path, str]) -> None:
    folder, output = undisturbed
    for row in (
        "L0",
        "FVE",
        "loss recovered",
        "dead features",
        "capture train",
        "train",
        "evaluate",
        "took",
        "gates passed",
    ):
        assert re.search(rf"^  {row} ", output, re.M), (row, output)
    assert re.search(r"^  took +\S+ (s|min), \S+ (ms|s|min) of it compiling$", output, re.M), output
    assert "6 of 6" in output
    assert (folder / RUN / "report.html").stat().st_size > 50_000
    files = {path.name for path in (folder / RUN).iterdir()}
    assert files >= {"config.json", "environment.json", "metrics.jsonl", "checkpoints", "eval.json", "report.html"}
    environment = json.loads((folder / RUN / "environment.json").read_text())
    assert environment["packages"]["jax"] and environment["command"][1].endswith("pipeline.py")


def test_the_second_command_says_that_all_is_done_and_changes_nothing(undisturbed: tuple[Path, str]) -> None:
    folder, _ = undisturbed
    kept = [p for p in folder.rglob("*") if p.is_file() and p.name not in (".lock", "config.json", "environment.json")]
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in kept}
    code, output = finish(start(folder))
    assert code == 0, output
    for stage in ("capture train", "capture heldout", "train", "evaluate", "report"):
        assert re.search(rf"^{stage}: already", output, re.M), (stage, output)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in kept} == before


def content(folder: Path) -> dict[str, str]:
    """Hashes of all that must not depend on interruptions: stores, final parameters and moments, results."""
    hashes = {}
    for path in sorted((folder / STORE).rglob("*")):
        if path.is_file() and path.name not in (".lock", "stages.json"):
            hashes[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    with Checkpoints(folder / RUN / "checkpoints") as checkpoints:
        last = checkpoints.latest()
        assert last is not None
        items, _ = checkpoints.restore_numpy(last, names=("params", "opt_state", "stats"))
    hashes["state"] = hashlib.sha256(repr(_arrays(items)).encode()).hexdigest()
    evaluation = json.loads((folder / RUN / "eval.json").read_text())
    hashes["eval"] = json.dumps([evaluation["step"], evaluation["metrics"], evaluation["density"]])
    hashes["features"] = hashlib.sha256((folder / RUN / "features.sqlite").read_bytes()).hexdigest()
    return hashes


def _arrays(tree: object) -> object:
    if isinstance(tree, dict):
        return {name: _arrays(value) for name, value in sorted(tree.items())}
    if isinstance(tree, list | tuple):
        return [_arrays(value) for value in tree]
    return np.asarray(tree).tobytes()


def _rows(folder: Path) -> int:
    path = folder / RUN / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


# Moments in the life of a pipeline, by what lies on disk when it dies.
MOMENTS: dict[str, Callable[[Path], bool]] = {
    "the first shard is committed": lambda f: (f / STORE / "train/commits/000000.json").is_file(),
    "training has begun": lambda f: _rows(f) >= 3,
    "a checkpoint is being written": lambda f: any((f / RUN / "checkpoints").glob("*tmp*")),
    "training has half done": lambda f: _rows(f) >= 9,
    "evaluation is written": lambda f: (f / RUN / "eval.json").is_file(),
}


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param(("a checkpoint is being written",), marks=pytest.mark.ci),
        pytest.param(("the first shard is committed", "a checkpoint is being written"), marks=pytest.mark.soak),
        pytest.param(MOMENTS, marks=pytest.mark.soak),
    ],
    ids=["one", "two", "all"],
)
def test_kill_9_at_any_stage_and_the_same_command_finishes_with_the_same_result(
    undisturbed: tuple[Path, str], tmp_path: Path, moments: Iterable[str]
) -> None:
    for moment in moments:
        process = start(tmp_path)
        while not MOMENTS[moment](tmp_path):
            assert process.poll() is None, f"it ended before: {moment}\n{process.communicate()[0]}"
            time.sleep(0.002)
        process.kill()
        process.communicate()
    code, output = finish(start(tmp_path))
    assert code == 0, output
    expected, found = content(undisturbed[0]), content(tmp_path)
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


@pytest.mark.soak
def test_kill_9_at_random_moments(undisturbed: tuple[Path, str], tmp_path: Path) -> None:
    """20 kills, each 2 to 14 seconds after the start, a new folder whenever a pipeline got through before its kill."""
    moments = random.Random(20)
    folder, kills, finished = tmp_path / "0", 0, 0
    while kills < 20:
        process = start(folder)
        try:
            process.communicate(timeout=moments.uniform(2, 14))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
            continue
        assert process.returncode == 0
        assert content(folder) == content(undisturbed[0])
        finished += 1
        folder = tmp_path / str(finished)
    code, output = finish(start(folder))
    assert code == 0, output
    assert content(folder) == content(undisturbed[0])


@pytest.mark.ci
def test_sigterm_ends_training_soon_with_its_own_code_and_everything_saved(
    undisturbed: tuple[Path, str], tmp_path: Path
) -> None:
    shutil.copytree(undisturbed[0] / "stores", tmp_path / "stores")
    # Longer than the pipeline's, so that the signal cannot come too late.
    process = start(tmp_path, "train", "--config.train.tokens=10000000")
    while _rows(tmp_path) < 4:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    told = time.monotonic()
    code, output = finish(process)
    assert code == EXIT_PREEMPTED == 75, output
    assert time.monotonic() - told < 10
    stopped = re.search(r"stopped by a signal after step ([\d,]+), saved", output)
    assert stopped, output
    with Checkpoints(tmp_path / RUN / "checkpoints") as checkpoints:
        assert checkpoints.latest() == int(stopped[1].replace(",", ""))


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        pytest.param(signal.SIGINT, 130, "interrupted", marks=pytest.mark.soak),
        pytest.param(signal.SIGUSR1, 75, "SIGUSR1", marks=pytest.mark.ci),
    ],
)
def test_a_signal_during_capture_says_how_to_go_on(
    tmp_path: Path, number: signal.Signals, code: int, said: str
) -> None:
    process = start(tmp_path, "capture", "--config.capture.tokens=2000000")
    while not (tmp_path / STORE / "train/commits/000000.json").is_file():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)
    process.send_signal(number)
    found, output = finish(process)
    assert found == code and f"{said}; the same command continues" in output and "Traceback" not in output, output


@pytest.mark.ci
def test_a_failed_gate_makes_evaluation_exit_with_1(undisturbed: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(undisturbed[0], tmp_path / "copy")
    code, output = finish(start(tmp_path / "copy", "evaluate", "--config.gates.zero_fraction=0.9999", "--redo"))
    assert (
        code == 1 and re.search(r"FAIL  0\.9\d+ > 0.9999  Latents that are zero", output) and "Lower coder.k" in output
    ), output


def test_the_readme_s_python_runs(
    undisturbed: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    code = next(block for block in blocks if "saejax.load(" in block)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart").symlink_to(undisturbed[0] / RUN)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebook.py").write_text("import saejax\n" + code)
    names = runpy.run_path(str(tmp_path / "notebook.py"))
    sae, latents = names["sae"], names["latents"]
    assert isinstance(sae, saejax.TrainedCoder)
    assert set(sae.params) == {"W_enc", "b_enc", "W_dec", "b_dec"} and sae.config.coder.preset == "topk"
    x, x_hat = np.asarray(names["x"]), np.asarray(names["x_hat"])
    assert np.asarray(latents).shape == (len(x), 1024) and x_hat.shape == x.shape
    # All but the bos token, whose activation no SAE is trained on, are reconstructed.
    error = np.square(x - x_hat)[1:].sum() / np.square(x)[1:].sum()
    assert error < 0.5
