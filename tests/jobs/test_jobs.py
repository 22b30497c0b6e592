"""Experiments as jobs: the graph, the scripts (run with stand-ins for Slurm's commands), the runner of this machine."""

import contextlib
import dataclasses
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny.commands import run_command

from saejax.app.experiment import experiment
from saejax.app.experiments import load, settings, shipped
from saejax.core.config import to_json
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import write_json
from saejax.jobs import slurm_queue
from saejax.jobs.graph import stages_of, write_job
from saejax.jobs.job import Job, Stage, read_job
from saejax.jobs.runner import run_job
from saejax.jobs.site import Site, read_site, seconds_of, site_of, slurm_time
from saejax.jobs.slurm import Request, request_of, write_scripts
from saejax.jobs.table import cancel, gather, print_table, rows
from saejax.jobs.task import left_of, read_starts

FLAGS: dict[str, Any] = {"out": "jobs", "site": "", "device": "cpu", "devices": 1, "layers": False, "at_once": 1}


@dataclasses.dataclass(frozen=True)
class Said:
    """An estimate of the planner, with what the jobs look at."""

    stage: str
    seconds: float
    host_bytes: float = 0.0


def quickstart(**changed: Any) -> Any:
    config = shipped("quickstart", "tiny")
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in changed.items()})
    return config


def chain(jobs: tuple[Stage, ...]) -> list[tuple[str, int, tuple[str, ...]]]:
    return [(job.name, len(job.tasks), job.after) for job in jobs]


# --- the graph -------------------------------------------------------------------------------------------------


def test_a_pipeline_is_one_job_a_stage_and_an_array_of_parts() -> None:
    jobs = stages_of(experiment(quickstart(capture__parts=3)), "pipeline", "e.py")
    assert chain(jobs) == [
        ("capture", 3, ()),
        ("train", 1, ("capture",)),
        ("evaluate", 1, ("train",)),
        ("report", 1, ("evaluate",)),
    ]
    assert jobs[0].tasks[2] == ("capture", "--config=e.py", "--config.parallel.processes=2/3")
    assert jobs[0].labels == ("capture.0", "capture.1", "capture.2") and jobs[1].labels == ("train",)


def test_a_sweep_is_an_array_of_programs_and_a_table() -> None:
    e = experiment(shipped("sweep_quickstart"))
    jobs = stages_of(e, "sweep", "e.py")
    assert chain(jobs) == [("capture", 1, ()), ("sweep", 3, ("capture",)), ("table", 1, ("sweep",))]
    assert jobs[1].tasks[2] == ("sweep", "--config=e.py", "--group=2")
    # Programs that must go on together, or that are one, are one job.
    stops = dataclasses.replace(e, train=dataclasses.replace(e.train, early_stop_patience=2))
    one = experiment(shipped("sweep_quickstart", "standard"))
    assert [chain(stages_of(o, "sweep", "e.py"))[1:] for o in (stops, one)] == [[("sweep", 1, ("capture",))]] * 2
    with pytest.raises(ConfigError, match="is a sweep"):
        stages_of(e, "sweep", "e.py", layers=True)


def test_layers_train_on_each_captured_hook_point() -> None:
    e = experiment(quickstart(capture__hook_points=("blocks.{1..2}.resid_post", "blocks.0.mlp_out")))
    jobs = stages_of(e, "study", "e.py", layers=True)
    points = [word.partition("=")[2] for task in jobs[1].tasks for word in task if "hook_point=" in word]
    assert sorted(points) == ["blocks.0.mlp_out", "blocks.1.resid_post", "blocks.2.resid_post"]
    assert chain(jobs)[1:] == [
        ("train", 3, ("capture",)),
        ("evaluate", 3, ("train",)),
        ("report", 3, ("evaluate",)),
        ("study", 1, ("report",)),
    ]
    assert [job.each for job in jobs] == [False, False, True, True, False]
    names = [task[2] for task in jobs[1].tasks]
    assert len(set(names)) == 3 and {"--config.store=quickstart-tiny"} == {task[3] for task in jobs[1].tasks}
    # The study takes the runs that the layers are.
    (study,) = jobs[-1].tasks
    runs = study[2].removeprefix("--config.study.dictionaries=").split(",")
    assert [Path(run).name for run in runs] == [name.removeprefix("--config.name=") for name in names]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hook_point": "blocks.3.resid_post"}, "leave hook_point"),
        ({"coder__preset": "crosscoder"}, "read and write one hook point"),
        ({}, "wants several hook points"),
    ],
)
def test_layers_are_refused_where_they_mean_nothing(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stages_of(experiment(quickstart(**changed)), "pipeline", "e.py", layers=True)


def test_a_prefix_is_one_job_of_one_process() -> None:
    e = experiment(shipped("latentwire"))
    assert stages_of(e, "prefix", "e.py") == (Stage("prefix", (("prefix", "--config=e.py"),)),)
    for wrong in ({"layers": True}, {"processes": 2}):
        with pytest.raises(ConfigError, match="A prefix is trained by one process"):
            stages_of(e, "prefix", "e.py", **wrong)


def test_a_study_with_dictionaries_is_one_job_and_processes_are_refused() -> None:
    assert chain(stages_of(experiment(quickstart(study__dictionaries=("runs/a",))), "study", "e.py")) == [
        ("study", 1, ())
    ]
    with pytest.raises(ConfigError, match="each job decides that for itself"):
        stages_of(experiment(quickstart(parallel__processes="slurm")), "pipeline", "e.py")


# --- the site and the limits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"partitoin": "gpu"}, "Unknown key site.partitoin. Did you mean 'partition'"),
        ({"stages": {"trian": {}}}, "Unknown key site.stages.trian. Did you mean 'train'"),
        ({"stages": {"train": {"node": 2}}}, "Unknown key .*node. Did you mean 'nodes'"),
        ({"stages": {"train": {"stages": {}}}}, "must hold keys"),
        ({"time": 3600}, "time is 3600"),
        ({"time": "soon"}, "write it as 90m"),
        ({"time_limit": "30s"}, "write it as 90m"),
        ({"time": "00:30"}, "one is the least"),
        ({"margin": 0.5}, "at least 1"),
        ({"partition": "gpu\nrm -rf x"}, "must be one line"),
        ({"account": "a b"}, "must be one word"),
        ({"sbatch": ["constraint=a100"]}, "no option of sbatch"),
        ([1], "must hold keys with values"),
    ],
)
def test_a_site_file_is_checked(content: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=message):
        read_site(str(tmp_path / "site.yaml"))


def test_what_is_no_yaml_is_refused(tmp_path: Path) -> None:
    for raw in (b"a: [", b"\xff\xfe\x00", b"x: !!python/object:os.system {}"):
        (tmp_path / "site.yaml").write_bytes(raw)
        with pytest.raises(DataError, match="is not YAML"):
            read_site(str(tmp_path / "site.yaml"))


def test_times() -> None:
    texts = {"90m": 5400, "12h": 43_200, "2d": 172_800, "1:30:00": 5400, "1-12:00:00": 129_600, "15:00": 900}
    assert {text: seconds_of(text, "time") for text in texts} == texts
    assert [slurm_time(s) for s in (60, 61, 129_600)] == ["0-00:01:00", "0-00:02:00", "1-12:00:00"]


def test_a_limit_is_the_estimate_with_a_margin_below_the_site_s() -> None:
    site = site_of({"time": "2h", "time_limit": "10h", "margin": 2.0}, "x")
    said = [Said("train", 3600 * 4, 8 << 30), Said("capture", 3600 * 8), Said("evaluate", 5), Said("report", 1e6)]
    parts = Stage("capture", ((), (), (), ()))
    got = {
        job.name: request_of(job, site, said).seconds
        for job in (parts, *(Stage(n, ((),)) for n in ("train", "evaluate")))
    }
    assert got == {"capture": 4 * 3600, "train": 8 * 3600, "evaluate": 600}
    assert request_of(Stage("report", ((),)), site, said).seconds == 36_000
    assert request_of(Stage("train", ((),)), site, said).host_bytes == 16 << 30
    assert request_of(Stage("study", ((),)), site, said) == Request(7200.0)


# --- the scripts, with stand-ins for Slurm's commands ----------------------------------------------------------


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """(command, lines of shell): a command of Slurm that does this; what it was called with is in <command>.log."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)

    def write(command: str, body: str) -> None:
        (folder / command).write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/{command}.log\n{body}\n')
        (folder / command).chmod(0o755)

    return write


def called(tmp_path: Path, command: str) -> list[str]:
    path = tmp_path / f"{command}.log"
    return path.read_text().splitlines() if path.is_file() else []


def test_the_scripts_say_what_the_site_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    site = {
        **{
            "partition": "gpu",
            "account": "me",
            "modules": ["cuda/12"],
            "setup": ["export A=1"],
            "cpus": 8,
            "at_once": 1,
        },
        **{"container": "apptainer exec --nv s.sif", "python": "python3", "sbatch": ["--constraint=h100"]},
        "stages": {"train": {"nodes": 2, "memory": "64G"}, "report": {"partition": "cpu"}},
    }
    folder = write_job(quickstart(capture__parts=2), "jobs", site_of(site, "x"), layers=False)
    write_scripts(folder, site_of(site, "x"), "h100", 4, [Said("train", 3600.0)])
    train, report, capture = ((tmp_path / f"jobs/{name}.sh").read_text() for name in ("train", "report", "capture"))
    for line in (
        *("--partition=gpu", "--account=me", "--nodes=2", "--mem=64G", "--gpus-per-node=4", "--constraint=h100"),
        *("--time=0-01:30:00", "--signal=USR1@120", "--requeue", f"--chdir={tmp_path}", "--cpus-per-task=8"),
    ):
        assert f"#SBATCH {line}\n" in train
    assert "module load cuda/12 || exit 1\nexport A=1\n" in train
    assert "srun --nodes=2 --ntasks=2 apptainer exec --nv s.sif python3 -P -m saejax.jobs.task" in train
    assert "--config.parallel.processes=slurm" in train
    assert "--partition=cpu" in report and "--nodes=1" in report and "#SBATCH --array=0-1%1\n" in capture
    for path in (tmp_path / "jobs").glob("*.sh"):
        assert subprocess.run(["bash", "-n", path], check=False).returncode == 0, path


def test_the_experiment_s_file_gives_the_same_experiment_from_anywhere(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    config = quickstart(train__lr=1e-3, capture__hook_points=("blocks.1.resid_post",))
    made = write_job(config, "jobs", Site(), layers=False)
    got = experiment(settings(load(tmp_path / "jobs" / "experiment.py")))
    assert got == made.experiment == read_job("jobs").experiment
    assert (got.runs_dir, got.stores_dir) == (str(tmp_path / "runs"), str(tmp_path / "stores"))
    assert to_json(dataclasses.replace(got, runs_dir="runs", stores_dir="stores")) == to_json(experiment(config))


def test_a_job_that_exits_with_75_goes_back_into_the_queue(
    tmp_path: Path, stand_in: Callable[[str, str], None]
) -> None:
    site = site_of({"requeues": 3}, "x")
    write_scripts(write_job(quickstart(capture__parts=2), "jobs", site, layers=False), site, "cpu", 1)
    stand_in("scontrol", "exit 1")  # else the script would wait for Slurm to end it

    def run(job: str, code: int, state: str = "RUNNING", **told: str) -> tuple[int, list[str]]:
        stand_in("srun", f"exit {code}")
        stand_in("squeue", f"echo {state}")
        (tmp_path / "scontrol.log").unlink(missing_ok=True)
        done = subprocess.run(["bash", f"jobs/{job}.sh"], env=os.environ | told, capture_output=True, check=False)
        return done.returncode, called(tmp_path, "scontrol")

    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "9"}
    assert run("train", 75, SLURM_JOB_ID="8") == (75, ["requeue 8"])
    # Of an array its own task alone: the array's id would be all of them.
    assert run("capture", 75, **array) == (75, ["requeue 7_1"])
    assert "capture.1 -- " in called(tmp_path, "srun")[-1] and "processes=1/2" in called(tmp_path, "srun")[-1]
    assert run("train", 75, SLURM_JOB_ID="8", SLURM_RESTART_COUNT="3") == (75, [])
    assert run("train", 75, "COMPLETING", SLURM_JOB_ID="8") == (75, [])
    assert run("train", 1, SLURM_JOB_ID="8") == (1, [])
    assert run("train", 0, SLURM_JOB_ID="8") == (0, [])


def test_submit_hands_over_with_dependencies_and_keeps_the_ids(
    tmp_path: Path, stand_in: Callable[[str, str], None]
) -> None:
    points = ("blocks.1.resid_post", "blocks.2.resid_post")
    write_scripts(write_job(quickstart(capture__hook_points=points), "jobs", Site(), layers=True), Site(), "cpu", 1)
    stand_in("sbatch", f'n=$(wc -l < {tmp_path}/sbatch.log); [ $n -lt 9 ] && echo "$((100 + n));cluster"')
    stand_in("squeue", "")
    done = subprocess.run(["jobs/submit.sh"], capture_output=True, text=True, check=True)
    assert [line.split() for line in done.stdout.splitlines()] == [
        *(["capture", "101"], ["train", "102"], ["evaluate", "103"], ["report", "104"], ["figures", "105"])
    ]
    ids = {"capture": "101", "train": "102", "evaluate": "103", "report": "104", "figures": "105"}
    assert json.loads((tmp_path / "jobs/submitted.json").read_text()) == {"jobs": ids}
    said = [re.sub(r" \S+/jobs/", " ", line) for line in called(tmp_path, "sbatch")]
    assert said == [
        "--parsable capture.sh",
        "--parsable --dependency=afterok:101 train.sh",
        "--parsable --dependency=aftercorr:102 evaluate.sh",
        "--parsable --dependency=aftercorr:103 report.sh",
        "--parsable --dependency=afterany:101:102:103:104 figures.sh",
    ]
    # Refused while they are in the queue; what was handed over before a refusal of Slurm is kept.
    stand_in("squeue", "echo 101 RUNNING")
    again = subprocess.run(["jobs/submit.sh"], capture_output=True, text=True, check=False)
    assert again.returncode == 1 and "saejax jobs cancel" in again.stderr
    stand_in("squeue", "")
    assert subprocess.run(["jobs/submit.sh"], capture_output=True, check=False).returncode == 1
    assert json.loads((tmp_path / "jobs/submitted.json").read_text())["jobs"]["evaluate"] == "108"


# --- tasks and the runner of this machine ----------------------------------------------------------------------

# Stands for Python: the record is kept by the task itself, and `saejax <words>` does what the word says.
_PYTHON = """\
import os, signal, sys, time
words = sys.argv[1:]
if words[2] == "saejax.jobs.task":
    from saejax.jobs.task import main
    sys.exit(main(words[3:]))
word, arguments = words[3], words[4:]
print("ran", word, flush=True)
if word == "wait":
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    open(arguments[0], "w").close()
    while not stopped:
        time.sleep(0.02)
    sys.exit(75)
if word == "until":
    open(arguments[0], "w").close()
    while not os.path.exists(arguments[1]):
        time.sleep(0.02)
if word == "once" and not os.path.exists(arguments[0]):
    open(arguments[0], "w").close()
    sys.exit(75)
sys.exit(int(arguments[0]) if word == "exit" else 0)
"""


def runnable(tmp_path: Path, *stages: Stage) -> Job:
    (tmp_path / "python.py").write_text(_PYTHON)
    (tmp_path / "jobs" / "logs").mkdir(parents=True, exist_ok=True)
    e = experiment(quickstart(runs_dir=str(tmp_path / "runs"), stores_dir=str(tmp_path / "stores")))
    python = (sys.executable, str(tmp_path / "python.py"))
    job = Job(tmp_path / "jobs", e.name, "pipeline", stages, str(tmp_path), python, Site().requeues, 0.0, to_json(e))
    job.write()
    return job


def test_a_failure_stops_what_depends_on_it_and_a_second_run_does_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ok, bad = ("ok",), ("exit", "1")
    capture = Stage("capture", (ok, ok))
    jobs = [
        Stage("train", (ok, bad), ("capture",)),
        Stage("evaluate", (ok, ok), ("train",), each=True),
        Stage("study", (ok,), ("evaluate",)),
    ]
    folder = runnable(tmp_path, capture, *jobs)
    assert run_job(folder, at_once=3) == 1
    said = capsys.readouterr().out
    assert "train.1: exit code 1" in said and "evaluate.0: done" in said
    assert "evaluate.1: not run, because train.1" in said and "study: not run, because evaluate.1" in said
    record = read_starts(folder.record_of("train.1"))[-1]
    assert record["code"] == 1 and record["seconds"] > 0 and record["max_rss_bytes"] > 1 << 20
    assert "# packages" in (tmp_path / "jobs/records/train.1.environment.txt").read_text()
    # The gate is mended: what ended well is not run again.
    mended = runnable(tmp_path, capture, Stage("train", (ok, ok), ("capture",)), *jobs[1:])
    assert run_job(mended, at_once=1) == 0
    said = capsys.readouterr().out
    assert said.count("already done") == 4 and said.count(": done") == 3
    assert len(read_starts(folder.record_of("train.0"))) == 1 and len(read_starts(folder.record_of("train.1"))) == 2
    assert gather(mended)["tasks"]["train.1"]["starts"][1]["code"] == 0


def test_a_task_that_was_told_to_stop_goes_on(tmp_path: Path) -> None:
    folder = runnable(tmp_path, Stage("train", (("once", str(tmp_path / "mark")),)))
    assert run_job(folder, at_once=1) == 0
    assert [one["code"] for one in read_starts(folder.record_of("train"))] == [75, 0]


def test_it_goes_on_as_often_as_the_site_says(tmp_path: Path) -> None:
    job = dataclasses.replace(runnable(tmp_path, Stage("train", (("exit", "75"),))), requeues=2)
    assert run_job(job, at_once=1) != 0
    assert [one["code"] for one in read_starts(job.record_of("train"))] == [75, 75, 75]


def test_cancelling_the_runner_is_passed_on(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    folder = runnable(tmp_path, Stage("train", (("wait", str(mark)),)), Stage("report", (("ok",),), ("train",)))

    seen: list[Any] = []

    def interrupt() -> None:
        deadline = time.monotonic() + 30
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        seen.extend([folder.runner(), rows(folder)[0].state])
        cancel(folder)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert run_job(folder, at_once=1) == 75
    thread.join()
    assert seen == [(platform.node(), os.getpid()), "running"] and folder.runner() is None
    assert read_starts(folder.record_of("train"))[-1]["code"] == 75 and not folder.record_of("report").exists()


@contextlib.contextmanager
def left_running(folder: Job, label: str, words: Sequence[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """A task as a runner that was killed leaves it: in a group of its own, with a record that has no end."""
    task = folder.recorded(label, folder.command_of(words))
    with (folder.path / "logs" / f"{label}.out").open("ab") as log:
        process = subprocess.Popen(task, cwd=folder.here, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(Path(words[1]).exists)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("task_killed", [False, True])
def test_what_a_killed_runner_left_running_is_taken_over(
    task_killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was called killed, was started a second time, failed at the first one's lease, and lost a record."""
    words = ("until", str(tmp_path / "jobs" / "began"), str(tmp_path / "jobs" / "end"))
    folder = runnable(tmp_path, Stage("train", (words,)), Stage("report", (("ok",),), ("train",)))
    with left_running(folder, "train", words) as task:
        if task_killed:  # and the training goes on without the process that keeps its record
            os.kill(task.pid, signal.SIGKILL)
            task.wait(30)
        assert [row.state for row in rows(folder)] == ["running", "waiting"] and folder.runner() is None

        def say(text: str, flush: bool) -> None:
            said.append(text)
            if text.endswith("taken over"):
                (folder.path / "end").touch()

        said: list[str] = []
        monkeypatch.setattr("saejax.jobs.runner.print", say, raising=False)
        assert run_job(folder, at_once=1) == 0
    assert said[0] == f"jobs: train: runs already, as process {task.pid}; taken over" and "jobs: report: done" in said
    codes = [one.get("code") for one in read_starts(folder.record_of("train"))]
    assert codes == ([None, 0] if task_killed else [0]) and rows(folder)[0].state == "done"
    assert (folder.path / "logs" / "train.out").read_text().count("ran until") == len(codes)


def test_what_a_killed_runner_left_running_is_cancelled(tmp_path: Path) -> None:
    words = ("wait", str(tmp_path / "jobs" / "mark"))
    folder = runnable(tmp_path, Stage("train", (words,)))
    with left_running(folder, "train", words) as task:
        cancel(folder)
        assert task.wait(30) == 75
    assert rows(folder)[0].state == "stopped"


def test_a_record_without_an_end_is_no_process_that_happens_to_have_its_number(tmp_path: Path) -> None:
    """The number alone may be another's by now; of another machine nothing is known."""
    folder = runnable(tmp_path, Stage("train", (("ok",),)))
    own = {"host": platform.node(), "pid": os.getpgrp(), "started": "x"}
    for attempt, state in ((own, "killed"), (own | {"host": "elsewhere"}, "unknown"), (own | {"pid": 1}, "killed")):
        write_json(folder.record_of("train"), {"starts": [attempt]})
        assert rows(folder)[0].state == state
        with pytest.raises(DataError, match="Nothing of"):
            cancel(folder)
    assert run_job(folder, at_once=1) == 0


def test_processes_of_an_attempt_are_found_without_proc_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = runnable(tmp_path, Stage("train", (("wait", str(tmp_path / "jobs" / "mark")),)))
    with left_running(folder, "train", folder.stages[0].tasks[0]) as task:
        found = left_of(task.pid, folder.path)
        assert task.pid in found and len(found) == 2, "the task and its command"
        assert left_of(os.getpgrp(), folder.path) == [] == left_of(0, folder.path)
        monkeypatch.setattr("saejax.jobs.task._PROCESSES", Path("/nowhere"))
        if shutil.which("ps"):
            assert sorted(left_of(task.pid, folder.path)) == sorted(found)


def test_the_end_of_an_attempt_leaves_the_others_in_the_record(tmp_path: Path) -> None:
    words = ("until", str(tmp_path / "jobs" / "began"), str(tmp_path / "jobs" / "end"))
    folder = runnable(tmp_path, Stage("train", (words,)))
    with left_running(folder, "train", words) as task:
        (first,) = read_starts(folder.record_of("train"))
        write_json(folder.record_of("train"), {"starts": [{"code": 137}, first, {"code": 75}]})
        (folder.path / "end").touch()
        assert task.wait(30) == 0
    assert [one["code"] for one in read_starts(folder.record_of("train"))] == [137, 0, 75]


def test_a_task_says_how_its_command_ended(tmp_path: Path) -> None:
    """In a process of its own, which takes the signals."""
    records, python = tmp_path / "records", sys.executable
    kill = "import os, signal; os.kill(os.getpid(), signal.{})"
    ends = {"SIGUSR1": 75, "SIGTERM": 75, "SIGKILL": 137}
    for name, code in ends.items():
        words = [python, "-m", "saejax.jobs.task", str(tmp_path), name, "--", python, "-c", kill.format(name)]
        assert subprocess.run(words, check=False).returncode == code
        assert read_starts(records / f"{name}.json")[0]["code"] == code
    # Of several processes of one task the first alone writes.
    words = [python, "-m", "saejax.jobs.task", str(tmp_path), "second", "--", "/no/such/program"]
    done = subprocess.run(words, env=os.environ | {"SLURM_PROCID": "1"}, capture_output=True, check=False)
    assert done.returncode == 127 and not (records / "second.json").exists()


# --- status, with stand-ins ------------------------------------------------------------------------------------


@pytest.fixture
def submitted(tmp_path: Path, stand_in: Callable[[str, str], None]) -> Job:
    folder = write_job(quickstart(capture__parts=2), "jobs", Site(), layers=False)
    write_json(
        folder.path / "submitted.json", {"jobs": {"capture": "11", "train": "12", "evaluate": "13", "report": "14"}}
    )
    stand_in("squeue", "echo '12|RUNNING|None|n1'; echo '13|PENDING|Dependency|'; echo '999|RUNNING|None|n9'")
    return folder


def test_status_is_slurm_s_word_and_the_files_progress(
    submitted: Job, stand_in: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    line = "JobId={} ArrayJobId=11 ArrayTaskId={} JobState={} Reason=None ExitCode={} RunTime=00:01:05 NodeList=n2"
    lines = "\n".join(
        f"echo '{line.format(*one)}'" for one in (("21", 0, "COMPLETED", "0:0"), ("11", 1, "FAILED", "1:0"))
    )
    stand_in("scontrol", f'[ "$4" = 11 ] || exit 1\n{lines}')
    run = submitted.experiment.run_dir
    run.mkdir(parents=True)
    steps, size = submitted.experiment.train.steps, submitted.experiment.train.batch_size
    row = {"step": steps // 4, "tokens": steps // 4 * size, "train/tokens_per_second": 1000.0}
    (run / "metrics.jsonl").write_text(json.dumps(row) + '\n{"step": 40, "val/fve": 1}\n{"torn')
    write_json(submitted.record_of("train"), {"starts": [{"code": 75, "host": "n2"}, {"host": "n1"}]})
    found = {one.label: one for one in rows(submitted)}
    assert (found["capture.0"].state, found["capture.0"].seconds, found["capture.0"].code) == ("done", 65.0, 0)
    assert (found["capture.1"].state, found["capture.1"].code, found["capture.1"].id) == ("failed", 1, "11_1")
    train = found["train"]
    assert (train.state, train.starts, train.share, train.where) == ("running", 2, 0.25, "n1")
    assert train.seconds_left == pytest.approx((steps - steps // 4) * size / 1000)
    assert found["evaluate"].state == "waiting (Dependency)" and found["report"].state == "waiting"
    print_table(submitted)
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:4] == ["job", "id", "state", "progress"] and re.search(
        r"^train +12 +running +25%", table[3]
    )
    assert "accounting storage is disabled" in gather(submitted)["accounts"]


def test_sacct_is_asked_first_and_its_figures_are_the_run_s(
    submitted: Job, stand_in: Callable[[str, str], None], tmp_path: Path
) -> None:
    lines = (
        *("11_0|COMPLETED|0:0|61||n1|00:58", "11_0.0|COMPLETED|0:0|60|350000K|n1|00:57"),
        *("11_1|CANCELLED by 0|0:15|5||n2|00:01", "14|TIMEOUT|0:0|60||n1|x", "14.batch|CANCELLED|0:15|60|1.5M|n1|x"),
    )
    stand_in("sacct", "\n".join(f"echo '{line}'" for line in lines))
    stand_in("scontrol", "exit 1")
    found = {one.label: one for one in rows(submitted)}
    assert [found[label].state for label in ("capture.0", "capture.1", "report")] == ["done", "cancelled", "timeout"]
    assert found["capture.1"].code == 128 + 15
    submitted.experiment.run_dir.mkdir(parents=True)
    gather(submitted)
    content = json.loads((submitted.experiment.run_dir / "jobs.json").read_text())
    assert content["accounts"] == "sacct" and content["tasks"]["capture.0"]["sacct"]["max_rss_bytes"] == 350000 * 1024
    assert content["tasks"]["report"]["sacct"]["max_rss_bytes"] == 1.5 * 2**20


def test_cancel(submitted: Job, stand_in: Callable[[str, str], None], tmp_path: Path) -> None:
    stand_in("scancel", "")
    cancel(submitted)
    assert called(tmp_path, "scancel") == ["--quiet 11 12 13 14"]
    (submitted.path / "submitted.json").unlink()
    with pytest.raises(DataError, match=r"Nothing of .* was submitted or runs"):
        cancel(submitted)


def test_without_slurm_it_says_so(submitted: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DataError, match="run this on a machine of the cluster"):
        rows(submitted)
    assert "is not here" in slurm_queue.accounting()


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "given", "message"),
    [
        ([], (), "has no word ''"),
        (["slrum"], (), "Did you mean 'slurm'"),
        (["status"], (), "Give the folder"),
        (["status", "jobs"], ("devices",), "--devices does nothing for `saejax jobs status`"),
        (["local"], ("site",), "--site does nothing for `saejax jobs local`"),
        (["slurm"], (), "Name the experiment"),
        (["slurm", "jobs"], (), "Unexpected argument"),
    ],
)
def test_lines_that_mean_nothing_are_refused(words: list[str], given: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_command("jobs", words, **{name: FLAGS[name] for name in given})


def test_damaged_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="There are no jobs"):
        read_job("jobs")
    write_job(quickstart(), "jobs", Site(), layers=False)
    good = json.loads((tmp_path / "jobs/job.json").read_text())
    for bad in (
        *([], {}, good | {"python": "python"}, good | {"stages": None}, good | {"stages": [{"name": "a"}]}),
        good | {"stages": [good["stages"][1]]},  # waits for a stage that is not there
        good | {"stages": [good["stages"][0] | {"name": "../x"}]},
    ):
        write_json(tmp_path / "jobs/job.json", bad)
        with pytest.raises(DataError, match=r"job\.json"):
            read_job("jobs")
    write_json(tmp_path / "jobs/job.json", good)
    for name, content in (("submitted.json", {"jobs": {"train": "1; rm"}}), ("records/train.json", [])):
        write_json(tmp_path / "jobs" / name, content)
        with pytest.raises(DataError, match=name):
            rows(read_job("jobs"))
        (tmp_path / "jobs" / name).unlink()


def test_jobs_that_were_begun_are_not_another_experiment_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_job(quickstart(), "jobs", Site(), layers=False)
    write_job(quickstart(train__lr=1e-3), "jobs", Site(), layers=False)  # nothing was begun
    write_json(folder.path / "submitted.json", {"jobs": {}})
    write_job(
        quickstart(train__lr=1e-3), "jobs", site_of({"partition": "gpu"}, "x"), layers=False
    )  # the same experiment
    with pytest.raises(DataError, match=r"another experiment \(experiment.train.lr: 0.001 -> 0.0"):
        write_job(quickstart(), "jobs", Site(), layers=False)


def test_what_a_script_cannot_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    with pytest.raises(ConfigError, match="cannot stand in a job's script"):
        write_job(quickstart(), "jobs", Site(), layers=False)
