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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.app.console import say
from saejax.app.experiment import Experiment, default_config, experiment
from saejax.app.stages import run_capture, run_evaluate, run_report, run_train
from saejax.app.workspace import Workspace
from saejax.core.errors import ConfigError
from saejax.core.host import available_memory
from saejax.core.progress import Progress
from saejax.fit.trainable import coder_of
from saejax.lm import decoder
from saejax.lm.conventions import DecoderConfig
from saejax.lm.forward import forward_program
from saejax.parallel import ParallelConfig, batch_sharding, make_mesh
from saejax.plans import lm_stages
from saejax.plans.devices import Device, devices, keep, own_file
from saejax.plans.laws import Law, fitted
from saejax.plans.models import shape_of
from saejax.plans.outline import captured_widths
from saejax.plans.programs import abstract_model, forward_footprint, step_program
from saejax.plans.train_stages import step_kind

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
# (layers, latents, steps, rows of an evaluation) of the two small experiments.
_EXPERIMENTS = (((3,), 512, 40, 8), ((3, 0, 1, 2), 1536, 160, 16))


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
            trials = [_trial_run(f"{folder}/{number}", *sizes) for number, sizes in enumerate(_EXPERIMENTS)]
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
    """(kind of coder, (amounts, seconds)) of a train step on this machine's first device, on random activations."""
    e = experiment_with({"coder.preset": preset, "coder.d_sae": d_sae, "coder.k": k, "train.batch_size": batch})
    coder, names = coder_of(e, [d_in], [d_in]), (("x",), ("x",))
    program, work = step_program(e, coder, names, make_mesh(ParallelConfig((1, 1)), jax.devices()))
    if jax.devices()[0].platform != "cpu":  # amounts are those that a plan sees
        _, work = step_program(e, coder, names, make_mesh(ParallelConfig((1, 1)), jax.devices("cpu")))
    rows = {"x": jnp.asarray(np.random.default_rng(0).normal(size=(batch, d_in)), jnp.bfloat16)}
    holder = [program.start()]

    def run() -> Any:
        holder[0], metrics = program.step(holder[0], rows, program.hyper)
        return holder[0], metrics

    return step_kind(coder), (work.amounts, _median(run, least=8))


def _forwards(platform: str) -> Iterator[Point]:
    """(amounts, seconds) of captures' forward passes, of the demo model and of models with random weights."""
    mesh, cpu = (make_mesh(ParallelConfig((1, 1)), on) for on in (jax.devices(), jax.devices("cpu")))
    demo = shape_of("demo")
    assert isinstance(demo, DecoderConfig)
    cases = [(demo, 32, 256)]
    for width, layers, rows, length in _MODELS[platform]:
        sizes: dict[str, Any] = {"n_layer": layers, "d_model": width, "d_head": width // demo.n_head}
        sizes |= {"d_mlp": 4 * width, "context_length": max(length, 256), "windows": ()}
        cases.append((dataclasses.replace(demo, **sizes, model="random"), rows, length))
    for model, n_rows, length in cases:
        names, batch = [f"blocks.{model.n_layer - 2}.resid_post"], (n_rows, length)
        lm, _ = abstract_model(model, model.n_layer, "float32", mesh)
        params = decoder.init_params(lm.config, jax.random.key(0))
        program = forward_program(lm, params, names, batch, mesh)
        tokens = jnp.asarray(np.random.default_rng(0).integers(0, model.vocab_size, batch), jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), batch)
        arrays = [jax.device_put(a, batch_sharding(mesh)) for a in (tokens, positions, jnp.zeros(batch, jnp.int32))]
        work = forward_footprint(model, names, batch, "float32", cpu)
        yield work.amounts, _median(functools.partial(program, params, *arrays))


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


def experiment_with(values: dict[str, Any]) -> Experiment:
    """The default experiment with some keys set: {"train.lr": 3e-4}."""
    config = default_config()
    config.update_from_flattened_dict(values)
    return experiment(config)


def _trial_run(folder: str, layers: Sequence[int], latents: int, steps: int, eval_rows: int) -> Ran:
    e = experiment_with(
        {
            "name": "calibrate",
            "runs_dir": folder,
            "stores_dir": folder,
            "capture.hook_points": tuple(f"blocks.{layer}.resid_post" for layer in layers),
            "capture.tokens": 131_072,
            "capture.heldout_tokens": 4096,
            "coder.preset": _EXPERIMENT,
            "coder.d_sae": latents,
            "train.batch_size": 2048,
            "train.tokens": 2048 * steps,
            "train.validate_every": 0,
            "train.checkpoint_every": 10_000,
            "eval.tokens": 24_576,
            "eval.batch_rows": eval_rows,
            "report.tokens": 24_576,
        }
    )
    work, started = Workspace(e), time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run_capture(work)
        run_train(work)
        run_evaluate(work)
        before = time.perf_counter()
        run_report(work)
        pages = time.perf_counter() - before
    stages = e.run.read_stages()
    recorded = sum(stage["seconds"] for stage in stages.values())
    start = max(0.0, time.perf_counter() - started - recorded) / 4
    coder, shape, length = work.build(), shape_of("demo"), e.text.context_length
    _, step = step_program(e, coder, work.sites, make_mesh(ParallelConfig((1, 1)), jax.devices("cpu")))
    train, captured = stages["train"], stages["capture train"]
    forward = captured["tokens"] / captured["forward_tokens_per_second"]
    stored = 2.0 * sum(captured_widths(work).values()) * captured["tokens"]
    evaluation = lm_stages.evaluation(shape, coder, work.sites, (eval_rows, length), e.lm.dtype)
    scan = lm_stages.report_work(shape, coder, (e.report.batch_rows, length), e.lm.dtype, work.sites[0])

    def of_batch(stage: str, rows: int) -> float:
        return stages[stage]["seconds"] / lm_stages.batches(stages[stage]["tokens"], rows * length, 1.0)

    return Ran(
        (captured["tokens"], stored, max(0.0, captured["seconds"] - forward)),
        (step.amounts, e.train.steps, train["seconds"]),
        (evaluation.amounts, of_batch("evaluate", eval_rows)),
        (scan.amounts, of_batch("features", e.report.batch_rows)),
        (math.prod(coder.topology.latent_shape), max(0.0, pages - stages["features"]["seconds"])),
        start,
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
    room = (chip.memory_stats() or {}).get("bytes_limit", 0) or available_memory()
    if not room:
        raise ConfigError(f"Nothing here says how much memory there is; add the device by hand to {own_file()}.")
    return float(room)
