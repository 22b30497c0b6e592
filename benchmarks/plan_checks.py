"""Plans beside what happened: bytes of train steps on many meshes, and seconds of stages on this machine.

    saejax calibrate
    export XLA_FLAGS="--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    python -m benchmarks.plan_checks --seconds=false --output=benchmarks/plan_bytes.md
    unset XLA_FLAGS
    python -m benchmarks.plan_checks --bytes=false --output=benchmarks/plan_seconds.md

Bytes: what a plan says against `memory_analysis()` of the program that the training itself compiles, and the state
against the arrays that it allocates. Seconds: what a plan with `--device=here` says against the clocks of real stages
(stages.json), which start when the program is compiled.
"""

import os
import statistics
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from absl import app, flags, logging

from saejax.app.experiment import Experiment, default_config, experiment
from saejax.app.stages import run_capture, run_evaluate, run_train
from saejax.app.workspace import Workspace
from saejax.coders import Sites
from saejax.core.compiled import keep_programs
from saejax.core.host import keep_memory
from saejax.plans.devices import HERE, device
from saejax.plans.estimate import stage_of
from saejax.plans.outline import Outline, mesh_of
from saejax.training import program_of_one
from saejax.training.profile import step_bytes

_OUTPUT = flags.DEFINE_string("output", "", "The Markdown file to write; without it the tables are printed.")
_QUICK = flags.DEFINE_bool("quick", False, "Fewer coders and widths: a minute.")
_BYTES = flags.DEFINE_bool("bytes", True, "The table of bytes.")
_SECONDS = flags.DEFINE_bool("seconds", True, "The table of seconds.")

CODERS = ("topk", "batchtopk", "standard", "gated", "jumprelu", "matryoshka")
WIDTHS = (768, 1024, 2048)
# Devices along data, latent; and whether the state is spread too.
MESHES = ((1, 1, False), (8, 1, False), (2, 2, False), (4, 1, True))


def made(**values: Any) -> Experiment:
    """The demo model with a few settings."""
    config = default_config()
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in values.items()})
    return experiment(config)


def compiled_bytes(e: Experiment, mesh: Any) -> tuple[int, int]:
    """(bytes of the training's own compiled step, of its state as allocated), on the fullest device."""
    outline = Outline.of(e)
    coder, (reads, writes) = outline.coder(), outline.work.sites
    sites = Sites(reads, writes, (1.0,) * len(reads), (1.0,) * len(writes), coder.topology.stacked)
    program = program_of_one(coder, e.train, sites, lambda params: params, mesh, seed=0, fsdp=e.parallel.fsdp)
    step = program.compiled(np.dtype(ml_dtypes.bfloat16)).step
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(program.start()):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    # A compiled step is typed as the function that it is; these attributes are jax's.
    return step_bytes(step.memory_analysis()), max(held.values())  # type: ignore[attr-defined]


def bytes_table() -> Iterator[str]:
    """A row for each coder, width and mesh."""
    yield "| coder | latents | data x latent | plan, MB | compiled, MB | off | state: plan, MB | allocated, MB |"
    yield "|---|---|---|---|---|---|---|---|"
    worst = 0.0
    for coder in CODERS[:2] if _QUICK.value else CODERS:
        for width in WIDTHS[:1] if _QUICK.value else WIDTHS[::2]:
            for data, latent, fsdp in MESHES[:3] if _QUICK.value else MESHES:
                e = made(
                    coder__preset=coder,
                    coder__d_sae=width,
                    coder__k=24,
                    train__batch_size=2048,
                    train__tokens=204_800,
                    parallel__mesh=(data, latent),
                    parallel__fsdp=fsdp,
                )
                mesh = mesh_of(e, data * latent)
                said = stage_of(Outline.of(e), device("h100"), data * latent, "train")
                found, held = compiled_bytes(e, mesh)
                off = said.device_bytes / found - 1
                worst = max(worst, abs(off))
                what = f"{data} x {latent}" + (", fsdp" if fsdp else "")
                numbers = (said.device_bytes, found, said.parts["state"], held)
                mb = [f"{count / 1e6:.2f}" for count in numbers]
                yield f"| {coder} | {width:,} | {what} | {mb[0]} | {mb[1]} | {off:+.1%} | {mb[2]} | {mb[3]} |"
    yield f"\nThe largest difference is {worst:.1%}."


def seconds_table(folder: Path) -> Iterator[str]:
    """A row for each stage that ran."""
    yield "| stage | of | plan, s | took, s | off |"
    yield "|---|---|---|---|---|"
    offs = []
    for stage, what, said, took in ran(folder):
        off = said / took - 1
        offs.append(abs(off))
        yield f"| {stage} | {what} | {said:.1f} | {took:.1f} | {off:+.0%} |"
    within = sum(off <= 0.2 for off in offs)
    middle, most = statistics.median(offs), max(offs)
    yield f"\n{within} of {len(offs)} are within 20 %; the median is {middle:.0%}, the largest {most:.0%}."


def ran(folder: Path) -> Iterator[tuple[str, str, float, float]]:
    """(stage, what of, seconds of the plan, seconds that it took), without starting, for stages that run here."""
    on = device(HERE)
    common = {
        "runs_dir": str(folder / "runs"),
        "stores_dir": str(folder / "stores"),
        "coder.k": 24,
        "train.batch_size": 2048,
        "train.tokens": 2048 * 80,
        "eval.tokens": 65_536,
        "capture.tokens": 300_000,
        "capture.heldout_tokens": 16_384,
    }
    three = tuple(f"blocks.{i}.resid_post" for i in (1, 2, 3))
    hooks = {"1 hook point": three[2:], "3 hook points": three}
    for what, names in hooks.items():
        config = default_config()
        config.update_from_flattened_dict(common | {"name": "capture", "store": what[:1], "capture.hook_points": names})
        e = experiment(config)
        said = stage_of(Outline.of(e), on, 1, "capture")
        run_capture(Workspace(e))
        stages = e.run.read_stages()
        took = sum(stages[f"capture {split}"]["seconds"] for split in ("train", "heldout"))
        yield "capture", what, said.seconds - said.start, took
        (e.run_dir / "stages.json").unlink()
    for coder in CODERS[:2] if _QUICK.value else CODERS:
        for width in WIDTHS[:2] if _QUICK.value else WIDTHS:
            settings = common | {"name": f"{coder}-{width}", "store": "1", "coder.preset": coder, "coder.d_sae": width}
            config = default_config()
            config.update_from_flattened_dict(settings)
            e = experiment(config)
            outline = Outline.of(e)
            stages_said = {name: stage_of(outline, on, 1, name) for name in ("train", "evaluate")}
            run_train(Workspace(e))
            if width == WIDTHS[1] and coder in ("topk", "standard"):
                run_evaluate(Workspace(e))
            stages = e.run.read_stages()
            for name, said in stages_said.items():
                if name in stages:
                    yield name, f"{coder}, {width:,} latents", said.seconds - said.start, stages[name]["seconds"]


def main(_: list[str]) -> None:
    # As every command does: without it each step asks the system for its memory again.
    keep_memory()
    keep_programs()
    logging.set_verbosity(logging.ERROR)
    text = [f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, jax {jax.__version__}, {date.today()}. The demo"]
    text[0] += " model, width 128, batches of 2,048 activations."
    if _BYTES.value:
        text += ["", *bytes_table()]
    if _SECONDS.value:
        with tempfile.TemporaryDirectory() as folder:
            text += ["", *seconds_table(Path(folder))]
    title = "Bytes of train steps" if _BYTES.value else "Seconds of stages"
    lines = [f"# {title}: the plan beside what happened", "", "`benchmarks/plan_checks.py` says how.", "", *text]
    page = "\n".join(lines)
    if _OUTPUT.value:
        Path(_OUTPUT.value).write_text(page + "\n", encoding="utf-8")
    print(page)


if __name__ == "__main__":
    app.run(main)
