"""The loss of the language model when an activation is replaced by its reconstruction.

For each predicted token within its document, with p the model's distribution, p_sae with the reconstruction
spliced in at the hook point, and p_zero with zeros there:

    ce_clean, ce_sae, ce_zero   mean of -log p(next token), in nats
    loss_recovered              (ce_zero - ce_sae) / (ce_zero - ce_clean): 1 is perfect, 0 as bad as zeros
    kl                          mean of sum_v p(v) (log p(v) - log p_sae(v))

All that a coder writes is replaced at once, by reconstructions of the clean run's activations, at tokens that a capture
stores. (SAEBench, core evaluation.) A token after which the clean run predicts NaN counts in none of the means. For two
models the loss is the first's, so a coder that writes only in the second has only ce_clean.

The other passes go on from where the coder reads or writes first (`Model.start_of`): before it they are the clean run.

Where each group of latents reads one place, ce_sae_in_turn, kl_in_turn and loss_recovered_in_turn are the same with
each place rebuilt from what the replaced ones before it leave (`in_turn`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.coders import Sites
from saejax.lm.forward import Edit, Model

# The model by itself on a batch: {"captured": {hook point: [R, S, D]}, "start": {hook point: [R, S, D]}, from where
# other passes go on, "keep": which tokens are replaced [R, S], "predicted": which predicted tokens count [R, S - 1],
# "log_p" [R, S - 1, V], "losses": {"predicted", "ce_clean", "ce_zero": [R, S - 1]}}, as far as there is a loss.
Clean = dict[str, Any]


def unspliced(
    lm: Model,
    lm_params: Any,
    sites: Sites,
    keep: Callable[[dict[str, jax.Array]], jax.Array],
    packed: dict[str, jax.Array],
) -> tuple[dict[str, jax.Array], Clean]:
    """(how many tokens are predicted, what `spliced` needs) of a batch, for every coder of these sites. Pure.

    `keep` says of the clean activations which tokens are replaced [R, S]. Where the loss does not see what the sites
    write (`Model.measures_loss`), the losses are `ce_clean` alone; where there is no loss, there are none.
    `unpredicted` counts tokens that are left out because the clean run predicts NaN after them.
    """
    rows = (packed["tokens"], packed["positions"], packed["segments"])
    start = lm.start_of(sites.hook_points)
    logits_RSV, seen = lm.apply(lm_params, *rows, [*sites.hook_points, *([start] if start else [])])
    captured = {name: seen[name] for name in sites.hook_points}
    segments = packed["segments"]
    predicted_RS = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
    clean: Clean = {"captured": captured, "keep": keep(captured), "losses": {}}
    if not lm.measures_loss(()):
        return {"predicted": predicted_RS.sum(), "unpredicted": jnp.int32(0)}, clean
    clean["start"] = {start: seen[start]} if start else {}
    clean["log_p"] = jax.nn.log_softmax(logits_RSV[:, :-1].astype(jnp.float32))
    nan_RS = predicted_RS & jnp.isnan(clean["log_p"]).any(-1)
    clean["predicted"] = predicted_RS & ~nan_RS
    sums = {"predicted": clean["predicted"].sum(), "unpredicted": nan_RS.sum()}
    clean["losses"]["predicted"] = clean["predicted"].astype(jnp.float32)
    clean["losses"]["ce_clean"] = _cross_entropy(clean["log_p"], clean, packed)
    if lm.measures_loss(sites.writes):
        clean["losses"]["ce_zero"] = zeroed(lm, sites, lm_params, clean, packed)
    return sums, clean


def zeroed(lm: Model, sites: Sites, lm_params: Any, clean: Clean, packed: dict[str, jax.Array]) -> jax.Array:
    """-log p_zero(next token) [R, S - 1], with zeros in place of what is kept; 0 for other tokens. Pure."""
    zeros = dict.fromkeys(sites.writes, jnp.zeros_like)
    return _cross_entropy(_log_probabilities(lm, lm_params, zeros, clean, packed), clean, packed)


def spliced(
    lm: Model, lm_params: Any, sites: Sites, edits: Mapping[str, Edit], clean: Clean, packed: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Of each predicted token [R, S - 1], with the edits in one forward pass; {} without a loss.

    Zeros for other tokens. Pure.
    """
    if not lm.measures_loss(sites.writes):
        return {}
    log_p_RSV, log_q_RSV = clean["log_p"], _log_probabilities(lm, lm_params, edits, clean, packed)
    return {
        "ce_sae": _cross_entropy(log_q_RSV, clean, packed),
        "kl": _of_predicted((jnp.exp(log_p_RSV) * (log_p_RSV - log_q_RSV)).sum(-1), clean),
    }


def instead(values: Mapping[str, jax.Array]) -> dict[str, Edit]:
    """Edits that put in {hook point: [R, S, D]}, whatever is there."""

    def put(value_RSD: jax.Array) -> Edit:
        return lambda x: value_RSD.astype(x.dtype)

    return {name: put(value_RSD) for name, value_RSD in values.items()}


def _log_probabilities(
    lm: Model, lm_params: Any, edits: Mapping[str, Edit], clean: Clean, packed: dict[str, jax.Array]
) -> jax.Array:
    """log p [R, S - 1, V] with the edits where tokens are kept."""

    def where_kept(edit: Edit) -> Edit:
        return lambda x: jnp.where(clean["keep"][:, :, None], edit(x), x)

    rows = (packed["tokens"], packed["positions"], packed["segments"])
    kept = {name: where_kept(edit) for name, edit in edits.items()}
    logits_RSV, _ = lm.apply(lm_params, *rows, (), kept, next(iter(clean["start"].items()), None))
    return jax.nn.log_softmax(logits_RSV[:, :-1].astype(jnp.float32))


def _of_predicted(value_RS: jax.Array, clean: Clean) -> jax.Array:
    return jnp.where(clean["predicted"], value_RS, 0)


def _cross_entropy(log_p_RSV: jax.Array, clean: Clean, packed: dict[str, jax.Array]) -> jax.Array:
    next_RS1 = packed["tokens"][:, 1:, None]
    return _of_predicted(-jnp.take_along_axis(log_p_RSV, next_RS1, axis=2)[:, :, 0], clean)


def splice_metrics(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics from the sums of all batches, numbers or arrays; those that the sums do not say are left out."""
    n = sums["predicted"]
    if "ce_sae" not in sums:
        return {name: sums[name] / n for name in ("ce_clean",) if name in sums}
    clean, sae, zero = (sums[name] / n for name in ("ce_clean", "ce_sae", "ce_zero"))
    apart = np.where(zero != clean, np.subtract(zero, clean), np.nan)
    metrics = {
        "ce_clean": clean,
        "ce_sae": sae,
        "ce_zero": zero,
        "loss_recovered": np.subtract(zero, sae) / apart,
        "kl": sums["kl"] / n,
    }
    if "ce_sae_in_turn" in sums:
        in_turn = {f"{name}_in_turn": sums[f"{name}_in_turn"] / n for name in ("ce_sae", "kl")}
        metrics |= in_turn | {"loss_recovered_in_turn": np.subtract(zero, in_turn["ce_sae_in_turn"]) / apart}
    return metrics
