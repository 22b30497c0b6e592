"""What the language model loses when an activation is replaced by its reconstruction.

For each predicted token within its document, with p the model's distribution, p_sae with the reconstruction
spliced in at the hook point, and p_zero with zeros there:

    ce_clean, ce_sae, ce_zero   mean of -log p(next token), in nats
    loss_recovered              (ce_zero - ce_sae) / (ce_zero - ce_clean): 1 is perfect, 0 as bad as zeros
    kl                          mean of sum_v p(v) (log p(v) - log p_sae(v))

Only tokens that a capture stores are replaced; bos, special and padding tokens keep their activation in all
three runs. (SAEBench, core evaluation.)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from saejax.lm import LanguageModel, decoder

Reconstruct = Callable[[jax.Array], jax.Array]


def splice_sums(
    lm: LanguageModel,
    lm_params: Any,
    hook_point: str,
    reconstruct: Reconstruct,
    packed: dict[str, jax.Array],
) -> tuple[dict[str, jax.Array], jax.Array]:
    """(sums over predicted tokens, clean activations [R, S, D]) of a batch of packed rows. Pure."""
    keep_RS1 = packed["keep"][:, :, None]

    def run(edit: decoder.Edit | None) -> tuple[jax.Array, dict[str, jax.Array]]:
        edits = {} if edit is None else {hook_point: lambda x: jnp.where(keep_RS1, edit(x).astype(x.dtype), x)}
        logits, captured = decoder.run(
            lm.config,
            lm_params,
            packed["tokens"],
            packed["positions"],
            packed["segments"],
            [hook_point],
            edits,
        )
        return jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32)), captured

    clean_RSV, captured = run(None)
    spliced_RSV, _ = run(reconstruct)
    zero_RSV, _ = run(jnp.zeros_like)
    segments = packed["segments"]
    predicted_RS = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
    next_RS1 = packed["tokens"][:, 1:, None]

    def total(value_RS: jax.Array) -> jax.Array:
        return jnp.where(predicted_RS, value_RS, 0).sum()

    def cross_entropy(log_p_RSV: jax.Array) -> jax.Array:
        return total(-jnp.take_along_axis(log_p_RSV, next_RS1, axis=2)[:, :, 0])

    sums = {
        "predicted": predicted_RS.sum(),
        "ce_clean": cross_entropy(clean_RSV),
        "ce_sae": cross_entropy(spliced_RSV),
        "ce_zero": cross_entropy(zero_RSV),
        "kl": total((jnp.exp(clean_RSV) * (clean_RSV - spliced_RSV)).sum(-1)),
    }
    return sums, captured[hook_point]


def splice_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Metrics from the sums of all batches."""
    n = sums["predicted"]
    clean, sae, zero = (sums[name] / n for name in ("ce_clean", "ce_sae", "ce_zero"))
    return {
        "ce_clean": clean,
        "ce_sae": sae,
        "ce_zero": zero,
        "loss_recovered": (zero - sae) / (zero - clean) if zero != clean else float("nan"),
        "kl": sums["kl"] / n,
    }
