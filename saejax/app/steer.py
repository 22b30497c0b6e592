"""The text that a model writes after a prompt, as it is and with some latents of a dictionary changed."""

import dataclasses
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from saejax.app.steer_settings import SteerSettings
from saejax.core.config import in_float32, nearest
from saejax.core.errors import ConfigError
from saejax.core.places import type_in_words
from saejax.interventions import Change, Interventions, added, clamped, kl_from, padded, scaled, set_to, steered, zero
from saejax.lm import LanguageModel
from saejax.lm.generation import Sampling, generate
from saejax.trained import TrainedCoder

# (latents, number, at) -> change, and how it reads.
_OPERATIONS: dict[str, tuple[Callable[[Any, float, Any], Change], str]] = {
    "add": (added, "f + {0:g}"),
    "set": (set_to, "f = {0:g}"),
    "scale": (scaled, "{0:g} f"),
    "zero": (lambda latents, _, at: zero(latents, at), "f = 0"),
    "least": (lambda latents, number, at: clamped(latents, low=number, at=at), "f at least {0:g}"),
    "most": (lambda latents, number, at: clamped(latents, high=number, at=at), "f at most {0:g}"),
}
OPERATIONS = tuple(_OPERATIONS)
_ROUNDED_TO = 16  # rows of few lengths, so few programs


@dataclasses.dataclass(frozen=True)
class Operation:
    """A change of some latents.

    Attributes:
        name: one of OPERATIONS.
        latents: latent f of group g is g F + f.
        number: what is added, set, multiplied by, or the bound; `zero` takes none.

    Raises:
        ConfigError: no such operation, or a number that float32 does not hold.
    """

    name: str
    latents: Sequence[int]
    number: float

    def __post_init__(self) -> None:
        if self.name not in _OPERATIONS:
            raise ConfigError(f"No operation {self.name!r}.{nearest(self.name, OPERATIONS)}")
        if not math.isfinite(in_float32(float(self.number))):
            raise ConfigError(f"scale is {self.number}; the model computes in float32, which holds up to 3.4e38.")

    @property
    def reads(self) -> str:
        """The change in words, as f + 5."""
        return _OPERATIONS[self.name][1].format(self.number)

    def at(self, there: Any) -> Change:
        """The change where `there` is true."""
        return _OPERATIONS[self.name][0](list(self.latents), self.number, there)


@dataclasses.dataclass(frozen=True)
class Written:
    """The continuations of one prompt.

    Attributes:
        prompt: the text.
        without, changed: ids of the tokens that it adds, as it is and with the latents changed.
        about: what the latents do in the prompt, and how far the next token's distribution moves.
    """

    prompt: str
    without: list[int]
    changed: list[int]
    about: str


def continuations(
    inside: Interventions, name: str, operation: Operation, prompts: Sequence[str], sampling: Sampling
) -> list[Written]:
    """The continuations of each prompt, without and with latents of the dictionary `name` changed.

    They are changed at every token but the first, where a model has its sink and dictionaries are not trained: the
    model's bos, which is put in front of each prompt where there is one, or the prompt's own first token.

    Raises:
        ConfigError: a latent that cannot be changed so.
        DataError: a prompt that is empty, or longer than the model reads.
    """
    lm = inside.lm
    bos = lm.tokenizer.bos
    first = max(1, len(bos))
    rows = [bos + ids for ids in lm.tokenizer.encode_behind_bos(list(prompts))]
    changed = _rows_of(steered(inside, name, operation.at(True), rows, sampling, first))
    without = _rows_of(generate(lm.config, lm.params, rows, sampling))
    about = _about(inside, name, list(operation.latents), rows, operation.at, first)
    return [Written(*row) for row in zip(prompts, without, changed, about, strict=True)]


@dataclasses.dataclass(frozen=True, repr=False)
class Steered:
    """The continuations of one prompt, as texts.

    Attributes:
        prompt: the text.
        change: of the latents, as f + 5.
        without, changed: what the model writes as it is, and with the latents changed.
        about: what the latents do in the prompt, and how far the next token's distribution moves.
    """

    prompt: str
    change: str
    without: str
    changed: str
    about: str

    def __repr__(self) -> str:
        lines = [textwrap.fill(self.prompt, 110, initial_indent="prompt   ", subsequent_indent=" " * 9)]
        lines.append(f"         {self.about}")
        for title, text in (("without", self.without), ("with", self.changed)):
            lines += [f"{'' if i else title:<7}| {line}" for i, line in enumerate(text.splitlines() or [""])]
        return "\n".join(lines)


def steer(
    sae: TrainedCoder,
    lm: LanguageModel,
    prompt: str | Sequence[str],
    latents: int | str | Sequence[int],
    scale: float = SteerSettings.scale,
    *,
    operation: str = SteerSettings.operation,
    tokens: int = SteerSettings.tokens,
    temperature: float = SteerSettings.temperature,
    top_p: float = SteerSettings.top_p,
    seed: int = SteerSettings.seed,
    past_end: bool = False,
) -> list[Steered]:
    """Continue each prompt, with the model as it is and with latents changed: steer(sae, lm, "def", 17, scale=5.0)

    It is what `saejax steer` prints. The change acts in every step, at every token but the first.

    Args:
        sae: a dictionary of the model's hook points.
        lm: a model of `saejax.load_lm` that JAX runs.
        prompt: a text or several.
        latents: a number or several; "2:123" is latent 123 of layer 2 of a cross-layer transcoder.
        scale: the number of the operation, in the latent's own unit.
        operation: add (f + scale), set (f = scale), scale (scale f), zero (f = 0), least, most (f no lower, no higher).
        tokens: how many are written.
        temperature: 0 takes the likeliest token.
        top_p: draw from the likeliest tokens that make up this share.
        seed: of the draws.
        past_end: go on behind the token that ends a text.

    Raises:
        ConfigError: no dictionary, a model that JAX does not run, an empty prompt, a latent or an operation that there
            is not.
        DataError: a prompt longer than the model reads, or a model of another width.
    """
    if not isinstance(sae, TrainedCoder):
        raise ConfigError(f"steer takes a dictionary and then its model; the first is {type_in_words(sae)}.")
    if not isinstance(lm, LanguageModel):
        raise ConfigError(f"steer needs a model that JAX runs (backend='jax'), not {type_in_words(lm)}.")
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if not prompts or not all(prompts):
        raise ConfigError("A prompt is empty: give the text that the model continues.")
    numbers = latents if isinstance(latents, str) else ",".join(map(str, np.ravel(latents).tolist()))
    change = Operation(operation, features(numbers, sae, "latents"), scale)
    stop = () if past_end else tuple(lm.tokenizer.special_ids)
    sampling = Sampling(tokens, temperature, top_p, seed, stop)
    written = continuations(Interventions(lm, {"sae": sae}), "sae", change, prompts, sampling)
    text = lm.tokenizer.decode_inside
    return [Steered(one.prompt, change.reads, text(one.without), text(one.changed), one.about) for one in written]


def features(text: str, sae: TrainedCoder, source: str = "--feature") -> list[int]:
    """Latents from `123`, `3,17`, or `layer:latent` of a cross-layer transcoder, whose layers count from its first.

    Args:
        source: where the text was given, for messages.

    Raises:
        ConfigError: something else, or a latent that the dictionary does not have.
    """
    shape, latents = sae.coder.topology.latent_shape, []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d+):)?(\d+)\s*", part)
        if not match:
            raise ConfigError(f"{source}={text}: give numbers, as in 123 or 3,17; of a layer, 2:123.")
        group, latent = int(match[1] or 0), int(match[2])
        if match[1] and (len(shape) == 1 or group >= shape[0]):
            layers = f"0 to {shape[0] - 1}" if len(shape) == 2 else "none: it has one group of latents"
            raise ConfigError(f"{source}={part.strip()}: there is no layer {group} of latents; there are {layers}.")
        largest = shape[-1] if match[1] else sae.n_latents
        if latent >= largest:
            raise ConfigError(f"{source}={part.strip()}: the latents are 0 to {largest - 1}.")
        latents.append(group * shape[-1] + latent)
    return latents


def _rows_of(steps: Any) -> list[list[int]]:
    """The tokens of each row, up to its end."""
    columns = list(steps)
    return [[int(token) for token in row if token >= 0] for row in np.stack(columns, axis=1)]


def _about(
    inside: Interventions, name: str, latents: list[int], rows: Sequence[Sequence[int]], change: Any, first: int
) -> list[str]:
    """Say what the latents do in each prompt as it is, and how far the next token's distribution moves."""
    tokens_RS, last_R = padded(rows)
    more = min(-len(tokens_RS[0]) % _ROUNDED_TO, inside.lm.config.context_length - len(tokens_RS[0]))
    tokens_RS = np.pad(tokens_RS, ((0, 0), (0, max(0, more))))  # nothing attends to what stands behind it
    there = np.broadcast_to(np.arange(tokens_RS.shape[1])[None] >= first, tokens_RS.shape)
    clean = inside.run(tokens_RS)
    changed = inside.run(tokens_RS, {name: change(there)})
    kl_R = np.asarray(kl_from(clean.logits, last_R)(changed.logits))
    f_RSK = np.asarray(clean.latents[name]).reshape(*tokens_RS.shape, -1)[..., latents]
    lines = []
    for row_SK, last, kl in zip(f_RSK, last_R, kl_R, strict=True):
        f_SK = row_SK[first : last + 1]
        if not math.isfinite(kl):
            raise ConfigError("The change is too large for the model's numbers, which overflow: give a smaller scale.")
        fires = (f_SK != 0).any(1).sum()
        most = f", at most {np.abs(f_SK).max():.3g}" if fires else ""
        lines.append(
            f"fires at {fires} of {len(f_SK)} tokens{most}; the next token's distribution moves by {kl:.3g} nats (KL)"
        )
    return lines
