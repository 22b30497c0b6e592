"""From a `CoderConfig` to a `Coder`: names to classes, coefficients to terms; what does not fit is refused."""

from collections.abc import Sequence
from typing import Any

from saejax.coders import losses
from saejax.coders.coder import Coder
from saejax.coders.config import CoderConfig
from saejax.coders.initialisation import reconstructing_scale
from saejax.coders.ramp import Ramp
from saejax.coders.sparsity import SPARSITIES, Sparsity
from saejax.coders.topologies import TOPOLOGIES
from saejax.core.errors import ConfigError


def build(
    config: CoderConfig, d_in: int | Sequence[int], steps: int, d_out: int | Sequence[int] | None = None
) -> Coder:
    """The coder for activations of width `d_in`, trained for `steps` steps.

    Args:
        d_in, d_out: widths of the sites read and written (one number: one site); d_out defaults to d_in.

    Raises:
        ConfigError: sites that differ in width or do not fit the topology; k, auxk_k or prefixes that do not fit the
            latents; a loss that does not fit the sparsity.
    """
    c = config.resolved()
    reads = _widths(d_in)
    writes = reads if d_out is None else _widths(d_out)
    topology = TOPOLOGIES[c.topology]
    _check_sites(c, topology, reads, writes)
    width = c.width(reads[0])
    sparsity = SPARSITIES[c.sparsity].build(c, steps)
    _check_counts(c, sparsity, width)
    return Coder(
        topology=topology(
            d_in=reads[0],
            d_sae=width,
            d_out=writes[0],
            sites=len(reads),
            init_name=c.init,
            decoder_norm=c.decoder_norm or 0.0,
            encoder_scale=c.encoder_scale or _scale_by_rule(c, sparsity, len(reads) * reads[0], width),
            matmul_dtype=c.matmul_dtype,
        ),
        sparsity=sparsity,
        terms=_terms(c, sparsity, reads[0], width, steps),
        unit_decoder_every=c.unit_decoder_every or 0,
        dead_after_tokens=c.dead_after_tokens,
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
            "Use crosscoder or clt for several."
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


def _scale_by_rule(c: CoderConfig, sparsity: Sparsity, d_in: int, width: int) -> float:
    """Where the encoder is the transpose and k of its latents are kept, what reconstructs best; elsewhere 1."""
    if c.init == "transpose" and "k" in sparsity.provides:
        return reconstructing_scale(d_in, width, max(c.k, c.k_start))
    return 1.0


def _check_counts(c: CoderConfig, sparsity: Sparsity, width: int) -> None:
    largest = max(c.k, c.k_start)
    if "k" in sparsity.provides and largest > width:
        name = "k_start" if c.k_start > c.k else "k"
        raise ConfigError(f"coder.{name} is {largest} but there are only {width} latents; lower it or raise d_sae.")
    if "k" not in sparsity.provides and c.k_start:
        raise ConfigError(f"coder.k_start is set, but {c.sparsity} has no k to anneal; remove it.")
    if c.auxk_k > width:
        raise ConfigError(f"coder.auxk_k is {c.auxk_k} but there are only {width} latents; lower it.")
    if c.multi_topk_coefficient and "k" in sparsity.provides and largest * c.multi_topk_factor > width:
        raise ConfigError(
            f"coder.multi_topk_factor x k is {largest * c.multi_topk_factor} but there are only {width} latents; lower "
            "one of them or raise d_sae."
        )


def _terms(c: CoderConfig, sparsity: Sparsity, d_in: int, width: int, steps: int) -> tuple[losses.Term, ...]:
    """Every term whose coefficient is not 0, the reconstruction first."""
    warmup = round((c.sparsity_warmup_fraction or 0.0) * steps)

    def rising(coefficient: Any) -> Ramp:
        return Ramp(0.0, coefficient, warmup)

    error: losses.Mse | losses.Fvu = losses.Mse() if c.reconstruction == "mse" else losses.Fvu()
    after = round(c.lp_after_fraction * steps)
    power = Ramp(1.0, c.lp_end, max(1, steps - after), after)
    constant = Ramp.constant
    auxk_k = min(c.auxk_k or max(1, d_in // 2), width)
    weighted: list[tuple[Any, losses.Term]] = [
        (c.l1_coefficient, losses.NormWeightedL1(rising(c.l1_coefficient))),
        (c.lp_coefficient, losses.AnnealedLp(rising(c.lp_coefficient), power, c.lp_updates)),
        (c.tanh_coefficient, losses.Tanh(rising(c.tanh_coefficient), c.tanh_scale)),
        (c.l0_coefficient, losses.L0(rising(c.l0_coefficient))),
        (c.target_l0_coefficient, losses.TargetL0(rising(c.target_l0_coefficient), c.target_l0)),
        (
            c.pre_activation_coefficient,
            losses.PreActivation(constant(c.pre_activation_coefficient or 0), c.pre_activation_dead_only),
        ),
        (c.gate_coefficient, losses.GateReconstruction(constant(c.gate_coefficient or 0))),
        (c.multi_topk_coefficient, losses.MultiTopK(constant(c.multi_topk_coefficient or 0), c.multi_topk_factor)),
        (c.auxk_coefficient, losses.AuxK(constant(c.auxk_coefficient or 0), auxk_k)),
        (c.ghost_coefficient, losses.GhostGradients(constant(c.ghost_coefficient or 0))),
        (c.decorrelation_coefficient, losses.Decorrelation(constant(c.decorrelation_coefficient or 0))),
    ]
    chosen = tuple(term for coefficient, term in weighted if coefficient)
    for term in chosen:
        if missing := term.needs - sparsity.provides:
            fitting = [name for name, kind in SPARSITIES.items() if term.needs <= kind.provides]
            raise ConfigError(
                f"The loss {term.name} needs a sparsity with {', '.join(sorted(missing))}, which {c.sparsity} has not. "
                f"Use {' or '.join(fitting)}, or set its coefficient to 0."
            )
    return ((losses.Matryoshka(error=error, prefixes=prefixes(c, width)) if c.prefixes else error), *chosen)


def prefixes(c: CoderConfig, width: int) -> tuple[int, ...]:
    """The prefixes as numbers of latents.

    Raises:
        ConfigError: they do not rise, or do not end with all latents.
    """
    counts = tuple(round(p * width) if p <= 1 else int(p) for p in c.prefixes)
    rising = all(a < b for a, b in zip((0, *counts), counts, strict=False))
    if not rising or counts[-1] != width:
        raise ConfigError(
            f"coder.prefixes {c.prefixes} are {counts} of {width} latents; they must rise and end with {width} "
            "(or 1.0), so that each contains the one before."
        )
    return counts
