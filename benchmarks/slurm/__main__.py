"""What `saejax jobs slurm` promises, tried on a real Slurm of two nodes; one table of what came of it.

    python -m benchmarks.slurm [--short]      (make slurm)

Arrays and dependencies, a failed gate, training by two tasks on two nodes, and without --short: a time limit, a node
that is killed, cancelling. Writes benchmarks/slurm.md without --short; exits with 1 when anything did not hold, and
with 0 after saying so where no Slurm can be started.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from absl import app, flags
from absl import logging as absl_logging

from benchmarks.faults.outcome import MACHINE
from benchmarks.slurm.cluster import Cluster, free_ports, missing, running

_SHORT = flags.DEFINE_boolean("short", False, "Arrays, dependencies, a failed gate and two tasks alone.")
_DATE = flags.DEFINE_string("date", time.strftime("%Y-%m-%d"), "The date above the table.")
_ROOT = Path(__file__).resolve().parents[2]
_TABLE = _ROOT / "benchmarks" / "slurm.md"
_PATIENCE = 240  # seconds for the jobs of one trial
_LONG = 25  # seconds of training that a signal or a kill finds under way

# Few steps of float32: later a pre-activation within its rounding of 0 turns a latent on (benchmarks/drift.md).
_SMOOTH = {
    **{"coder.preset": "standard", "coder.l1_coefficient": 0.5, "coder.matmul_dtype": "float32"},
    **{"train.tokens": 512 * 16, "train.lr": 3e-3, "train.validate_every": 0},
}
# Slurm's shortest limit. It looks every half minute, so that the signal comes 10 to 40 seconds after the start.
_WARNED = "time: 1m\nwarning: 20\n"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the trials happen: a cluster, and a folder for stores, runs and jobs."""

    cluster: Cluster
    folder: Path

    def saejax(self, *words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-P", "-m", "saejax", *words]
        return subprocess.run(
            command, cwd=self.folder, env=self.cluster.environment, capture_output=True, text=True, check=False
        )

    def submit(self, name: str, settings: Mapping[str, object], site: str = "") -> "Jobs":
        """The jobs of quickstart:tiny with these settings, handed over."""
        (self.folder / f"{name}.yaml").write_text(f'gpus: ""\n{site}')
        words = [f"--config.{key}={value}" for key, value in ({"name": name} | dict(settings)).items()]
        words += [f"--out={name}-jobs", f"--site={name}.yaml"]
        made = self.saejax("jobs", "slurm", "--config=quickstart:tiny", *words)
        check(made.returncode == 0, made.stdout + made.stderr)
        script = self.folder / f"{name}-jobs" / "submit.sh"
        said = subprocess.run(
            [script], cwd="/", env=self.cluster.environment, capture_output=True, text=True, check=False
        )
        check(said.returncode == 0, said.stdout + said.stderr)
        return Jobs(self, name, json.loads((script.parent / "submitted.json").read_text())["jobs"])

    def train(self, name: str, settings: Mapping[str, object]) -> None:
        """The same training without Slurm, unless it is there."""
        if not (self.folder / "runs" / name).is_dir():
            words = [f"--config.{key}={value}" for key, value in ({"name": name} | dict(settings)).items()]
            done = self.saejax("train", "--config=quickstart:tiny", *words)
            check(done.returncode == 0, done.stdout + done.stderr)

    def long(self) -> dict[str, object]:
        """Settings of a training of `_LONG` seconds, by the pace that the first one had here."""
        lines = (self.folder / "runs" / "chain" / "metrics.jsonl").read_text().splitlines()
        pace = max(json.loads(line).get("train/tokens_per_second", 0) for line in lines)
        steps = max(300, round(pace * _LONG / 512 / 100) * 100)
        return {"train.tokens": 512 * steps, "train.checkpoint_every": 100, "train.validate_every": steps // 2}

    def parameters(self, name: str) -> dict[str, np.ndarray]:
        """Of a run's end."""
        from saejax import load

        return {key: np.asarray(value) for key, value in load(self.folder / "runs" / name).params.items()}


@dataclasses.dataclass(frozen=True)
class Jobs:
    """Jobs that were submitted."""

    place: Place
    name: str
    ids: Mapping[str, str]

    def state(self, job: str) -> str:
        """Slurm's words, one for each task of an array."""
        said = self.place.cluster.ask("scontrol", "-o", "show", "job", self.ids[job])
        words = (word for line in said.splitlines() for word in line.split())
        return ",".join(word.partition("=")[2] for word in words if word.startswith("JobState="))

    def restarts(self, job: str) -> int:
        words = self.place.cluster.ask("scontrol", "-o", "show", "job", self.ids[job]).split()
        return max((int(word.partition("=")[2]) for word in words if word.startswith("Restarts=")), default=0)

    def wait(self, true: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not true():
            if time.monotonic() > deadline:
                queue = self.place.cluster.ask("squeue", "-o", "%i %j %T %r %N")
                raise AssertionError(f"not in {_PATIENCE} s: {what}\n{queue}{self.logs()}")
            time.sleep(0.5)

    def end(self, job: str = "figures") -> None:
        """Wait until a job is over."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait(lambda: all(state in over for state in self.state(job).split(",")), f"the end of {job}")

    def drop(self) -> None:
        """Nobody waits for what is left."""
        self.place.cluster.ask("scancel", *self.ids.values())

    def starts(self, label: str) -> list[dict[str, object]]:
        path = self.place.folder / f"{self.name}-jobs" / "records" / f"{label}.json"
        return list(json.loads(path.read_text())["starts"]) if path.is_file() else []

    def rows(self) -> int:
        """Rows of the training's metrics."""
        path = self.place.folder / "runs" / self.name / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.is_file() else 0

    def logs(self) -> str:
        paths = sorted((self.place.folder / f"{self.name}-jobs" / "logs").glob("*.out"))
        return "".join(f"--- {path.name}\n{path.read_text()[-1500:]}\n" for path in paths)


def check(true: object, what: str) -> None:
    if not true:
        raise AssertionError(what)


def same(place: Place, name: str, other: str) -> None:
    """Two runs end with the same parameters, bit by bit."""
    got, want = place.parameters(name), place.parameters(other)
    for key, value in want.items():
        check(np.array_equal(got[key], value), f"{key} of {name} differs from {other}")


# --- the trials ------------------------------------------------------------------------------------------------


def chain(place: Place) -> str:
    """Capture as an array of two on two nodes, then training, evaluation and report, each after the one before"""
    jobs = place.submit("chain", {"capture.parts": 2})
    jobs.end()
    for job in ("capture", "train", "evaluate", "report", "figures"):
        check(set(jobs.state(job).split(",")) == {"COMPLETED"}, f"{job}: {jobs.state(job)}\n{jobs.logs()}")
    order = [str(jobs.starts(label)[-1]["started"]) for label in ("capture.1", "train", "evaluate", "report")]
    check(order == sorted(order), f"started at {order}")
    record = json.loads((place.folder / "runs" / "chain" / "jobs.json").read_text())
    check(record["tasks"]["train"]["starts"][0]["max_rss_bytes"] > 1 << 26, str(record))
    check("accounting storage is disabled" in record["accounts"], record["accounts"])
    table = place.saejax("jobs", "status", "chain-jobs").stdout
    check(table.count(" done ") == 5, table)
    return "all completed; memory and seconds of each in jobs.json, which says that sacct does not answer"


def gate(place: Place) -> str:
    """A gate that fails: evaluation exits with 1, and what depends on it is not run"""
    jobs = place.submit("gate", {"capture.parts": 2, "gates.r2": 0.999})
    jobs.end()
    states = {job: jobs.state(job) for job in ("train", "evaluate", "report")}
    check(list(states.values()) == ["COMPLETED", "FAILED", "CANCELLED"], f"{states}\n{jobs.logs()}")
    check(not (place.folder / "runs" / "gate" / "report.html").exists(), "there is a report")
    same(place, "gate", "chain")
    return "evaluation FAILED with 1, report CANCELLED by its dependency"


def two_tasks(place: Place) -> str:
    """Training by two tasks on two nodes, joined by jax.distributed, against one process"""
    meeting = {"capture.parts": 2, "parallel.coordinator": f"127.0.0.1:{free_ports(1)[0]}"}
    jobs = place.submit("two", meeting | _SMOOTH, "stages:\n  train:\n    nodes: 2\n")
    jobs.end("train")
    jobs.drop()
    check(jobs.state("train") == "COMPLETED", jobs.state("train") + jobs.logs())
    place.train("one", _SMOOTH)
    written = json.loads((place.folder / "runs" / "two" / "environment.json").read_text())
    check(written["processes"] == 2, f"{written['processes']} processes")
    got, want = place.parameters("two"), place.parameters("one")
    worst = max(float(np.abs(got[key] - want[key]).max() / np.abs(want[key]).max()) for key in want)
    check(worst < 1e-5, f"parameters differ by {worst:.1e} of the largest")
    return f"after 16 steps parameters within {worst:.0e} of the largest"


def time_limit(place: Place) -> str:
    """A time limit of a minute under a longer training: USR1, saved, requeued, to its end like one without it"""
    jobs = place.submit("limited", place.long() | {"capture.parts": 2}, _WARNED)
    jobs.end("train")
    jobs.drop()
    starts = jobs.starts("train")
    codes = [one.get("code") for one in starts]
    check(jobs.state("train") == "COMPLETED" and codes[-1] == 0, f"{jobs.state('train')} {codes}\n{jobs.logs()}")
    check(len(codes) > 1 and set(codes[:-1]) == {75}, f"codes {codes}\n{jobs.logs()}")
    place.train("undisturbed", place.long())
    same(place, "limited", "undisturbed")
    return f"exit codes {', '.join(map(str, codes))}; parameters equal bit by bit"


def node_killed(place: Place) -> str:
    """A node killed in the middle of a training, with its daemon and all that runs there: requeued on the other"""
    jobs = place.submit("killed", place.long() | {"capture.parts": 2})
    jobs.wait(lambda: jobs.rows() > 5 and jobs.state("train") == "RUNNING", "a training that runs")
    node = place.cluster.ask("squeue", "-h", "-j", jobs.ids["train"], "-o", "%N").strip()
    place.cluster.kill_node(node)
    jobs.end("train")
    jobs.drop()
    starts = jobs.starts("train")
    check(jobs.state("train") == "COMPLETED", jobs.state("train") + jobs.logs())
    nodes = [one.get("nodes") for one in starts]
    check(len(nodes) > 1 and nodes[0] == node != nodes[-1] and "code" not in starts[0], f"{starts}")
    place.train("undisturbed", place.long())
    same(place, "killed", "undisturbed")
    return f"on {nodes[0]}, then on {nodes[-1]}; parameters equal bit by bit"


def cancelled(place: Place) -> str:
    """Cancelled in the middle of a training: it saves, and does not go back into the queue"""
    jobs = place.submit("cancelled", place.long() | {"capture.parts": 2})
    jobs.wait(lambda: jobs.rows() > 5, "a training that runs")
    done = place.saejax("jobs", "cancel", "cancelled-jobs")
    check(done.returncode == 0, done.stdout + done.stderr)
    jobs.end("train")
    time.sleep(10)
    check(jobs.state("train") == "CANCELLED" and not jobs.restarts("train"), jobs.state("train"))
    code = jobs.starts("train")[-1].get("code")
    check(code == 75, f"exit code {code}\n{jobs.logs()}")
    return "CANCELLED, exit code 75, no restart"


_ALWAYS = (chain, gate, two_tasks)
_LATER = (cancelled, node_killed, time_limit)


def main(_: list[str]) -> None:
    if reason := missing():
        print(f"slurm: not tried, {reason}")
        return
    absl_logging.set_verbosity(absl_logging.ERROR)
    # The jobs compile the same programs; what they compile runs for seconds.
    os.environ.update(JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1", PYTHONPATH=f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    rows, started = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="saejax-slurm-") as folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/compiled"
        with running(Path(folder) / "cluster") as cluster:
            place = Place(cluster, Path(folder))
            for trial in _ALWAYS if _SHORT.value else (*_ALWAYS, *_LATER):
                begun = time.monotonic()
                try:
                    held, said = "yes", trial(place)
                except AssertionError as error:
                    held, said = "NO", str(error)
                rows.append((trial.__doc__ or "", held, said, f"{time.monotonic() - begun:.0f}"))
                print(" | ".join(rows[-1]), flush=True)
    print(f"slurm: {len(rows)} trials in {time.monotonic() - started:.0f} s")
    if any(row[1] == "NO" for row in rows):
        sys.exit(1)
    if not _SHORT.value:
        version = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=False).stdout.strip()
        lines = [f"| {' | '.join(row)} |" for row in rows]
        head = "| trial | held | what was seen | seconds |\n|---|---|---|---|\n"
        load = os.getloadavg()[2]
        text = (
            f"`python -m benchmarks.slurm`, {_DATE.value}, {MACHINE}; {version}, two nodes on this machine, whose load "
            f"was {load:.0f} at the end."
        )
        _TABLE.write_text(f"# The jobs on a real Slurm\n\n{text}\n\n{head}" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    app.run(main)
