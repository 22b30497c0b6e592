"""Generation with changed latents in every step.

(Templeton et al. 2024: features clamped or added to while the model writes.)
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from saejax.core.errors import ConfigError
from saejax.interventions.change import Change
from saejax.interventions.checks import checked_changes
from saejax.interventions.inside import Inside, reads_all
from saejax.interventions.runs import Interventions
from saejax.lm.generation import Sampling, generate
from saejax.trained.coder import ParamMap

# The change of tokens where `at` [B, S] is true.
ChangeAt = Callable[[jax.Array], Change]


def steered(
    inside: Interventions,
    name: str,
    change: ChangeAt | Change,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    first: int = 0,
) -> Iterator[np.ndarray]:
    """The next token of each row, int [B], as `generate` gives them, with one dictionary's latents changed.

    Args:
        name: of the dictionary.
        change: at -> the change, as in lambda at: added(123, 5.0, at). Or a change of all tokens, added(123, 5.0):
            then `inside` keeps the programs, for other changes of as many latents.
        first: the place of the first token that is changed; 1 spares the model's bos.

    Raises:
        ConfigError: no such dictionary; one whose latents read hook points behind those that they write.
        DataError: as `generate`.
    """
    sae = inside.named(name)
    own = change if isinstance(change, Change) else change(jnp.ones((1, 1), bool))
    if reads_all(sae):
        raise ConfigError(
            f"{name} reads several hook points for one latent, so that it cannot steer while a text is written. Take "
            "a dictionary of one hook point, or Interventions.run on a whole text."
        )

    # What cannot be changed is refused before anything runs.
    checked_changes(inside.dictionaries, {name: own}, (1, 1))
    lm_params, params = inside.params

    def edits(place_BS: jax.Array, arrays: tuple[ParamMap, Change | None]) -> Any:
        params, of_all = arrays
        at = place_BS >= first
        changed = dataclasses.replace(of_all, at=of_all.at & at) if of_all is not None else cast(ChangeAt, change)(at)
        return Inside(sae, params, [changed]).edits()

    programs: dict[Any, Any] | None = None
    if isinstance(change, Change):
        edits, programs = inside.kept.setdefault((name, first), (edits, {}))
    arrays = params[name], change if isinstance(change, Change) else None
    yield from generate(inside.lm.config, lm_params, prompts, sampling, edits, arrays, programs)
