"""The stages that run the language model: capture, evaluation, report, graphs and interventions.

Tokens that are read but not stored (bos, padding) are left out, and of a selection (chat, last_tokens) every token
counts as stored: then more text is read than is said here.
"""

import dataclasses
import math

from saejax.app.experiment import Experiment
from saejax.coders import Coder
from saejax.kernels.batch import DATA
from saejax.lm.shape import ModelShape
from saejax.plan.laws import law_of, roofline
from saejax.plan.planned import Planned, parameter_count
from saejax.plan.programs import Footprint, forward_footprint
from saejax.plan.stage import StageEstimate, Terms

# Of a process that has imported everything and holds no arrays.
_PROCESS = 1.0e9
# How many arrays of float32 logits, and of dense latents of a block, an evaluation's program holds at once. (With
# bfloat16 3.3 of the former, as compiled for Llama-3-8B.)
_LOGITS, _DENSE = 3.1, 3
# Of the tokens that are read, those that are no bos and no filling.
_KEPT = 0.99
# Bytes for each latent: of features.sqlite (5.3e3 of what benchmarks.serve_load makes up, 2026-11-25) and report.html.
_PAGE_BYTES = 7.5e3
# A study's prompts have about so many tokens, and so many of the latents' places in them are active.
_PROMPT, _ACTIVE = 64, 32
_FILES = 1e6


@dataclasses.dataclass(frozen=True)
class Passes:
    """The forward passes of all models: bytes on the fullest device; seconds and operations of one token."""

    parts: dict[str, float]
    seconds: float
    flops: float


def passes(planned: Planned, terms: Terms) -> Passes:
    """What reads the hook points of an experiment."""
    e, length = planned.experiment, planned.experiment.text.context_length
    rows = -(-(e.capture.batch_rows or 32) // terms.mesh.shape[DATA]) * terms.mesh.shape[DATA]
    own = [(shape, _own(planned, i)) for i, shape in enumerate(planned.models)]
    works = [forward_footprint(shape, names, (rows, length), e.lm.dtype, terms.mesh) for shape, names in own if names]
    each = sum(_forward_seconds(terms, work, e.lm.dtype) for work in works)
    flops = sum(work.flops for work in works) * terms.devices
    return Passes(_sum(works), each / (rows * length), flops / (rows * length))


def capture(planned: Planned, terms: Terms) -> StageEstimate:
    """Text through the model, and activations to disk."""
    c, host, found = planned.experiment.capture, terms.host, passes(planned, terms)
    tokens = (0 if c.into == "training" else c.tokens) + c.heldout_tokens
    stored = planned.store_bytes()
    host_work = tokens * host.token + sum(stored.values()) * host.stored_byte
    forward = tokens * found.seconds
    shards = c.shard_rows * sum(planned.widths.values()) * 2
    return StageEstimate(
        "capture",
        terms.devices,
        found.parts,
        _PROCESS + 3 * shards + found.parts["language model"],
        sum(stored.values()),
        host.start + terms.together(forward, host_work),
        tokens * found.flops,
        "the forward pass" if forward >= host_work else "packing and writing",
        _selected(planned),
        start=host.start,
    )


def evaluate(planned: Planned, terms: Terms) -> StageEstimate | None:
    """Three forward passes with logits, encoding and decoding; on one device."""
    if planned.swept:
        return None
    e, shape, host, coder = planned.experiment, planned.models[0], terms.host, planned.coder()
    rows, length = e.eval.batch_rows, e.text.context_length
    work = evaluation(shape, coder, (rows, length), e.lm.dtype)
    law = law_of(terms.device, "evaluate")
    if law is not None:
        each = law.seconds(evaluation_amounts(shape, coder, work, rows * length))
    else:
        each = roofline(terms.device, work, terms.device.peak(e.lm.dtype))
    count = batches(e.eval.tokens, rows * length)
    held, own = shape.n_parameters * _width(e), parameter_bytes(coder)
    return StageEstimate(
        "evaluate",
        1,
        {"language model": held, "coder": own, "temporaries": work.temporaries},
        _PROCESS + held,
        _FILES,
        host.start + count * each,
        count * work.flops,
        "the forward passes",
        start=host.start,
    )


def batches(tokens: float, of: int, kept: float = _KEPT) -> int:
    """How many batches of `of` tokens are read until `tokens` are there, if a share of them is kept."""
    return max(1, math.ceil(tokens / (of * kept)))


def evaluation(shape: ModelShape, coder: Coder, rows: tuple[int, int], dtype: str) -> Footprint:
    """One batch of an evaluation, `rows` = (rows, tokens of each).

    It is not compiled: for a CPU XLA turns every bfloat16 weight into float32 first, which no other device does.
    """
    tokens, width = rows[0] * rows[1], 2 if dtype == "bfloat16" else 4
    own, latents = parameter_bytes(coder), math.prod(coder.topology.latent_shape)
    sites = math.prod(coder.topology.out_shape) + math.prod(coder.topology.in_shape)
    logits, dense = 4.0 * tokens * shape.vocab_size, 4.0 * tokens * latents
    block = _DENSE * 4.0 * min(tokens, coder.few_tokens) * latents
    # The clean run's logits are there all the time; with them the latents, and when these are gone two more logits.
    between = max(_LOGITS * logits, logits + block) + tokens * 2 * sites
    operations = 3 * rows[0] * shape.operations(rows[1]) + 2.0 * tokens * own / 4
    held = shape.n_parameters * width
    moved = 3 * held + 8 * logits + 8 * dense
    return Footprint(held + own, 0.0, between, operations, moved, 0.0, 0, 40 * shape.n_layer)


def evaluation_amounts(shape: ModelShape, coder: Coder, work: Footprint, tokens: int) -> tuple[float, ...]:
    """(operations, logits and latents) of a batch: what its measured law is about."""
    return work.flops, float(tokens * (shape.vocab_size + math.prod(coder.topology.latent_shape)))


def report(planned: Planned, terms: Terms) -> StageEstimate | None:
    """One forward pass over held-out text for the features' examples, and the pages; on one device."""
    if planned.swept:
        return None
    e, shape, host, coder = planned.experiment, planned.models[0], terms.host, planned.coder()
    rows, length = e.report.batch_rows, e.text.context_length
    work = report_work(shape, coder, (rows, length), e.lm.dtype, planned.work.sites[0])
    law = law_of(terms.device, "report")
    if law is not None:
        each = law.seconds(report_amounts(work, coder, rows * length))
    else:
        each = roofline(terms.device, work, terms.device.peak(e.lm.dtype))
    count, n_latents = batches(e.report.tokens, rows * length), math.prod(coder.topology.latent_shape)
    shown = min(e.report.max_features or n_latents, n_latents)
    held, own = shape.n_parameters * _width(e), parameter_bytes(coder)
    return StageEstimate(
        "report",
        1,
        {"language model": held, "coder": own, "temporaries": work.temporaries},
        _PROCESS + held + e.report.tokens * 64 * 12,
        _PAGE_BYTES * shown,
        host.start + count * each + shown * host.latent,
        count * work.flops,
        "the forward pass" if count * each >= shown * host.latent else "the pages",
        start=host.start,
    )


def report_work(
    shape: ModelShape, coder: Coder, rows: tuple[int, int], dtype: str, reads: tuple[str, ...]
) -> Footprint:
    """One batch of the scan for examples, `rows` = (rows, tokens of each)."""
    tokens, width = rows[0] * rows[1], 2 if dtype == "bfloat16" else 4
    latents, held = math.prod(coder.topology.latent_shape), shape.n_parameters * width
    depth = shape.depth(tuple(name for name in reads if not name.startswith("second.")))
    operations = rows[0] * shape.operations(rows[1], depth) + tokens * parameter_bytes(coder) / 4.0
    between = _DENSE * 4.0 * min(tokens, coder.few_tokens) * latents + tokens * (4 * shape.d_model + shape.d_mlp) * 4
    return Footprint(held, 0.0, between, operations, held + 8 * 4.0 * tokens * latents, 0.0, 0, 40 * depth)


def report_amounts(work: Footprint, coder: Coder, tokens: int) -> tuple[float, ...]:
    """(operations, latents) of a batch: what its measured law is about."""
    return work.flops, float(tokens * math.prod(coder.topology.latent_shape))


def graphs(planned: Planned, terms: Terms) -> StageEstimate | None:
    """A study's attribution graphs: a row for each feature and logit, by chunks of backward passes; on one device."""
    if not (found := _of_study(planned)):
        return None
    e, shape, coder = found
    c, a = e.study, e.attribution
    n_graphs = len(c.behaviours) * c.graphs
    active = min(_ACTIVE, coder.topology.d_sae) * _PROMPT * _layers(coder)
    rows = min(a.max_features or active, active) + a.logits
    operations = rows * (2 * shape.operations(_PROMPT, shape.n_layer) + 2 * active * shape.d_model)
    held = shape.n_parameters * _width(e)
    # Of a row and token: four vectors of the residual stream (benchmarks/attribution_memory.md).
    chunk = a.chunk * _PROMPT * 4 * shape.d_model * 4
    decoders = parameter_bytes(coder)
    work = Footprint(held, 0.0, chunk, operations, rows / a.chunk * (held + 2 * chunk), 0.0, 0, 0)
    seconds = roofline(terms.device, work, terms.device.peak(e.lm.dtype))
    return StageEstimate(
        "graphs",
        1,
        {"language model": held, "coder": decoders, "temporaries": chunk + rows * active * 4},
        _PROCESS + held + decoders + rows * active * 4,
        n_graphs * rows * active * 4.0,
        terms.host.start + n_graphs * seconds,
        n_graphs * operations,
        "rows",
        f"prompts of {_PROMPT} tokens, {_ACTIVE} active latents a token and layer",
        start=terms.host.start,
    )


def interventions(planned: Planned, terms: Terms) -> StageEstimate | None:
    """A study's interventions: forward passes with changed latents, blocks of them at once; on one device."""
    if not (found := _of_study(planned)):
        return None
    e, shape, coder = found
    c = e.study
    each_group = 1 + c.controls + c.positions + c.resamples
    passes = len(c.behaviours) * (c.groups * each_group * c.test_pairs + c.graphs * c.singles * 2)
    per_row = shape.operations(_PROMPT) + _PROMPT * _dense_operations(coder)
    held, at_once = shape.n_parameters * _width(e), max(c.every, c.test_pairs)
    latents = at_once * _PROMPT * math.prod(coder.topology.latent_shape) * 4.0
    logits = at_once * _PROMPT * shape.vocab_size * 4.0
    work = Footprint(held, 0.0, 0.0, per_row * passes, passes / at_once * (held + 6 * (latents + logits)), 0.0, 0, 0)
    return StageEstimate(
        "interventions",
        1,
        {
            "language model": held,
            "coder": parameter_bytes(coder),
            "temporaries": 3 * latents + 2 * logits,
            "key-value cache": shape.cache_bytes(_PROMPT, _width(e)),
        },
        _PROCESS + held,
        _FILES,
        terms.host.start + roofline(terms.device, work, terms.device.peak(e.lm.dtype)),
        per_row * passes,
        "the forward passes",
        f"prompts of {_PROMPT} tokens; the cache is of `saejax steer`",
        start=terms.host.start,
    )


def _of_study(planned: Planned) -> tuple[Experiment, ModelShape, Coder] | None:
    """(experiment, model, coder) where a study can be made: one model that JAX runs."""
    shape = planned.models[0]
    if len(planned.models) > 1 or shape.config is None or planned.swept:
        return None
    return planned.experiment, shape, planned.coder()


def _own(planned: Planned, i: int) -> tuple[str, ...]:
    """The hook points that are captured of the model with this number, by its own names."""
    second = [name for name in planned.captured if name.startswith("second.")]
    first = [name for name in planned.captured if name not in second]
    return tuple(name.removeprefix("second.") for name in second) if i else tuple(first)


def _forward_seconds(terms: Terms, work: Footprint, dtype: str) -> float:
    law = law_of(terms.device, "forward")
    if law is not None and terms.devices == 1:
        return law.seconds(forward_amounts(work))
    return roofline(terms.device, work, terms.device.peak(dtype))


def forward_amounts(work: Footprint) -> tuple[float, ...]:
    """(1, operations, bytes moved) of a batch of a capture: what its measured law is about."""
    return 1.0, work.flops, work.moved


def _sum(works: list[Footprint]) -> dict[str, float]:
    return {
        "language model": sum(work.state for work in works),
        "batch": sum(work.batch for work in works),
        "temporaries": max(work.temporaries for work in works),
    }


def _dense_operations(coder: Coder) -> float:
    """Of encoding and decoding one token densely."""
    return 2.0 * parameter_bytes(coder) / 4


def parameter_bytes(coder: Coder) -> int:
    """Of a coder in float32."""
    return 4 * parameter_count(coder)


def _layers(coder: Coder) -> int:
    return math.prod(coder.topology.latent_shape) // coder.topology.d_sae


def _selected(planned: Planned) -> str:
    e = planned.experiment
    chosen = any(part.chat for part in e.text.parts) or e.capture.last_tokens
    return "every token counts as stored; of conversations more text is read" if chosen else ""


def _width(e: Experiment) -> int:
    """Bytes of a number of the model."""
    return 2 if e.lm.dtype == "bfloat16" else 4
