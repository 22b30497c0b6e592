"""Base of all topologies: one encoder and one decoder, everything but what the encoder sees.

    pre   = x' W_enc + b_enc          x' [B, *in] the encoder's input, all sites at once
    y_hat = f W_dec + b_dec           y_hat [B, *out]

In training x' is x - centre where the coder is `centred`: a constant [*in] among the parameters, the mean of what is
read. Were it not taken off, a step on W_enc would move each latent's bias by centre . step, many times as far as a step
on b_enc, and latents that it made negative everywhere would die. `uncentred` puts it into b_enc.

Flax declares the parameters, with their logical axes, and computes nothing: losses compute with parameters that are
frozen, folded, or of some latents alone, so the mathematics takes them as an argument. Names and layouts are those of
SAELens: W_enc [*in, F], b_enc [F], W_dec [F, *out], b_dec [*out].
"""

import dataclasses
import math
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from saejax.coders.initialisation import INITS
from saejax.coders.latents import Latents, ListedLatents, Params
from saejax.kernels.dense import EXACT, product
from saejax.kernels.listed import decode_listed, kept_listed, of_latents_listed
from saejax.kernels.norms import norms, unit_rows
from saejax.kernels.sparse import decode_rows, kept_pre_activations, of_latents

Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Topology:
    """Parameters and products of a coder with one group of latents; a cross-layer transcoder has one for each layer.

    Attributes:
        d_in, d_out: width of a site read, of a site written.
        d_sae: F.
        sites: hook points read; [] axes below are absent where a topology has one site.
        init_name: of `INITS`.
        decoder_norm: length of a decoder row at the start, where the init asks for one.
        encoder_scale: what the init gives W_enc is multiplied by this.
        matmul_dtype: of the operands of the dense products (`kernels.dense.product`).
        centred: whether there is a centre.
    """

    d_in: int
    d_sae: int
    d_out: int = 0
    sites: int = 1
    init_name: str = "transpose"
    decoder_norm: float = 1.0
    encoder_scale: float = 1.0
    matmul_dtype: str = "auto"
    centred: bool = False

    # A site axis in x and y; writes what it reads; `init=transpose` makes sense; the encoder can have a centre.
    stacked: ClassVar[bool] = False
    centrable: ClassVar[bool] = True
    tied: ClassVar[bool] = False
    transposable: ClassVar[bool] = True

    @property
    def decoders(self) -> tuple[str, ...]:
        """Names of the decoder matrices."""
        return ("W_dec",)

    @property
    def in_shape(self) -> tuple[int, ...]:
        return (self.sites, self.d_in) if self.stacked else (self.d_in,)

    @property
    def out_shape(self) -> tuple[int, ...]:
        width = self.d_out or self.d_in
        return (self.sites, width) if self.stacked else (width,)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (self.d_sae,)

    @property
    def latent_axes(self) -> Axes:
        return ("latent",)

    def start(self, key: jax.Array) -> dict[str, tuple[Axes, jax.Array]]:
        """{parameter: (its logical axes, its value before the first step)}."""
        into, out, F = self.in_shape, self.out_shape, self.d_sae
        axes_in, axes_out = (("site",) * (len(shape) - 1) + ("d_in",) for shape in (into, out))
        W_enc, W_dec = INITS[self.init_name](key, (*into, F), (F, *out), self.decoder_norm)
        return {
            "W_dec": (("latent", *axes_out), W_dec),
            "W_enc": ((*axes_in, "latent"), W_enc * self.encoder_scale),
            "b_enc": (("latent",), jnp.zeros(F)),
            "b_dec": (axes_out, jnp.zeros(out)),
            **({"centre": (axes_in, jnp.zeros(into))} if self.centred else {}),
        }

    def encoder_input(self, params: Params, x: jax.Array) -> jax.Array:
        """x' [B, *in], without gradient to parameters."""
        return less_centre(params, x)

    def encoder_bias(self, params: Params) -> jax.Array:
        """b_enc [F], carrying what gradient `encoder_input` left out."""
        return params["b_enc"]

    def uncentred(self, params: Params) -> tuple[Params, jax.Array]:
        """(parameters without the centre, what each latent's bias has to gain for it [F])."""
        rest = dict(params)
        centre = rest.pop("centre")
        return rest, -jnp.matmul(centre.reshape(-1), _encoder(params), precision=EXACT)

    def pre_activations(self, params: Params, x: jax.Array) -> jax.Array:
        """pre = x' W_enc + b_enc, float32 [B, F]."""
        return product(self._input(params, x), _encoder(params), self.matmul_dtype) + self.encoder_bias(params)[None]

    def kept(
        self, params: Params, x: jax.Array, pre_BF: jax.Array, indices_BK: jax.Array, rows_P: jax.Array | None = None
    ) -> jax.Array:
        """pre at `indices`, [B, K], where pre is known already; its gradient stays sparse (and skips x).

        Of a list for the batch: pre at (rows, indices), [P].
        """
        bias_F = self.encoder_bias(params)
        raw_BF = jax.lax.stop_gradient(pre_BF - bias_F[None])
        if rows_P is not None:
            x_BD, n_tokens = self._input(params, x), pre_BF.shape[0]
            kept_P = kept_listed(x_BD[:, None], _encoder(params)[None], raw_BF[:, None], rows_P, indices_BK, n_tokens)
            return kept_P + of_latents_listed(bias_F[None], rows_P, indices_BK, n_tokens)
        kept_BK = kept_pre_activations(self._input(params, x), _encoder(params), raw_BF, indices_BK)
        return kept_BK + of_latents(bias_F, indices_BK)

    def decode(self, params: Params, latents: Latents, x: jax.Array | None) -> jax.Array:
        """y_hat = f W_dec + b_dec, float32 [B, *out]; x matters to a skip connection and layer normalisation."""
        return self.decode_without_bias(params, latents, x) + params["b_dec"][None]

    def decode_without_bias(self, params: Params, latents: Latents, x: jax.Array | None) -> jax.Array:
        """f W_dec, float32 [B, *out]: what latents of x add to y_hat."""
        (rows_FR,) = self.decoder_rows(params)
        if isinstance(latents, ListedLatents):
            out_BR = decode_listed(latents.values, latents.rows, latents.at, (rows_FR,), latents.leading[0], 1)
        elif latents.indices is None:
            out_BR = product(latents.values, rows_FR, self.matmul_dtype)
        else:
            out_BR = decode_rows(latents.values, latents.indices, rows_FR)
        return self.written_by(params, out_BR, x)

    def written_by(self, params: Params, out_BR: jax.Array, x: jax.Array | None) -> jax.Array:
        """The part of y_hat that a sum of `decoder_rows` adds, [B, *out]."""
        return out_BR.reshape(-1, *params["b_dec"].shape)

    def restrict(self, params: Params, chosen: slice) -> Params:
        """Parameters of the smaller coder that has only the latents `chosen`."""
        encoder = {name: params[name][..., chosen] for name in ("W_enc", "b_enc")}
        return params | encoder | {"W_dec": params["W_dec"][chosen]}

    def decoder_rows(self, params: Params) -> tuple[jax.Array, ...]:
        """All that a latent writes as one row: one [F, R] for each group."""
        return (params["W_dec"].reshape(params["W_dec"].shape[0], -1),)

    def decoder_norms(self, params: Params) -> jax.Array:
        """Length of each latent's decoder row, [F]: the weight of its sparsity penalty."""
        return norms(self.decoder_rows(params)[0], axis=1)

    def fold(self, params: Params, read_scales: tuple[float, ...], write_scales: tuple[float, ...]) -> Params:
        """Parameters for raw activations from those trained on scale * activation; the latents stay the same."""
        reads, writes = (_per_site(scales, self.stacked) for scales in (read_scales, write_scales))
        centre = {"centre": params["centre"] / reads} if "centre" in params else {}
        return params | {
            **centre,
            "W_enc": params["W_enc"] * reads.reshape(*reads.shape, 1),
            "W_dec": params["W_dec"] / writes[None],
            "b_dec": params["b_dec"] / writes,
        }

    def aim(self, params: Params, x_F: jax.Array, y_F: jax.Array) -> Params:
        """Unit weights that point at tokens: x_F [F, *in], y_F [F, *out], one token for each latent."""
        into = unit_rows(self.encoder_input(params, x_F))
        return {"W_enc": jnp.moveaxis(into, 0, -1), "W_dec": unit_rows(y_F - params["b_dec"][None])}

    def written(self, params: Params) -> list[dict[int, jax.Array]]:
        """One group {site: [F, D]}: what a unit of each latent adds to the last site that the coder writes."""
        return [{-1: params["W_dec"][:, -1] if self.stacked else params["W_dec"]}]

    def group(self, params: Params, g: int) -> tuple[Any, Params]:
        return self, params

    def _input(self, params: Params, x: jax.Array) -> jax.Array:
        into = self.encoder_input(params, x)
        return into.reshape(into.shape[0], math.prod(self.in_shape))


class Transcoder(Topology):
    """Reads one hook point and writes another, as an MLP's input and output. (Dunefsky et al. 2024, arXiv:2406.11944)

    pre   = x W_enc + b_enc
    y_hat = f W_dec + b_dec
    """


class Declared(nn.Module):
    """The parameters of a topology for Flax, which remembers their logical axes."""

    topology: Topology

    @nn.compact
    def __call__(self) -> None:
        # Both weights come from one key, since some inits tie them.
        for name, (axes, value) in self.topology.start(self.make_rng("params")).items():
            self.param(name, nn.with_logical_partitioning(lambda _, start: start, axes), value)


def less_centre(params: Params, x: jax.Array) -> jax.Array:
    """x - centre, float32; x itself where there is no centre."""
    x = x.astype(jnp.float32)
    return x - jax.lax.stop_gradient(params["centre"])[None] if "centre" in params else x


def _encoder(params: Params) -> jax.Array:
    return params["W_enc"].reshape(-1, params["W_enc"].shape[-1])


def _per_site(scales: tuple[float, ...], stacked: bool) -> jax.Array:
    """[S, 1] where there is a site axis, else [1]."""
    return jnp.asarray(scales, jnp.float32)[:, None] if stacked else jnp.asarray(scales[:1], jnp.float32)
