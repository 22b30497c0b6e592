"""The stages that run the language model: capture, evaluation, report, graphs and interventions.

Tokens that are read but not stored (bos, padding) are left out, and of a selection (chat, last_tokens) every token
counts as stored: then more text is read than is said here.
"""

import math

import jax.numpy as jnp

from saejax.coders import Coder
from saejax.evals.in_turn import several_groups
from saejax.fit.learner import Sides
from saejax.kernels.batch import DATA
from saejax.lm.conventions import DecoderConfig
from saejax.lm.points import next_block
from saejax.lm.shape import ModelShape
from saejax.plans.laws import law_of, roofline
from saejax.plans.models import has_bos
from saejax.plans.outline import Outline, store_bytes
from saejax.plans.programs import Footprint, forward_footprint, parameter_count
from saejax.plans.stage import StageEstimate, Terms

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


def passes(outline: Outline, terms: Terms) -> tuple[dict[str, float], float, float]:
    """The forward passes of all models that read an experiment's hook points.

    ({part: bytes on the fullest device}, seconds of a token, operations of a token)
    """
    e, length = outline.experiment, outline.experiment.text.context_length
    rows = -(-(e.capture.batch_rows or 32) // terms.mesh.shape[DATA]) * terms.mesh.shape[DATA]
    second = [name for name in outline.widths if name.startswith("second.")]
    names = [[name for name in outline.widths if name not in second], [n.removeprefix("second.") for n in second]]
    works = [
        forward_footprint(shape, read, (rows, length), e.lm.dtype, terms.mesh)
        for shape, read in zip(outline.models, names, strict=False)
        if read
    ]
    law, peak = law_of(terms.device, "forward"), terms.device.peak(e.lm.dtype)
    each = sum(terms.seconds(law, work, peak) for work in works)
    parts = {
        "language model": sum(work.state for work in works),
        "batch": sum(work.batch for work in works),
        "temporaries": max(work.temporaries for work in works),
    }
    flops = sum(work.flops for work in works) * terms.devices
    return parts, each / (rows * length), flops / (rows * length)


def capture(outline: Outline, terms: Terms) -> StageEstimate:
    """Text through the model, and activations to disk."""
    e, c, host = outline.experiment, outline.experiment.capture, terms.host
    parts, each, flops = passes(outline, terms)
    tokens = (0 if c.into == "training" else c.tokens) + c.heldout_tokens
    stored = sum(store_bytes(outline.work).values())
    writing, computing = tokens * host.token + stored * host.stored_byte, tokens * each
    shards = c.shard_rows * sum(outline.widths.values()) * 2
    selected = any(part.chat for part in e.text.parts) or c.last_tokens
    return terms.estimate(
        "capture",
        parts,
        host=3 * shards + parts["language model"],
        disk=stored,
        seconds=terms.together(computing, writing),
        flops=tokens * flops,
        bound="the forward pass" if computing >= writing else "packing and writing",
        note="every token counts as stored; of conversations more text is read" if selected else "",
    )


def evaluate(outline: Outline, terms: Terms) -> StageEstimate | None:
    """Forward passes with logits, encoding and decoding; on one device."""
    if outline.experiment.swept:
        return None
    e, coder, rows = outline.experiment, outline.coder(), outline.experiment.eval.batch_rows
    sinks, note = first_tokens_are_sinks(outline)
    work = evaluation(outline.models[0], coder, outline.work.sites, (rows, e.text.context_length), e.lm.dtype, sinks)
    count = batches(e.eval.tokens, rows * e.text.context_length)
    return terms.estimate(
        "evaluate",
        _parts(outline, coder, work.temporaries),
        host=outline.weights,
        disk=_TABLES_BYTES,
        seconds=count * terms.seconds(law_of(terms.device, "evaluate"), work, terms.device.peak(e.lm.dtype)),
        flops=count * work.flops,
        bound="the forward passes",
        note=note,
    )


def first_tokens_are_sinks(outline: Outline) -> tuple[bool, str]:
    """(every batch of an evaluation has sinks, because texts begin with tokens that capture.drop_first leaves out; what
    was assumed). A bos is no sink, as it is never kept; sinks by their norm alone are too few to count."""
    e, shape = outline.experiment, outline.models[0]
    has = has_bos(e.lm.model, e.lm.revision) if e.text.prepend_bos and not shape.note else None
    bos = e.text.prepend_bos and has is not False
    note = "as if the model had a bos token; without one five forward passes, not three"
    return e.capture.drop_first > bos, note if bos and has is None and e.capture.drop_first == 1 else ""


def batches(tokens: float, of: int, share: float = _STORED_SHARE) -> int:
    """Number of batches of `of` tokens that are read until `tokens` are there, if a share of them is kept."""
    return max(1, math.ceil(tokens / (of * share)))


def evaluation(
    shape: ModelShape, coder: Coder, names: Sides, rows: tuple[int, int], dtype: str, sinks: bool = False
) -> Footprint:
    """One batch of an evaluation, `rows` = (rows, tokens of each). Its amounts are operations, and logits and latents.

    The model runs as it is; and from where the coder reads or writes first, with zeros and with reconstructions, of
    several groups of latents also in turn, all once more where the batch has `sinks`.
    It is not compiled: for a CPU XLA turns every bfloat16 weight into float32 first, which no other device does.
    """
    tokens, held = rows[0] * rows[1], shape.n_parameters * jnp.dtype(dtype).itemsize
    coder_bytes, latents = parameter_bytes(coder), math.prod(coder.topology.latent_shape)
    sites = math.prod(coder.topology.out_shape) + math.prod(coder.topology.in_shape)
    logits, dense = 4.0 * tokens * shape.vocab_size, 4.0 * tokens * latents
    # The clean run's logits are there all the time; with them the latents, and when these are gone two more logits.
    between = max(_LOGITS * logits, logits + _block_bytes(coder, tokens)) + tokens * 2 * sites
    zeroed = 2 if sinks else 1
    encoded = zeroed * (2 if several_groups(coder) else 1)
    n_passes = 1 + zeroed + encoded
    start = shape.start_of([name for side in names for name in side if not name.startswith("second.")])
    before = (n_passes - 1) * next_block(start) if start else 0
    operations = rows[0] * (n_passes * shape.operations(rows[1]) - shape.operations(rows[1], before))
    operations += encoded * 2.0 * tokens * coder_bytes / 4
    blocks = n_passes * shape.n_layer - before
    moved = blocks / shape.n_layer * held + 8 * logits * n_passes / 3 + 8 * dense * encoded
    amounts = operations, tokens * (shape.vocab_size * n_passes / 3 + latents * encoded)
    kernels = 40 * blocks // 3
    return Footprint(held + coder_bytes, 0.0, between, operations, moved, kernels, amounts=amounts)


def report(outline: Outline, terms: Terms) -> StageEstimate | None:
    """One forward pass over held-out text for the features' examples, and the pages; on one device."""
    if outline.experiment.swept:
        return None
    e, coder, rows = outline.experiment, outline.coder(), outline.experiment.report.batch_rows
    work = report_work(outline.models[0], coder, (rows, e.text.context_length), e.lm.dtype, outline.work.sites[0])
    count, n_latents = batches(e.report.tokens, rows * e.text.context_length), math.prod(coder.topology.latent_shape)
    shown = min(e.report.max_features or n_latents, n_latents)
    each = terms.seconds(law_of(terms.device, "report"), work, terms.device.peak(e.lm.dtype))
    scanning, pages = count * each, shown * terms.host.latent
    return terms.estimate(
        "report",
        _parts(outline, coder, work.temporaries),
        host=outline.weights + e.report.tokens * 64 * 12,
        disk=_PAGE_BYTES * shown,
        seconds=scanning + pages,
        flops=count * work.flops,
        bound="the forward pass" if scanning >= pages else "the pages",
    )


def report_work(
    shape: ModelShape, coder: Coder, rows: tuple[int, int], dtype: str, reads: tuple[str, ...]
) -> Footprint:
    """One batch of the scan for examples, `rows` = (rows, tokens of each). Its amounts are operations and latents."""
    tokens, held = rows[0] * rows[1], shape.n_parameters * jnp.dtype(dtype).itemsize
    latents = math.prod(coder.topology.latent_shape)
    depth = shape.depth(tuple(name for name in reads if not name.startswith("second.")))
    operations = rows[0] * shape.operations(rows[1], depth) + tokens * parameter_bytes(coder) / 4.0
    between = _block_bytes(coder, tokens) + tokens * (4 * shape.d_model + shape.d_mlp) * 4
    moved, amounts = held + 8 * 4.0 * tokens * latents, (operations, float(tokens * latents))
    return Footprint(held, 0.0, between, operations, moved, 40 * depth, amounts=amounts)


def graphs(outline: Outline, terms: Terms) -> StageEstimate | None:
    """A study's attribution graphs: a row for each feature and logit, by chunks of backward passes; on one device."""
    if not _has_study(outline):
        return None
    e, shape, coder, held = outline.experiment, outline.models[0], outline.coder(), outline.weights
    a, n_graphs = e.attribution, len(e.study.behaviours) * e.study.graphs
    layers = math.prod(coder.topology.latent_shape) // coder.topology.d_sae
    active = min(_ACTIVE, coder.topology.d_sae) * _PROMPT * layers
    rows = min(a.max_features or active, active) + a.logits
    operations = rows * (2 * shape.operations(_PROMPT, shape.n_layer) + 2 * active * shape.d_model)
    # Of a row and token: four vectors of the residual stream (benchmarks/attribution_memory.md).
    chunk, graph = a.chunk * _PROMPT * 4 * shape.d_model * 4, rows * active * 4
    work = Footprint(held, 0.0, chunk, operations, rows / a.chunk * (held + 2 * chunk))
    return terms.estimate(
        "graphs",
        _parts(outline, coder, chunk + graph),
        host=held + parameter_bytes(coder) + graph,
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
    e, shape, coder, held = outline.experiment, outline.models[0], outline.coder(), outline.weights
    c = e.study
    each_group = 1 + c.controls + c.positions + c.resamples
    count = len(c.behaviours) * (c.groups * each_group * c.test_pairs + c.graphs * c.singles * 2)
    # Encoding and decoding one token densely takes two operations a parameter.
    operations = count * (shape.operations(_PROMPT) + _PROMPT * 2.0 * parameter_bytes(coder) / 4)
    at_once = max(c.every, c.test_pairs)
    latents = at_once * _PROMPT * math.prod(coder.topology.latent_shape) * 4.0
    logits = at_once * _PROMPT * shape.vocab_size * 4.0
    work = Footprint(held, 0.0, 0.0, operations, count / at_once * (held + 6 * (latents + logits)))
    cache = shape.cache_bytes(_PROMPT, jnp.dtype(e.lm.dtype).itemsize)
    return terms.estimate(
        "interventions",
        _parts(outline, coder, 3 * latents + 2 * logits) | {"key-value cache": cache},
        host=held,
        disk=_TABLES_BYTES,
        seconds=roofline(terms.device, work, terms.device.peak(e.lm.dtype)),
        flops=operations,
        bound="the forward passes",
        note=f"prompts of {_PROMPT} tokens; the cache is of `saejax steer`",
    )


def _has_study(outline: Outline) -> bool:
    """A study can be made of one coder on one model that JAX runs."""
    return len(outline.models) == 1 and isinstance(outline.models[0], DecoderConfig) and not outline.experiment.swept


def _parts(outline: Outline, coder: Coder, temporaries: float) -> dict[str, float]:
    return {"language model": outline.weights, "coder": parameter_bytes(coder), "temporaries": temporaries}


def parameter_bytes(coder: Coder) -> int:
    """Bytes of a coder in float32."""
    return 4 * parameter_count(coder)


def _block_bytes(coder: Coder, tokens: int) -> float:
    """Bytes of the dense latents of one block of an evaluation's tokens."""
    return _DENSE * 4.0 * min(tokens, coder.few_tokens) * math.prod(coder.topology.latent_shape)
