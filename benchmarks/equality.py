"""The same training on one device and spread over several, in every way saejax spreads one: by how much numbers differ.

    python -m benchmarks.equality [--output=benchmarks/equality.md] [--only=clt/topk,autoencoder/relu]

Every coder takes 20 steps of plain SGD on the same float32 rows: Adam would hide a gradient of the wrong scale. Some
latents are dead from the start and more die on the way, so that both branches of AuxK run where a coder has it. A cell
is the largest max |a - b| / max |b| over the loss and the gradient's norm of every step, and over every parameter and
statistic after the last, b on one device. Exits with 1 where one is above 1e-5, or an L0 is another.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import platform
import socket
import sys
import time
import unittest.mock
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

from saejax.coders import Coder, CoderConfig, Sites, build
from saejax.kernels import pairs
from saejax.parallel import ParallelConfig, batch_sharding, joined, make_mesh
from saejax.training.config import TrainConfig
from saejax.training.state import TrainState, abstract_state, make_init
from saejax.training.step import compile_step, default_hyper, make_step

B, D, F, K, LAYERS, STEPS = 32, 8, 64, 3, 2, 20
LIMIT = 1e-5
# Machine code of less quality, in less time: the same sums in the same order on the same devices.
_QUICK = {"xla_backend_optimization_level": 0}

# {topology/sparsity: (what CoderConfig is told, the rate)}. Losses that sum over the width have larger gradients. From
# a small encoder latents die within the few steps.
SMALL = {"encoder_scale": 0.1}
CODERS: dict[str, tuple[dict[str, Any], float]] = {
    "autoencoder/relu": ({"preset": "standard", "l1_coefficient": 0.3}, 0.02),
    "autoencoder/gated": ({"preset": "gated", "l1_coefficient": 0.3}, 0.002),
    "autoencoder/topk": ({"preset": "topk", **SMALL}, 0.2),
    "autoencoder/abs_topk": ({"preset": "abs_topk", **SMALL}, 0.2),
    "autoencoder/batchtopk": ({"preset": "batchtopk", **SMALL}, 0.2),
    # Few of its latents die here, and the others have AuxK.
    "autoencoder/jumprelu": (
        {"preset": "jumprelu", "bandwidth": 0.1, "target_l0": 20.0, "auxk_coefficient": 0.0},
        0.02,
    ),
    "autoencoder/matryoshka": ({"preset": "matryoshka", **SMALL}, 0.2),
    "crosscoder/topk": ({"preset": "crosscoder_batchtopk", "sparsity": "topk", **SMALL}, 0.2),
    "crosscoder/batchtopk": ({"preset": "crosscoder_batchtopk", **SMALL}, 0.2),
    "clt/topk": ({"preset": "clt", "sparsity": "topk"}, 0.2),
    "clt/batchtopk": ({"preset": "clt"}, 0.2),
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a training runs: devices along ("data", "latent"), and how."""

    mesh: tuple[int, int]
    fsdp: bool = False
    mode: str = "jit"
    processes: int = 1

    def __str__(self) -> str:
        words = [f"{self.mesh[0]} x {self.mesh[1]}"]
        words += ["fsdp"] if self.fsdp else []
        words += [self.mode] if self.mode != "jit" else []
        words += [f"{self.processes} processes"] if self.processes > 1 else []
        return ", ".join(words)


ALONE = Place((1, 1))
PLACES = (
    *(Place((n, 1)) for n in (2, 4, 8)),
    *(Place(mesh) for mesh in ((4, 2), (2, 4), (1, 8))),
    *(Place(mesh, fsdp=True) for mesh in ((8, 1), (4, 2))),
    Place((8, 1), mode="pmap"),
    *(Place(mesh, processes=2) for mesh in ((8, 1), (2, 4))),
)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a training gave.

    Attributes:
        rows: every metric of every step.
        start, end: {name: parameter or statistic} before the first step and after the last.
    """

    rows: list[dict[str, float]]
    start: dict[str, np.ndarray]
    end: dict[str, np.ndarray]

    def column(self, metric: str) -> np.ndarray:
        return np.array([row[metric] for row in self.rows])


def a_coder(name: str) -> tuple[Coder, Sites]:
    """The coder of a name in `CODERS`, and the hook points h0, h1 that it reads and writes."""
    config = CoderConfig(d_sae=F, k=K, matmul_dtype="float32", dead_after_tokens=3 * B, auxk_k=4, **CODERS[name][0])
    stacked = not name.startswith("autoencoder")
    n = LAYERS if stacked else 1
    hooks = tuple(f"h{i}" for i in range(n))
    return build(config, [D] * n, steps=STEPS), Sites(hooks, hooks, (1.0,) * n, (1.0,) * n, stacked)


@functools.cache
def trained(name: str, place: Place = ALONE, by_blocks: bool = True) -> Trained:
    """The training of the coder `name` at `place`, whose devices this process has or has joined."""
    abstract, step = program(name, place, by_blocks)
    own = _start(name)
    state = jax.tree.map(lambda s, a: jax.make_array_from_callback(s.shape, s.sharding, lambda i: a[i]), abstract, own)
    sites, hyper, rows = a_coder(name)[1], default_hyper(0), []
    mesh = make_mesh(ParallelConfig(place.mesh))
    start = _numbers(state)
    for i in range(STEPS):
        state, metrics = step(state, activations(sites, mesh, i), hyper)
        rows.append({metric: float(value) for metric, value in metrics.items()})
    return Trained(rows, start, _numbers(state))


@functools.cache
def program(name: str, place: Place, by_blocks: bool = True) -> tuple[TrainState, Any]:
    """(shapes and shardings of the state, the compiled step): kept entries `by_blocks` as in a large training."""
    (coder, sites), rate, mesh = a_coder(name), CODERS[name][1], make_mesh(ParallelConfig(place.mesh))
    optimizer = optax.with_extra_args_support(optax.sgd(rate))
    config = TrainConfig(batch_size=B, tokens=STEPS * B, lr=3e-4)
    abstract = abstract_state(coder, _init(name), mesh, place.fsdp)
    step = make_step(coder, optimizer, optax.constant_schedule(rate), sites, config)
    jitted: Any = compile_step(step, abstract, mesh, place.mode)
    with unittest.mock.patch.object(pairs, "FEW", 0 if by_blocks else pairs.FEW):
        lowered = jitted.lower(abstract, activations(sites, mesh, 0), default_hyper(0))
    return abstract, lowered.compile(compiler_options=_QUICK)


@functools.cache
def _init(name: str) -> Callable[[Any], TrainState]:
    """The birth of a state with 3 latents (of each group) dead: fewer than auxk_k."""
    coder, optimizer = a_coder(name)[0], optax.with_extra_args_support(optax.sgd(CODERS[name][1]))
    init = make_init(coder, optimizer, TrainConfig(batch_size=B, tokens=STEPS * B, lr=3e-4))

    def start(seed: Any) -> TrainState:
        state = init(seed)
        since = state.stats["tokens_since_fired"].at[..., :3].set(3 * B)
        return dataclasses.replace(state, stats=state.stats | {"tokens_since_fired": since})

    return start


@functools.cache
def _start(name: str) -> TrainState:
    """The state at step 0, in numpy; not compiled as one, so that coders of the same shape share the pieces."""
    return jax.tree.map(np.asarray, _init(name)(0))


def activations(sites: Sites, mesh: jax.sharding.Mesh, step: int) -> dict[str, jax.Array]:
    """The batch of a step, rows over "data": sparse positive sums of 32 directions of each hook point, and noise."""
    fixed, rng = np.random.default_rng(99), np.random.default_rng(1000 + step)
    codes = (rng.random((B, 32)) < 0.1) * rng.exponential(1.0, (B, 32))
    hooks = {
        hook: (codes @ fixed.normal(size=(32, D)) + 0.3 * rng.normal(size=(B, D))).astype(np.float32)
        for hook in sites.hook_points
    }
    split = batch_sharding(mesh)
    return {hook: jax.make_array_from_callback(a.shape, split, lambda i, a=a: a[i]) for hook, a in hooks.items()}


def _numbers(state: TrainState) -> dict[str, np.ndarray]:
    """Parameters and statistics, whole, in every process."""
    held = state.params | state.stats
    if jax.process_count() == 1:
        return {name: np.array(value) for name, value in held.items()}
    return dict(multihost_utils.process_allgather(held, tiled=True))


# --- comparing ---------------------------------------------------------------------------------------------------


def difference(got: Trained, want: Trained) -> float:
    """The largest relative difference: losses and gradients' norms step by step, arrays by their largest entry."""
    pairs = [
        (a[metric], b[metric]) for a, b in zip(got.rows, want.rows, strict=True) for metric in ("loss", "grad_norm")
    ]
    pairs += [(got.end[name], value) for name, value in want.end.items()]
    return max(_relative(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs)


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(np.abs(a - b).max() / (np.abs(b).max() or 1))


def same_l0(got: Trained, want: Trained) -> bool:
    """Whether every step kept exactly as many latents."""
    kept = [np.rint(one.column("l0") * B * LAYERS) for one in (got, want)]
    return bool((kept[0] == kept[1]).all())


# --- two processes -----------------------------------------------------------------------------------------------


def devices(n: int) -> None:
    """So many virtual CPU devices; before JAX looks for them."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={n}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    # More threads than devices, so that their collectives cannot wait for each other for ever.
    os.environ["NPROC"] = "16"


def _one_of(processes: int, rank: int, address: str, jobs: Sequence[tuple[str, Place]], out: Connection) -> None:
    devices(8 // processes)
    with joined(ParallelConfig(processes=f"{rank}/{processes}", coordinator=address)):
        for name, place in jobs:
            result = trained(name, place)
            if rank == 0:
                out.send(result)


def trained_by(processes: int, jobs: Sequence[tuple[str, Place]]) -> list[Trained]:
    """Each of `jobs` by so many processes of 8 / n devices each, which meet over loopback.

    Raises:
        EOFError: a process ended early; it said why.
    """
    spawn = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    out, into = spawn.Pipe(duplex=False)
    them = [
        spawn.Process(target=_one_of, args=(processes, rank, address, jobs, into), daemon=True)
        for rank in range(processes)
    ]
    for process in them:
        process.start()
    into.close()
    results = [out.recv() for _ in jobs]
    for process in them:
        process.join()
    return results


# --- the tables --------------------------------------------------------------------------------------------------


def learned(name: str) -> str:
    """What the training on one device was like: without this, equality would mean little."""
    want = trained(name)
    loss, dead = want.column("loss"), want.column("dead")
    branches = {"none": (dead == 0).any(), "few": ((dead > 0) & (dead <= 4)).any(), "many": dead.max() > 4 * LAYERS}
    taken = ", ".join(branch for branch, seen in branches.items() if seen) if "auxk" in want.rows[0] else "-"
    learnt = {array: start for array, start in want.start.items() if start.dtype != np.int32 and array != "centre"}
    moved = min(np.abs(want.end[array] - start).max() for array, start in learnt.items())
    cells = (
        f"{loss[0]:.3f} | {loss[-1]:.3f} | {want.column('l0').mean():.1f} | {dead.max():.0f} | {taken} | {moved:.1e}"
    )
    return f"| {name} | {cells} |"


def compared(name: str, elsewhere: dict[tuple[str, Place], Trained]) -> tuple[str, bool, str]:
    """(a line of the table, whether all of it holds, what the coder `learned`)"""
    want, cells, good = trained(name), [], True
    for place in PLACES:
        got = elsewhere.get((name, place)) or trained(name, place)
        same, apart = same_l0(got, want), difference(got, want)
        good &= same and apart <= LIMIT
        cells.append(f"{apart:.0e}" if same else f"{apart:.0e}, another L0")
    return f"| {name} | {' | '.join(cells)} |", good, learned(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the tables there")
    parser.add_argument("--only", default=",".join(CODERS), help="coders, as topology/sparsity (default: all)")
    asked = parser.parse_args()
    devices(8)
    started, names = time.time(), asked.only.split(",")
    if unknown := [name for name in names if name not in CODERS]:
        parser.error(f"--only: there is no {', '.join(unknown)}; there are {', '.join(CODERS)}")
    jobs = [(name, place) for name in names for place in PLACES if place.processes > 1]
    elsewhere = dict(zip(jobs, trained_by(2, jobs), strict=True))
    lines = ["| coder | " + " | ".join(map(str, PLACES)) + " |", "|---|" + "---|" * len(PLACES)]
    all_good, of_coders = True, []
    # The programs of all coders together are more memory maps than a process may have (vm.max_map_count).
    alone = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, alone, devices, (8,), max_tasks_per_child=1) as pool:
        for line, good, of_coder in pool.map(compared, names, [elsewhere] * len(names)):
            lines.append(line)
            of_coders.append(of_coder)
            all_good &= good
            print(line, flush=True)
    what = [
        "| coder | first loss | last loss | L0 | most dead | AuxK's branches | least moved |",
        "|---|---|---|---|---|---|---|",
    ]
    text = _HEAD.format(
        command=" ".join(["python -m benchmarks.equality", *(a for a in sys.argv[1:] if "output" not in a)]),
        machine=f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPU cores, Python {platform.python_version()}, "
        f"jax {jax.__version__}, {time.time() - started:,.0f} s",
        size=f"{STEPS} steps of plain SGD, batch {B}, width {D}, {F} latents (a layer), k {K}",
        differences="\n".join(lines),
        learned="\n".join([*what, *of_coders]),
    )
    print(text)
    if asked.output:
        asked.output.write_text(text)
    sys.exit(0 if all_good else 1)


_HEAD = """# The same numbers, however a training is spread

`{command}`: {machine}, eight virtual devices. {size}, float32, the same rows everywhere.

Largest relative difference from one device: of the loss and the gradient's norm of each step, of every parameter and
statistic after the last (max |a - b| / max |b| of an array, b on one device). A column is a mesh, (devices along data)
x (devices along latent); fsdp spreads parameters over data too; 2 processes have four devices each and meet over
loopback. In every cell each step kept exactly as many latents, unless it says otherwise.

{differences}

What was trained, on one device. AuxK's branches: none of the latents dead, few (at most auxk_k), many. Least moved: of
the parameters, the one whose largest change is least.

{learned}

The rows are chosen so that no two latents stand within a rounding of each other at the border of a selection. With the
first rows that were tried two did, in AuxK of abs_topk, one token of step 7: with the latents split the other one was
kept, and that column said 7e-05. Any other order of a sum does the same.
"""


if __name__ == "__main__":
    main()
