"""The layers of a graph: the places in the model where dictionaries read and write."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from saejax.coders import Crosscoder, LayerNormAutoencoder
from saejax.core.errors import ConfigError, DataError
from saejax.lm import LanguageModel
from saejax.trained import TrainedCoder

_WITHOUT_A_PLACE = {
    Crosscoder: "one latent of it reads several hook points, and so has no place in the model",
    LayerNormAutoencoder: "it divides by its input's standard deviation, which attribution does not hold fixed",
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """One group of latents: a place in the model to read, and the first place that it writes, where its error stands.

    Attributes:
        dictionary, group: which group of which dictionary.
        reaches: the layers at whose `write` the group writes, its own first; in the order of its decoder rows.
        skip: a linear map leads from `read` to `write`.
    """

    dictionary: int
    group: int
    read: str
    write: str
    reaches: tuple[int, ...]
    skip: bool


def at_model(lm: Any, dictionaries: Sequence[TrainedCoder]) -> tuple[TrainedCoder, ...]:
    """The dictionaries with the model's own names of hook points, if they can be."""
    if not isinstance(lm, LanguageModel):
        raise ConfigError(
            f"Attribution differentiates the model in JAX; it has no way into a {type(lm).__name__}. Load one model of "
            "an architecture that saejax knows, with lm.backend=jax."
        )
    if not dictionaries:
        raise ConfigError("Attribution needs dictionaries, one for each layer or a cross-layer transcoder; none given.")
    for sae in dictionaries:
        for kind, why in _WITHOUT_A_PLACE.items():
            if isinstance(sae.coder.topology, kind):
                raise ConfigError(f"{sae!r} cannot be a part of an attribution graph: {why}.")
        if sae.coder.lista.steps:
            raise ConfigError(
                f"{sae!r} cannot be a part of an attribution graph: its encoder is unrolled (coder.lista_steps), and a "
                "graph needs one that is linear."
            )
        _check_model(lm, sae)
    named = [sae.at(lm) for sae in dictionaries]
    # One that has the names already stays itself, with the programs that it has compiled.
    return tuple(old if old.sites == new.sites else new for old, new in zip(dictionaries, named, strict=True))


def _check_model(lm: LanguageModel, sae: TrainedCoder) -> None:
    origin, identity = sae.origin, lm.identity
    mine, theirs = (str(name).rsplit("/", 1)[-1].lower() for name in (identity["model"], origin.model))
    tokenizers = (origin.tokenizer, identity.get("tokenizer_sha256"))
    if (theirs and mine != theirs) or (all(tokenizers) and tokenizers[0] != tokenizers[1]):
        what = f"of the model {origin.model!r}" if theirs and mine != theirs else "of a model with another tokenizer"
        raise DataError(
            f"{sae!r} is {what}; the graph is of {identity['model']!r}. If it is meant for both, say so: "
            "dataclasses.replace(sae, origin=Origin())."
        )


def layers_of(lm: LanguageModel, saes: Sequence[TrainedCoder]) -> tuple[Layer, ...]:
    """The dictionaries' groups, in the order in which the model computes what they write."""
    order = {name: i for i, name in enumerate(lm.hook_points())}
    writes = [name for sae in saes for name in sae.sites.writes]
    if len(set(writes)) < len(writes):
        twice = next(name for name in writes if writes.count(name) > 1)
        raise ConfigError(f"Two dictionaries write {twice}. Give one for each hook point.")
    place = {name: i for i, name in enumerate(sorted(writes, key=order.__getitem__))}
    layers = []
    for number, sae in enumerate(saes):
        for group, (read, write) in enumerate(zip(sae.sites.reads, sae.sites.writes, strict=True)):
            reaches = tuple(place[sae.sites.writes[to]] for to in sae.coder.topology.targets(group))
            if order[read] > order[write] or reaches != tuple(sorted(reaches)):
                raise ConfigError(f"{sae!r} writes {write} before the model has computed what it reads, {read}.")
            layers.append(Layer(number, group, read, write, reaches, "W_skip" in sae.params))
    return tuple(sorted(layers, key=lambda layer: place[layer.write]))
