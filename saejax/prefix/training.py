"""The training of encoder and adapters beside frozen models, as a program that `saejax.training`'s loop runs.

    loss = sum over models of  mean over answer tokens of  w (-log p(token | prefix, prompt, tokens before))
           + distill x the same mean of  KL(p(. | context, ...) || p(. | prefix, ...))

w is prefix.first_token_weight for an answer's first token and 1 for the others, and the means are weighted by it; the
models' parameters are an input of the step, and nothing is differentiated by them.

Shape letters: B rows, P latents, M width of a model, S tokens, A tokens of an answer, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from saejax.lm import LanguageModel, decoder
from saejax.lm.conventions import DecoderConfig
from saejax.prefix.encoder import Encoder, Weights
from saejax.training import Program, TrainConfig, TrainState
from saejax.training.optim import make_optimizer, make_schedule
from saejax.training.program import program_on
from saejax.training.state import make_init
from saejax.training.step import Arrays, apply_gradients


@dataclasses.dataclass(frozen=True)
class PrefixLearner:
    """Encoder and adapters with their loss: `training.state.Learnable`.

    Attributes:
        frozen: {model: (its configuration, its bos tokens)} of those that are read and never changed.
    """

    encoder: Encoder
    frozen: Mapping[str, tuple[DecoderConfig, Sequence[int]]]
    distill: float = 0.0

    def init(self, key: jax.Array) -> Weights:
        return self.encoder.init(key)

    def init_stats(self) -> dict[str, Any]:
        return {}

    def logical_axes(self) -> dict[str, tuple[str | None, ...]]:
        return {}  # small beside the models: whole on every device

    def project_gradients(self, params: Weights, grads: Weights) -> Weights:
        return grads

    def constrain(self, params: Weights, step: jax.Array) -> Weights:
        return params

    def loss(self, params: Weights, models: Mapping[str, Any], batch: Arrays) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(loss, metrics); of each model nll, in nats a token, and first, the share of answers whose first token is the
        likeliest."""
        prefixes, total = self.encoder.prefixes(params, batch["ids"]), jnp.float32(0)
        metrics: dict[str, jax.Array] = {}
        for name, (config, bos) in self.frozen.items():
            arrays = {key.removeprefix(f"{name}/"): value for key, value in batch.items() if key.startswith(f"{name}/")}
            bos_BS = jnp.broadcast_to(jnp.asarray(bos, jnp.int32), (len(prefixes[name]), len(bos)))
            before = decoder.embed(config, models[name], bos_BS).astype(jnp.float32)
            prefix_BPM = jnp.concatenate([before, prefixes[name]], axis=1)
            logits_BSV, _ = decoder.run(config, models[name], arrays["tokens"], prefix_BPM=prefix_BPM)
            logits_BAV = _logits_at(logits_BSV, prefix_BPM.shape[1] + arrays["at"])
            weights_BA = arrays["weights"]
            there_BA = (weights_BA > 0).astype(jnp.float32)
            log_p_BAV = jax.nn.log_softmax(logits_BAV)
            nll_BA = -jnp.take_along_axis(log_p_BAV, arrays["targets"][..., None], axis=-1)[..., 0]
            total += (weights_BA * nll_BA).sum() / weights_BA.sum()
            first_B = log_p_BAV[:, 0].argmax(-1) == arrays["targets"][:, 0]
            metrics |= {f"nll_{name}": (there_BA * nll_BA).sum() / there_BA.sum(), f"first_{name}": first_B.mean()}
            if self.distill:
                text_BTV, _ = decoder.run(config, models[name], arrays["text"])
                teacher_BAV = jax.nn.log_softmax(_logits_at(text_BTV, arrays["text_at"]))
                kl_BA = (jnp.exp(teacher_BAV) * (teacher_BAV - log_p_BAV)).sum(-1)
                metrics[f"kl_{name}"] = (weights_BA * kl_BA).sum() / weights_BA.sum()
                total += self.distill * metrics[f"kl_{name}"]
        return total, metrics | {"loss": total}


def _logits_at(logits_BSV: jax.Array, at_BA: jax.Array) -> jax.Array:
    """Logits at these positions, float32 [B, A, V]."""
    return jnp.take_along_axis(logits_BSV, at_BA[..., None], axis=1).astype(jnp.float32)


def prefix_program(
    learner: PrefixLearner,
    config: TrainConfig,
    models: Mapping[str, Any],
    mesh: Mesh,
    *,
    shapes: Mapping[str, tuple[tuple[int, ...], Any]],
    optimizer: optax.GradientTransformationExtraArgs | None = None,
    **how: Any,
) -> Program:
    """The program that trains a prefix on all devices of a mesh.

    Args:
        models: parameters of the frozen models, as they lie on the mesh.
        shapes: (shape, dtype) of each array of a batch.
        optimizer: in place of the settings' own.
        how: seed, checkpoints, meta and fsdp, as of `program_on`.
    """
    optimizer, schedule = optimizer or make_optimizer(config), make_schedule(config)

    def step(state: TrainState, batch: Arrays, hyper: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        (_, metrics), grads = jax.value_and_grad(learner.loss, has_aux=True)(state.params, hyper["models"], batch)
        after, metrics, _ = apply_gradients(learner, optimizer, schedule, config, state, hyper, (grads, metrics, {}))
        return after, metrics

    init = make_init(learner, optimizer, config)
    return program_on(mesh, learner, step, init, lambda dtype: shapes, inputs={"models": dict(models)}, **how)


def embedding_rms(lm: LanguageModel) -> float:
    """The root mean square of what a model's blocks read of its tokens."""
    W_E = jnp.asarray(lm.params["W_E"])
    return float(jnp.sqrt(jnp.mean(jnp.square(W_E.astype(jnp.float32)))) * lm.config.embed_scale)
