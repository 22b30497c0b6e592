"""Dictionaries side by side in one coder (`coders.PerLayerTranscoder`), and each by itself."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from saejax.coders import Autoencoder, Coder, PerLayerAutoencoder, PerLayerTranscoder, Sites, Transcoder
from saejax.core.errors import ConfigError
from saejax.trained.coder import TrainedCoder
from saejax.trained.sites import centred

_SEVERAL = {Autoencoder: PerLayerAutoencoder, Transcoder: PerLayerTranscoder}


def layers(sae: TrainedCoder) -> list[TrainedCoder]:
    """The dictionaries of a per-layer topology, each by itself, in the order of the hook points that they read.

    Raises:
        ConfigError: it is one dictionary.
    """
    topology = sae.coder.topology
    alone = next((one for one, several in _SEVERAL.items() if type(topology) is several), None)
    if alone is None:
        raise ConfigError(f"{sae!r} is one dictionary; layers is for those of a per-layer topology.")
    found = []
    for layer, (read, write) in enumerate(zip(sae.sites.reads, sae.sites.writes, strict=True)):
        params = {name: np.asarray(value)[layer] for name, value in sae.params.items() if name not in topology.decoders}
        params["W_dec"] = np.asarray(sae.params[f"W_dec_{layer}"])[:, 0]
        if alone is Autoencoder:  # whose encoder sees x - b_dec
            params = centred(params, 1)
        one = alone(topology.d_in, topology.d_sae, topology.out_shape[-1], matmul_dtype=topology.matmul_dtype)
        sites = Sites((read,), (write,), (1.0,), (1.0,))
        coder = dataclasses.replace(sae.coder, topology=one)
        found.append(dataclasses.replace(sae, coder=coder, params=params, sites=sites, figures={}))
    return found


def side_by_side(dictionaries: Sequence[TrainedCoder]) -> TrainedCoder:
    """Several dictionaries as one of a per-layer topology, which trains, is saved and is evaluated as a whole.

        saejax.side_by_side([saejax.load("runs/a"), saejax.load("runs/b")]).save("both")

    Autoencoders or transcoders, as many latents each, in the order in which the model computes what they write.
    `layers` gives them back.

    Raises:
        ConfigError: none, or some that differ in more than hook points and numbers; says in what.
    """
    if not dictionaries:
        raise ConfigError("side_by_side needs dictionaries; none given.")
    first = dictionaries[0]
    several = _SEVERAL.get(type(first.coder.topology))
    if several is None or first.coder.lista.steps:
        raise ConfigError(f"side_by_side takes autoencoders and transcoders with a linear encoder, not {first!r}.")
    for other in dictionaries:
        if (apart := _kind(other.coder)) != _kind(first.coder) or other.params.keys() != first.params.keys():
            raise ConfigError(f"side_by_side: {other!r} is {apart}, {first!r} is {_kind(first.coder)}.")
        if other.origin.lm != first.origin.lm:
            raise ConfigError(f"side_by_side: {other!r} is of another model ({other.origin.model}) than {first!r}.")
    params = [{name: np.asarray(value) for name, value in one.params.items()} for one in dictionaries]
    if several is PerLayerAutoencoder:
        params = [centred(one, -1) for one in params]
    whole = {name: np.stack([one[name] for one in params]) for name in params[0] if name != "W_dec"}
    whole |= {f"W_dec_{layer}": one["W_dec"][:, None] for layer, one in enumerate(params)}
    reads, writes = (tuple(name for one in dictionaries for name in getattr(one.sites, s)) for s in ("reads", "writes"))
    if len(set(reads)) < len(reads) or len(set(writes)) < len(writes):
        raise ConfigError("side_by_side: two of the dictionaries have one hook point. Give one for each.")
    t = first.coder.topology
    topology = several(t.d_in, t.d_sae, t.out_shape[-1], sites=len(reads), matmul_dtype=t.matmul_dtype)
    ones = (1.0,) * len(reads)
    coder = dataclasses.replace(first.coder, topology=topology)
    origin = dataclasses.replace(first.origin, tokens=0, step=0, source="")
    return TrainedCoder(coder, whole, Sites(reads, writes, ones, ones, stacked=True), origin)


def _kind(coder: Coder) -> str:
    t = coder.topology
    sizes = f"{t.d_in} -> {t.d_sae} latents -> {t.out_shape[-1]}"
    return f"{type(t).__name__} {sizes} with {coder.sparsity}"
