"""Footprints of compiled programs on each device: lowered and compiled for devices that are not there, and never run.

A device that is not there is one of the virtual devices of this machine's CPU. State and batch are the same on every
kind of device. Temporaries are those of XLA's schedule for a CPU: another backend fuses otherwise.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from saejax.app.experiment import Experiment
from saejax.coders import Coder
from saejax.core.errors import ConfigError
from saejax.fit.beginning import unscaled_sites
from saejax.fit.learner import Sides
from saejax.fit.resolve import step_program as compiled_step
from saejax.kernels.batch import DATA, LATENT
from saejax.lm import LanguageModel, decoder, logical_axes
from saejax.lm.conventions import DecoderConfig
from saejax.lm.forward import forward_program
from saejax.lm.shape import ModelShape
from saejax.parallel import batch_sharding, on_mesh, sharding_of
from saejax.plans.collectives import collectives
from saejax.text import Tokenizer
from saejax.through import Through
from saejax.training import Program
from saejax.training.profile import step_bytes

# Blocks of a model that are compiled; all further ones need no more memory at once.
_BLOCKS = 2


@dataclasses.dataclass(frozen=True)
class Footprint:
    """A compiled program on one device.

    Attributes:
        state: bytes that stay from call to call: parameters, moments, averages; or the language model.
        batch: bytes of what comes in with each call.
        temporaries: bytes of results and of what is between.
        flops, moved: floating-point operations, and bytes read and written, as XLA counts them (a loop's body once).
        operations: instructions that run by themselves.
        sent: bytes that collectives carry away from it in a run; those in branches, as for dead latents, are left out.
        collectives: how many there are, each as often as its loop runs.
        amounts: of work, by which the measured law of its kind says its seconds (`laws`).
    """

    state: float
    batch: float
    temporaries: float
    flops: float
    moved: float
    operations: int = 0
    sent: float = 0.0
    collectives: int = 0
    amounts: tuple[float, ...] = ()

    @property
    def bytes(self) -> float:
        """Of its memory, while it runs."""
        return self.state + self.batch + self.temporaries


def step_program(e: Experiment, coder: Coder, names: Sides, mesh: Mesh) -> tuple[Program, Footprint]:
    """(the train step of an experiment, compiled for a mesh; what it takes on each device). Without a second loss.

    Its amounts are 1, operations, bytes moved, kept pairs x width, and parameters: XLA counts a loop over pairs once,
    however long it is, so these stand by themselves.

    Raises:
        ConfigError: what training itself would refuse of the mesh.
    """
    program = compiled_step(e, coder, names, mesh, np.dtype(ml_dtypes.bfloat16), lambda *_: None)
    topology = coder.topology
    widths = unscaled_sites(coder, names).widths(topology.in_shape[-1], topology.out_shape[-1])
    batch = sum(e.train.batch_size // mesh.shape[DATA] * width * 2 for width in widths.values())
    work = _footprint(program.step, bytes_on_one(program.abstract), batch)
    groups = math.prod(topology.latent_shape) // topology.d_sae
    kept = (coder.sparsity.kept or 0) * groups if coder.sparsity.sparse else 0
    pairs = float(e.train.batch_size * kept * math.prod(topology.out_shape))
    amounts = 1.0, work.flops, work.moved, pairs, float(parameter_count(coder))
    return program, dataclasses.replace(work, amounts=amounts)


def through_program(e: Experiment, coder: Coder, names: Sides, shape: ModelShape, mesh: Mesh) -> Footprint:
    """The second loss of a step (`train.through`) with its gradient: of one part of the rows, beside the step itself.

    Raises:
        ConfigError: what training itself would refuse of it.
    """
    if not isinstance(shape, DecoderConfig):
        raise ConfigError(f"train.through={e.train.through} needs a model that JAX runs, and {shape.model} is not one.")
    lm, lm_params = abstract_model(shape, shape.n_layer, e.lm.dtype, mesh)
    length, t = e.text.context_length, e.train
    loss = Through.of(t, e.capture.sinks, lm, lm_params, length, coder, unscaled_sites(coder, names), mesh)
    rows, axes = t.through_rows // t.through_parts, coder.logical_axes()

    def spread(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(mesh, leaf.shape, axes.get(name, ())))

    shapes = jax.eval_shape(coder.init, jax.random.key(0)), jax.eval_shape(coder.init_stats)
    params, stats = ({name: spread(name, leaf) for name, leaf in of.items()} for of in shapes)
    packed = {
        name: jax.ShapeDtypeStruct((rows, *of[1:]), dtype, sharding=batch_sharding(mesh))
        for name, (of, dtype) in loss.arrays.items()
    }
    one = dataclasses.replace(loss, parts=1)
    compiled = jax.jit(on_mesh(one.gradient, mesh)).lower(params, stats, packed, lm_params).compile()
    held = bytes_on_one((params, stats))
    work = _footprint(compiled, bytes_on_one(lm_params) + held, bytes_on_one(packed))
    work = dataclasses.replace(work, state=work.state - held)
    return dataclasses.replace(work, amounts=(1.0, work.flops, work.moved))


@functools.lru_cache(maxsize=256)
def parameter_count(coder: Coder) -> int:
    """Numbers that a coder learns."""
    shapes = jax.eval_shape(coder.init, jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def forward_footprint(
    shape: ModelShape, names: Sequence[str], rows: tuple[int, int], dtype: str, mesh: Mesh
) -> Footprint:
    """The forward pass of a capture of these hook points, `rows` = (rows, tokens of each), over a mesh.

    Its amounts are 1, operations and bytes moved. The model of PyTorch is not compiled: its temporaries are what its
    widest layer holds at once.
    """
    depth = shape.depth(tuple(names))
    n_tokens = rows[0] * rows[1] / mesh.shape[DATA]
    operations = rows[0] * shape.operations(rows[1], depth) / mesh.size
    stored = sum(shape.hook_points()[name] for name in names) * n_tokens * 2
    if not isinstance(shape, DecoderConfig):
        width = jnp.dtype(dtype).itemsize
        held, wide = shape.n_parameters * width, n_tokens * (6 * shape.d_model + 2 * shape.d_mlp) * width
        moved = held + 4 * wide
        return Footprint(held, n_tokens * 12, wide + stored, operations, moved, 1, amounts=(1.0, operations, moved))
    lm, params = abstract_model(shape, min(_BLOCKS, shape.n_layer), dtype, mesh)
    last = f"blocks.{lm.config.n_layer - 1}.resid_post"
    compiled = _footprint(forward_program(lm, params, [last], rows, mesh), bytes_on_one(params), n_tokens * 12)
    repeats = max(1.0, depth / lm.config.n_layer)
    split = mesh.shape[LATENT] > 1
    return dataclasses.replace(
        compiled,
        state=bytes_on_one(abstract_model(shape, shape.n_layer, dtype, mesh)[1]),
        temporaries=compiled.temporaries - n_tokens * shape.d_model * 2 + stored,
        flops=operations,
        moved=compiled.moved * repeats,
        sent=compiled.sent * repeats,
        collectives=round(compiled.collectives * repeats) if split else compiled.collectives,
        operations=round(compiled.operations * repeats),
        amounts=(1.0, operations, compiled.moved * repeats),
    )


def abstract_model(shape: DecoderConfig, n_layer: int, dtype: str, mesh: Mesh) -> tuple[LanguageModel, Any]:
    """The first blocks of a model, and the shapes of its parameters."""
    config = shape.of_first(n_layer)

    def spread(leaf: Any, axes: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype), sharding=sharding_of(mesh, leaf.shape, axes))

    shapes = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))
    params = jax.tree.map(spread, shapes, logical_axes(config))
    # Nothing here asks for its tokens.
    return LanguageModel(config, params, cast(Tokenizer, None), {"model": shape.model}), params


def bytes_on_one(tree: Any) -> float:
    """Bytes of a tree of shapes with shardings, on the device that holds most."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _footprint(compiled: Any, state: float, batch: float) -> Footprint:
    costs = compiled.cost_analysis() or {}
    text = compiled.as_text()
    always = [one for one in collectives(text) if not one.branch]
    entry = text[text.find("\nENTRY ") :]
    operations = len(re.findall(r" (?:fusion|dot|custom-call|while|conditional|sort|scatter|gather|copy)\(", entry))
    whole = step_bytes(compiled.memory_analysis())
    return Footprint(
        state=state,
        batch=batch,
        temporaries=max(0.0, whole - state - batch),
        flops=float(costs.get("flops", 0.0)),
        moved=float(costs.get("bytes accessed", 0.0)),
        operations=operations,
        sent=float(sum(one.sent for one in always)),
        collectives=sum(one.times for one in always),
    )
