"""Jobs as real processes: in turn, stopped, continued, killed, and found again after their server is gone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import one_device, planted_store

from saejax.app import experiments
from saejax.app.experiment import Experiment
from saejax.core.errors import BusyError, ConfigError
from saejax.core.lease import held, lease
from saejax.core.metrics import read_metrics
from saejax.jobs.job import ENDED, Job, chain
from saejax.jobs.task import read_starts
from saejax.plans.devices import VARIABLE, PlanSettings
from saejax.serve.jobs.activations import training
from saejax.serve.jobs.experiments import requested
from saejax.serve.jobs.plans import Plans, made_from
from saejax.serve.jobs.queue import Queue, View, new_id
from saejax.serve.jobs.requests import ExperimentBody, TrainBody
from saejax.serve.problems import Problem
from saejax.serve.site import Folders, Site
from saejax.store.manifest import MANIFEST

VERSION, WRONG = ["--version"], ["nosuch"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("jobs")
    for split, rows, seed in (("train", 4096, 0), ("heldout", 600, 1)):
        planted_store(folder / "stores" / "planted" / split, rows, seed)
    (folder / "runs").mkdir()
    shipped = {name: experiments.folder() / f"{name}.py" for name in experiments.names()}
    return Site(Folders(folder / "runs", folder / "stores"), shipped)


@pytest.fixture
def queue(site: Site, tmp_path: Path) -> Iterator[Queue]:
    """A queue whose jobs are all gone at the end."""
    with queue_of(site.folders.runs, tmp_path) as one:
        yield one


@contextlib.contextmanager
def queue_of(runs: Path, here: Path, at_once: int = 1) -> Iterator[Queue]:
    own = Queue(runs, at_once, one_device(), here)
    try:
        with own.turning(0.05):
            yield own
    finally:
        for view in own.views():
            job = own.job(view.id)
            with contextlib.suppress(Problem):
                own.cancel(view.id)
            until(lambda job=job: not job.alive() or job.tell_to_end() is None, "a job does not end")
            until_gone(job)


def short(site: Site, name: str, **fields: Any) -> Experiment:
    """40 steps on planted activations."""
    small = {"latent_dim": 64, "batch_size": 128, "max_epochs": 1.25, "sparsity": 4} | fields
    return training(site, TrainBody(layer_idx=0, activation_data_path="planted", hook_point="h", name=name, **small))[0]


def endless(site: Site, name: str) -> Experiment:
    """The same for hours, with a row of metrics for each of its first steps."""
    more = {"train.log_every": 1, "train.checkpoint_every": 1_000_000, "train.validate_every": 0}
    return short(site, name, max_epochs=1e5, config=more)


def until(true: Callable[[], Any], why: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, why
        time.sleep(0.02)


def ended(queue: Queue, name: str) -> View:
    until(lambda: queue.view(name).state in ENDED, f"{name} does not end")
    return queue.view(name)


def processes(job: Job) -> list[int]:
    """Of this job, by their command lines."""
    found = []
    for one in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if one.name.isdigit() and os.fsencode(job.path) in (one / "cmdline").read_bytes():
                found.append(int(one.name))
    return found


def until_gone(job: Job) -> None:
    """A job has ended once its record says so; the process that wrote that needs another moment to leave."""
    until(lambda: not processes(job), "a process is left")


def rows(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return read_metrics(path) if path.is_file() else []


def made(queue: Queue, *commands: list[str], command: str = "report", name: str = "none") -> str:
    """A job of quick commands."""
    return queue.write(queue.folder / new_id(), command, name, chain(commands)).path.name


# --- the queue, with commands of no time --------------------------------------------------------------------------


def test_commands_run_in_order_until_one_fails(queue: Queue) -> None:
    good, bad = made(queue, VERSION, VERSION), made(queue, VERSION, WRONG, VERSION)
    view = ended(queue, good)
    assert (view.state, view.code, view.can_continue, view.pid) == ("done", 0, False, None)
    assert view.started is not None and view.ended is not None and view.seconds == view.ended - view.started > 0
    text, at = queue.job(good).log(0)
    assert text.count("$ saejax --version\nsaejax 0") == 2 and at == view.log_bytes
    records = [read_starts(path) for path in sorted((queue.folder / good / "records").glob("*.json"))]
    assert [record[0]["code"] for record in records] == [0, 0]
    view = ended(queue, bad)
    assert (view.state, view.code, view.can_continue) == ("failed", 2, True)
    text, _ = queue.job(bad).log(0)
    assert "There is no command 'nosuch'" in text and text.count("$ ") == 2 and view.last == "exit code 2"


def test_one_at_a_time_in_order_and_those_that_wait_can_go(site: Site, tmp_path: Path) -> None:
    """No queue turns meanwhile: what waits is what a server that was killed leaves behind."""
    queue = Queue(site.folders.runs, 1, one_device(), tmp_path)
    names = [made(queue, VERSION) for _ in range(3)]
    assert [queue.view(name).state for name in names] == ["queued"] * 3
    assert [view.id for view in queue.views()][:3] == names[::-1]
    assert queue.cancel(names[1]).state == "stopped"
    with queue_of(site.folders.runs, tmp_path) as other:
        first, last = ended(other, names[0]), ended(other, names[2])
    assert (first.state, last.state) == ("done", "done")
    assert first.ended is not None and last.started is not None and first.ended <= last.started
    assert (queue.view(names[1]).state, queue.view(names[1]).code) == ("stopped", 75)
    assert not (queue.folder / names[1] / "log.txt").exists()
    with pytest.raises(Problem, match="has ended") as caught:
        queue.cancel(names[0])
    assert caught.value.status == 409
    with pytest.raises(Problem, match="only one that was stopped or failed"):
        queue.again(names[0])


@pytest.mark.parametrize("name", ["..", "a/../..", "20260101-000000-000000-abcdef", "x" * 5000, ""])
def test_no_such_job(queue: Queue, name: str) -> None:
    with pytest.raises(Problem) as caught:
        queue.view(name)
    assert caught.value.status == 404


def test_two_runners_of_one_attempt_are_one(queue: Queue, tmp_path: Path) -> None:
    """As when a server is killed while it starts a job, and the next one starts it too."""
    other = Queue(queue.runs, 1, one_device(), tmp_path)
    job = other.write(queue.folder / new_id(), "report", "none", chain([VERSION]))
    both = [threading.Thread(target=other._start, args=(job.path.name,)) for _ in range(3)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert ended(other, job.path.name).state == "done"
    assert len(job.starts()) == 1 and job.log(0)[0].count("saejax 0") == 1


def test_damaged_jobs_are_left_out_and_hold_nobody_up(site: Site, tmp_path: Path) -> None:
    still = Queue(site.folders.runs, 1, one_device(), tmp_path)
    broken, other = made(still, VERSION), made(still, VERSION)
    (still.folder / broken / "starts.json").write_text("[{]")
    with queue_of(site.folders.runs, tmp_path) as queue:  # begins when the damage is there
        assert ended(queue, other).state == "done"
        assert broken not in [view.id for view in queue.views()]


def test_what_cannot_start_fails_once(site: Site, tmp_path: Path) -> None:
    queue = Queue(site.folders.runs, 1, one_device() | {"PYTHONPATH": "", "PYTHONHOME": "/nowhere"}, tmp_path)
    name = made(queue, VERSION)
    queue.turn()
    view = queue.view(name)
    assert (view.state, view.code) == ("failed", 127) and view.log_bytes > 0


def test_a_log_is_read_in_whole_letters(tmp_path: Path) -> None:
    job = Job(tmp_path, "none", "report", (), "")
    text = "aé€😀" * 50
    (tmp_path / "log.txt").write_text(text)
    for most in range(4, 12):
        at, found = 0, ""
        while True:
            piece, behind = job.log(at, most)
            if behind == at:
                break
            assert "\ufffd" not in piece
            found, at = found + piece, behind
        assert found == text
    (tmp_path / "log.txt").write_bytes(b"ab\xff\xe2\x82")
    assert job.log(0) == ("ab\ufffd", 3), "the last letter is still to come"
    assert job.log(99) == ("", 99)


# --- trainings ----------------------------------------------------------------------------------------------------

SERVER = """
    import os, sys, time
    from pathlib import Path
    from saejax.serve.jobs.queue import Queue, View, new_id
    queue = Queue(Path(sys.argv[1]), 1, dict(os.environ), Path(sys.argv[2]))
    queue.turn()
    print("started", flush=True)
    time.sleep(600)
"""


@pytest.mark.ci
def test_a_job_outlives_its_server_and_is_found_by_the_next(site: Site, tmp_path: Path) -> None:
    runs = site.folders.runs
    name = Queue(runs).add("train", short(site, "outlives")).id
    words = [sys.executable, "-c", textwrap.dedent(SERVER), str(runs), str(tmp_path)]
    with subprocess.Popen(words, env=one_device(), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "started\n"
        server.kill()
    with queue_of(runs, tmp_path) as queue:
        view = queue.view(name)
        assert view.state == "running" and view.pid is not None
        with pytest.raises(BusyError, match=f"The job {name} is to train outlives"):
            queue.add("train", short(site, "outlives"))
        waiting = queue.add("train", short(site, "waits"))
        assert waiting.state == "queued"
        queue.cancel(waiting.id)
        view = ended(queue, name)
    assert (view.state, view.run) == ("done", "outlives")
    assert max(row["step"] for row in rows(runs / "outlives")) == 40
    assert "train: 40 steps" in view.last and held(queue.folder / name) is None
    sent = json.loads((runs / "outlives" / "config.json").read_text())
    assert (sent["coder"]["k"], sent["store"]) == (4, "planted")
    environment = (queue.folder / name / "records" / "0-train.environment.txt").read_text()
    assert "saejax==" in environment


@pytest.mark.ci
def test_stopped_continued_and_its_runner_killed(site: Site, queue: Queue) -> None:
    run = site.folders.runs / "long"
    name = queue.add("train", endless(site, "long")).id
    job = queue.job(name)
    until(lambda: rows(run), "no row is written")
    assert queue.cancel(name).state == "running"
    view = ended(queue, name)
    assert (view.state, view.code, view.can_continue) == ("stopped", 75, True)
    until_gone(job)
    before = rows(run)[-1]["step"]

    assert queue.again(name).state in ("queued", "starting", "running")
    until(lambda: rows(run)[-1]["step"] > before, "it does not go on")
    view = queue.view(name)
    assert view.state == "running" and view.pid is not None
    assert [start["code"] for start in job.starts()] == [75, None]
    assert "saved" in job.log(0)[0], "the log goes on"

    # The runner is killed: what it started goes on, and is not lost from sight.
    os.kill(view.pid, signal.SIGKILL)
    until(lambda: held(job.path) is None, "the lease is still held")
    view = queue.view(name)
    assert view.state == "running" and held(run)
    with pytest.raises(BusyError):
        queue.add("train", short(site, "long"))
    queue.cancel(name)
    view = ended(queue, name)
    assert (view.state, view.code, view.can_continue) == ("failed", None, True) and held(run) is None
    until_gone(job)


def test_a_run_that_others_train_is_neither_started_nor_continued(site: Site, queue: Queue) -> None:
    taken = short(site, "taken")
    with lease(taken.run_dir):
        with pytest.raises(BusyError, match=f"taken is being written by another process \\(pid {os.getpid()}"):
            queue.add("train", taken)
        assert queue.add("report", taken).command == "report", "which writes nothing that they write"
    # A process that another thread starts has a copy of the lock's file for a moment.
    until(lambda: held(taken.run_dir) is None, "the lease is not given back")
    with pytest.raises(Problem, match="Nobody trains") as caught:
        queue.stop_run("taken", taken.run_dir)
    assert caught.value.status == 409


def test_stop_tells_whoever_trains_a_run_here(
    site: Site, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = """if True:
        import sys, time
        from saejax.core.lease import lease
        with lease(sys.argv[1]):
            print(1, flush=True)
            time.sleep(60)
    """
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], env=one_device(), stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert queue.stop_run("x", tmp_path) == process.pid
        assert process.wait(30) == -signal.SIGTERM
    with lease(tmp_path), pytest.raises(Problem, match="cannot be told from here"):
        queue.stop_run("x", tmp_path)  # ourselves
    monkeypatch.setattr("saejax.serve.jobs.queue.held", lambda folder: "pid 77 on node12")
    with pytest.raises(Problem, match="node12, which cannot be told from here"):
        queue.stop_run("x", tmp_path)


def test_a_setting_of_half_a_letter_is_no_job(site: Site, queue: Queue) -> None:
    with pytest.raises(ConfigError, match="lone surrogate"):
        queue.add("train", short(site, "half", config={"lm.device": "\ud800"}))
    assert not any(view.name == "half" for view in queue.views())


# --- plans --------------------------------------------------------------------------------------------------------


def test_a_plan_is_kept_by_what_it_is_made_from(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `saejax calibrate` a device of one name is another; a store or a model may lie where another one did."""
    e = dataclasses.replace(short(site, "planned"), stores_dir=str(tmp_path / "stores"))
    e = dataclasses.replace(e, lm=dataclasses.replace(e.lm, model=str(tmp_path / "lm")))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "devices.yaml"))
    known = [list(made_from(e))]
    assert list(made_from(e)) == known[0]
    written = tmp_path / "devices.yaml", Path(e.store_dir("train"), MANIFEST), tmp_path / "lm" / "config.json"
    for text in ("{}", "{ }"):
        for path in written:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            known.append(list(made_from(e)))
    assert all(one not in known[:i] for i, one in enumerate(known))


def test_a_plan_is_made_once_by_a_process_of_its_own(site: Site, tmp_path: Path) -> None:
    small = {"coder.preset": "standard", "coder.d_sae": 64, "train.batch_size": 64, "train.tokens": 6400}
    e = requested(site, ExperimentBody(experiment="quickstart", config=small))
    plans, wanted = Plans(tmp_path, one_device()), PlanSettings("cpu", (1,))
    with contextlib.closing(plans), plans.queue.turning(0.05):
        asked = plans.ask(e, wanted)
        assert asked["state"] == "running"
        assert plans.ask(e, wanted)["id"] == asked["id"]
        with pytest.raises(ConfigError, match="Did you mean 'h100'"):
            plans.ask(e, PlanSettings("h10", (1,)))
        until(lambda: plans.state(asked["id"])["state"] != "running", "the plan does not end", 120)
        made = plans.state(asked["id"])
        assert made["state"] == "done", made
        assert made["estimates"][0]["seconds"] > 0 and "| train" in made["text"]
        assert plans.ask(e, wanted) == made, "it is kept"
    for name in ("", "..", "0" * 32):
        with pytest.raises(Problem):
            plans.state(name)


def test_a_plan_that_takes_too_long_is_given_up(site: Site, tmp_path: Path) -> None:
    plans, wanted = Plans(tmp_path, one_device(), seconds=0.05), PlanSettings("cpu", (1,))
    with contextlib.closing(plans), plans.queue.turning(0.05):
        name = plans.ask(short(site, "planned"), wanted)["id"]
        until(lambda: plans.state(name)["state"] == "failed", "it goes on", 30)
    assert "more than 0.05 seconds" in plans.state(name)["error"]
    until_gone(plans.queue.job(name))


def test_a_plan_says_why_there_is_none_and_is_made_anew(site: Site, tmp_path: Path) -> None:
    e = short(site, "planned")
    e = dataclasses.replace(e, lm=dataclasses.replace(e.lm, model=str(tmp_path / "nothing")))
    plans, wanted = Plans(tmp_path, one_device()), PlanSettings("cpu", (1,))
    with contextlib.closing(plans), plans.queue.turning(0.05):
        names = []
        for _ in range(2):
            names.append(plans.ask(e, wanted)["id"])
            until(lambda: plans.state(names[0])["state"] != "running", "the plan does not end", 120)
            assert (state := plans.state(names[0]))["state"] == "failed" and "nothing" in state["error"], state
            assert "exit code" not in state["error"] and not state["estimates"], state
    assert len(set(names)) == 1


def test_plans_end_with_their_server(site: Site, tmp_path: Path) -> None:
    plans, wanted = Plans(tmp_path, one_device()), PlanSettings("cpu", (1,))
    with contextlib.closing(plans), plans.queue.turning(0.05):
        names = [plans.ask(short(site, name), wanted)["id"] for name in ("first", "second")]
        until(lambda: plans.queue.view(names[0]).state == "running", "it does not begin")
    until_gone(plans.queue.job(names[0]))
    assert [plans.queue.view(name).state for name in names] == ["stopped", "stopped"]
    assert [plans.state(name)["error"] for name in names] == ["The plan was not finished; ask again."] * 2
