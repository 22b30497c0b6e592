"""Training a small decoder from nothing: how the embedded demo model was made.

Not a pre-training framework: one device, one schedule, a model of a few million parameters.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from saejax.lm import decoder
from saejax.lm.conventions import DecoderConfig


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """AdamW with warm-up and cosine decay; `batch` rows of the packed corpus a step."""

    steps: int
    batch: int = 32
    lr: float = 3e-3
    warmup_fraction: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0


def next_token_loss(
    config: DecoderConfig, params: Any, tokens_BS: jax.Array, positions_BS: jax.Array, segments_BS: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(sum over predicted tokens of -log p(next), number of them), in nats, within segments only."""
    logits_BSV, _ = decoder.run(config, params, tokens_BS, positions_BS, segments_BS)
    # Targets are shifted instead of logits: a slice of [B, S, V] would be copied, forward and backward.
    next_BS, next_segments_BS = jnp.roll(tokens_BS, -1, axis=1), jnp.roll(segments_BS, -1, axis=1)
    last_BS = jnp.arange(tokens_BS.shape[1])[None] == tokens_BS.shape[1] - 1
    same_BS = (next_segments_BS == segments_BS) & (segments_BS >= 0) & ~last_BS
    is_next_BSV = jnp.arange(logits_BSV.shape[-1])[None, None] == next_BS[:, :, None]
    log_p_BS = jnp.where(is_next_BSV, logits_BSV, 0).sum(-1) - jax.nn.logsumexp(logits_BSV, axis=-1)
    return -jnp.where(same_BS, log_p_BS, 0).sum(), same_BS.sum()


def pretrain(
    model: DecoderConfig,
    config: PretrainConfig,
    rows: dict[str, np.ndarray],
    on_step: Callable[[int, float, Any], None],
    params: Any = None,
) -> Any:
    """Parameters after `config.steps` steps on `rows` ({tokens, positions, segments}: int32 [N, S]).

    They begin at `params`, or fresh. `on_step(step, mean loss in nats since the last call, params)` is called every 50
    steps.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.lr, max(1, int(config.warmup_fraction * config.steps)), config.steps, config.lr * 0.05
    )

    def decayed(params: Any) -> Any:
        return jax.tree.map(lambda x: x.ndim > 1, params)

    optimizer = optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(schedule, b2=0.98, weight_decay=config.weight_decay, mask=decayed),
    )
    if params is None:
        params = jax.jit(lambda key: decoder.init_params(model, key))(jax.random.key(config.seed))
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params: Any, opt_state: Any, batch: tuple[jax.Array, ...]) -> tuple[Any, Any, jax.Array]:
        def mean_loss(params: Any) -> jax.Array:
            total, count = next_token_loss(model, params, *batch)
            return total / count

        loss, grads = jax.value_and_grad(mean_loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    rng = np.random.Generator(np.random.Philox(key=config.seed))
    order: np.ndarray = np.zeros(0, np.int64)
    losses: list[jax.Array] = []
    for i in range(config.steps):
        if len(order) < config.batch:
            order = np.concatenate([order, rng.permutation(len(rows["tokens"]))])
        index, order = order[: config.batch], order[config.batch :]
        batch = tuple(rows[k][index] for k in ("tokens", "positions", "segments"))
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(loss)
        if (i + 1) % 50 == 0 or i + 1 == config.steps:
            on_step(i + 1, float(np.mean(jax.device_get(losses))), params)
            losses = []
    return params


def evaluate(model: DecoderConfig, params: Any, rows: dict[str, np.ndarray], batch: int = 32) -> float:
    """Mean next-token loss in nats over `rows`."""
    loss = jax.jit(lambda params, *b: next_token_loss(model, params, *b))
    total = count = 0.0
    for start in range(0, len(rows["tokens"]), batch):
        part = [rows[k][start : start + batch] for k in ("tokens", "positions", "segments")]
        nll, n = loss(params, *part)
        total, count = total + float(nll), count + float(n)
    return total / count
