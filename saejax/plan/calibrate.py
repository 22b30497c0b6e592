"""`saejax calibrate`: what this machine really reaches, in about a minute.

    products, memory    of square matrices, and of a sum of two arrays
    train.<kind>        train steps of six kinds of coder at several sizes: a law of the amounts of work
    forward             the demo model, and wider ones with random weights
    host, evaluate,     one small experiment, captured, trained, evaluated and reported twice in a temporary folder
    report

The amounts of work are those of the programs that a plan compiles, which are a CPU's wherever the measurement runs.
"""

import contextlib
import dataclasses
import functools
import io
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.app.console import say
from saejax.app.experiment import Experiment, default_config, experiment
from saejax.app.stages import run_capture, run_evaluate, run_report, run_train
from saejax.app.workspace import Workspace
from saejax.coders import Coder
from saejax.core.errors import ConfigError
from saejax.core.host import available_memory
from saejax.core.progress import Progress
from saejax.fit.trainable import coder_of
from saejax.lm import decoder
from saejax.lm.forward import forward_program
from saejax.lm.shape import ModelShape
from saejax.parallel import ParallelConfig, batch_sharding, make_mesh
from saejax.plan import lm_stages, train_stages
from saejax.plan.devices import Device, devices, keep, own_file
from saejax.plan.laws import Law, fitted
from saejax.plan.models import of_decoder, shape_of
from saejax.plan.programs import Footprint, abstract_model, forward_footprint, step_footprint, step_program

Point = tuple[tuple[float, ...], float]

# (width, latents, batch, k): small for a CPU, and such as fill an accelerator.
_STEPS = {
    "cpu": ((128, 512, 2048, 24), (128, 1536, 2048, 24), (256, 4096, 1024, 32)),
    "": ((768, 6144, 4096, 32), (768, 24576, 4096, 32), (2048, 16384, 8192, 64)),
}
PRESETS = ("topk", "batchtopk", "standard", "gated", "jumprelu", "matryoshka")
# Of PRESETS: what the small experiments train.
_EXPERIMENT = "standard"
# (d_model, layers, rows, tokens) of models with random weights.
_MODELS = {"cpu": ((64, 4, 32, 128), (256, 4, 8, 256)), "": ((1024, 8, 32, 512), (2048, 8, 16, 1024))}


def run_calibrate(name: str, tell: Callable[[str], None] = say) -> Device:
    """Measure this machine and keep it under `name`; takes about a minute.

    Raises:
        ConfigError: the name is that of a data sheet.
    """
    if name.lower() in devices() and not devices()[name.lower()].measured:
        raise ConfigError(f"--name={name} is the name of a data sheet; choose another, or leave it away.")
    chip = jax.devices()[0]
    platform = chip.platform if chip.platform in _STEPS else ""
    tell(f"calibrate: {chip.device_kind}, {os.cpu_count()} cores, jax {jax.__version__}")
    laws: dict[str, Law] = {}
    measured: dict[str, Any] = {"platform": chip.platform, "device": chip.device_kind}
    with Progress("calibrate", 4 + len(PRESETS), unit="measurements") as progress:
        peaks = _peaks(platform)
        progress.advance(1, next="train steps")
        for preset in PRESETS:
            points = [step_point(preset, *sizes) for sizes in _STEPS[platform]]
            laws[preset] = fitted([point for _, point in points])
            measured[f"train.{points[0][0]}"] = laws[preset].to_json()
            progress.advance(1, next="train steps")
        measured["forward"] = fitted(list(_forwards(platform))).to_json()
        progress.advance(1, next="an experiment")
        with tempfile.TemporaryDirectory() as folder:
            trials = [_trial_run(Path(folder), number) for number in range(2)]
        measured["evaluate"] = fitted([trial.evaluate for trial in trials]).to_json()
        measured["report"] = fitted([trial.report for trial in trials]).to_json()
        progress.advance(2, next="")
        measured["host"] = host_of(trials, laws[_EXPERIMENT])
    here = Device(
        name.lower(), _device_memory(chip), **peaks, source=f"measured, {chip.device_kind}", measured=measured
    )
    tell(
        f"calibrate: products {here.float32 / 1e9:,.0f} GFLOP/s float32, {here.bfloat16 / 1e9:,.0f} bfloat16; memory "
        f"{here.bandwidth / 1e9:,.1f} GB/s"
    )
    tell(f"calibrate: kept as {here.name!r} in {keep(here)}")
    return here


def _median(run: Callable[[], Any], least: int = 5, seconds: float = 1.0) -> float:
    """Median seconds of `run`, after two that do not count."""
    for _ in range(2):
        jax.block_until_ready(run())
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while len(taken) < least or (time.perf_counter() < until and len(taken) < 200):
        started = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - started)
    return float(np.median(taken))


def _peaks(platform: str) -> dict[str, float]:
    """Operations a second of products, and bytes a second of memory and of copies to the device."""
    n = 2048 if platform else 8192
    peaks = {}
    for dtype, precision in (("float32", jax.lax.Precision.HIGHEST), ("bfloat16", jax.lax.Precision.DEFAULT)):
        a = jnp.ones((n, n), dtype)
        product = jax.jit(functools.partial(jnp.matmul, precision=precision))
        peaks[dtype] = 2 * n**3 / _median(functools.partial(product, a, a))
    x = jnp.ones((2**24 if platform else 2**28,), jnp.float32)
    add = jax.jit(lambda x: x + 1)
    peaks["bandwidth"] = 2 * x.nbytes / _median(lambda: add(x))
    host = np.ones((2**22,), np.float32)
    peaks["host"] = host.nbytes / _median(lambda: jax.device_put(host))
    # One device tells nothing of links: its own memory bounds them.
    return peaks | {"link": peaks["bandwidth"] / 2}


def step_point(preset: str, d_in: int, d_sae: int, batch: int, k: int) -> tuple[str, Point]:
    """(kind of coder, (amounts, seconds)) of a train step."""
    e = experiment_with({"coder.preset": preset, "coder.d_sae": d_sae, "coder.k": k, "train.batch_size": batch})
    coder = coder_of(e, [d_in], [d_in])
    work, seconds = measured_step(e, coder)
    return train_stages.step_kind(coder), (train_stages.amounts(coder, work, batch), seconds)


def measured_step(e: Experiment, coder: Coder) -> tuple[Footprint, float]:
    """(what a train step takes, as a plan sees it; its seconds on this machine's first device, on random activations).

    Of coders of one site that write what they read.
    """
    names, width = (("x",), ("x",)), coder.topology.in_shape[-1]
    program, work = step_program(e, coder, names, make_mesh(ParallelConfig((1, 1)), jax.devices()))
    if jax.devices()[0].platform != "cpu":
        work = step_footprint(e, coder, names, make_mesh(ParallelConfig((1, 1)), jax.devices("cpu")))
    rows = {"x": jnp.asarray(np.random.default_rng(0).normal(size=(e.train.batch_size, width)), jnp.bfloat16)}
    holder = [program.start()]

    def run() -> Any:
        holder[0], metrics = program.step(holder[0], rows, program.hyper)
        return holder[0], metrics

    return work, _median(run, least=8)


def _forwards(platform: str) -> Iterator[Point]:
    """(amounts, seconds) of captures' forward passes, of the demo model and of models with random weights."""
    mesh, cpu = (make_mesh(ParallelConfig((1, 1)), on) for on in (jax.devices(), jax.devices("cpu")))
    demo = shape_of("demo")
    assert demo.config is not None
    cases = [(demo, 32, 256)]
    for width, layers, rows, length in _MODELS[platform]:
        config = dataclasses.replace(demo.config, d_model=width, n_layer=layers, d_head=width // demo.config.n_head)
        config = dataclasses.replace(config, d_mlp=4 * width, context_length=max(length, 256), windows=())
        cases.append((of_decoder("random", config), rows, length))
    for shape, rows, length in cases:
        name = [f"blocks.{shape.n_layer - 2}.resid_post"]
        work = forward_footprint(shape, name, (rows, length), "float32", cpu)
        yield lm_stages.forward_amounts(work), _forward_seconds(shape, name, (rows, length), mesh)


def _forward_seconds(shape: ModelShape, names: Sequence[str], rows: tuple[int, int], mesh: Any) -> float:
    lm, _ = abstract_model(shape, shape.n_layer, jnp.float32, mesh)
    params = decoder.init_params(lm.config, jax.random.key(0))
    program = forward_program(lm, params, names, rows, mesh)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, shape.vocab_size, rows), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(rows[1], dtype=jnp.int32), rows)
    arrays = [jax.device_put(a, batch_sharding(mesh)) for a in (tokens, positions, jnp.zeros(rows, jnp.int32))]
    return _median(lambda: program(params, *arrays))


# --- a small experiment, whole ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ran:
    """Figures of a small experiment.

    Attributes:
        captured: (tokens, bytes on disk, seconds beside the forward pass).
        loop: (amounts of a step, steps, seconds of the training, with one checkpoint at its end).
        evaluate, report: (amounts, seconds) of a batch.
        pages: (latents, seconds of the report beside its forward pass).
        start: seconds of the stages before their clocks began.
    """

    captured: tuple[float, float, float]
    loop: tuple[tuple[float, ...], int, float]
    evaluate: Point
    report: Point
    pages: tuple[int, float]
    start: float


# Of the first and the second experiment.
_VARIED: tuple[dict[str, Any], ...] = (
    {
        "capture.hook_points": ("blocks.3.resid_post",),
        "coder.d_sae": 512,
        "train.tokens": 2048 * 40,
        "eval.batch_rows": 8,
    },
    {
        "capture.hook_points": tuple(f"blocks.{i}.resid_post" for i in (3, 0, 1, 2)),
        "coder.d_sae": 1536,
        "train.tokens": 2048 * 160,
        "eval.batch_rows": 16,
    },
)


def experiment_with(values: dict[str, Any]) -> Experiment:
    """The default experiment with some keys set: {"train.lr": 3e-4}."""
    config = default_config()
    config.update_from_flattened_dict(values)
    return experiment(config)


def _trial_run(folder: Path, number: int) -> Ran:
    fixed = {
        "name": f"calibrate-{number}",
        "runs_dir": str(folder),
        "stores_dir": str(folder),
        "capture.tokens": 131_072,
        "capture.heldout_tokens": 4096,
        "coder.preset": _EXPERIMENT,
        "train.batch_size": 2048,
        "train.validate_every": 0,
        "train.checkpoint_every": 10_000,
        "eval.tokens": 24_576,
        "report.tokens": 24_576,
    }
    e = experiment_with(fixed | _VARIED[number])
    work = Workspace(e)
    started = time.perf_counter()
    pages = 0.0
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run_capture(work)
        run_train(work)
        run_evaluate(work)
        before = time.perf_counter()
        run_report(work)
        pages = time.perf_counter() - before
    stages = e.run.read_stages()
    whole = time.perf_counter() - started
    return _trial_figures(e, work, stages, pages, whole)


def _trial_figures(e: Experiment, work: Workspace, stages: dict[str, Any], pages: float, whole: float) -> Ran:
    coder, shape, length = work.build(), shape_of("demo"), e.text.context_length
    cpu = make_mesh(ParallelConfig((1, 1)), jax.devices("cpu"))
    step = step_footprint(e, coder, work.sites, cpu)
    latents = math.prod(coder.topology.latent_shape)
    per_eval, per_report = e.eval.batch_rows * length, e.report.batch_rows * length
    evaluation = lm_stages.evaluation(shape, coder, (e.eval.batch_rows, length), e.lm.dtype)
    scan = lm_stages.report_work(shape, coder, (e.report.batch_rows, length), e.lm.dtype, tuple(work.sites[0]))
    train, captured = stages["train"], stages["capture train"]
    forward = captured["tokens"] / captured["forward_tokens_per_second"]
    stored = 2.0 * sum(shape.names.hook_points()[name] for name in e.capture.hook_points) * captured["tokens"]
    recorded = sum(stage["seconds"] for stage in stages.values())
    return Ran(
        (captured["tokens"], stored, max(0.0, captured["seconds"] - forward)),
        (train_stages.amounts(coder, step, e.train.batch_size), e.train.steps, train["seconds"]),
        (
            lm_stages.evaluation_amounts(shape, coder, evaluation, per_eval),
            stages["evaluate"]["seconds"] / lm_stages.batches(stages["evaluate"]["tokens"], per_eval, 1.0),
        ),
        (
            lm_stages.report_amounts(scan, coder, per_report),
            stages["features"]["seconds"] / lm_stages.batches(stages["features"]["tokens"], per_report, 1.0),
        ),
        (latents, max(0.0, pages - stages["features"]["seconds"])),
        max(0.0, whole - recorded) / 4,
    )


def host_of(trials: Sequence[Ran], step: Law) -> dict[str, float]:
    """The host's part, from what the experiments took beside the device's."""
    (tokens, few, alone), (_, many, more) = (trial.captured for trial in trials)
    byte = max(0.0, more - alone) / (many - few)
    (narrow, short), (wide, long) = (trial.pages for trial in trials)
    # Beside its steps a training of n takes n times the loop's own work, and one checkpoint at its end.
    (n, short_run), (m, long_run) = (
        (steps, seconds - steps * step.seconds(amounts)) for amounts, steps, seconds in (trial.loop for trial in trials)
    )
    each = max(0.0, (long_run - short_run) / (m - n))
    return {
        "token": max(0.0, alone - byte * few) / tokens,
        "stored_byte": byte,
        "read_byte": 0.0,  # part of a step here
        "step": each,
        "save": max(0.0, short_run - n * each),
        "latent": max(0.0, long - short) / (wide - narrow),
        "start": float(np.mean([trial.start for trial in trials])),
    }


def _device_memory(chip: Any) -> float:
    """Bytes of the device."""
    known = chip.memory_stats() or {}
    room = float(known.get("bytes_limit", 0)) or float(available_memory())
    if not room:
        raise ConfigError(f"Nothing here says how much memory there is; add the device by hand to {own_file()}.")
    return room
