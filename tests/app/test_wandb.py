"""Weights & Biases beside metrics.jsonl: rows, settings and ids of runs, groups, and failures that end nothing."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import planted_experiment, replaced, tiny_experiment

import saejax
from saejax.app.experiment import Experiment
from saejax.app.stages import run_train
from saejax.app.sweep.members import groups, members
from saejax.app.sweep.run import run_sweep
from saejax.app.training_folders import RunFolder, SweepFolder
from saejax.app.workspace import Workspace
from saejax.checkpoints import Checkpoints
from saejax.core.errors import EXIT_PREEMPTED, ConfigError, DataError
from saejax.core.metrics import Writer
from saejax.core.wandb_runs import WandbRuns, refuse_no_login
from saejax.fit.coders import Coders
from saejax.fit.learner import Ready
from saejax.fit.train import train
from saejax.parallel import Process
from saejax.runs import Run
from saejax.training import Setup

X = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
SHORT: dict[str, Any] = {"d_sae": 16, "batch_size": 64, "tokens": 12 * 64, "log_every": 1, "monitor": False}


class FakeRun:
    """A run of `FakeWandb`: its arguments, the rows it was given, and the code it ended with."""

    offline, disabled, url = False, False, "https://wandb.test/run"

    def __init__(self, wandb: "FakeWandb", about: dict[str, Any]):
        self.about, self.rows, self.ended, self._wandb = about, list[dict[str, Any]](), -1, wandb

    def log(self, row: dict[str, Any], step: int) -> None:
        self._wandb.on_log(step)
        self.rows.append({"step": step, **row})

    def finish(self, exit_code: int) -> None:
        self.ended = exit_code


class FakeWandb(types.ModuleType):
    """As much of wandb as saejax calls; `on_init` and `on_log` may fail."""

    Settings = dict
    run = None

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[FakeRun] = []
        self.mode, self.logged_in = "online", True
        self.on_init: Callable[[], None] = lambda: None
        self.on_log: Callable[[int], None] = lambda step: None

    def setup(self) -> Any:
        return types.SimpleNamespace(settings=types.SimpleNamespace(mode=self.mode))

    def login(self, prompt: bool) -> bool:
        assert not prompt
        return self.logged_in

    def init(self, **about: Any) -> FakeRun:
        self.on_init()
        self.runs.append(FakeRun(self, about))
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return fake


def failing(*_: Any) -> None:
    raise RuntimeError("the network\nis gone")


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def opened(folder: RunFolder | SweepFolder, e: Experiment) -> Iterator[Mapping[str, Sequence[Writer]]]:
    """The writers of a session's members, as the loop is given them."""
    nothing: Any = None
    ready = Ready(e.train, Setup((), nothing, nothing), ())
    with Checkpoints(e.run.checkpoints) as stored, folder.recorded(ready, Process(), [stored]) as setup:
        yield setup.writers


def test_each_session_of_a_run_has_its_rows_settings_and_id(wandb: FakeWandb, tmp_path: Path) -> None:
    e = tiny_experiment(tmp_path, train={"wandb": True})
    for first_step in (1, 3):
        with opened(RunFolder(e, dict), e) as writers:
            for step in (first_step, first_step + 1):
                for writer in writers[""]:
                    writer.write(step, {"train/loss": 1.0 / step})
    first, second = wandb.runs
    assert first.about["id"] == second.about["id"] == e.run.wandb_id()
    assert first.rows + second.rows == rows_of(e.run_dir) and [row["step"] for row in second.rows] == [3, 4]
    assert [first.about[key] for key in ("resume", "project", "name", "group")] == ["allow", "saejax", e.name, None]
    assert first.about["config"] == json.loads(e.run.config.read_text()) and first.ended == 0
    with pytest.raises(ZeroDivisionError), opened(RunFolder(e, dict), e):
        raise ZeroDivisionError
    assert wandb.runs[-1].ended == 1


def test_members_of_a_sweep_are_one_group(wandb: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "paper")
    e = replaced(tiny_experiment(tmp_path, train={"wandb": True}), "sweep", lrs=(1e-3, 2e-3))
    plan = members(e)
    with opened(SweepFolder(e, plan, groups(plan), None, dict), e) as writers:
        assert list(writers) == ["lr0.001", "lr0.002"]
        for writer in writers["lr0.002"]:
            writer.write(1, {"train/lr": 2e-3})
    abouts = [run.about for run in wandb.runs]
    assert [about["name"] for about in abouts] == [f"{e.name}/lr0.001", f"{e.name}/lr0.002"]
    assert {(about["group"], about["project"]) for about in abouts} == {(e.name, "paper")}
    assert len({about["id"] for about in abouts}) == 2
    assert [about["config"]["train"]["lr"] for about in abouts] == [1e-3, 2e-3]
    assert [run.rows for run in wandb.runs] == [[], [{"step": 1, "train/lr": 2e-3}]]


@pytest.mark.ci
def test_a_run_that_resumes_goes_on_in_the_same_run_of_wandb(
    wandb: FakeWandb, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb.on_log = lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 5 else None
    with pytest.raises(SystemExit) as stopped:
        saejax.train(X, "topk", k=4, run=tmp_path / "mine", wandb=True, **SHORT)
    assert stopped.value.code == EXIT_PREEMPTED
    wandb.on_log = lambda step: None
    assert saejax.train(X, "topk", k=4, run=tmp_path / "mine", wandb=True, **SHORT).finished
    first, second = wandb.runs
    assert first.about["id"] == second.about["id"] == Run(tmp_path / "mine").wandb_id()
    assert [first.about[key] for key in ("resume", "project", "name", "group")] == ["allow", "saejax", "mine", None]
    assert first.about["config"] == json.loads((tmp_path / "mine" / "config.json").read_text())
    assert first.rows + second.rows == rows_of(tmp_path / "mine") and second.rows[0]["step"] > 1
    assert {"train/loss", "train/l0"} <= first.rows[0].keys() and first.ended == second.ended == 0
    assert capsys.readouterr().out.count("Weights & Biases: https://wandb.test/run") == 2


@pytest.mark.ci
def test_a_call_without_a_folder_is_a_new_run_each_time(wandb: FakeWandb, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        sae = saejax.train(X, "topk", k=4, wandb=True, heldout=X, validate_every=6, **SHORT)
        wandb.logged_in = False
        with pytest.raises(ConfigError, match="needs an API key"):
            saejax.train(X, "topk", k=4, wandb=True, **SHORT)
    (run,) = wandb.runs
    assert [run.about[key] for key in ("id", "dir")] == [None, None] and run.ended == 0
    assert run.about["config"]["coder"]["k"] == 4 and run.about["config"]["train"]["lr"] > 0
    assert {row["step"] for row in run.rows} == set(range(13)) and not list(tmp_path.iterdir())
    assert {"val/fve": sae.figures["val/fve"]}.items() <= next(
        row for row in run.rows[::-1] if "val/fve" in row
    ).items()


@pytest.mark.ci
def test_a_failure_is_one_line_and_ends_no_sweep(
    wandb: FakeWandb, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb.on_log = lambda step: failing() if step == 3 else None
    e = planted_experiment(tmp_path, "grid", tokens=4 * 128, log_every=1, wandb=True)
    assert run_sweep(Workspace(replaced(e, "sweep", lrs=(1e-3, 2e-3)))) == 0
    printed = capsys.readouterr().out
    assert printed.count("Weights & Biases has failed") == 1 and "metrics.jsonl has them all: the network is" in printed
    for run in wandb.runs:
        rows = rows_of(e.run_dir / run.about["name"].removeprefix("grid/"))
        assert rows[-1]["step"] == 4 and run.rows == [row for row in rows if row["step"] < 3]


def test_attempts_of_a_run_are_one_group(wandb: FakeWandb, tmp_path: Path) -> None:
    e = tiny_experiment(tmp_path, train={"wandb": True})
    again = e.within(e, "attempt-1")
    again.run_dir.mkdir(parents=True)
    e.run.attempts.write_text("{}")
    with opened(RunFolder(again, dict), again):
        pass
    assert [wandb.runs[0].about[key] for key in ("name", "group")] == [f"{e.name}/attempt-1", e.name]


def test_after_a_failure_nothing_more_is_tried(wandb: FakeWandb, tmp_path: Path) -> None:
    """A network that is not there takes a minute and a half to be missed, each time."""
    begun: list[str] = []
    wandb.on_init = lambda: (begun.append("one"), failing())[0]
    told: list[str] = []
    runs = WandbRuns(told.append)
    for name in ("first", "second"):
        writer = runs.open(tmp_path, name)
        writer.write(1, {"train/loss": 1.0})
        writer.close()
    assert len(begun) == len(told) == 1 and "\n" not in told[0] and told[0].endswith("all: the network is gone")


@pytest.mark.ci
def test_a_training_that_fails_ends_its_run_as_failed(wandb: FakeWandb, tmp_path: Path) -> None:
    e = planted_experiment(tmp_path, "bad", lr=1e30, max_skipped_steps=2, wandb=True)
    with pytest.raises(DataError):
        run_train(Workspace(e))
    assert [run.ended for run in wandb.runs] == [1]


@pytest.mark.ci
def test_of_several_processes_the_first_alone_writes(wandb: FakeWandb, tmp_path: Path) -> None:
    work = Workspace(planted_experiment(tmp_path, "second", tokens=2 * 128, wandb=True))
    outcome = train(Coders.alone(work), RunFolder(work.experiment, work.made_from), Process(1, 1), print)
    assert outcome is not None and outcome.finished
    assert not wandb.runs and not work.experiment.run.metrics.exists()


def test_no_key_is_refused_before_any_work(wandb: FakeWandb, tmp_path: Path) -> None:
    wandb.logged_in = False
    e = planted_experiment(tmp_path, "none", wandb=True)
    with pytest.raises(ConfigError, match=r"train\.wandb=True needs an API key: run `wandb login`.*WANDB_MODE=offline"):
        run_train(Workspace(e))
    assert not e.run.config.exists() and not wandb.runs
    for change in ({"mode": "offline"}, {"run": FakeRun(wandb, {})}, {"setup": failing}, {"logged_in": True}):
        for name, value in change.items():
            setattr(wandb, name, value)
        refuse_no_login()
        vars(wandb).update({"mode": "online", "logged_in": False})
        vars(wandb).pop("run", None), vars(wandb).pop("setup", None)


def test_a_damaged_id_says_what_to_do(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.wandb_id() == run.wandb_id() != Run(tmp_path / "other").wandb_id()
    run.wandb.write_text('{"id": 3}')
    with pytest.raises(DataError, match=r"wandb\.json is damaged: .*; delete it"):
        run.wandb_id()


# --- the real package, offline -----------------------------------------------------------------------------------

OFFLINE = """
import os, signal, sys
import numpy as np
import wandb
import saejax

x = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
log = wandb.Run.log

def stopping(self, row, step):
    if sys.argv[2] == "stop" and step == 5:
        os.kill(os.getpid(), signal.SIGTERM)
    log(self, row, step=step)

wandb.Run.log = stopping
saejax.train(x, "topk", k=4, run=sys.argv[1], wandb=True, d_sae=16, batch_size=64, tokens=768, log_every=1)
"""


def records(path: Path) -> list[Any]:
    """The records of a .wandb file: LevelDB's log format of protobuf messages, after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    raw, at, part, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(raw):
        if 0 < (rest := -at % 32768) < 7:
            at += rest
            continue
        size, kind = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        part, at = part + raw[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last piece
            found.append(Record.FromString(part))
            part = b""
    return found


@pytest.mark.ci
def test_offline_the_rows_are_in_wandbs_own_file(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    env = {**os.environ, "WANDB_MODE": "offline", "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    for how, code in (("stop", EXIT_PREEMPTED), ("go on", 0)):
        command = [sys.executable, "-c", OFFLINE, str(folder), how]
        done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stderr
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and {path.stem for path in files} == {f"run-{Run(folder).wandb_id()}"}
    sent: dict[int, dict[str, float]] = {}
    for path in files:
        content = records(path)
        (config,) = [record.run.config for record in content if record.HasField("run")]
        settings = {update.key: json.loads(update.value_json) for update in config.update}
        assert settings["coder"]["k"] == 4 and settings["train"]["wandb"] is True
        for record in content:
            row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            if row:
                sent.setdefault(int(row["_step"]), {}).update(row)
    for row in Run(folder).rows():
        got = sent[row["step"]]
        assert {key: value for key, value in row.items() if key != "step"}.items() <= got.items(), row["step"]
