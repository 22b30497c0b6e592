"""Train steps on 8 to 64 devices that are not there: memory, bytes between devices, and what the store must give.

    XLA_FLAGS="--xla_force_host_platform_device_count=64 --xla_backend_optimization_level=0" python -m benchmarks.scale

Every step is compiled for its mesh of virtual CPU devices and never run; shapes alone exist. Memory and bytes are
counted in the compiled program, a loop as often as it runs; what a branch sends stands by itself, for not every step
takes it (AuxK where a latent is dead, ties of a selection). Seconds are predicted from
an H100's data sheet by the planner's roofline, with machines of eight cards. Writes scale.md beside this file.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from absl import app

from saejax.app.experiment import Experiment, with_settings
from saejax.coders import Coder, build
from saejax.experiment import experiment
from saejax.parallel import ParallelConfig, make_mesh
from saejax.plans.collectives import collectives
from saejax.plans.devices import devices
from saejax.plans.laws import roofline, training_peak
from saejax.plans.programs import Footprint, step_program

HERE = Path(__file__).parent
MACHINE = 8  # cards
NETWORK = 50e9  # bytes a second of a card to another machine: NVIDIA DGX H100, 400 Gb/s a card
TOKENS = 1024  # of a batch, for each device
MEMORY = 0.9  # of a card, as the planner counts


@dataclasses.dataclass(frozen=True)
class Case:
    """A dictionary, and the meshes ("data", "latent") that it is compiled for."""

    preset: str
    d_in: int
    d_sae: int
    k: int
    layers: int = 0
    meshes: tuple[tuple[int, int], ...] = ((8, 1), (2, 4), (1, 8), (16, 1), (2, 8), (4, 8), (64, 1), (8, 8), (1, 64))

    @property
    def title(self) -> str:
        shape = f"{self.d_in:,} -> {self.d_sae:,}, k {self.k}"
        return f"{self.preset}, {self.layers} layers of {shape}" if self.layers else f"{self.preset}, {shape}"


WIDE = ((1, 8), (2, 8), (4, 8), (8, 8), (2, 32), (1, 64))
CASES = (
    Case("topk", 2304, 65_536, 64),
    Case("batchtopk", 2304, 65_536, 64),
    Case("jumprelu", 2304, 65_536, 64),
    Case("topk", 4096, 1_048_576, 64, meshes=WIDE),
    Case("batchtopk", 4096, 1_048_576, 64, meshes=WIDE),
    Case("clt", 2304, 16_384, 16, 26, meshes=WIDE),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A compiled step on one mesh."""

    mesh: tuple[int, int]
    work: Footprint
    in_branches: float
    by_kind: dict[str, float]
    batch: int
    stored: int

    @property
    def devices(self) -> int:
        return math.prod(self.mesh)

    def seconds(self) -> tuple[float, float]:
        """(a step, of it what travels), of H100s with NVLink within a machine and the network between machines."""
        card = devices()["h100"]
        if self.devices > MACHINE:
            card = dataclasses.replace(card, link=NETWORK)
        peak = training_peak(card, "auto")
        whole = roofline(card, self.work, peak)
        return whole, whole - roofline(card, dataclasses.replace(self.work, sent=0.0, collectives=0), peak)


def measured(case: Case, mesh_shape: tuple[int, int]) -> Row:
    """One mesh; its batch grows with the devices."""
    batch = TOKENS * math.prod(mesh_shape)
    settings = {"coder.preset": case.preset, "coder.k": case.k, "train.batch_size": batch, "train.lr": 1e-4}
    e = with_settings(experiment("quickstart"), settings | {"train.tokens": 1000 * batch})
    names = (tuple(f"in.{i}" for i in range(case.layers)), tuple(f"out.{i}" for i in range(case.layers)))
    sides = names if case.layers else (("x",), ("x",))
    mesh = make_mesh(ParallelConfig(mesh_shape), jax.devices()[: math.prod(mesh_shape)])
    coder = coder_of(case, e)
    program, work = step_program(e, coder, sides, mesh)
    found = collectives(program.step.as_text())
    always: dict[str, float] = {}
    for one in found:
        if not one.branch:
            always[one.kind] = always.get(one.kind, 0.0) + one.sent
    branches = sum(one.sent for one in found if one.branch)
    stored = 2 * case.d_in * len({*sides[0], *sides[1]})
    return Row(mesh_shape, work, branches, always, batch, stored)


def coder_of(case: Case, e: Experiment) -> Coder:
    config = dataclasses.replace(e.coder, d_sae=case.d_sae, target_l0=float(case.k))
    widths = [case.d_in] * max(1, case.layers)
    return build(config, widths, e.train.steps, widths if case.layers else None)


def gb(size: float) -> str:
    return f"{size / 1e9:.2f}"


def lines(case: Case) -> Iterator[str]:
    """The table of a case."""
    yield f"## {case.title}\n"
    heads = ["devices", "data, latent", "state, GB", "temporaries, GB", "fits 80 GB", "sent a step, GB", "most of it"]
    heads += ["in branches, GB", "step, ms", "of it links", "tokens/s", "store, GB/s a machine"]
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for shape in case.meshes:
        row = measured(case, shape)
        whole, links = row.seconds()
        most = max(row.by_kind, key=row.by_kind.__getitem__) if row.by_kind else "-"
        fits = "yes" if row.work.bytes < MEMORY * 80e9 else "no"
        rate = row.batch / whole
        store = rate * row.stored / max(1, row.devices // MACHINE) / 1e9
        cells = [str(row.devices), f"{shape[0]}, {shape[1]}", gb(row.work.state), gb(row.work.temporaries), fits]
        cells += [gb(row.work.sent), most, gb(row.in_branches), f"{1e3 * whole:.1f}", f"{links / whole:.0%}"]
        yield f"| {' | '.join([*cells, f'{rate:,.0f}', f'{store:.2f}'])} |"
        print(row.devices, shape, f"{row.work.sent / 1e9:.3f} GB", row.by_kind, flush=True)
    yield ""


HEAD = """# Scale, on paper

`python -m benchmarks.scale`, jax {jax}, 64 virtual CPU devices; nothing was run. A batch has {tokens:,} tokens for each
device. State, temporaries and sent bytes are those of one device, from the program that XLA compiled for a CPU: another
backend schedules otherwise, and temporaries are an upper bound for it. Steps are **predicted**, by an H100's data sheet
(3,350 GB/s, 989 TFLOP/s of bfloat16, half of that and 70 % of it reached; 450 GB/s between cards of a machine of
eight). Beyond one machine all that travels goes at a card's share of the network, {network:.0f} GB/s, and nothing
overlaps: so these are pessimistic. "Store" is what one machine must read for that rate, in bfloat16.

"""


# Read off the tables of 2026-11-28.
REMARKS = """## What it says

- One machine of eight: the latents split over all cards. Summing gradients over "data" sends 12 to 16 times the bytes,
  and a card's state is eight times as large.
- Several machines: latents split within each, "data" between them (8, 8). 37 to 59 % of a step is then the network's,
  if nothing overlaps. With (1, 64) TopK gathers every card's candidates of every row.
- A million latents of width 4,096 fit from eight cards on. Between machines the sums of gradients take half of a step;
  with the latents split over machines as well (2, 32) a step takes half as long.
- The store must give 0.1 to 4 GB/s a machine. One reader here gave 1.24 GB/s ([RESULTS](RESULTS.md)), so narrow
  dictionaries on one machine of H100s would wait for it; with `capture.into=training` there is none.
- A cross-layer transcoder of this size does not fit in the schedule for a CPU, whose sums over kept pairs differ from a
  GPU's: each device has room for all pairs of the batch. `train.accumulate` computes a batch in parts. Before sums of
  long rows went in pieces (2026-11-28) it was 742 GB on eight devices, and nearly doubled with the batch; this page
  found that. The other tables are of that day as well, before that change.
"""


def main(_: Sequence[str]) -> None:
    head = HEAD.format(jax=jax.__version__, tokens=TOKENS, network=NETWORK / 1e9)
    tables = [line for case in CASES for line in lines(case)]
    (HERE / "scale.md").write_text("\n".join([head, *tables, REMARKS]), encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
