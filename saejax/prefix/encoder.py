"""The parameters that are trained: text to latents, and latents to embeddings of each frozen model.

    x = blocks(W_E[ids] + W_pos)                              [B, L, E]    bidirectional attention, then an MLP
    z = queries; z += attention(z, x); z += mlp(z)            [B, P, D]    n_pool times (Perceiver, arXiv:2103.03206)
    prefix_i = g_i rms_i unit(z W_i + b_i)                    [B, P, M_i]  unit: divided by its root mean square

rms_i is the root mean square of model i's embeddings, and the gain g_i begins at 1: a prefix of another size than
embeddings have is what frozen models make nothing of.

Shape letters: B rows, L ids, E encoder width, P latents, D latent width, M width of a model, H heads, K their width.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp

from saejax.prefix.config import PrefixConfig

Weights = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Shape of encoder and adapters.

    Attributes:
        config: sizes of the encoder.
        vocab: ids from 1 on; 0 is filling, which nothing reads.
        models: (name, width, root mean square of its embeddings) of each.
    """

    config: PrefixConfig
    vocab: int
    models: tuple[tuple[str, int, float], ...]

    @classmethod
    def from_meta(cls, config: PrefixConfig, meta: Mapping[str, Any]) -> Self:
        """Inverse of `to_meta`."""
        models = tuple((name, int(width), float(rms)) for name, width, rms in meta["models"])
        return cls(config, int(meta["vocab"]), models)

    def to_meta(self) -> dict[str, Any]:
        """The part of a checkpoint's meta that the settings do not say."""
        return {"kind": "prefix", "vocab": self.vocab, "models": [list(model) for model in self.models]}

    def init(self, key: jax.Array) -> Weights:
        """Fresh parameters, float32. Weights are named W_..., so that weight decay knows them."""
        c = self.config
        wide, narrow = c.d_encoder, c.d_latent
        keys = iter(jax.random.split(key, 8 * (c.n_layer + c.n_pool) + 4 + len(self.models)))

        def weight(rows: int, columns: int) -> jax.Array:
            return jax.random.normal(next(keys), (rows, columns)) / math.sqrt(rows)

        def block(width: int, source: int) -> Weights:
            attention = {"W_Q": weight(width, width), "W_K": weight(source, width), "W_V": weight(source, width)}
            norms = {"norm": jnp.ones(width), "norm_source": jnp.ones(source), "norm_mlp": jnp.ones(width)}
            mlp = {"W_in": weight(width, 4 * width), "b_in": jnp.zeros(4 * width), "W_out": weight(4 * width, width)}
            return attention | norms | mlp | {"W_O": weight(width, width), "b_out": jnp.zeros(width)}

        params = {
            "W_E": jax.random.normal(next(keys), (self.vocab + 1, wide)),
            "W_pos": jax.random.normal(next(keys), (c.length, wide)),
            "W_queries": jax.random.normal(next(keys), (c.latents, narrow)),
            "encode": {str(i): block(wide, wide) for i in range(c.n_layer)},
            "pool": {str(i): block(narrow, wide) for i in range(c.n_pool)},
            "adapters": {
                name: {"W": weight(narrow, width), "b": jnp.zeros(width), "gain": jnp.ones(())}
                for name, width, _ in self.models
            },
        }
        if not c.n_layer:
            del params["encode"]  # a checkpoint keeps no part that is empty
        return params

    def encode(self, params: Weights, ids_BL: jax.Array) -> jax.Array:
        """ids [B, L] -> latents [B, P, D]. Pure."""
        there_BL = ids_BL > 0
        x_BLE = params["W_E"][ids_BL] + params["W_pos"][None, : ids_BL.shape[1]]
        for i in range(self.config.n_layer):
            block = params["encode"][str(i)]
            x_BLE = self._block(block, x_BLE, x_BLE, there_BL)
        z_BPD = jnp.broadcast_to(params["W_queries"], (len(ids_BL), self.config.latents, self.config.d_latent))
        for i in range(self.config.n_pool):
            z_BPD = self._block(params["pool"][str(i)], z_BPD, x_BLE, there_BL)
        return z_BPD

    def prefixes(self, params: Weights, ids_BL: jax.Array) -> dict[str, jax.Array]:
        """ids [B, L] -> {model: embeddings [B, P, M]}. Pure."""
        z_BPD = self.encode(params, ids_BL)
        prefixes = {}
        for name, _, rms in self.models:
            adapter = params["adapters"][name]
            prefixes[name] = adapter["gain"] * rms * _unit_rms(z_BPD @ adapter["W"] + adapter["b"][None, None])
        return prefixes

    def _block(self, block: Weights, q_BPD: jax.Array, x_BLE: jax.Array, there_BL: jax.Array) -> jax.Array:
        source_BLE = _unit_rms(x_BLE) * block["norm_source"][None, None]
        q_BPD = q_BPD + self._attention(block, _unit_rms(q_BPD) * block["norm"][None, None], source_BLE, there_BL)
        hidden = jax.nn.gelu(
            (_unit_rms(q_BPD) * block["norm_mlp"][None, None]) @ block["W_in"] + block["b_in"][None, None]
        )
        return q_BPD + hidden @ block["W_out"] + block["b_out"][None, None]

    def _attention(self, block: Weights, q_BPD: jax.Array, x_BLE: jax.Array, there_BL: jax.Array) -> jax.Array:
        def heads(x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape[:2], self.config.n_head, -1)

        q_BPHK, k_BLHK, v_BLHK = heads(q_BPD @ block["W_Q"]), heads(x_BLE @ block["W_K"]), heads(x_BLE @ block["W_V"])
        scores_BHPL = jnp.einsum("bphk,blhk->bhpl", q_BPHK, k_BLHK) / math.sqrt(q_BPHK.shape[-1])
        scores_BHPL = jnp.where(there_BL[:, None, None], scores_BHPL, -1e30)
        z_BPHK = jnp.einsum("bhpl,blhk->bphk", jax.nn.softmax(scores_BHPL), v_BLHK)
        return z_BPHK.reshape(q_BPD.shape) @ block["W_O"]


def _unit_rms(x: jax.Array) -> jax.Array:
    """x / rms(x), over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
