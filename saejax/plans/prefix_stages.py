"""A latent prefix: the training of encoder and adapters through frozen models, and the evaluation of six ways.

    memory     weights + activations that the backward pass keeps, of the model with the most + 16 bytes a parameter
    seconds    2 x the models' operations (forward, and backward to the prefix alone) over speed

What a record holds is not known before it is read: a prompt with its answer counts as 48 tokens, and a context as
prefix.length / 4. Measured beside nothing yet on a GPU.
"""

import dataclasses

import jax
import jax.numpy as jnp

from saejax.kernels.batch import DATA, LATENT
from saejax.lm.shape import ModelShape
from saejax.plans.devices import EFFICIENCY
from saejax.plans.models import shapes_of
from saejax.plans.outline import Outline
from saejax.plans.stage import StageEstimate, Terms
from saejax.prefix.encoder import Encoder
from saejax.prefix.evaluation import WAYS

# Tokens of a prompt with its answer, and bytes of a token.
_PROMPT, _BYTES = 48, 4
# Bytes of each trained parameter: itself, gradient, two moments.
_TRAINED = 16
# Tables and pages of an evaluation.
_PAGES_BYTES = 2e6


def prefix(outline: Outline, terms: Terms) -> StageEstimate | None:
    """Training and evaluation as one stage; None where the experiment has no prefix."""
    e, host = outline.experiment, terms.host
    if not e.prefix.source:
        return None
    # The models that read the prefix.
    models = shapes_of(dataclasses.replace(e.lm, second=e.prefix.second, second_revision=e.prefix.second_revision))
    spread, width = terms.mesh.shape[LATENT], float(jnp.dtype(e.lm.dtype).itemsize)
    weights = sum(width * model.n_parameters for model in models) / spread
    rows = e.train.batch_size / terms.mesh.shape[DATA]
    # Learned are encoder and adapters.
    vocab = 256 if e.prefix.encoder == "bytes" else models[0].vocab_size
    encoder = Encoder(e.prefix, vocab, tuple((f"{i}", model.d_model, 1.0) for i, model in enumerate(models)))
    learned = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(encoder.init, jax.random.key(0))))
    # Tokens to the last one of each model's rows; the teacher of a distillation keeps nothing but its logits.
    read = 1 + e.prefix.latents + _PROMPT
    context = e.prefix.length if e.prefix.encoder == "tokens" else e.prefix.length // _BYTES
    activations = max(rows * _activation_bytes(model, read, width) for model in models) / spread
    operations = sum(2 * model.operations(read) for model in models)
    if e.prefix.distill:
        operations += sum(model.operations(context + _PROMPT) for model in models)
    peak = EFFICIENCY["products"] * terms.device.peak(e.lm.dtype)
    bandwidth = EFFICIENCY["bandwidth"] * terms.device.bandwidth
    # A batch is at least one reading of the weights, forward and back.
    step = max(rows * operations / spread / peak, 2 * weights / bandwidth)
    batches = -(-e.prefix.heldout // e.prefix.eval_rows)
    answering = len(WAYS) * batches * e.prefix.answer_tokens * weights / bandwidth
    saving = e.train.steps / e.train.checkpoint_every * host.save
    return terms.estimate(
        "prefix",
        {"language model": weights, "temporaries": activations, "state": _TRAINED * learned},
        host=weights,
        disk=e.train.keep_checkpoints * 3.0 * 4 * learned + _PAGES_BYTES,
        seconds=e.train.steps * (step + host.step) + answering + saving,
        flops=e.train.tokens * operations,
        bound="the step",
        note=f"a prompt with its answer counts as {_PROMPT} tokens, a context as prefix.length / {_BYTES}",
    )


def _activation_bytes(model: ModelShape, length: int, width: float) -> float:
    """Bytes that the backward pass of one row needs: residual stream, attention and MLP of each block, and logits."""
    return length * (model.n_layer * (8 * model.d_model + 3 * model.d_mlp) * width + 12 * model.vocab_size)
