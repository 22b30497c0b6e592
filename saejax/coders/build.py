"""From a `CoderConfig` to a `Coder`: names to classes, weights to terms; parts that do not fit together are refused."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from saejax.coders.coder import Coder
from saejax.coders.config import CoderConfig
from saejax.coders.cross_layer import CrossLayerTranscoder
from saejax.coders.initialisation import reconstructing_scale
from saejax.coders.lista import Lista
from saejax.coders.parts import SPARSITIES, TERMS
from saejax.coders.ramp import At, Ramp
from saejax.coders.sparsity.base import Sparsity
from saejax.coders.term import Term
from saejax.coders.topologies import TOPOLOGIES
from saejax.core.errors import ConfigError


def build(
    config: CoderConfig,
    d_in: int | Sequence[int],
    steps: int,
    d_out: int | Sequence[int] | None = None,
    neighbours: int = 0,
    tokens: int = 0,
) -> Coder:
    """The coder for activations of width `d_in`, trained for `steps` steps.

    Args:
        d_in, d_out: widths of the sites read and written (one number: one site); d_out defaults to d_in.
        neighbours: train.neighbours; 0 for a coder whose loss nobody asks for, as one that is loaded.
        tokens: train.tokens; 0 where they are not known.

    Raises:
        ConfigError: sites that differ in width or do not fit the topology; k, auxk_k or prefixes that do not fit the
            latents; a loss that does not fit the sparsity.
    """
    c = config.resolved()
    reads = _widths(d_in)
    writes = reads if d_out is None else _widths(d_out)
    topology = TOPOLOGIES[c.topology]
    _check_sites(c, topology, reads, writes)
    warmup = round((c.sparsity_warmup_fraction or 0.0) * steps)
    at = At(reads[0], c.width(reads[0]), steps, warmup, neighbours=neighbours)
    sparsity = SPARSITIES[c.sparsity].build(c, at)
    if c.k_start and not sparsity.kept:
        raise ConfigError(f"coder.k_start is set, but {c.sparsity} has no k to anneal; remove it.")
    if c.k_start and c.hierarchical_every:
        raise ConfigError("coder.hierarchical_every trains every number of latents up to k: remove coder.k_start.")
    if c.lista_steps and (not topology.tied or issubclass(topology, CrossLayerTranscoder)):
        raise ConfigError(
            f"coder.lista_steps is {c.lista_steps}: it is for coders with one group of latents that write what they "
            f"read, and a {c.topology} is none. Set it to 0."
        )
    by_rule = c.init == "transpose" and sparsity.kept
    read = reads[0] if issubclass(topology, CrossLayerTranscoder) else len(reads) * reads[0]
    scale_by_rule = reconstructing_scale(read, at.width, sparsity.kept) if by_rule else 1.0
    return Coder(
        topology=topology(
            d_in=reads[0],
            d_sae=at.width,
            d_out=writes[0],
            sites=len(reads),
            init_name=c.init,
            decoder_norm=c.decoder_norm or 0.0,
            encoder_scale=c.encoder_scale or scale_by_rule,
            matmul_dtype=c.matmul_dtype,
            centred=bool(c.encoder_centre) and topology.centrable,
        ),
        sparsity=sparsity,
        terms=_terms(c, sparsity, dataclasses.replace(at, kept=sparsity.kept)),
        unit_decoder_every=c.unit_decoder_every or 0,
        dead_after_tokens=c.dead_after(tokens),
        lista=Lista(c.lista_steps or 0, c.lista_rate),
    )


def _widths(d: int | Sequence[int]) -> tuple[int, ...]:
    return (d,) if isinstance(d, int) else tuple(d)


def _check_sites(c: CoderConfig, topology: Any, reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
    for side, widths in (("reads", reads), ("writes", writes)):
        if len(set(widths)) != 1:
            raise ConfigError(f"A {c.topology} needs sites of one width; the hook points it {side} have {widths}.")
    if not topology.stacked and (len(reads), len(writes)) != (1, 1):
        raise ConfigError(
            f"The topology {c.topology} reads and writes one hook point; given are {len(reads)} and {len(writes)}. "
            "Use crosscoder or clt for several, or per_layer_autoencoder or per_layer_transcoder for one at each."
        )
    if len(reads) != len(writes):
        raise ConfigError(f"A {c.topology} writes a site for each that it reads; given {len(reads)}, {len(writes)}.")
    if topology.tied and reads != writes:
        raise ConfigError(f"A {c.topology} writes what it reads; the widths are {reads} and {writes}.")
    if c.init == "transpose" and (reads != writes or not topology.transposable):
        raise ConfigError(
            "coder.init=transpose needs an encoder and a decoder of the same shape; use kaiming or uniform."
        )
    if c.init == "transpose" and c.decoder_norm == 0:
        raise ConfigError(
            "coder.decoder_norm is 0, so the encoder, which starts as its transpose, would be 0 too, and nothing could "
            "ever be learned. Use coder.init=zero_decoder, which has an encoder of its own."
        )
    if c.init == "zero_decoder" and c.unit_decoder_every:
        raise ConfigError("coder.init=zero_decoder has no rows of length 1; set coder.unit_decoder_every=0.")


def _terms(c: CoderConfig, sparsity: Sparsity, at: At) -> tuple[Term, ...]:
    """The reconstruction, and every term whose weight is not 0."""
    chosen: list[Term] = [c.term(at)]
    _check_needs(c, sparsity, chosen[0], "hierarchical_every")
    for kind in TERMS.values():
        if not (weight := getattr(c, kind.key())):
            continue
        _check_needs(c, sparsity, kind, kind.key())
        coefficient = Ramp(0.0, weight, at.warmup) if kind.is_sparsity_weight() else Ramp.constant(weight)
        chosen.append(kind.build(coefficient, c, at))
    return tuple(chosen)


def _check_needs(c: CoderConfig, sparsity: Sparsity, term: Term | type[Term], key: str) -> None:
    if missing := term.needs - sparsity.provides:
        fitting = [name for name, kind in SPARSITIES.items() if term.needs <= kind.provides]
        raise ConfigError(
            f"The loss {term.name} needs a sparsity with {', '.join(sorted(missing))}, which {c.sparsity} has not. "
            f"Use {' or '.join(fitting)}, or set coder.{key} to 0."
        )
