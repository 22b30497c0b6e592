"""The language model and the training on devices of their own (capture.mesh): whether both work at the same time.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 NPROC=16 python -m benchmarks.disjoint [--steps=20]

Trainings straight from the demo model: one device does both; one trains and another runs the model; two train and a
third runs the model. JAX's profiler says when each operation of a program ran. Printed are the seconds in which an
operation of the language model ran, one of the training, and both at the same time; and the largest difference of the
parameters at the end from those of the first training. Virtual devices share the processor, so seconds say nothing
about speed; that both run at once does. Here the model has one device, because XLA runs programs of several virtual CPU
devices one after the other, whatever devices they are for (jax 0.10.2).
"""

import argparse
import dataclasses
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from saejax.app.experiment import Experiment
from saejax.app.stages import run_capture, run_train
from saejax.app.workspace import Workspace
from saejax.capture import CaptureConfig
from saejax.checkpoints import Checkpoints
from saejax.coders import CoderConfig
from saejax.core.host import keep_memory
from saejax.parallel import ParallelConfig
from saejax.training import TrainConfig

Spans = list[tuple[float, float]]  # seconds, in order, none of which overlap
_MODEL = "jit_forward"  # what the compiled forward pass is called (saejax/lm/forward.py)
_STEP = "jit_traced"  # and the step (saejax/parallel/mesh.py)


# name, parallel.mesh, capture.mesh
_RUNS: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (
    ("one does both", (1, 1), ()),
    ("one trains, one runs the model", (1, 1), (1, 1)),
    ("two train, one runs the model", (2, 1), (1, 1)),
)


def traced_training(e: Experiment, folder: Path) -> tuple[Spans, Spans]:
    """(when the language model ran, when a step ran) in a training of `e`."""
    run_capture(Workspace(e))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
        run_train(Workspace(e))
    (file,) = folder.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    model, step = (merged(events, program) for program in (_MODEL, _STEP))
    if not model or not step:
        programs = {event["args"]["hlo_module"] for event in events if "hlo_module" in event.get("args", {})}
        raise SystemExit(f"The trace lacks {_MODEL} or {_STEP}; it has {', '.join(sorted(programs))}.")
    return [span for span in model if span[1] > step[0][0]], step


def merged(events: list[dict[str, Any]], program: str) -> Spans:
    """The time in which an operation of a program ran on any device."""
    own = [event for event in events if event.get("args", {}).get("hlo_module") == program]
    found: Spans = []
    for start, stop in sorted((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in own):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def seconds(spans: Spans) -> float:
    return sum(stop - start for start, stop in spans)


def both(one: Spans, other: Spans) -> Spans:
    """The time that is in a span of each list."""
    shared = ((max(a[0], b[0]), min(a[1], b[1])) for a in one for b in other)
    return [(start, stop) for start, stop in shared if start < stop]


def final(e: Experiment) -> dict[str, np.ndarray]:
    with Checkpoints(e.run_dir / "checkpoints") as checkpoints:
        return dict(checkpoints.restore_numpy(e.train.steps, names=("params",))[0]["params"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps (20)")
    steps = parser.parse_args().steps
    keep_memory()
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Four rows of the text are about as many activations as a batch: a forward pass for every step.
        capture = CaptureConfig(tokens=16_384, heldout_tokens=256, into="training", buffer_rows=4096, batch_rows=4)
        for run, devices, mesh in _RUNS:
            e = Experiment(
                name=run,
                runs_dir=str(folder / "runs"),
                stores_dir=str(folder / "stores"),
                capture=dataclasses.replace(capture, mesh=mesh),
                coder=CoderConfig(preset="standard", d_sae=1024),
                train=TrainConfig(tokens=1024 * steps, batch_size=1024, lr=3e-4, validate_every=0),
                parallel=ParallelConfig(devices),
            )
            model, step = traced_training(e, folder / "traces" / run)
            least, shared = min(seconds(model), seconds(step)), seconds(both(model, step))
            print(f"{run}: model {seconds(model):.2f} s, step {seconds(step):.2f} s, at once {shared:.2f} s", end=" ")
            print(f"({shared / least:.0%} of the shorter)")
            found.append(final(e))
    for (run, *_), params in zip(_RUNS[1:], found[1:], strict=True):
        largest = max(np.abs(params[name] - value).max() / np.abs(value).max() for name, value in found[0].items())
        print(f"{run}: parameters differ from the first by {largest:.1e} of the largest")


if __name__ == "__main__":
    main()
