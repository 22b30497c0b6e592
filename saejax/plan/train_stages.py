"""Training and sweeps: state, batch and temporaries of the compiled step; seconds of steps, reading, validation."""

import math

from jax.sharding import Mesh

from saejax.app.experiment import Experiment
from saejax.coders import Coder
from saejax.kernels.batch import LATENT
from saejax.parallel import ParallelConfig, make_mesh
from saejax.plan import lm_stages
from saejax.plan.devices import Device
from saejax.plan.laws import Law, law_of, roofline, training_peak
from saejax.plan.planned import Planned, parameter_count
from saejax.plan.programs import Footprint
from saejax.plan.stage import StageEstimate, Terms
from saejax.store.neighbours import block_rows
from saejax.training.config import TrainConfig

# Of a process that has imported everything and holds no arrays.
_PROCESS = 1.0e9
# Encoding and decoding alone, beside a step with its gradients and the optimizer.
_FORWARD_SHARE = 0.35


def train(planned: Planned, terms: Terms) -> StageEstimate | None:
    """The training of one coder; None for a sweep."""
    if planned.swept:
        return None
    e, host = planned.experiment, terms.host
    coder, work = planned.step(terms.mesh)
    t = e.train
    each = step_seconds(terms, coder, work, e)
    read = _read_bytes(planned, t) * host.read_byte
    loop = terms.together(each, read) + host.step
    validated = _validations(planned, t) * _heldout_steps(planned, t) * each * _FORWARD_SHARE
    seconds = t.steps * loop + validated + saves(t) * host.save
    held = sum(planned.widths.values()) * block_rows(t.neighbours, t.block_chunks, e.capture.layout("train")) * 2 * 2
    parts = {"state": work.state, "batch": work.batch, "temporaries": work.temporaries}
    flops = t.steps * work.flops * terms.devices
    streaming = 0.0
    if e.capture.into == "training":  # the model runs beside it, on the same devices
        passes = lm_stages.passes(planned, terms)
        streaming = t.tokens * (passes.seconds + host.token)
        parts |= {"language model": passes.parts["language model"]}
        parts["temporaries"] = max(parts["temporaries"], passes.parts["temporaries"])
        flops += t.tokens * passes.flops
        held = 2 * e.capture.buffer_rows * sum(planned.widths.values()) * 2
    return StageEstimate(
        "train",
        terms.devices,
        parts,
        _PROCESS + held + 2 * work.state,
        checkpoint_bytes(t, work.state * (terms.devices if e.parallel.fsdp else terms.mesh.shape[LATENT])),
        host.start + seconds + streaming,
        flops,
        _bound(
            {
                "the step": each,
                "reading the store": read,
                "the loop": host.step,
                "the language model": streaming / t.steps,
            }
        ),
        start=host.start,
    )


def sweep(planned: Planned, terms: Terms) -> StageEstimate | None:
    """All members of a sweep, its programs dealt out to the devices; None for one training.

    One program of each kind of coder is compiled, the widest; others take their share of it by parameters.
    """
    if not planned.swept:
        return None
    alone = Terms(terms.device, _one(terms), terms.host)
    groups = planned.groups()
    sizes = {id(group): planned.with_experiment(group.experiment).coder() for group in groups}
    compiled: dict[str, tuple[Coder, Footprint, Experiment]] = {}
    for group in sorted(groups, key=lambda group: -parameter_count(sizes[id(group)])):
        kind = kind_of(sizes[id(group)])
        if kind not in compiled:
            own = planned.with_experiment(group.experiment)
            compiled[kind] = (*own.step(alone.mesh), group.experiment)
    seconds, state = [0.0] * terms.devices, [0.0] * terms.devices
    temporaries = flops = disk = batch = 0.0
    for group in groups:
        coder, work, e = compiled[kind_of(sizes[id(group)])]
        share = parameter_count(sizes[id(group)]) / parameter_count(coder)
        count = len(group.members)
        on = seconds.index(min(seconds))
        seconds[on] += share * count * step_seconds(alone, coder, work, e)
        state[on] += share * count * work.state
        # On a CPU members of a program take turns; elsewhere they are one batch.
        at_once = 1 if alone.shares_cores else count
        temporaries = max(temporaries, share * at_once * work.temporaries)
        batch = max(batch, work.batch)
        flops += share * count * work.flops
        disk += count * checkpoint_bytes(e.train, share * work.state)
    e = planned.experiment
    host = terms.host
    read = _read_bytes(planned, e.train) * host.read_byte
    loop = terms.together(max(seconds), read) + host.step
    validated = _validations(planned, e.train) * _heldout_steps(planned, e.train) * max(seconds) * _FORWARD_SHARE
    members = sum(len(group.members) for group in groups)
    return StageEstimate(
        "sweep",
        min(terms.devices, len(groups)),
        {"state": max(state), "batch": batch, "temporaries": temporaries},
        _PROCESS + 2 * sum(state),
        disk,
        host.start * len(groups) ** 0.5 + e.train.steps * loop + validated + members * saves(e.train) * host.save,
        e.train.steps * flops,
        _bound({"the step": max(seconds), "reading the store": read, "the loop": host.step}),
        f"{members} members as {len(groups)} programs",
        start=host.start * len(groups) ** 0.5,
    )


def step_seconds(terms: Terms, coder: Coder, work: Footprint, e: Experiment) -> float:
    """One train step."""
    law = law_of_step(terms.device, coder)
    if law is not None and terms.devices == 1:
        return law.seconds(amounts(coder, work, e.train.batch_size))
    return roofline(terms.device, work, training_peak(terms.device, e.coder.matmul_dtype))


def amounts(coder: Coder, work: Footprint, batch_size: int) -> tuple[float, ...]:
    """(1, operations, bytes moved, kept pairs x width, parameters): what a step's measured law is about.

    XLA counts a loop over pairs once, however long it is, so these stand by themselves.
    """
    topology = coder.topology
    groups = math.prod(topology.latent_shape) // topology.d_sae
    kept = (coder.sparsity.kept or 0) * groups if coder.sparsity.sparse else 0
    pairs = float(batch_size * kept * math.prod(topology.out_shape))
    return 1.0, work.flops, work.moved, pairs, float(parameter_count(coder))


def kind_of(coder: Coder) -> str:
    """What a step's speed depends on besides amounts: how it selects, and the terms of its loss."""
    return f"{type(coder.sparsity).__name__.lower()}.{'+'.join(sorted(term.name for term in coder.terms))}"


def law_of_step(device: Device, coder: Coder) -> Law | None:
    """What was measured of such steps; of other losses with the same selection where there is nothing else."""
    kind = kind_of(coder)
    alike = f"train.{kind.partition('.')[0]}."
    names = [f"train.{kind}", *(name for name in device.measured if name.startswith(alike))]
    return next((law for name in names if (law := law_of(device, name))), None)


def _read_bytes(planned: Planned, t: TrainConfig) -> float:
    """Of one batch, as the store holds it."""
    reads, writes = planned.work.sites
    width = sum(planned.widths.get(name, 0) for name in dict.fromkeys((*reads, *writes)))
    return t.batch_size * width * (1 if planned.experiment.capture.dtype == "int8" else 2)


def _validations(planned: Planned, t: TrainConfig) -> int:
    every = t.validation_interval(min(planned.experiment.capture.tokens, t.max_rows or 2**62))
    return t.steps // every + 1 if every else 0


def _heldout_steps(planned: Planned, t: TrainConfig) -> float:
    return planned.experiment.capture.heldout_tokens / t.batch_size


def saves(t: TrainConfig) -> int:
    """Checkpoints that a training writes."""
    return -(-t.steps // t.checkpoint_every)


def checkpoint_bytes(t: TrainConfig, state: float) -> float:
    """On disk at the end of a training whose state takes so many bytes."""
    kept = min(t.keep_checkpoints, saves(t)) + bool(t.keep_best)
    return state * (kept + (t.steps // t.keep_every if t.keep_every else 0))


def _bound(parts: dict[str, float]) -> str:
    return max(parts, key=lambda name: parts[name])


def _one(terms: Terms) -> Mesh:
    """The mesh of one of the devices."""
    return make_mesh(ParallelConfig((1, 1)), list(terms.mesh.devices.flat))
