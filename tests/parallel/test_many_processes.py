"""Training by several real processes over loopback: the numbers, the files and the ends are those of one."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import ROOT, planted_store

from saejax.app.experiment import default_config, experiment
from saejax.app.stages import run_train
from saejax.app.workspace import Workspace
from saejax.checkpoints import Checkpoints
from saejax.coders import CoderConfig, Sites, build
from saejax.core.errors import BusyError, DataError
from saejax.core.lease import lease
from saejax.core.metrics import read_metrics
from saejax.parallel import ParallelConfig, batch_sharding, make_mesh
from saejax.store import merge
from saejax.training.config import TrainConfig
from saejax.training.optim import make_optimizer, make_schedule
from saejax.training.state import abstract_state, make_init
from saejax.training.step import compile_step, default_hyper, make_step

# Adam hides a wrong scale of the gradients, which SGD shows. With b1 = 0 and an eps of 1e8, far above every gradient,
# its step lr g / (sqrt(g^2) + eps) is SGD with a rate of lr / eps, to eight digits.
SGD = {"train.lr": 0.05e8, "train.eps": 1e8, "train.b1": 0.0, "train.warmup_fraction": 0.0, "train.clip_norm": 0.0}
SETTINGS = {
    **SGD,
    "lm.model": "",
    "name": "run",
    "store": "planted",
    "coder.preset": "topk",
    "coder.d_sae": 64,
    "coder.k": 4,
    "coder.matmul_dtype": "float32",
    "coder.b_dec_init": "geometric_median",
    "train.schedule": "constant",
    "train.batch_size": 64,
    "train.tokens": 20 * 64,
    "train.block_chunks": 8,
    "train.log_every": 1,
    "train.validate_every": 10,
    "train.checkpoint_every": 10,
}
PROGRAM = """
'Train.'
import json, sys
from saejax.app import cli
from saejax.app.experiment import default_config, experiment
from saejax.app.stages import run_train
from saejax.app.workspace import Workspace
config = default_config()
config.update_from_flattened_dict(json.loads(sys.argv.pop()))
sys.argv.append("--config=configs/quickstart.py")
class Train(cli.Command):
    def run(self, line):
        return run_train(Workspace(experiment(config)))
cli.run(Train, sys.argv)
"""


def start(
    runs: Path, folder: Path, devices: int, environment: Mapping[str, str] = {}, **settings: object
) -> subprocess.Popen[str]:
    # Compiled as in this very process: the programs run for milliseconds.
    flags = {"XLA_FLAGS": re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(flat(runs, folder, **settings))],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **flags, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def start_two(runs: Path, folder: Path, **settings: object) -> list[subprocess.Popen[str]]:
    """Two processes of four devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = {"parallel__coordinator": f"127.0.0.1:{free.getsockname()[1]}"}
    return [start(runs, folder, 4, parallel__processes=f"{r}/2", **meet, **settings) for r in range(2)]


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=200)
    assert process.returncode == code, output
    return output


def flat(runs: Path, folder: Path, **settings: object) -> dict[str, object]:
    chosen = SETTINGS | {"runs_dir": str(runs), "stores_dir": str(folder / "stores")}
    return chosen | {key.replace("__", "."): value for key, value in settings.items()}


def train_here(runs: Path, folder: Path, **settings: object) -> int:
    """One process on the eight devices of this very one."""
    config = default_config()
    config.update_from_flattened_dict(flat(runs, folder, **settings))
    return run_train(Workspace(experiment(config)))


def half_of(run: Path, copy: Path) -> Path:
    """A copy of a finished run that has to go on from step 10."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "run" / "checkpoints" / "000000020")
    return copy


def assert_same_run(got: Path, want: Path) -> None:
    """Every number of every logged step, and the parameters at the end, to 1e-5."""
    curves = [
        [
            {k: v for k, v in row.items() if not re.search("time|per_second|wait|^host/|^loop/|^device/", k)}
            for row in rows
        ]
        for rows in (read_metrics(run / "run" / "metrics.jsonl") for run in (got, want))
    ]
    curves = [[row for row in rows if len(row) > 1] for rows in curves]
    losses = [row["train/loss"] for row in curves[0] if "train/loss" in row]
    assert len(curves[0]) == len(curves[1]) and len(losses) == 20 and losses[-1] < 0.9 * losses[0]
    for a, b in zip(*curves, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)
    params = [Checkpoints(run / "run" / "checkpoints").restore_numpy(20)[0]["params"] for run in (got, want)]
    for name, value in params[1].items():
        np.testing.assert_allclose(params[0][name], value, rtol=1e-5, atol=1e-5 * np.abs(value).max(), err_msg=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores, the run of one process on eight devices, and that of two processes on four each."""
    folder = tmp_path_factory.mktemp("many")
    for split, rows in (("train", 1500), ("heldout", 300)):
        # A merged store is taken as it is, without a language model.
        for i in range(2):
            planted_store(folder / split / str(i), rows=rows // 2 + i)
        merge(folder / "stores" / "planted" / split, [folder / split / str(i) for i in range(2)])
    two = start_two(folder / "two", folder)
    assert train_here(folder / "alone", folder) == 0
    said = [finish(process) for process in two]
    assert "train: 20 steps" in said[0] and "train:" not in said[1]
    return folder


@pytest.mark.ci
def test_two_processes_train_as_one(folder: Path) -> None:
    assert_same_run(folder / "two", folder / "alone")
    assert json.loads((folder / "two/run/environment.json").read_text())["processes"] == 2
    assert Checkpoints(folder / "two/run/checkpoints").steps() == [10, 20]


@pytest.mark.soak
def test_one_goes_on_from_two_and_two_go_on_from_one(folder: Path) -> None:
    """Both with fsdp; the two with the latents over all devices of both, so that they read the same rows."""
    two = start_two(half_of(folder / "alone", folder / "then_two"), folder, parallel__mesh=(1, 8), parallel__fsdp=True)
    one = half_of(folder / "two", folder / "then_one")
    assert train_here(one, folder, parallel__mesh=(4, 2), parallel__fsdp=True) == 0
    for process in two:
        finish(process)
    assert_same_run(folder / "then_one", folder / "alone")
    assert_same_run(folder / "then_two", folder / "alone")


@pytest.mark.ci
def test_fsdp_changes_no_number(folder: Path) -> None:
    assert train_here(folder / "fsdp", folder, parallel__mesh=(8, 1), parallel__fsdp=True) == 0
    assert_same_run(folder / "fsdp", folder / "alone")


LONG = {"train__tokens": 10**6 * 64, "train__validate_every": 0, "train__checkpoint_every": 10**6}


def steps_done(run: Path) -> int:
    path = run / "run" / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


def until_under_way(run: Path) -> None:
    deadline = time.monotonic() + 200
    while steps_done(run) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.ci
def test_a_signal_to_one_stops_both_at_the_same_step(folder: Path) -> None:
    two = start_two(folder / "stopped", folder, **LONG)
    until_under_way(folder / "stopped")
    two[1].send_signal(signal.SIGTERM)
    said = [finish(process, 75) for process in two]
    step = Checkpoints(folder / "stopped/run/checkpoints").latest()
    assert step and f"stopped by a signal after step {step:,}, saved" in said[0]
    assert Checkpoints(folder / "stopped/run/checkpoints").verify(step) == []


@pytest.mark.soak
def test_when_one_is_killed_the_other_ends_too(folder: Path) -> None:
    """By the broken connection, or after the heartbeat's seconds."""
    two = start_two(folder / "killed", folder, parallel__heartbeat=10, **LONG)
    until_under_way(folder / "killed")
    two[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    output, _ = two[0].communicate(timeout=200)
    assert two[0].returncode not in (0, 75), output
    assert time.monotonic() - killed < 60
    two[1].communicate()


@pytest.mark.ci
def test_what_only_process_0_sees_stops_both_with_a_message(folder: Path) -> None:
    """Found as under SLURM."""
    with lease(folder / "busy" / "run"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        slurm = {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_NODELIST": "127.0.0.1",
            "SLURM_NTASKS": "2",
            "JAX_COORDINATOR_PORT": port,
        }
        two = [
            start(
                folder / "busy", folder, 4, slurm | {"SLURM_PROCID": r, "SLURM_LOCALID": r}, parallel__processes="slurm"
            )
            for r in "01"
        ]
        assert "is being written by another process" in finish(two[0], BusyError.exit_code)
        assert "Process 0 has stopped" in finish(two[1], DataError.exit_code)


def bytes_of(mesh_shape: tuple[int, int], fsdp: bool) -> tuple[int, int]:
    """(arguments, donated) of a device in the compiled train step of a small transcoder."""
    mesh, config = make_mesh(ParallelConfig(mesh_shape)), TrainConfig(batch_size=64, tokens=6400, lr=3e-4)
    coder, optimizer = build(CoderConfig("standard", d_sae=512), 32, config.steps), make_optimizer(config)
    state = abstract_state(coder, make_init(coder, optimizer, config), mesh, fsdp)
    arrays = {"h": jax.ShapeDtypeStruct((64, 32), jnp.bfloat16, sharding=batch_sharding(mesh))}
    step = make_step(coder, optimizer, make_schedule(config), Sites(("h",), ("h",), (1.0,), (1.0,)), config)
    lowered = compile_step(step, state, mesh).lower(state, arrays, default_hyper(0))  # type: ignore[attr-defined]
    memory = lowered.compile().memory_analysis()
    return memory.argument_size_in_bytes, memory.alias_size_in_bytes


def test_the_bytes_of_a_device_fall_as_one_over_n() -> None:
    """Parameters, both moments: 3 x (2 x 32 x 512 + 512 + 32) float32, all of it donated; little is replicated."""
    state, batch, floor = 3 * 4 * (2 * 32 * 512 + 512 + 32), 2 * 64 * 32, 4096
    for (data, latent), fsdp in (((1, 2), False), ((4, 1), True), ((2, 4), True)):
        arguments, donated = bytes_of((data, latent), fsdp)
        share = state / (data * latent)
        assert share <= donated <= share + floor
        assert share + batch / data <= arguments <= share + batch / data + floor
