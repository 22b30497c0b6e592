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
from collections.abc import Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from saejax.coders.initialisation import INITS
from saejax.coders.latents import Latents, ListedLatents, Params
from saejax.kernels.batch import for_tokens
from saejax.kernels.dense import EXACT, product
from saejax.kernels.groups import Groups
from saejax.kernels.listed import decode_listed, kept_listed, of_latents_listed
from saejax.kernels.norms import norms, unit_rows
from saejax.kernels.sparse import decode_rows, kept_pre_activations, of_latents, rows_of_columns

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

    def targets(self, group: int) -> range:
        """The sites that a group's latents write."""
        return range(self.sites if self.stacked else 1)

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
        W_enc = params["W_enc"]
        return rest, -jnp.matmul(centre.reshape(-1), W_enc.reshape(-1, W_enc.shape[-1]), precision=EXACT)

    def encoders(self, params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(x' [B, G, N], W_enc [G, N, F]): all that each group of latents reads as one row, and its weights."""
        into, W_enc = self.encoder_input(params, x), params["W_enc"]
        W_GNF = W_enc.reshape(len(self.decoders), -1, W_enc.shape[-1])
        return into.reshape(len(into), *W_GNF.shape[:2]), W_GNF

    def encoder_rows(self, params: Params) -> jax.Array:
        """W_enc as [G, F, N], a row for each latent. Gradients that come to it are added up before they are turned."""
        W_enc = params["W_enc"]
        return rows_of_columns(W_enc.reshape(len(self.decoders), -1, W_enc.shape[-1]))

    def by_group(self, groups: Sequence[jax.Array], axis: int = 1) -> jax.Array:
        """Arrays, one for each group of latents, as one: with an axis of groups where latents have one."""
        return groups[0] if len(self.latent_shape) == 1 else jnp.stack(groups, axis)

    def pre_activations(self, params: Params, x: jax.Array) -> jax.Array:
        """pre = x' W_enc + b_enc, float32 [B, F] or [B, G, F]."""
        # Group by group: a batched product of bfloat16 into float32 does not exist on every backend.
        x_BGN, W_GNF = self.encoders(params, x)
        pre = [product(x_BGN[:, g], W_GNF[g], self.matmul_dtype) for g in range(len(W_GNF))]
        return self.by_group(pre) + for_tokens(self.encoder_bias(params), len(x))

    def kept(
        self,
        params: Params,
        W_GFN: jax.Array,
        x: jax.Array,
        pre: jax.Array,
        indices: jax.Array,
        rows_P: jax.Array | None = None,
    ) -> jax.Array:
        """pre at `indices`, [B, K] or [B, G, K], where pre is known already; its gradient stays sparse (and skips x).

        W_GFN, to which it goes, is from `encoder_rows`. Of a list for the batch: pre at (rows, indices), [P].
        """
        bias = self.encoder_bias(params)
        (x_BGN, _), raw = self.encoders(params, x), jax.lax.stop_gradient(pre - bias[None])
        n_tokens, n_groups, n_latents = len(x), len(W_GFN), pre.shape[-1]
        raw_BGF, bias_GF = raw.reshape(n_tokens, n_groups, n_latents), bias.reshape(n_groups, n_latents)
        if rows_P is not None:
            kept_P = kept_listed(x_BGN, W_GFN, raw_BGF, rows_P, indices, n_tokens)
            return kept_P + of_latents_listed(bias_GF, rows_P, indices, n_tokens)
        at_BGK = indices.reshape(n_tokens, n_groups, indices.shape[-1])

        def of_group(g: int) -> jax.Array:
            kept_BK = kept_pre_activations(x_BGN[:, g], W_GFN[g], raw_BGF[:, g], at_BGK[:, g])
            return kept_BK + of_latents(bias_GF[g], at_BGK[:, g])

        return self.by_group([of_group(g) for g in range(n_groups)])

    def decode(self, params: Params, latents: Latents, x: jax.Array | None) -> jax.Array:
        """y_hat = f W_dec + b_dec, float32 [B, *out]; x matters to a skip connection and layer normalisation."""
        return self.decode_without_bias(params, latents, x) + params["b_dec"][None]

    def at_rest(self, params: Params, x: jax.Array | None, n_tokens: int) -> jax.Array:
        """decode of no latents, float32 [B, *out]: the bias, and what a skip connection adds."""
        none = Latents(jnp.zeros((n_tokens, *self.latent_shape[:-1], 1)), None, 1)
        return self.decode(self.restrict(params, slice(0, 1)), none, x)

    def decode_without_bias(self, params: Params, latents: Latents, x: jax.Array | None) -> jax.Array:
        """f W_dec, float32 [B, *out]: what latents of x add to y_hat."""
        rows = self.decoder_rows(params)
        if isinstance(latents, ListedLatents):
            out_BR = decode_listed(latents.values, latents.rows, latents.at, rows, latents.leading[0], 1)
        elif latents.indices is None:
            out_BR = product(latents.values, rows[0], self.matmul_dtype)
        else:
            out_BR = decode_rows(latents.values, latents.indices, rows[0])
        return self.written_by(params, out_BR, x)

    def written_by(self, params: Params, out_BR: jax.Array, x: jax.Array | None) -> jax.Array:
        """The part of y_hat that a sum of `decoder_rows` adds, [B, *out]."""
        return out_BR.reshape(-1, *params["b_dec"].shape)

    def restrict(self, params: Params, chosen: slice) -> Params:
        """Parameters of the smaller coder that has only the latents `chosen`."""
        encoder = {name: params[name][..., chosen] for name in ("W_enc", "b_enc")}
        return params | encoder | {name: params[name][chosen] for name in self.decoders}

    def decoder_rows(self, params: Params) -> Groups:
        """All that a latent writes as one row: one [F, R] for each group."""
        return Groups.one(params["W_dec"].reshape(params["W_dec"].shape[0], -1))

    def decoder_norms(self, params: Params) -> jax.Array:
        """Length of each latent's decoder row, [F] or [G, F]: the weight of its sparsity penalty."""
        return self.by_group([norms(rows, axis=1) for rows in self.decoder_rows(params)], axis=0)

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


def _per_site(scales: tuple[float, ...], stacked: bool) -> jax.Array:
    """[S, 1] where there is a site axis, else [1]."""
    return jnp.asarray(scales, jnp.float32)[:, None] if stacked else jnp.asarray(scales[:1], jnp.float32)
