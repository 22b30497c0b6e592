"""Topologies with a group of latents for each layer: cross-layer transcoders, causal crosscoders, one for each layer.

    x [B, L, D] -> f [B, L, F] -> y_hat [B, L, D]

    pre_l   = x_l W_enc,l + b_enc,l
    y_hat_m = sum_{l <= m} f_l W_dec,l->m + b_dec,m  (+ x_m W_skip,m)

x_l is what layer l's MLP reads, y_m what layer m's MLP writes; of a crosscoder y is x. A latent of layer l writes its
`targets`: the layers from l on, or l alone where dictionaries stand side by side. W_dec_l [F, n, D] holds the rows of
group l for its n targets, source-major as in circuit-tracer; nothing is stored for other layers.
(Ameisen et al. 2025, "Circuit Tracing"; Lindsey et al. 2025; the skip: Gemma Scope 2)
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from saejax.coders.initialisation import INITS
from saejax.coders.latents import Latents, ListedLatents, Params
from saejax.coders.topology import Axes, Topology, Transcoder
from saejax.core.errors import DataError
from saejax.kernels.dense import EXACT, decode_dense, decode_dense_split, product
from saejax.kernels.groups import Groups
from saejax.kernels.listed import decode_listed
from saejax.kernels.norms import unit_rows
from saejax.kernels.sparse import decode_groups


@dataclasses.dataclass(frozen=True)
class CrossLayerTranscoder(Topology):
    """W_enc [L, D, F], b_enc [L, F], W_dec_0 ... W_dec_{L-1} [F, L - l, D], b_dec [L, D].

    `sites` is L, `d_sae` is F, the latents of a layer.
    """

    init_name: str = "uniform"
    stacked: ClassVar[bool] = True
    transposable: ClassVar[bool] = False

    @property
    def decoders(self) -> tuple[str, ...]:
        return tuple(f"W_dec_{layer}" for layer in range(self.sites))

    def targets(self, group: int) -> range:
        return range(group, self.sites)

    def decoder_rows(self, params: Params) -> Groups:
        tables = tuple(params[name].reshape(params[name].shape[0], -1) for name in self.decoders)
        return Groups(tables, tuple(self.targets(layer).start * self.out_shape[1] for layer in range(self.sites)))

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (self.sites, self.d_sae)

    @property
    def latent_axes(self) -> Axes:
        return ("site", "latent")

    def start(self, key: jax.Array) -> dict[str, tuple[Axes, jax.Array]]:
        L, D, F, out = self.sites, self.d_in, self.d_sae, self.out_shape[1]
        init, written = INITS[self.init_name], [len(self.targets(layer)) for layer in range(L)]
        weights = [
            init(jax.random.fold_in(key, layer), (D, F), (F, written[layer], out), self.decoder_norm)
            for layer in range(L)
        ]
        decoders = zip(self.decoders, weights, strict=True)
        return {
            "W_enc": (
                ("site", "d_in", "latent"),
                self.encoder_scale * jnp.stack([W_enc.reshape(D, F) for W_enc, _ in weights]),
            ),
            "b_enc": (("site", "latent"), jnp.zeros((L, F))),
            **{name: (("latent", "site", "d_in"), W_dec) for name, (_, W_dec) in decoders},
            "b_dec": (("site", "d_in"), jnp.zeros((L, out))),
            **({"centre": (("site", "d_in"), jnp.zeros((L, D)))} if self.centred else {}),
        }

    def uncentred(self, params: Params) -> tuple[Params, jax.Array]:
        rest = dict(params)
        centre_LD = rest.pop("centre")
        return rest, -jnp.einsum("ld,ldf->lf", centre_LD, params["W_enc"], precision=EXACT)

    def decode_without_bias(self, params: Params, latents: Latents, x_BLD: jax.Array | None) -> jax.Array:
        """sum_{l <= m} f_l W_dec,l->m, float32 [B, L, D]."""
        rows = self.decoder_rows(params)
        if isinstance(latents, ListedLatents):
            y_BR = decode_listed(latents.values, latents.rows, latents.at, rows, *latents.leading)
        elif latents.indices is not None:
            y_BR = decode_groups(latents.values, latents.indices, rows)
        elif latents.d_sae == self.d_sae:
            y_BR = decode_dense_split(latents.values, rows, self.matmul_dtype)
        else:  # a prefix, where latents are not split
            y_BR = decode_dense(latents.values, rows, self.matmul_dtype)
        return self.written_by(params, y_BR, x_BLD)

    def fold(self, params: Params, read_scales: tuple[float, ...], write_scales: tuple[float, ...]) -> Params:
        reads, writes = (jnp.asarray(scales, jnp.float32) for scales in (read_scales, write_scales))
        to = [jnp.asarray(self.targets(layer)) for layer in range(self.sites)]
        rows = {name: params[name] / writes[to[layer]][None, :, None] for layer, name in enumerate(self.decoders)}
        if "centre" in params:
            rows["centre"] = params["centre"] / reads[:, None]
        return (
            params
            | rows
            | {"W_enc": params["W_enc"] * reads[:, None, None], "b_dec": params["b_dec"] / writes[:, None]}
        )

    def aim(self, params: Params, x: jax.Array, y: jax.Array) -> Params:
        """x, y [L, F, L, D]: one token for each latent of each layer."""
        into = [unit_rows(self.encoder_input(params, x[i])[:, i]).T for i in range(self.sites)]
        aimed: Params = {"W_enc": jnp.stack(into)}
        for layer, name in enumerate(self.decoders):
            aimed[name] = unit_rows((y[layer] - params["b_dec"][None])[:, jnp.asarray(self.targets(layer))])
        return aimed

    def written(self, params: Params) -> list[dict[int, jax.Array]]:
        """For each layer {site: [F, D]}: what a unit of each of its latents adds to its targets."""
        return [
            {site: params[name][:, i] for i, site in enumerate(self.targets(layer))}
            for layer, name in enumerate(self.decoders)
        ]

    def group(self, params: Params, g: int) -> tuple[Transcoder, Params]:
        """(topology, params) of layer g by itself: the transcoder that reads x_g, and writes y_g alone.

        Other parameters that are of each latent, [L, F], become those of layer g.
        """
        layer = {name: value[g] for name, value in params.items() if not name.startswith("W_dec_") and name != "W_skip"}
        alone = Transcoder(self.d_in, self.d_sae, self.d_out or self.d_in, matmul_dtype=self.matmul_dtype)
        return alone, layer | {"W_dec": params[f"W_dec_{g}"][:, 0]}


class SkipCrossLayerTranscoder(CrossLayerTranscoder):
    """A cross-layer transcoder with W_skip [L, D_in, D_out], which starts at 0: layer m's goes to y_m alone."""

    def start(self, key: jax.Array) -> dict[str, tuple[Axes, jax.Array]]:
        W_skip = jnp.zeros((*self.in_shape, self.out_shape[1]))
        return super().start(key) | {"W_skip": (("site", "d_in", None), W_skip)}

    def decode(self, params: Params, latents: Latents, x_BLD: jax.Array | None) -> jax.Array:
        """y_hat_m with x_m W_skip,m, float32 [B, L, D].

        Raises:
            DataError: without x.
        """
        if x_BLD is None:
            raise DataError("A coder with a skip connection decodes with its input: give x.")
        skips = [product(x_BLD[:, i], params["W_skip"][i], self.matmul_dtype) for i in range(self.sites)]
        return super().decode(params, latents, x_BLD) + jnp.stack(skips, axis=1)

    def fold(self, params: Params, read_scales: tuple[float, ...], write_scales: tuple[float, ...]) -> Params:
        reads, writes = (jnp.asarray(scales, jnp.float32)[:, None, None] for scales in (read_scales, write_scales))
        return super().fold(params, read_scales, write_scales) | {"W_skip": params["W_skip"] * (reads / writes)}


class CausalCrosscoder(CrossLayerTranscoder):
    """Weakly causal crosscoder: writes what it reads. A latent reads one site and writes that site and those after it.

    Sites are in the order in which the model computes them, so that no latent sees what comes after what it writes.
    The encoder sees x itself, as in Gemma Scope 2's files; that project trains with x - b_dec and folds b_dec in.
    (Gemma Scope 2, technical report, section 2.6; Anthropic, "Sparse Crosscoders", October 2024, variants)
    """

    tied: ClassVar[bool] = True


class PerLayerTranscoder(CrossLayerTranscoder):
    """Transcoders side by side, one for each layer: y_hat_m = f_m W_dec,m + b_dec,m.

    They share batches, steps and the loss, and no parameter. What counts latents of a batch or a token over all groups
    (batchtopk, target_l0) counts them over the layers together.
    """

    transposable: ClassVar[bool] = True

    def targets(self, group: int) -> range:
        return range(group, group + 1)


class PerLayerAutoencoder(PerLayerTranscoder):
    """Autoencoders side by side, one for each hook point; as a crosscoder's, their encoders see x itself."""

    tied: ClassVar[bool] = True
