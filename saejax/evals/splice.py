"""What the language model loses when an activation is replaced by its reconstruction.

For each predicted token within its document, with p the model's distribution, p_sae with the reconstruction
spliced in at the hook point, and p_zero with zeros there:

    ce_clean, ce_sae, ce_zero   mean of -log p(next token), in nats
    loss_recovered              (ce_zero - ce_sae) / (ce_zero - ce_clean): 1 is perfect, 0 as bad as zeros
    kl                          mean of sum_v p(v) (log p(v) - log p_sae(v))

A coder of several sites has all that it writes replaced at once, by reconstructions of the clean run's activations.
Only tokens that a capture stores are replaced; bos, special and padding tokens keep their activation in all
three runs. (SAEBench, core evaluation.) A token after which the clean run predicts NaN counts in none of the means.
For two models the loss is the first's, so a coder that writes only in the second has only ce_clean. A model that does
not predict the next token (an encoder) has none of these.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from saejax.coders import Sites
from saejax.lm.forward import Edit, Model

# {hook point: clean activations [R, S, D]} -> the reconstructions, and which tokens are replaced by them [R, S]
Reconstruct = Callable[[dict[str, jax.Array]], tuple[dict[str, jax.Array], jax.Array]]


def splice_sums(
    lm: Model,
    lm_params: Any,
    sites: Sites,
    reconstruct: Reconstruct,
    packed: dict[str, jax.Array],
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """(sums over predicted tokens, clean activations {hook point: [R, S, D]}) of a batch of packed rows. Pure.

    `reconstruct` gets the clean activations and gives ({hook point written: [R, S, D]}, which tokens to replace
    [R, S]); all of them are put in at once. Where the loss does not see them (`Model.measures_loss`), the sums are
    `predicted` and `ce_clean` alone; where there is no loss, `predicted`. `unpredicted` counts tokens that are left
    out because the clean run predicts NaN after them.
    """
    rows = (packed["tokens"], packed["positions"], packed["segments"])

    logits_RSV, captured = lm.apply(lm_params, *rows, sites.hook_points)
    reconstructed, keep_RS = reconstruct(captured)

    def run(values: Mapping[str, jax.Array]) -> jax.Array:
        def instead(value_RSD: jax.Array) -> Edit:
            return lambda x: jnp.where(keep_RS[:, :, None], value_RSD.astype(x.dtype), x)

        edits = {name: instead(value_RSD) for name, value_RSD in values.items()}
        logits_RSV, _ = lm.apply(lm_params, *rows, sites.hook_points, edits)
        return jax.nn.log_softmax(logits_RSV[:, :-1].astype(jnp.float32))

    segments = packed["segments"]
    predicted_RS = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
    next_RS1 = packed["tokens"][:, 1:, None]

    def total(value_RS: jax.Array) -> jax.Array:
        return jnp.where(predicted_RS, value_RS, 0).sum()

    def cross_entropy(log_p_RSV: jax.Array) -> jax.Array:
        return total(-jnp.take_along_axis(log_p_RSV, next_RS1, axis=2)[:, :, 0])

    if not lm.measures_loss(()):
        return {"predicted": predicted_RS.sum(), "unpredicted": jnp.int32(0)}, captured
    clean_RSV = jax.nn.log_softmax(logits_RSV[:, :-1].astype(jnp.float32))
    nan_RS = predicted_RS & jnp.isnan(clean_RSV).any(-1)
    predicted_RS &= ~nan_RS
    sums = {"predicted": predicted_RS.sum(), "unpredicted": nan_RS.sum(), "ce_clean": cross_entropy(clean_RSV)}
    if not lm.measures_loss(tuple(reconstructed)):
        return sums, captured
    spliced_RSV = run(reconstructed)
    zero_RSV = run({name: jnp.zeros_like(value) for name, value in reconstructed.items()})
    sums |= {
        "ce_sae": cross_entropy(spliced_RSV),
        "ce_zero": cross_entropy(zero_RSV),
        "kl": total((jnp.exp(clean_RSV) * (clean_RSV - spliced_RSV)).sum(-1)),
    }
    return sums, captured


def splice_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Metrics from the sums of all batches; those that the sums do not say are left out."""
    n = sums["predicted"]
    if "ce_sae" not in sums:
        return {name: sums[name] / n for name in ("ce_clean",) if name in sums}
    clean, sae, zero = (sums[name] / n for name in ("ce_clean", "ce_sae", "ce_zero"))
    return {
        "ce_clean": clean,
        "ce_sae": sae,
        "ce_zero": zero,
        "loss_recovered": (zero - sae) / (zero - clean) if zero != clean else float("nan"),
        "kl": sums["kl"] / n,
    }
