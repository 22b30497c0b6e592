"""The refusals of an intervention, before anything runs, in one line each."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from saejax.core.arrays import as_array
from saejax.core.errors import ConfigError, DataError
from saejax.interventions.change import Change
from saejax.lm import LanguageModel
from saejax.lm.rows import check_ids, check_length
from saejax.trained import TrainedCoder

Dictionaries = Mapping[str, TrainedCoder]
Changes = Mapping[str, Change | Sequence[Change]]


def placed(lm: LanguageModel, dictionaries: Dictionaries) -> dict[str, TrainedCoder]:
    """The dictionaries with the model's own names of hook points, if they can act in it together."""
    if not dictionaries:
        raise ConfigError("There is no dictionary whose latents could be changed; give one or more.")
    if not lm.pure:
        raise ConfigError("Interventions need a model that JAX runs (lm.backend=jax), not one of PyTorch.")
    tokenizer = lm.identity.get("tokenizer_sha256", "")
    for name, sae in dictionaries.items():
        if sae.origin.tokenizer and tokenizer and sae.origin.tokenizer != tokenizer:
            raise DataError(
                f"{name} was made with another tokenizer, that of {sae.origin.model or 'another model'}: its latents "
                f"mean nothing in {lm.identity['model']}. Give a dictionary of this model."
            )
    here = {name: sae.at(lm) for name, sae in dictionaries.items()}
    written = [point for sae in here.values() for point in sae.sites.writes]
    if twice := sorted({point for point in written if written.count(point) > 1}):
        raise ConfigError(f"Two dictionaries write {', '.join(twice)}; take one of them.")
    return here


def named(dictionaries: Dictionaries, name: str) -> TrainedCoder:
    """The dictionary of this name. Raises ConfigError where there is none."""
    if name not in dictionaries:
        raise ConfigError(f"There is no dictionary {name!r}; there are {', '.join(dictionaries)}.")
    return dictionaries[name]


def padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [R, S] filled up behind, the place of each row's last token [R]): rows that run together.

    Nothing attends to what stands behind it, so that a row gives what it gives alone.
    """
    if not prompts or not all(map(len, prompts)):
        raise DataError("A prompt has no tokens: there is nothing to run.")
    longest = max(map(len, prompts))
    rows = [np.pad(np.asarray(row, np.int32), (0, longest - len(row))) for row in prompts]
    return np.stack(rows), np.asarray([len(row) - 1 for row in prompts])


def checked_tokens(lm: LanguageModel, tokens_RS: Any) -> np.ndarray:
    """Tokens [R, S] that the model can run."""
    if len(lengths := {len(row) for row in tokens_RS}) > 1:
        raise DataError(f"Rows of {sorted(lengths)} tokens do not run together; fill them up with `padded`.")
    tokens = np.asarray(as_array(tokens_RS, "tokens"))
    if 0 in tokens.shape:
        raise DataError("A prompt has no tokens: there is nothing to run.")
    check_ids("tokens", tokens, lm.config.vocab_size)
    check_length("The rows have", tokens.shape[1], lm.config.context_length)
    return tokens


def checked_changes(
    dictionaries: Dictionaries, changes: Changes, shape: tuple[int, ...]
) -> dict[str, tuple[Change, ...]]:
    """The changes of each dictionary, if rows of this shape [R, S] can have them.

    All have one form, `at` [R, S] and numbers [1, 1, K] or [R, S, K], so that a program of one operation on K latents
    runs the others too.
    """
    checked = {}
    for name, of_dictionary in changes.items():
        listed = (of_dictionary,) if isinstance(of_dictionary, Change) else tuple(of_dictionary)
        checked[name] = tuple(_checked(change, named(dictionaries, name), name, shape) for change in listed)
    return checked


def checked_errors(
    dictionaries: Dictionaries, errors: Any
) -> tuple[Literal["own", "none"], dict[str, dict[str, jax.Array]]]:
    """("own" or "none" for dictionaries without given errors, the given ones)."""
    if errors == "own" or errors == "none":
        return errors, {}
    if isinstance(errors, str):
        raise ConfigError(f"errors is {errors!r}; it is own, none, or the errors of another run.")
    for name, given in errors.items():
        if missing := set(named(dictionaries, name).sites.writes) - given.keys():
            raise ConfigError(f"errors of {name} lack {', '.join(sorted(missing))}; give those of a whole run.")
    return "own", {name: dict(given) for name, given in errors.items()}


def _checked(change: Change, sae: TrainedCoder, name: str, shape: tuple[int, ...]) -> Change:
    latents = np.asarray(change.latents)
    if not latents.size:
        raise DataError(f"A change of {name} names no latent.")
    if latents.min() < 0 or latents.max() >= sae.n_latents:
        wrong = latents[(latents < 0) | (latents >= sae.n_latents)][0]
        raise DataError(f"{name} has no latent {wrong}; its latents are 0 to {sae.n_latents - 1}.")
    different, counts = np.unique(latents, return_counts=True)
    if counts.max() > 1:
        raise DataError(f"A change of {name} names latent {different[counts.argmax()]} twice; name each once.")
    parts = {}
    for part in ("at", "scale", "shift", "low", "high"):
        value, whole = getattr(change, part), shape if part == "at" else (*shape, latents.size)
        try:
            fits = np.broadcast_shapes(value.shape, whole) == whole
        except ValueError:
            fits = False
        if not fits:
            raise DataError(f"`{part}` of a change of {name} is {value.shape}; the tokens (and latents) are {whole}.")
        # Numbers that are the same for all tokens stay one for all.
        if part != "at" and not any(size > 1 for size in value.shape[max(0, value.ndim - 3) : -1]):
            whole = (1, 1, latents.size)
        parts[part] = value if value.shape == whole else np.broadcast_to(np.asarray(value), whole)
    return dataclasses.replace(change, **parts)
