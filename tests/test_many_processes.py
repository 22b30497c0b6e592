"""Training by several real processes over loopback: the numbers, the files and the ends are those of one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import ROOT, planted_store

from saejax.checkpoints import Checkpoints
from saejax.core.metrics import read_metrics
from saejax.store import merge

# Adam hides a wrong scale of the gradients, which SGD shows. With b1 = 0 and an eps of 1e8, far above every gradient,
# its step lr g / (sqrt(g^2) + eps) is SGD with a rate of lr / eps, to eight digits.
SGD = {"train.lr": 0.05e8, "train.eps": 1e8, "train.b1": 0.0, "train.warmup_fraction": 0.0, "train.clip_norm": 0.0}
SETTINGS = {
    **SGD,
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
import json, sys
from saejax.core import cli
from saejax.experiment import default_config, experiment
from saejax.stages import Workspace, run_train
config = default_config()
config.lm.model = ""
config.update_from_flattened_dict(json.loads(sys.argv.pop()))
sys.argv.append("--config=configs/quickstart.py")
cli.define_config()
cli.run(lambda: run_train(Workspace(experiment(config))))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores, and the run of one process on eight devices."""
    folder = tmp_path_factory.mktemp("many")
    for split, rows in (("train", 1500), ("heldout", 300)):
        # A merged store is taken as it is, without a language model.
        for i in range(2):
            planted_store(folder / split / str(i), rows=rows // 2 + i)
        merge(folder / "stores" / "planted" / split, [folder / split / str(i) for i in range(2)])
    finish(start(folder / "alone", folder))
    return folder


def start(runs: Path, folder: Path, devices: int = 8, **settings: object) -> subprocess.Popen[str]:
    chosen = SETTINGS | {"runs_dir": str(runs), "stores_dir": str(folder / "stores")}
    chosen |= {key.replace("__", "."): value for key, value in settings.items()}
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(chosen)],
        cwd=ROOT,
        env=os.environ | flags,
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
    output, _ = process.communicate(timeout=100)
    assert process.returncode == code, output
    return output


def assert_same_run(got: Path, want: Path) -> None:
    """Every number of every logged step, and the parameters at the end, to 1e-5."""
    curves = [
        [{k: v for k, v in row.items() if "time" not in k and "per_second" not in k and "wait" not in k} for row in rows]
        for rows in (read_metrics(run / "run" / "metrics.jsonl") for run in (got, want))
    ]
    assert len(curves[0]) == len(curves[1]) and sum("train/loss" in row for row in curves[0]) == 20
    for a, b in zip(*curves, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)
    params = [Checkpoints(run / "run" / "checkpoints").restore_numpy(20)[0]["params"] for run in (got, want)]
    for name, value in params[1].items():
        np.testing.assert_allclose(params[0][name], value, rtol=1e-5, atol=1e-5 * np.abs(value).max(), err_msg=name)


def test_two_processes_train_as_one(folder: Path) -> None:
    two = start_two(folder / "two", folder)
    said = [finish(process) for process in two]
    assert "train: 20 steps" in said[0] and "train:" not in said[1]
    assert_same_run(folder / "two", folder / "alone")
    assert json.loads((folder / "two/run/environment.json").read_text())["processes"] == 2
