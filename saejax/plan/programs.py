"""Footprints of compiled programs on each device: lowered and compiled for devices that are not there, and never run.

A device that is not there is one of the virtual devices of this machine's CPU. State and batch are the same on every
kind of device. Temporaries are those of XLA's schedule for a CPU: another backend fuses otherwise.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from saejax.app.experiment import Experiment
from saejax.coders import Coder
from saejax.fit.beginning import unscaled_sites
from saejax.fit.learner import Sides
from saejax.fit.resolve import step_program as compiled_step
from saejax.kernels.batch import DATA, LATENT
from saejax.lm import LanguageModel, decoder, logical_axes
from saejax.lm.forward import forward_program
from saejax.lm.shape import ModelShape
from saejax.parallel import sharding_of
from saejax.text import Tokenizer
from saejax.training import Program
from saejax.training.profile import step_bytes

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
# Blocks of a model that are compiled; all further ones need no more memory at once.
_BLOCKS = 2

_COLLECTIVE = re.compile(
    r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) "
    r"(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)
# Which devices take part: {{0,1},{2,3}}, or [2,2]<=[4] for groups of two.
_GROUP, _GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}"), re.compile(r"replica_groups=\[\d+,(\d+)\]")
_ARRAY = re.compile(r"(pred|[suf]\d+|bf16)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Footprint:
    """A compiled program on one device.

    Attributes:
        state: bytes that stay from call to call: parameters, moments, averages; or the language model.
        batch: bytes of what comes in with each call.
        temporaries: bytes of results and of what is between.
        flops, moved: floating-point operations, and bytes read and written, as XLA counts them (a loop's body once).
        sent: bytes that collectives carry away from it.
        collectives: how many there are.
        operations: instructions that run by themselves.
    """

    state: float
    batch: float
    temporaries: float
    flops: float
    moved: float
    sent: float
    collectives: int
    operations: int

    @property
    def bytes(self) -> float:
        """Of its memory, while it runs."""
        return self.state + self.batch + self.temporaries


def step_footprint(e: Experiment, coder: Coder, names: Sides, mesh: Mesh) -> Footprint:
    """The train step of an experiment on a mesh.

    Raises:
        ConfigError: what training itself would refuse of the mesh.
    """
    return step_program(e, coder, names, mesh)[1]


def step_program(e: Experiment, coder: Coder, names: Sides, mesh: Mesh) -> tuple[Program, Footprint]:
    """(the train step, compiled; what it takes on each device)."""
    program = compiled_step(e, coder, names, mesh, np.dtype(ml_dtypes.bfloat16))
    widths = unscaled_sites(coder, names).widths(coder.topology.in_shape[-1], coder.topology.out_shape[-1])
    batch = sum(e.train.batch_size // mesh.shape[DATA] * width * 2 for width in widths.values())
    return program, _footprint(program.step, bytes_on_one(program.abstract), batch)


def forward_footprint(
    shape: ModelShape, names: Sequence[str], rows: tuple[int, int], dtype: str, mesh: Mesh
) -> Footprint:
    """The forward pass of a capture of these hook points, `rows` = (rows, tokens of each), over a mesh.

    The model of PyTorch is not compiled: its temporaries are what its widest layer holds at once.
    """
    depth, width = shape.depth(tuple(names)), 2 if dtype == "bfloat16" else 4
    devices, split = mesh.size, mesh.shape[LATENT]
    n_tokens = rows[0] * rows[1] / mesh.shape[DATA]
    operations = rows[0] * shape.operations(rows[1], depth) / devices
    held = shape.n_parameters * width
    stored = sum(shape.names.hook_points()[name] for name in names) * n_tokens * 2
    if shape.config is None:
        wide = n_tokens * (6 * shape.d_model + 2 * shape.d_mlp) * width
        return Footprint(held, n_tokens * 12, wide + stored, operations, held + 4 * wide, 0.0, 0, 1)
    lm, params = abstract_model(shape, min(_BLOCKS, shape.n_layer), _DTYPES[dtype], mesh)
    last = f"blocks.{lm.config.n_layer - 1}.resid_post"
    compiled = _footprint(forward_program(lm, params, [last], rows, mesh), bytes_on_one(params), n_tokens * 12)
    hook_bytes = n_tokens * shape.d_model * 2
    repeats = max(1.0, depth / lm.config.n_layer)
    whole = _abstract_params(shape.config, _DTYPES[dtype], mesh)
    return dataclasses.replace(
        compiled,
        state=bytes_on_one(whole),
        temporaries=compiled.temporaries - hook_bytes + stored,
        flops=operations,
        moved=compiled.moved * repeats,
        sent=compiled.sent * repeats,
        collectives=round(compiled.collectives * repeats) if split > 1 else compiled.collectives,
        operations=round(compiled.operations * repeats),
    )


def abstract_model(shape: ModelShape, n_layer: int, dtype: Any, mesh: Mesh) -> tuple[LanguageModel, Any]:
    """The first blocks of a model, and the shapes of its parameters."""
    assert shape.config is not None
    config = dataclasses.replace(shape.config, n_layer=n_layer, windows=shape.config.windows[:n_layer])
    params = _abstract_params(config, dtype, mesh)
    # Nothing here asks for its tokens.
    nobody: Tokenizer = None  # type: ignore[assignment]
    return LanguageModel(config, params, nobody, {"model": shape.model}), params


def _abstract_params(config: Any, dtype: Any, mesh: Mesh) -> Any:
    shapes = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))
    return jax.tree.map(
        lambda leaf, axes: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding_of(mesh, leaf.shape, axes)),
        shapes,
        logical_axes(config),
    )


def bytes_on_one(tree: Any) -> float:
    """Bytes of a tree of shapes with shardings, on the device that holds most."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _footprint(compiled: Any, state: float, batch: float) -> Footprint:
    costs = compiled.cost_analysis() or {}
    text = compiled.as_text()
    spread = re.search(r"\bnum_partitions=(\d+)", text)
    devices = int(spread[1]) if spread else 1
    sizes = [sent for line in text.splitlines() if (sent := sent_by(line, devices)) > 0]
    entry = text[text.find("\nENTRY ") :]
    operations = len(re.findall(r" (?:fusion|dot|custom-call|while|conditional|sort|scatter|gather|copy)\(", entry))
    whole = step_bytes(compiled.memory_analysis())
    return Footprint(
        state=state,
        batch=batch,
        temporaries=max(0.0, whole - state - batch),
        flops=float(costs.get("flops", 0.0)),
        moved=float(costs.get("bytes accessed", 0.0)),
        sent=float(sum(sizes)),
        collectives=len(sizes),
        operations=operations,
    )


def sent_by(line: str, devices: int) -> float:
    """Bytes that each device sends for a line of a program that is compiled for so many; 0 where it is no collective.

    Of n devices in a ring a sum of s bytes sends 2 s (n - 1) / n, the others s (n - 1) / n.
    """
    if not (match := _COLLECTIVE.match(line)):
        return 0.0
    listed, counted = _GROUP.search(line), _GROUPS.search(line)
    n = len(listed[1].split(",")) if listed else int(counted[1]) if counted else devices
    return (2 if match[2] == "all-reduce" else 1) * _array_bytes(match[1]) * (n - 1) / n


def _array_bytes(shapes: str) -> int:
    """Bytes of the arrays that stand in a line of HLO before its operation."""
    total = 0
    for kind, dims in _ARRAY.findall(shapes):
        width = 1 if kind == "pred" else int(re.sub(r"\D", "", kind)) / 8
        total += int(math.prod(int(n) for n in dims.split(",") if n) * width)
    return total
