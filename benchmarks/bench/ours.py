"""saejax as a contestant: the train step that `saejax train` runs, with its default settings.

A worker (see protocol.py); started for one row, so that its memory is that row's.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.bench.activations import Batches, explained
from benchmarks.bench.protocol import peak_bytes, serve, timed_steps, used
from saejax.coders import Coder, CoderConfig, Sites, build
from saejax.coders.config import LONG_AGO
from saejax.core.host import keep_memory
from saejax.kernels.selection import largest_listed, largest_mask, largest_of_rows
from saejax.parallel import ParallelConfig, make_mesh
from saejax.store import ArrayRows
from saejax.store import Batches as StoreBatches
from saejax.trained import make_sites
from saejax.training import TrainConfig
from saejax.training.program import Program, program_of_one, put_on
from saejax.training.start import make_prepare

# Latents that are to stay dead read so weakly that no selection takes them, yet AuxK finds positive ones.
WEAK = 0.01


def hook_points(row: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """(all of a row's hook points, those it reads, those it writes)"""
    names = tuple(f"site{s}" for s in range(row["sites"]))
    return (names, names[:1], names[1:]) if row["preset"] == "transcoder" else (names, names, names)


def program_of(row: dict[str, Any], rows: ArrayRows, lr: float, steps: int) -> tuple[Coder, Sites, Program, Mesh]:
    """As `saejax.train` does, but for a learning rate that is constant: it is everybody's."""
    _, reads, writes = hook_points(row)
    of_k = {"jumprelu": {"target_l0": float(row["k"])}, "standard": {}, "crosscoder": {}}
    config = CoderConfig(preset=row["preset"], d_sae=row["d_sae"], **of_k.get(row["preset"], {"k": row["k"]}))
    train = TrainConfig(
        tokens=steps * row["batch"], batch_size=row["batch"], lr=lr, schedule="constant", warmup_fraction=0.0
    )
    widths = [row["d_in"]] * len(reads)
    coder = build(config, widths, train.steps, widths)
    sites = make_sites(config, coder.topology, reads, writes, rows.statistics)
    mesh = make_mesh(ParallelConfig((1, 1)))
    prepare = make_prepare(config, coder, sites, StoreBatches(rows, min(row["batch"], rows.n_tokens), 0))
    return coder, sites, program_of_one(coder, train, sites, prepare, mesh, seed=0), mesh


class Training:
    """One coder in training."""

    def __init__(self, row: dict[str, Any], data: str, lr: float, steps: int):
        self.row, self.source = row, Batches(data, row["batch"])
        self.names = hook_points(row)[0]
        rows = ArrayRows({name: self.source.rows[:, s] for s, name in enumerate(self.names)})
        self.coder, self.sites, program, mesh = program_of(row, rows, lr, steps)
        self.put = put_on(mesh, row["batch"], self.names)
        started = time.perf_counter()
        self.program = program.compiled(np.dtype(np.float32))
        self.compile_seconds = time.perf_counter() - started
        self.state = self.program.start()
        self.dead = jnp.arange(row["d_sae"]) < row["dead"]
        if row["dead"]:
            params = self.state.params
            weak = params["W_enc"] * self.coder.along_latents("W_enc", jnp.where(self.dead, WEAK, 1.0))
            self.state = self.state.replace(params=params | {"W_enc": weak})
        self.metrics: dict[str, jax.Array] = {}

    def before(self) -> dict[str, np.ndarray]:
        """The next batch, and who is dead: every step finds as many."""
        if self.row["dead"]:
            since = jnp.where(self.dead, jnp.int32(LONG_AGO), 0)
            self.state = self.state.replace(stats=self.state.stats | {"tokens_since_fired": since})
            jax.block_until_ready(since)
        batch_BSD = self.source.take()
        return {name: np.ascontiguousarray(batch_BSD[:, s]) for s, name in enumerate(self.names)}

    def step(self, rows: dict[str, np.ndarray]) -> None:
        (arrays,) = self.put(rows)
        self.state, self.metrics = self.program.step(self.state, arrays, self.program.hyper)

    def wait(self) -> None:
        jax.block_until_ready((self.state, self.metrics))

    def reconstructed(self, batch_BSD: np.ndarray) -> tuple[np.ndarray, int]:
        """What the step's own forward pass makes of a batch, in the activations' units, and how many latents are on."""
        arrays = {name: jnp.asarray(batch_BSD[:, s]) for s, name in enumerate(self.names)}
        y_hat, count = _forward(self.coder, self.sites)(self.state.params, arrays)
        scales = np.asarray(self.sites.write_scales, np.float32)
        return np.asarray(y_hat).reshape(len(batch_BSD), len(scales), -1) / scales[:, None], int(count)


@functools.cache
def _forward(coder: Any, sites: Any) -> Callable[..., Any]:
    def forward(params: Any, arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x = sites.batch(arrays)["x"]
        latents = coder.encode(params, x)
        return coder.decode(params, latents, x), (latents.l0() * x.shape[0]).round()

    return jax.jit(forward)


_training: list[Training] = []


def prepare(row: dict[str, Any], data: str, lr: float, steps: int) -> dict[str, Any]:
    """Compiles the row's step, and makes its first state."""
    training = Training(row, data, lr, steps)
    _training[:] = [training]
    return {
        "version": f"jax {jax.__version__}",
        "matmul_dtype": training.coder.topology.matmul_dtype,
        "compile_seconds": training.compile_seconds,
        **counted(training.program),
    }


def counted(program: Program) -> dict[str, Any]:
    """FLOPs and bytes of the compiled step by XLA's cost analysis, and the memory that it needs at once."""
    compiled: Any = program.step
    cost, memory = compiled.cost_analysis() or {}, compiled.memory_analysis()
    kinds = ("argument", "output", "temp")
    needed = sum(getattr(memory, f"{kind}_size_in_bytes") for kind in kinds) - memory.alias_size_in_bytes
    return {"flops": cost.get("flops"), "bytes": cost.get("bytes accessed"), "memory": needed}


def run(steps: int) -> dict[str, Any]:
    """The seconds of each step, and what they took."""
    (training,) = _training
    with used() as use:
        seconds = timed_steps(steps, training.before, training.step, training.wait, each=jax.default_backend() == "cpu")
    return {"seconds": seconds, **use.to_json(), "peak": peak(), "dead": int(training.metrics["dead"])}


def peak() -> int:
    """The process's, or the device's where arrays lie on one."""
    found = jax.devices()[0].memory_stats() or {}
    return found.get("peak_bytes_in_use") or peak_bytes()


def fve(heldout: str) -> dict[str, Any]:
    (training,) = _training
    written = slice(1, None) if training.row["preset"] == "transcoder" else slice(None)
    return explained(training.reconstructed, heldout, training.row["batch"], written)


def parts(calls: int) -> dict[str, Any]:
    """Median seconds of parts of the step, each compiled alone: so they need not add up to the step."""
    (training,) = _training
    coder, state, step = training.coder, training.state, jnp.int32(10)
    batch = training.sites.batch({name: jnp.asarray(rows) for name, rows in training.before().items()})

    def pre_activations(params: Any) -> Any:
        return coder.topology.pre_activations(params, batch["x"])

    def loss(params: Any, stats: Any) -> Any:
        return coder.loss(params, batch, stats, step)

    def gradient(params: Any, stats: Any) -> Any:
        return jax.grad(coder.loss, has_aux=True)(params, batch, stats, step)

    found = {
        "encoder": median_seconds(calls, pre_activations, state.params),
        "loss": median_seconds(calls, loss, state.params, state.stats),
        "loss and gradient": median_seconds(calls, gradient, state.params, state.stats),
    }
    return {"seconds": found}


def select(rows: int, width: int, k: int, calls: int) -> dict[str, Any]:
    """Median seconds of the kernels' selections out of rectified normal numbers [rows, width]."""
    # NumPy's numbers: jax.random.normal has 2^23 different ones, so that the k-th largest of 2^25 has equals.
    positive = jnp.maximum(np.random.default_rng(0).standard_normal((rows, width), np.float32), 0)
    count = jnp.int32(rows * k)
    kinds: dict[str, Callable[[jax.Array], Any]] = {
        "saejax, k of each row, by falling value": lambda v: largest_of_rows(v, k),
        "saejax, k of each row, by rising index (topk's step)": lambda v: largest_of_rows(v, k, falling=False),
        "saejax, k a row over the batch, as a list (batchtopk's step)": lambda v: largest_listed(v, count, rows * k),
        "saejax, k a row over the batch, as a mask": lambda v: largest_mask(v, count),
    }
    found = {name: median_seconds(calls, of, positive) for name, of in kinds.items()}
    return {"seconds": found, "peak": peak()}


def median_seconds(calls: int, function: Callable[..., Any], *arguments: Any) -> float:
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*arguments))
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


if __name__ == "__main__":
    keep_memory()  # as every command does, before JAX starts its threads
    serve({"prepare": prepare, "run": run, "fve": fve, "parts": parts, "select": select})
