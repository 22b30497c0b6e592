"""Effects of an intervention, in numbers: of logits [R, S, V] one number a row, [R]; and what follows from them.

    logit difference   z_right - z_wrong                                              at one token of each row
    recovered          (m - m_corrupt) / (m_clean - m_corrupt)                        1: all of it, 0: none
    faithfulness       (m(C) - m(nothing)) / (m(M) - m(nothing))                      C: a set of features, M: all
    completeness       the same of the complement of C: what is left without C
    KL                 sum_v p(v) (log p(v) - log q(v))                               p clean, q changed

(Marks et al. 2024, sparse feature circuits; Heimersheim and Nanda 2024, activation patching.)

Shape letters: R rows, S tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from saejax.core.bootstrap import LEVEL, mean_interval

Measure = Callable[[jax.Array], Any]


def as_argument(measure: Measure) -> Partial:
    """The measure as a pytree that a program takes: those of this module differ by arrays alone, and share one."""
    return measure if isinstance(measure, Partial) else Partial(measure)


def at_tokens(logits_RSV: jax.Array, at: Any) -> jax.Array:
    """[R, V], float32: the logits at place `at` of each row; one number for all of them, -1 the last."""
    rows, length, _ = logits_RSV.shape
    at_R = jnp.broadcast_to(jnp.asarray(at, jnp.int32), (rows,)) % length
    return jnp.take_along_axis(logits_RSV, at_R[:, None, None], axis=1)[:, 0].astype(jnp.float32)


def logit_difference(at: Any, right: Any, wrong: Any) -> Measure:
    """z_right - z_wrong, [R]: at place `at`, of token ids that are one number or one a row."""
    return Partial(_logit_difference, at, right, wrong)


def probability(at: Any, token: Any) -> Measure:
    """softmax(z)_token, [R]."""
    return Partial(_probability, at, token)


def loss(at: Any, token: Any) -> Measure:
    """-log softmax(z)_token, [R], in nats."""
    return Partial(_loss, at, token)


def kl_from(clean_RSV: jax.Array, at: Any) -> Measure:
    """KL(clean || changed) of the next token, [R], in nats."""
    return Partial(_kl, at_tokens(clean_RSV, at), at)


def both(**measures: Measure) -> Measure:
    """{name: what each measures}, of one pass."""
    return Partial(_each, {name: as_argument(measure) for name, measure in measures.items()})


def share(value: Any, none: Any, all_: Any) -> np.ndarray:
    """(value - none) / (all - none): a share recovered, faithfulness or completeness; NaN where there is nothing to
    recover.
    """
    value, none, all_ = (np.asarray(x, np.float64) for x in (value, none, all_))
    whole = all_ - none
    return np.divide(value - none, whole, out=np.full(np.broadcast(value, whole).shape, np.nan), where=whole != 0)


def interval(
    values: Any, level: float = LEVEL, draws: int = 2_000, seed: int = 0, clusters: Any = None
) -> tuple[float, float, float]:
    """(mean, low, high): of values [R], with the percentile bootstrap's interval (`core.bootstrap`).

    The same seed gives the same interval. NaN rows are left out; of no row all three are NaN.

    Args:
        clusters: [R], equal for rows of one source, as a pair of prompts that is changed in several ways: sources are
            drawn, not rows. None: each row has its own.
    """
    return mean_interval(values, clusters, resamples=draws, seed=seed, level=level)


def _logit_difference(at: Any, right: Any, wrong: Any, logits_RSV: jax.Array) -> jax.Array:
    logits_RV = at_tokens(logits_RSV, at)
    return _of(logits_RV, right) - _of(logits_RV, wrong)


def _probability(at: Any, token: Any, logits_RSV: jax.Array) -> jax.Array:
    return jnp.exp(-_loss(at, token, logits_RSV))


def _loss(at: Any, token: Any, logits_RSV: jax.Array) -> jax.Array:
    return -_of(jax.nn.log_softmax(at_tokens(logits_RSV, at)), token)


def _kl(clean_RV: jax.Array, at: Any, logits_RSV: jax.Array) -> jax.Array:
    log_p_RV, log_q_RV = (jax.nn.log_softmax(z_RV) for z_RV in (clean_RV, at_tokens(logits_RSV, at)))
    return (jnp.exp(log_p_RV) * (log_p_RV - log_q_RV)).sum(-1)


def _each(measures: dict[str, Measure], logits_RSV: jax.Array) -> dict[str, Any]:
    return {name: measure(logits_RSV) for name, measure in measures.items()}


def _of(values_RV: jax.Array, token: Any) -> jax.Array:
    token_R = jnp.broadcast_to(jnp.asarray(token, jnp.int32), values_RV.shape[:1])
    return jnp.take_along_axis(values_RV, token_R[:, None], axis=1)[:, 0]
