"""Effects of single features on a measure, when their values are replaced by those in another run.

    exact       m(f_i of the source put in) - m                       `Interventions.many` with `set_to`
    estimated   (f_source - f) dm/df                                  at f: attribution patching, 1 step
                (f_source - f) mean over alpha of dm/df               at f + alpha (f_source - f): integrated gradients,
                                                                      alpha = 0, 1/n, ..., (n - 1)/n of n steps

The error of a dictionary, e = y - Dec(f), is one node for each token, and is patched as features are. A path moves the
features that read one place, with the error there; all others stay as the model makes them. Where m is linear in what
is written, the effects of these features and errors add up to what putting all of them in does, to rounding.
(Nanda 2023; Marks et al. 2024; Sundararajan et al. 2017)

Shape letters: R rows, S tokens, F latents, G groups, D width.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.core.errors import ConfigError
from saejax.interventions.inside import n_groups
from saejax.interventions.metrics import Measure
from saejax.interventions.runs import Interventions, Run


@dataclasses.dataclass(frozen=True)
class Effects:
    """The effect of each node of one dictionary on the sum of a measure over rows.

    Attributes:
        features: [R, S, F], or [R, S, G, F] of a cross-layer transcoder.
        errors: {hook point that it writes: [R, S]}.
    """

    features: np.ndarray
    errors: dict[str, np.ndarray]


def estimated(
    inside: Interventions,
    name: str,
    tokens_RS: Any,
    source: Run,
    measure: Measure,
    steps: int = 1,
    held: Mapping[str, jax.Array] | None = None,
) -> Effects:
    """Effects of one dictionary's features and errors by gradients: 1 step is attribution patching, 10 are usual for
    integrated gradients. Costs `steps` passes forward and back.

    Args:
        source: a run of rows of the same lengths, whose features and errors are patched in.
        measure: logits -> [R].
        held: {hook point: value} to keep as given, as in `Interventions.run`.

    Raises:
        ConfigError: no such dictionary; steps below 1; a source of another shape.
    """
    clean = inside.run(tokens_RS, held=held)
    if name not in clean.latents:
        raise ConfigError(f"There is no dictionary {name!r}; there are {', '.join(clean.latents)}.")
    if steps < 1:
        raise ConfigError(f"steps is {steps}; it must be 1 or more.")
    if source.latents[name].shape != clean.latents[name].shape:
        raise ConfigError(
            f"The source's latents are {source.latents[name].shape}, the run's {clean.latents[name].shape}; give rows "
            "of the same number and length."
        )
    delta = jax.tree.map(
        jnp.subtract, (source.latents[name], source.errors[name]), (clean.latents[name], clean.errors[name])
    )
    gradient = functools.partial(inside.gradient, name, measure, tokens_RS=tokens_RS, held=held or {})
    n_parts = n_groups(inside.dictionaries[name])
    total: Any = jax.tree.map(jnp.zeros_like, delta)
    # At alpha = 0 nothing has moved, and all parts have one gradient.
    first = gradient(jax.tree.map(jnp.zeros_like, delta))
    for part in range(n_parts):
        mask = _mask(delta, part, n_parts)
        for step in range(steps):
            alpha = step / steps
            g = first if step == 0 else gradient(jax.tree.map(lambda d, m, a=alpha: a * m * d, delta, mask))
            total = jax.tree.map(lambda t, g, m: t + g * m, total, g, mask)
    features, errors = jax.tree.map(lambda t, d: np.asarray(t, np.float64) * np.asarray(d) / steps, total, delta)
    return Effects(features, {point: value.sum(-1) for point, value in errors.items()})


def _mask(delta: tuple[jax.Array, dict[str, jax.Array]], part: int, n_parts: int) -> Any:
    """1 for the features that read one place and the error there, else 0."""
    latents, errors = delta
    if n_parts == 1:
        return jax.tree.map(jnp.ones_like, delta)
    of_group = jnp.zeros_like(latents).at[:, :, part].set(1)
    return of_group, {point: jnp.full_like(e, i == part) for i, (point, e) in enumerate(errors.items())}
