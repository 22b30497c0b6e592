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
from saejax.plan.laws import roofline
from saejax.plan.outline import Outline, parameter_count
from saejax.plan.programs import Footprint, forward_footprint
from saejax.plan.stage import StageEstimate, Terms

# How many arrays of float32 logits, and of dense latents of a block, an evaluation's program holds at once. (With
# bfloat16 3.3 of the former, as compiled for Llama-3-8B.)
_LOGITS, _DENSE = 3.1, 3
# Of the tokens that are read, those that are no bos and no filling.
_STORED_SHARE = 0.99
# Bytes for each latent: of features.sqlite (5.3e3 of what benchmarks.serve_load makes up, 2026-11-25) and report.html.
_PAGE_BYTES = 7.5e3
# A study's prompts have about so many tokens, and so many of the latents' places in them are active.
_PROMPT, _ACTIVE = 64, 32
_TABLES_BYTES = 1e6


@dataclasses.dataclass(frozen=True)
class Passes:
    """The forward passes of all models: bytes on the fullest device; seconds and operations of one token."""

    parts: dict[str, float]
    seconds: float
    flops: float


def passes(outline: Outline, terms: Terms) -> Passes:
    """The forward passes that read the hook points of an experiment."""
    e, length = outline.experiment, outline.experiment.text.context_length
    rows = -(-(e.capture.batch_rows or 32) // terms.mesh.shape[DATA]) * terms.mesh.shape[DATA]
    second = [name for name in outline.captured if name.startswith("second.")]
    names = [[name for name in outline.captured if name not in second], [n.removeprefix("second.") for n in second]]
    works = [
        forward_footprint(shape, read, (rows, length), e.lm.dtype, terms.mesh)
        for shape, read in zip(outline.models, names, strict=False)
        if read
    ]
    each = sum(terms.seconds("forward", work, forward_amounts(work), e.lm.dtype) for work in works)
    parts = {
        "language model": sum(work.state for work in works),
        "batch": sum(work.batch for work in works),
        "temporaries": max(work.temporaries for work in works),
    }
    flops = sum(work.flops for work in works) * terms.devices
    return Passes(parts, each / (rows * length), flops / (rows * length))


def forward_amounts(work: Footprint) -> tuple[float, ...]:
    """(1, operations, bytes moved) of a batch of a capture, of which its measured law is."""
    return 1.0, work.flops, work.moved


def capture(outline: Outline, terms: Terms) -> StageEstimate:
    """Text through the model, and activations to disk."""
    e, host, forward = outline.experiment, terms.host, passes(outline, terms)
    c = e.capture
    tokens = (0 if c.into == "training" else c.tokens) + c.heldout_tokens
    stored = sum(outline.store_bytes().values())
    writing, computing = tokens * host.token + stored * host.stored_byte, tokens * forward.seconds
    shards = c.shard_rows * sum(outline.widths.values()) * 2
    selected = any(part.chat for part in e.text.parts) or c.last_tokens
    return terms.estimate(
        "capture",
        forward.parts,
        host=3 * shards + forward.parts["language model"],
        disk=stored,
        seconds=terms.together(computing, writing),
        flops=tokens * forward.flops,
        bound="the forward pass" if computing >= writing else "packing and writing",
        note="every token counts as stored; of conversations more text is read" if selected else "",
    )


def evaluate(outline: Outline, terms: Terms) -> StageEstimate | None:
    """Three forward passes with logits, encoding and decoding; on one device."""
    if outline.swept:
        return None
    e, shape, coder = outline.experiment, outline.models[0], outline.coder()
    rows, length = e.eval.batch_rows, e.text.context_length
    work = evaluation(shape, coder, (rows, length), e.lm.dtype)
    each = terms.seconds("evaluate", work, evaluation_amounts(shape, coder, work, rows * length), e.lm.dtype)
    count = batches(e.eval.tokens, rows * length)
    held = shape.n_parameters * _width(e)
    return terms.estimate(
        "evaluate",
        {"language model": held, "coder": parameter_bytes(coder), "temporaries": work.temporaries},
        host=held,
        disk=_TABLES_BYTES,
        seconds=count * each,
        flops=count * work.flops,
        bound="the forward passes",
    )


def batches(tokens: float, of: int, share: float = _STORED_SHARE) -> int:
    """Number of batches of `of` tokens that are read until `tokens` are there, if a share of them is kept."""
    return max(1, math.ceil(tokens / (of * share)))


def evaluation(shape: ModelShape, coder: Coder, rows: tuple[int, int], dtype: str) -> Footprint:
    """One batch of an evaluation, `rows` = (rows, tokens of each).

    It is not compiled: for a CPU XLA turns every bfloat16 weight into float32 first, which no other device does.
    """
    tokens, width = rows[0] * rows[1], 2 if dtype == "bfloat16" else 4
    coder_bytes, latents = parameter_bytes(coder), math.prod(coder.topology.latent_shape)
    sites = math.prod(coder.topology.out_shape) + math.prod(coder.topology.in_shape)
    logits, dense = 4.0 * tokens * shape.vocab_size, 4.0 * tokens * latents
    block = _DENSE * 4.0 * min(tokens, coder.few_tokens) * latents
    # The clean run's logits are there all the time; with them the latents, and when these are gone two more logits.
    between = max(_LOGITS * logits, logits + block) + tokens * 2 * sites
    operations = 3 * rows[0] * shape.operations(rows[1]) + 2.0 * tokens * coder_bytes / 4
    held = shape.n_parameters * width
    moved = 3 * held + 8 * logits + 8 * dense
    return Footprint(held + coder_bytes, 0.0, between, operations, moved, 0.0, 0, 40 * shape.n_layer)


def evaluation_amounts(shape: ModelShape, coder: Coder, work: Footprint, tokens: int) -> tuple[float, ...]:
    """(operations, logits and latents) of a batch, of which its measured law is."""
    return work.flops, float(tokens * (shape.vocab_size + math.prod(coder.topology.latent_shape)))


def report(outline: Outline, terms: Terms) -> StageEstimate | None:
    """One forward pass over held-out text for the features' examples, and the pages; on one device."""
    if outline.swept:
        return None
    e, shape, coder = outline.experiment, outline.models[0], outline.coder()
    rows, length = e.report.batch_rows, e.text.context_length
    work = report_work(shape, coder, (rows, length), e.lm.dtype, outline.work.sites[0])
    each = terms.seconds("report", work, report_amounts(work, coder, rows * length), e.lm.dtype)
    count, n_latents = batches(e.report.tokens, rows * length), math.prod(coder.topology.latent_shape)
    shown = min(e.report.max_features or n_latents, n_latents)
    held, pages = shape.n_parameters * _width(e), shown * terms.host.latent
    return terms.estimate(
        "report",
        {"language model": held, "coder": parameter_bytes(coder), "temporaries": work.temporaries},
        host=held + e.report.tokens * 64 * 12,
        disk=_PAGE_BYTES * shown,
        seconds=count * each + pages,
        flops=count * work.flops,
        bound="the forward pass" if count * each >= pages else "the pages",
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
    """(operations, latents) of a batch, of which its measured law is."""
    return work.flops, float(tokens * math.prod(coder.topology.latent_shape))


def graphs(outline: Outline, terms: Terms) -> StageEstimate | None:
    """A study's attribution graphs: a row for each feature and logit, by chunks of backward passes; on one device."""
    if not _has_study(outline):
        return None
    e, shape, coder = outline.experiment, outline.models[0], outline.coder()
    a, n_graphs = e.attribution, len(e.study.behaviours) * e.study.graphs
    layers = math.prod(coder.topology.latent_shape) // coder.topology.d_sae
    active = min(_ACTIVE, coder.topology.d_sae) * _PROMPT * layers
    rows = min(a.max_features or active, active) + a.logits
    operations = rows * (2 * shape.operations(_PROMPT, shape.n_layer) + 2 * active * shape.d_model)
    held, decoders = shape.n_parameters * _width(e), parameter_bytes(coder)
    # Of a row and token: four vectors of the residual stream (benchmarks/attribution_memory.md).
    chunk = a.chunk * _PROMPT * 4 * shape.d_model * 4
    work = Footprint(held, 0.0, chunk, operations, rows / a.chunk * (held + 2 * chunk), 0.0, 0, 0)
    return terms.estimate(
        "graphs",
        {"language model": held, "coder": decoders, "temporaries": chunk + rows * active * 4},
        host=held + decoders + rows * active * 4,
        disk=n_graphs * rows * active * 4.0,
        seconds=n_graphs * roofline(terms.device, work, terms.device.peak(e.lm.dtype)),
        flops=n_graphs * operations,
        bound="rows",
        note=f"prompts of {_PROMPT} tokens, {_ACTIVE} active latents a token and layer",
    )


def interventions(outline: Outline, terms: Terms) -> StageEstimate | None:
    """A study's interventions: forward passes with changed latents, blocks of them at once; on one device."""
    if not _has_study(outline):
        return None
    e, shape, coder = outline.experiment, outline.models[0], outline.coder()
    c = e.study
    each_group = 1 + c.controls + c.positions + c.resamples
    count = len(c.behaviours) * (c.groups * each_group * c.test_pairs + c.graphs * c.singles * 2)
    # Encoding and decoding one token densely takes two operations a parameter.
    operations = count * (shape.operations(_PROMPT) + _PROMPT * 2.0 * parameter_bytes(coder) / 4)
    held, at_once = shape.n_parameters * _width(e), max(c.every, c.test_pairs)
    latents = at_once * _PROMPT * math.prod(coder.topology.latent_shape) * 4.0
    logits = at_once * _PROMPT * shape.vocab_size * 4.0
    work = Footprint(held, 0.0, 0.0, operations, count / at_once * (held + 6 * (latents + logits)), 0.0, 0, 0)
    return terms.estimate(
        "interventions",
        {
            "language model": held,
            "coder": parameter_bytes(coder),
            "temporaries": 3 * latents + 2 * logits,
            "key-value cache": shape.cache_bytes(_PROMPT, _width(e)),
        },
        host=held,
        disk=_TABLES_BYTES,
        seconds=roofline(terms.device, work, terms.device.peak(e.lm.dtype)),
        flops=operations,
        bound="the forward passes",
        note=f"prompts of {_PROMPT} tokens; the cache is of `saejax steer`",
    )


def _has_study(outline: Outline) -> bool:
    """A study can be made of one coder on one model that JAX runs."""
    return len(outline.models) == 1 and outline.models[0].config is not None and not outline.swept


def parameter_bytes(coder: Coder) -> int:
    """Bytes of a coder in float32."""
    return 4 * parameter_count(coder)


def _width(e: Experiment) -> int:
    """Bytes of a number of the model."""
    return 2 if e.lm.dtype == "bfloat16" else 4
