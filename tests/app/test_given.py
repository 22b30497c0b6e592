"""`saejax.train`: arrays, stores and iterators train as the stages do, stop, continue, and are refused in one line."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import ROOT, planted_experiment, planted_store

import saejax
from saejax.app.stages import run_train
from saejax.app.workspace import Workspace
from saejax.coders import CoderConfig
from saejax.core.errors import ConfigError, DataError, SaejaxError
from saejax.core.metrics import read_metrics
from saejax.store import ArrayRows, StoreReader
from saejax.training import TrainConfig

WIDTH = 8
HOW: dict[str, Any] = {
    "k": 3,
    "d_sae": 32,
    "tokens": 20 * 64,
    "batch_size": 64,
    "lr": 3e-3,
    "mesh": (1, 1),
    "progress": False,
}


def activations(rows: int = 600, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    directions = np.random.default_rng(9).normal(size=(16, WIDTH))
    return (((rng.random((rows, 16)) < 0.1) * rng.exponential(1, (rows, 16))) @ directions + 0.3).astype(np.float32)


def same(one: saejax.TrainedCoder, other: saejax.TrainedCoder) -> bool:
    return all(one.params[name].tobytes() == other.params[name].tobytes() for name in one.params)


@pytest.fixture(scope="module")
def trained() -> saejax.TrainedCoder:
    return saejax.train(activations(), "topk", **HOW)


def test_a_matrix_becomes_a_coder_that_reconstructs_it(trained: saejax.TrainedCoder) -> None:
    x = activations()
    error = np.square(x - trained.decode(trained.encode(x))).sum()
    assert error < np.square(x - x.mean(0)).sum()
    assert (trained.encode(x) != 0).sum(1).max() == 3
    assert trained.finished and trained.step == 20 and trained.origin.tokens == 20 * 64
    assert (trained.hook_point, trained.config.coder.k, trained.config.train.lr) == ("x", 3, 3e-3)


def test_what_is_not_said_has_the_default_of_an_experiment_file(trained: saejax.TrainedCoder) -> None:
    """Not what old runs had, whose config.json lacks newer keys."""
    config = trained.config.to_dict()
    for section, usual in (("coder", CoderConfig("topk")), ("train", TrainConfig())):
        left = vars(usual).keys() - HOW.keys()
        assert {name: config[section][name] for name in left} == {name: getattr(usual, name) for name in left}


@pytest.mark.ci
def test_a_run_folder_gives_the_same_coder_and_a_dict_a_map_and_jax_too(
    trained: saejax.TrainedCoder, tmp_path: Path
) -> None:
    import jax.numpy as jnp

    run = saejax.train(activations(), "topk", run=tmp_path / "mine", heldout=activations(200, 1), **HOW)
    assert same(run, trained) and same(saejax.load(tmp_path / "mine"), trained)
    assert run.origin.source == str(tmp_path / "mine")
    assert any("val/fve" in row for row in read_metrics(tmp_path / "mine" / "metrics.jsonl"))
    np.save(tmp_path / "x.npy", activations())
    short = HOW | {"tokens": 3 * 64}
    plain = saejax.train(activations(), "topk", **short)
    mapped = {"x": np.load(tmp_path / "x.npy", mmap_mode="r")}
    for given in (jnp.asarray(activations()), mapped, ArrayRows({"x": activations()})):
        assert same(saejax.train(given, "topk", **short), plain)


def test_settings_may_be_numbers_of_numpy(trained: saejax.TrainedCoder, tmp_path: Path) -> None:
    how = HOW | {"k": np.int64(3), "lr": np.array(3e-3), "tokens": np.float64(20 * 64), "mesh": np.array([1, 1])}
    sae = saejax.train(activations(), "topk", run=tmp_path / "run", seed=np.int64(0), fsdp=np.False_, **how)
    assert same(sae, trained) and sae.config == saejax.load(tmp_path / "run", step=np.int64(20)).config
    assert sae.with_k(np.int64(2)).describe()["sparsity"] == {"name": "topk", "k": 2}
    wrong: Any = "2"
    with pytest.raises(ConfigError, match="with_k: k is '2'"):
        sae.with_k(wrong)


@pytest.mark.ci
def test_every_door_takes_tensors_of_torch(tmp_path: Path) -> None:
    import ml_dtypes

    torch = pytest.importorskip("torch")
    numbers, more = (activations(300, seed).astype(ml_dtypes.bfloat16) for seed in (0, 1))
    tensor, heldout = (torch.from_numpy(a.astype(np.float32)).bfloat16().requires_grad_() for a in (numbers, more))
    short = HOW | {"tokens": 2 * 64}
    plain = saejax.train(numbers, "topk", heldout=more, **short)
    assert same(saejax.train(tensor, "topk", heldout=heldout, **short), plain)
    assert same(saejax.train({"x": tensor}, "topk", heldout={"x": heldout}, **short), plain)
    parts = saejax.train(np.split(numbers, 3), "topk", **short)
    assert same(saejax.train(tensor.split(100), "topk", **short), parts)


def test_a_store_trains_as_the_stage_does(tmp_path: Path) -> None:
    """The stage and the library are one path: the same parameters to the bit, from the same store."""
    e = planted_experiment(tmp_path, "stage", tokens=10 * 128)
    assert run_train(Workspace(e)) == 0
    keys = {"d_sae", "dead_after_tokens", "matmul_dtype", "encoder_centre"}
    coder = {key: getattr(e.coder, key) for key in keys}
    keys = {"tokens", "batch_size", "lr", "b_enc_rate", "log_every"}
    train = {key: getattr(e.train, key) for key in keys}
    store = tmp_path / "stores" / "planted" / "train"
    sae = saejax.train(store, "standard", mesh=(1, 1), progress=False, **coder, **train)
    assert same(sae, saejax.load(e.run_dir)) and sae.sites.reads == ("h",)
    assert same(saejax.train(StoreReader.open(store), "standard", mesh=(1, 1), progress=False, **coder, **train), sae)


@pytest.mark.ci
@pytest.mark.parametrize("preset", ["batchtopk", pytest.param("topk", marks=pytest.mark.soak)])
def test_what_is_learnt_does_not_depend_on_where_the_activations_lie(preset: str) -> None:
    """By default, in few steps: with a mean of 12 times their spread every latent was soon negative for every token."""
    x, how = activations(4000), {"k": 4, "d_sae": 64, "batch_size": 512, "tokens": 48 * 512, "mesh": (1, 1)}
    l0, fve = {}, {}
    for mean in (0, 12):
        rows = x + np.float32(mean) * x.std()
        sae = saejax.train(rows, preset, progress=False, **how)
        latents = sae.encode(rows)
        l0[mean], left = float((latents != 0).sum(1).mean()), rows - sae.decode(latents)
        fve[mean] = 1 - np.square(left).sum() / np.square(rows - rows.mean(0)).sum()
    assert l0[12] == pytest.approx(l0[0], rel=0.2) and l0[0] == pytest.approx(4, rel=0.2)
    assert fve[12] > 0.9 * fve[0] > 0.6


class _Stopping:
    """Gives batches, and a signal before the n-th."""

    def __init__(self, x: np.ndarray, n: int, number: int) -> None:
        self.x, self.n, self.number = x, n, number

    def __iter__(self) -> Any:
        for i in range(10**6):
            if i == self.n:
                os.kill(os.getpid(), self.number)
            yield self.x[(np.arange(64) + 64 * i) % len(self.x)]


@pytest.mark.ci
def test_a_stopped_run_continues_to_the_same_bits(tmp_path: Path) -> None:
    """An iterable that begins again and passes over what was seen; Ctrl-C gives the coder as it is by then."""
    x, how = activations(), HOW | {"checkpoint_every": 8}
    whole = saejax.train(_Stopping(x, -1, 0), "topk", run=tmp_path / "whole", **how)
    half = saejax.train(_Stopping(x, 11, signal.SIGINT), "topk", run=tmp_path / "half", **how)
    assert not half.finished and 8 <= half.step < 20
    with pytest.raises(SystemExit) as stopped:
        saejax.train(_Stopping(x, 15, signal.SIGTERM), "topk", run=tmp_path / "half", **how)
    assert stopped.value.code == 75
    again = saejax.train(_Stopping(x, -1, 0), "topk", run=tmp_path / "half", **how)
    assert again.finished and same(again, whole)
    assert same(saejax.train(_Stopping(x, -1, 0), "topk", run=tmp_path / "half", **how), whole)  # complete already


def test_a_signal_in_the_last_step_still_stops_what_follows(tmp_path: Path) -> None:
    """It came too late to end the training, and the command went on with the next stage as if nothing had been said."""
    with pytest.raises(SystemExit) as stopped:
        saejax.train(_Stopping(activations(), 19, signal.SIGTERM), "topk", run=tmp_path / "run", **HOW)
    assert stopped.value.code == 75 and saejax.load(tmp_path / "run").finished
    assert saejax.train(_Stopping(activations(), 19, signal.SIGINT), "topk", **HOW).finished, "Ctrl-C gives what is"


def test_what_is_held_out_is_told_without_a_run_folder() -> None:
    """float64, of the coder that is returned; a training that validated nothing says nothing."""
    x, y = activations(), activations(200, 1)
    sae = saejax.train(x, "topk", heldout=y, **HOW | {"matmul_dtype": "float32"})
    error = np.square(y.astype(np.float64) - sae.decode(sae.encode(y))).sum()
    fve = 1 - error / np.square(y.astype(np.float64) - y.mean(0, np.float64)).sum()
    assert sae.figures["val/fve"] == pytest.approx(fve, abs=1e-5)
    none = saejax.train(x, "topk", heldout=y, validate_every=0, **HOW | {"tokens": 64})
    assert not [key for key in none.figures if key.startswith("val/")]


def test_a_thread_may_train(trained: saejax.TrainedCoder) -> None:
    """Only the main thread can take signals; a server or a notebook may train in another."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        assert same(pool.submit(saejax.train, activations(), "topk", **HOW).result(), trained)


@pytest.mark.ci
def test_several_hook_points(tmp_path: Path) -> None:
    x, how = activations(), HOW | {"tokens": 2 * 64}
    y = x @ np.random.default_rng(3).normal(size=(WIDTH, 6)).astype(np.float32)
    pair = saejax.train({"in": x, "out": y}, "transcoder", **how)
    assert (pair.sites.reads, pair.sites.writes) == (("in",), ("out",)) and pair.decode(pair.encode(x)).shape == y.shape
    both = saejax.train({"a": x, "b": x * 2}, "crosscoder_batchtopk", **how)
    assert both.sites.reads == ("a", "b") and both.encode(np.stack([x, x], 1)).shape == (600, 32)
    one = saejax.train({"a": x, "b": y}, "topk", hook_point="b", **how)
    assert one.sites.reads == ("b",) and one.coder.topology.d_in == 6
    layers = {"a": x, "b": x, "c": x, "d": x}
    clt = saejax.train(layers, "clt", reads=("a", "b"), writes=("c", "d"), **how)
    assert (clt.sites.reads, clt.sites.writes) == (("a", "b"), ("c", "d"))


def test_defaults_fit_what_is_at_hand() -> None:
    sae = saejax.train(activations(80), "standard", progress=False, mesh=(1, 1))
    assert (sae.config.train.batch_size, sae.config.train.tokens, sae.step) == (20, 800, 40)


def test_no_setting_has_two_homes() -> None:
    import dataclasses

    coder, train = ({f.name for f in dataclasses.fields(kind)} for kind in (CoderConfig, TrainConfig))
    assert not coder & train
    own = {"x", "run", "heldout", "hook_point", "reads", "writes", "seed", "mesh", "mode", "fsdp", "progress"}
    assert not (coder | train) & own


X = activations(100)
BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a vector": (X[0], {}, r"x has shape \(8,\)"),
    "integers": (X.astype(int), {}, "dtype int64"),
    "empty": (X[:0], {}, "not one activation"),
    "NaN": (np.where(np.arange(100)[:, None] == 7, np.nan, X), {}, "row 7"),
    "all alike": (np.ones((50, 4), np.float32), {}, "are the same for all 50 tokens"),
    "no preset": (X, {"preset": "tpok"}, "Did you mean 'topk'"),
    "no such key": (X, {"kk": 1}, "There is no setting 'kk'. Did you mean 'k'"),
    "wrong type": (X, {"k": "many"}, "it must be int"),
    "tokens that are no number": (X, {"tokens": "many"}, "it must be int"),
    "half a token": (X, {"tokens": 64.5}, "it must be int"),
    "a mesh that is a number": (X, {"mesh": 1}, "mesh is 1; it must be a list of int"),
    "a hook point that is a number": (X, {"hook_point": 3}, r"hook_point is 3 \(int\); it must be str"),
    "reads that are one name": ({"a": X, "b": X}, {"reads": "ab"}, "reads is 'ab'; it must be a list of str"),
    "a seed of another type": (X, {"seed": 1.5}, "seed is 1.5"),
    "k above the width": (X, {"k": 99}, "only 32 latents"),
    "no store": ("nowhere", {}, "There is no store at .*nowhere: it does not exist"),
    "nothing": (None, {}, "cannot be a NoneType"),
    "an empty dict": ({}, {}, "the dict is empty"),
    "which of two": ({"a": X, "b": X}, {}, "choose hook_point= of a, b"),
    "no such hook point": ({"a": X, "b": X}, {"reads": ("aa",)}, "Did you mean 'a'"),
    "what a clt writes": ({"a": X, "b": X}, {"preset": "clt"}, "Say what the clt reads and writes"),
    "held-out of another width": (X, {"heldout": X[:, :3]}, "heldout is 3 wide at x, x 8"),
    "held-out iterator": (X, {"heldout": iter([X])}, "read again and again"),
    "nothing held out": (X, {"keep_best": "val/fve"}, "keep_best=val/fve needs held-out activations: give heldout="),
    "an iterator without a length": (iter([X]), {"tokens": None}, "tokens=..."),
    "parts that do not divide": (X, {"batch_size": 66, "accumulate": 4, "tokens": 66}, "not a multiple of accumulate"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_trained_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    x, changes, message = BAD[case]
    how = {key: value for key, value in (HOW | {"run": tmp_path / "run"} | changes).items() if value is not None}
    with pytest.raises(SaejaxError, match=message) as caught:
        saejax.train(x, **{"preset": "topk"} | how)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "run").glob("config.json")), "a refused call leaves no run"


def test_a_run_belongs_to_its_settings_and_activations(tmp_path: Path) -> None:
    how = HOW | {"run": tmp_path / "run", "tokens": 2 * 64}
    saejax.train(activations(), "topk", **how)
    with pytest.raises(DataError, match=r"coder\.k: 3 -> 4"):
        saejax.train(activations(), "topk", **how | {"k": 4})
    with pytest.raises(DataError, match="was made from something else"):
        saejax.train(activations(seed=1), "topk", **how)
    planted_store(tmp_path / "stores" / "run" / "train")  # a store that happens to be called like the run
    assert saejax.train(activations(), "topk", **how).finished
    with pytest.raises(ConfigError, match=r"coder\.k_start is 1"):
        saejax.train(activations(), "topk", **how | {"k_start": 1})


def test_a_run_belongs_to_the_order_of_its_rows_and_to_what_is_held_out(tmp_path: Path) -> None:
    """Rows in another order have the same moments, and are other activations."""
    x, held = activations(), activations(80, 1)
    how = HOW | {"run": tmp_path / "run", "tokens": 2 * 64}
    saejax.train(x, "topk", heldout=held, **how)
    swapped = x.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert (swapped != x).any()
    with pytest.raises(DataError, match=r"was made from something else:\n  train: arrays \(600 rows"):
        saejax.train(swapped, "topk", heldout=held, **how)
    with pytest.raises(DataError, match=r"was made from something else:\n  heldout: arrays \(80 rows"):
        saejax.train(x, "topk", heldout=held[::-1], **how)
    assert saejax.train(x, "topk", heldout=held.copy(), **how).finished


@pytest.mark.soak
def test_a_killed_process_continues_to_the_same_bits(tmp_path: Path) -> None:
    """kill -9 in a loop of real processes that call `saejax.train`; the end is that of one that nobody killed."""
    code = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(ROOT / "tests")!r})
        sys.path.insert(0, {str(ROOT / "tests" / "app")!r})
        import saejax
        from test_given import HOW, activations
        print("begin", flush=True)
        saejax.train(activations(), "topk", run=sys.argv[1], **HOW | {{"tokens": 600 * 64, "checkpoint_every": 5}})
    """)
    whole = saejax.train(activations(), "topk", **HOW | {"tokens": 600 * 64})
    folder, kills = tmp_path / "killed", 0
    for delay in (0.5, 1.0, 1.5, 2.0, 0.7, 600):
        child = subprocess.Popen([sys.executable, "-c", code, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None and child.stdout.readline() == "begin\n"
        try:
            assert child.wait(timeout=delay + 4) == 0
            break
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            kills += 1
        finally:
            child.stdout.close()
    assert kills and same(saejax.load(folder), whole)
