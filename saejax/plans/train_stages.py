"""Training and sweeps: state, batch and temporaries of the compiled step; seconds of steps, reading, validation."""

from saejax.app.experiment import Experiment
from saejax.app.sweep.members import groups, members
from saejax.coders import Coder
from saejax.kernels.batch import LATENT
from saejax.parallel import ParallelConfig, make_mesh
from saejax.plans import lm_stages
from saejax.plans.devices import Device
from saejax.plans.laws import Law, law_of, training_peak
from saejax.plans.outline import Outline
from saejax.plans.programs import Footprint, parameter_count
from saejax.plans.stage import StageEstimate, Terms
from saejax.store.neighbours import block_rows
from saejax.training.config import TrainConfig

# Encoding and decoding alone, beside a step with its gradients and the optimizer.
_FORWARD_SHARE = 0.35


def train(outline: Outline, terms: Terms) -> StageEstimate | None:
    """The training of one coder; None for a sweep."""
    if outline.experiment.swept:
        return None
    e, t = outline.experiment, outline.experiment.train
    coder, work = outline.step(terms.mesh)
    seconds, times = _loop(outline, terms, step_seconds(terms, coder, work, e))
    width = sum(outline.widths.values()) * 2
    held = block_rows(t.neighbours, t.block_chunks, e.capture.layout("train")) * width * 2
    parts = {"state": work.state, "batch": work.batch, "temporaries": work.temporaries}
    flops = t.steps * work.flops * terms.devices
    if e.capture.into == "training":  # the model runs beside it, on the same devices
        of_model, each, operations = lm_stages.passes(outline, terms)
        streaming = t.tokens * (each + terms.host.token)
        seconds += streaming
        times["the language model"] = streaming / t.steps
        parts["language model"] = of_model["language model"]
        parts["temporaries"] = max(parts["temporaries"], of_model["temporaries"])
        flops += t.tokens * operations
        held = 2 * e.capture.buffer_rows * width
    if second := outline.through(terms.mesh):
        law, peak = law_of(terms.device, "evaluate"), terms.device.peak(e.lm.dtype)
        share = (1 - t.through_from) * t.through_parts
        times["the loss through the model"] = share * terms.seconds(law, second, peak)
        seconds += t.steps * times["the loss through the model"]
        flops += t.steps * share * second.flops * terms.devices
        parts["language model"] = second.state
        parts["temporaries"] = max(parts["temporaries"], second.temporaries)
    return terms.estimate(
        "train",
        parts,
        host=held + 2 * work.state,
        disk=checkpoint_bytes(t, work.state * (terms.devices if e.parallel.fsdp else terms.mesh.shape[LATENT])),
        seconds=seconds + saves(t) * terms.host.save,
        flops=flops,
        bound=max(times, key=lambda what: times[what]),
    )


def sweep(outline: Outline, terms: Terms) -> StageEstimate | None:
    """All members of a sweep, its programs dealt out to the devices; None for one training.

    One program of each kind of coder is compiled, the widest; others take their share of it by parameters.
    """
    if not outline.experiment.swept:
        return None
    alone = Terms(terms.device, make_mesh(ParallelConfig((1, 1)), list(terms.mesh.devices.flat)))
    programs = groups(members(outline.experiment))
    counts = [len(group.members) for group in programs]
    outlines = [outline.with_experiment(group.experiment) for group in programs]
    coders = [each.coder() for each in outlines]
    compiled: dict[str, tuple[Coder, Footprint, Experiment]] = {}
    for each, coder in sorted(zip(outlines, coders, strict=True), key=lambda pair: -parameter_count(pair[1])):
        if step_kind(coder) not in compiled:
            compiled[step_kind(coder)] = (*each.step(alone.mesh), each.experiment)
    seconds, state = [0.0] * terms.devices, [0.0] * terms.devices
    temporaries = flops = disk = batch = 0.0
    for count, own in zip(counts, coders, strict=True):
        coder, work, e = compiled[step_kind(own)]
        share = parameter_count(own) / parameter_count(coder)
        on = seconds.index(min(seconds))
        seconds[on] += share * count * step_seconds(alone, coder, work, e)
        state[on] += share * count * work.state
        # On a CPU members of a program take turns; elsewhere they are one batch.
        at_once = 1 if alone.shares_cores else count
        temporaries = max(temporaries, share * at_once * work.temporaries)
        batch = max(batch, work.batch)
        flops += share * count * work.flops
        disk += count * checkpoint_bytes(e.train, share * work.state)
    t = outline.experiment.train
    whole, times = _loop(outline, terms, max(seconds))
    return terms.estimate(
        "sweep",
        {"state": max(state), "batch": batch, "temporaries": temporaries},
        host=2 * sum(state),
        disk=disk,
        seconds=whole + sum(counts) * saves(t) * terms.host.save,
        flops=t.steps * flops,
        bound=max(times, key=lambda what: times[what]),
        note=f"{sum(counts)} members as {len(counts)} programs",
        devices=min(terms.devices, len(counts)),
        starts=len(counts) ** 0.5,
    )


def _loop(outline: Outline, terms: Terms, step: float) -> tuple[float, dict[str, float]]:
    """(seconds of all steps and validations; {part of a step: seconds}), of steps that compute so many seconds."""
    e, host = outline.experiment, terms.host
    t, sites = e.train, outline.work.sites
    width = sum(outline.widths.get(name, 0) for name in dict.fromkeys((*sites[0], *sites[1])))
    read = t.batch_size * width * (1 if e.capture.dtype == "int8" else 2) * host.read_byte
    every = t.validation_interval(min(e.capture.tokens, t.max_rows or 2**62))
    validations = t.steps // every + 1 if every else 0
    validated = validations * e.capture.heldout_tokens / t.batch_size * step * _FORWARD_SHARE
    seconds = t.steps * (terms.together(step, read) + host.step) + validated
    return seconds, {"the step": step, "reading the store": read, "the loop": host.step}


def step_seconds(terms: Terms, coder: Coder, work: Footprint, e: Experiment) -> float:
    """Seconds of one train step."""
    return terms.seconds(law_of_step(terms.device, coder), work, training_peak(terms.device, e.coder.matmul_dtype))


def step_kind(coder: Coder) -> str:
    """The kind of a step, by which its speed differs besides amounts: its selection and the terms of its loss."""
    return f"{type(coder.sparsity).__name__.lower()}.{'+'.join(sorted(term.name for term in coder.terms))}"


def law_of_step(device: Device, coder: Coder) -> Law | None:
    """Measurements of such steps; of other losses with the same selection where there is nothing else."""
    kind = step_kind(coder)
    alike = f"train.{kind.partition('.')[0]}."
    names = [f"train.{kind}", *(name for name in device.measured if name.startswith(alike))]
    return next((law for name in names if (law := law_of(device, name))), None)


def saves(t: TrainConfig) -> int:
    """Number of checkpoints that a training writes."""
    return -(-t.steps // t.checkpoint_every)


def checkpoint_bytes(t: TrainConfig, state: float) -> float:
    """Bytes on disk at the end of a training whose state takes so many bytes."""
    count = min(t.keep_checkpoints, saves(t)) + bool(t.keep_best)
    return state * (count + (t.steps // t.keep_every if t.keep_every else 0))
