"""The reconstruction's summand of the loss: an error, of the whole coder or as a mean over nested reconstructions.

Sums run over the model width (and sites), means over tokens.
"""

import dataclasses
import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp

from saejax.coders.latents import Latents, ListedLatents
from saejax.coders.ramp import At
from saejax.coders.term import Context, Term, squared_error
from saejax.core.errors import ConfigError
from saejax.core.settings import Settings, setting
from saejax.kernels.batch import per_token
from saejax.kernels.listed import decode_listed
from saejax.kernels.prefixes import prefix_errors
from saejax.kernels.shards import shards_of


@dataclasses.dataclass(frozen=True)
class Mse(Term):
    """mean_b sum_d (y - y_hat)^2"""

    name: ClassVar[str] = "mse"

    def __call__(self, c: Context) -> jax.Array:
        return self.of(c, c.y_hat)

    def of(self, c: Context, y_hat: jax.Array) -> jax.Array:
        return self.share(c, squared_error(c.y, y_hat))

    def share(self, c: Context, error: jax.Array) -> jax.Array:
        return error


@dataclasses.dataclass(frozen=True)
class Fvu(Mse):
    """sum (y - y_hat)^2 / sum (y - mean y)^2 over the batch: 1 - FVE."""

    name: ClassVar[str] = "fvu"

    def share(self, c: Context, error: jax.Array) -> jax.Array:
        return error / c.variance


MSE = Mse()
RECONSTRUCTIONS: dict[str, type[Mse]] = {"fvu": Fvu, "mse": Mse}


@dataclasses.dataclass(frozen=True)
class Matryoshka(Term):
    """mean over prefixes m of error(y, y_hat from the first m latents alone).

    `prefixes` rise and end at F, so that the whole coder is one of them. The mean, not the sum: another number of
    prefixes does not change what AuxK weighs beside it. One selection of latents serves all prefixes. (Bussmann et al.
    2025, arXiv:2503.17547) With `detached` the error of a prefix between the first and the whole has a gradient for
    the latents alone that the prefix before has not. (github.com/chanind/claude-auto-research-synthsaebench)
    """

    error: Mse = MSE
    prefixes: tuple[int, ...] = ()
    detached: bool = False
    name: ClassVar[str] = "matryoshka"

    def __call__(self, c: Context) -> jax.Array:
        none = c.topology.decode(c.params, _none(c.latents), c.x)
        if isinstance(c.latents, ListedLatents) and len(c.latents.leading) == 1:
            return self._of_list(c, c.latents, none)
        total, errors = none, jnp.float32(0)
        for m, (start, stop) in enumerate(itertools.pairwise((0, *self.prefixes))):
            block = c.topology.decode_without_bias(*_latents_between(c, start, stop), c.x)
            errors = errors + self.error.of(c, self._frozen(m, total) + block)
            total = total + block
        return errors / len(self.prefixes)

    def _of_list(self, c: Context, latents: ListedLatents, none: jax.Array) -> jax.Array:
        """Every kept latent is decoded once, into the sum of its block; the prefixes add the blocks up."""
        rows, n, n_tokens = c.topology.decoder_rows(c.params), len(self.prefixes), latents.leading[0]
        into_P = latents.rows * n + self.blocks(latents)  # of pairs that there are not: beyond the last row
        sums_BMR = decode_listed(latents.values, into_P, latents.at, rows, n_tokens, n).reshape(n_tokens, n, -1)
        prefixes_BMR, errors = jnp.cumsum(sums_BMR, axis=1), []
        for m in range(n):
            rows_BR = self._frozen(m, prefixes_BMR[:, m], sums_BMR[:, m])
            errors.append(self.error.of(c, self._frozen(m, none) + c.topology.written_by(c.params, rows_BR, c.x)))
        return jnp.stack(errors).sum() / n

    def blocks(self, latents: ListedLatents) -> jax.Array:
        """int32 [P]: how many prefixes end before each kept latent."""
        return jnp.searchsorted(jnp.asarray(self.prefixes), latents.at, side="right").astype(jnp.int32)

    def _frozen(self, m: int, written: jax.Array, own: jax.Array | float = 0.0) -> jax.Array:
        """`written`; for a prefix m between the first and the whole that is detached, with the gradient of `own`."""
        inner = self.detached and 0 < m < len(self.prefixes) - 1
        return jax.lax.stop_gradient(written) + (own - jax.lax.stop_gradient(own)) if inner else written


@dataclasses.dataclass(frozen=True)
class Hierarchical(Term):
    """mean over j of error(y, y_hat from the j largest latents alone),   j = k, k - every, k - 2 every, ... > 0.

    (of each group the j largest.) The paper's J is every number up to k, `every` 1, or a few of them. After training
    `TrainedCoder.with_k` keeps any number of latents up to k. (HierarchicalTopK: Balagansky et al. 2025,
    arXiv:2505.24473, the loss L_hierarchical)
    """

    error: Mse = MSE
    every: int = 1
    name: ClassVar[str] = "hierarchical"
    needs: ClassVar[frozenset[str]] = frozenset({"ranks"})

    def __call__(self, c: Context) -> jax.Array:
        values, indices = c.latents.values, c.latents.indices
        assert indices is not None  # build() has seen that they have ranks
        order = jnp.argsort(-jnp.abs(jax.lax.stop_gradient(values)), axis=-1)
        values, indices = (jnp.take_along_axis(a, order, axis=-1) for a in (values, indices))
        rows, n_tokens = c.topology.decoder_rows(c.params), c.x.shape[0]
        target = c.y - c.topology.decode(c.params, _none(c.latents), c.x)
        # What a topology does to a sum of rows is to multiply it by a number of the token: so are its latents.
        ones_BR = jnp.ones((n_tokens, rows.width), jnp.float32)
        size_B = c.topology.written_by(c.params, ones_BR, c.x).reshape(n_tokens, -1)[:, 0]
        values = values.reshape(n_tokens, len(rows), -1) * size_B[:, None, None]
        errors_B = prefix_errors(values, indices.reshape(values.shape), rows, target.reshape(n_tokens, -1), self.every)
        return self.error.share(c, per_token(errors_B))


@dataclasses.dataclass(frozen=True)
class ReconstructionSettings(Settings, section="coder"):
    """Settings of the reconstruction's error."""

    reconstruction: str = setting(
        "", "fvu (variance unexplained) or mse (sum over the width).", choices=RECONSTRUCTIONS, base="fvu"
    )
    prefixes: tuple[float, ...] = setting(
        (),
        "Matryoshka: the loss is the mean over the first n latents, for each n here (a count, or a share of the "
        "latents where at most 1); rising, and ending with all latents. Empty: only all latents.",
        low=0,
    )
    prefixes_detached: bool | None = setting(
        None,
        "Matryoshka: the error of the first n latents teaches those alone that a smaller prefix has not; the error of "
        "the smallest prefix and of all latents teach all that they have.",
        base=False,
    )
    hierarchical_every: int | None = setting(
        None,
        "HierarchicalTopK: the loss is the mean over the j largest latents, for j = k, k - n, k - 2 n, ... with n this "
        "number: 1 takes every j. 0: only k.",
        low=0,
        base=0,
    )

    def term(self, at: At) -> Mse | Matryoshka | Hierarchical:
        """The reconstruction's summand of the loss.

        Raises:
            ConfigError: prefixes that do not nest, or that are detached and absent; both kinds of parts.
        """
        error = RECONSTRUCTIONS[self.reconstruction]()
        if self.prefixes_detached and not self.prefixes:
            raise ConfigError("coder.prefixes_detached is set, but the coder has no prefixes; set coder.prefixes.")
        if self.prefixes and self.hierarchical_every:
            raise ConfigError(
                "coder.prefixes and coder.hierarchical_every both say which parts of a reconstruction the loss is a "
                "mean over; leave prefixes empty, or set hierarchical_every to 0."
            )
        if self.hierarchical_every:
            return Hierarchical(error=error, every=self.hierarchical_every)
        if not self.prefixes:
            return error
        return Matryoshka(error=error, prefixes=self.counts(at.width), detached=bool(self.prefixes_detached))

    def counts(self, width: int) -> tuple[int, ...]:
        """The prefixes as numbers of latents.

        Raises:
            ConfigError: they do not rise, or do not end with all latents.
        """
        counts = tuple(round(p * width) if p <= 1 else int(p) for p in self.prefixes)
        rising = all(a < b for a, b in zip((0, *counts), counts, strict=False))
        if not rising or counts[-1] != width:
            raise ConfigError(
                f"coder.prefixes {self.prefixes} are {counts} of {width} latents; they must rise and end with {width} "
                "(or 1.0), so that each contains the one before."
            )
        return counts


def _none(latents: Latents) -> Latents:
    """One kept latent a token, of value 0: what decodes to the biases alone."""
    leading = latents.leading if isinstance(latents, ListedLatents) else latents.values.shape[:-1]
    zero = jnp.zeros((*leading, 1), latents.values.dtype)
    return Latents(zero, zero.astype(jnp.int32), latents.d_sae)


def _latents_between(c: Context, start: int, stop: int) -> tuple[dict[str, jax.Array], Latents]:
    """(params, latents) of the latents start..stop alone."""
    if c.latents.indices is None:
        if shards_of(c.x.shape[0], c.latents.d_sae).n_along_latents > 1:
            # A block of latents that are split over devices lies on few of them, and taking it would move it to all.
            place = jax.lax.broadcasted_iota(jnp.int32, c.latents.values.shape, c.latents.values.ndim - 1)
            values = jnp.where((place >= start) & (place < stop), c.latents.values, 0)
            return c.params, dataclasses.replace(c.latents, values=values)
        block = slice(start, stop)
        return c.topology.restrict(c.params, block), Latents(c.latents.values[..., block], None, stop - start)
    inside = (c.latents.indices >= start) & (c.latents.indices < stop)
    return c.params, dataclasses.replace(c.latents, values=jnp.where(inside, c.latents.values, 0))
