"""Latents: dense [B, F], or sparse as (values [B, K], indices [B, K]), or as one list for the batch.

With groups [B, G, F] and [B, G, K].
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from saejax.kernels.batch import n_tokens, of_batch, per_token
from saejax.kernels.listed import spread_listed, tally_listed
from saejax.kernels.sparse import spread, tally

Params = dict[str, Any]


@flax.struct.dataclass
class Latents:
    """The code of B tokens. A cross-layer transcoder has G groups of F latents, every other coder one.

    Attributes:
        values: [B, F] or [B, G, F] when dense; [B, K] or [B, G, K] when sparse.
        indices: None when dense; int32 as `values`, distinct along K, when sparse. A kept latent may be 0.
        d_sae: F.
    """

    values: jax.Array
    indices: jax.Array | None
    d_sae: int = flax.struct.field(pytree_node=False)

    def dense(self) -> jax.Array:
        """[B, F] or [B, G, F], zeros where nothing was kept."""
        if self.indices is None:
            return self.values
        return spread(self.values, self.indices, self.d_sae)

    def flat(self) -> "Latents":
        """The same code with one group of G F latents: latent f of group g has number g F + f."""
        if self.values.ndim == 2:
            return self
        n_tokens, n_groups = self.values.shape[:2]
        values = self.values.reshape(n_tokens, -1)
        if self.indices is None:
            return Latents(values, None, n_groups * self.d_sae)
        offset = (jnp.arange(n_groups) * self.d_sae)[None, :, None]
        return Latents(values, (self.indices + offset).reshape(n_tokens, -1), n_groups * self.d_sae)

    def active(self) -> jax.Array:
        """Non-zero entries: bool, of the shape of `values`."""
        return self.values != 0

    def l0(self) -> jax.Array:
        """Mean number of non-zero latents of a token, over all groups together."""
        return per_token(self.active().astype(jnp.float32))

    def fired(self) -> jax.Array:
        """bool [F] or [G, F]: latents that are non-zero for at least one token."""
        if self.indices is None:
            # On 2 CPU cores a count of [2048, 1024] costs 15 ms of a step of 39, this under 1.
            return of_batch(self.active().any(0).astype(jnp.int32)) > 0
        return self.counts() > 0

    def counts(self) -> jax.Array:
        """int32 [F] or [G, F]: tokens for which each latent is non-zero."""
        active = self.active().astype(jnp.int32)
        if self.indices is None:
            own = active.sum(0)
        elif active.ndim == 2:
            own = tally(active, self.indices, self.d_sae)
        else:
            groups = range(active.shape[1])
            own = jnp.stack([tally(active[:, g], self.indices[:, g], self.d_sae) for g in groups])
        return of_batch(own)


@flax.struct.dataclass
class ListedLatents(Latents):
    """The same as one list of P kept entries, each token any number of them (`kernels.listed`).

    Attributes:
        values, indices: [P]; over devices each has a part of the list.
        rows: int32 [P]: the token, or b G + g where there are groups; B G and more for no entry.
        leading: (B,) or (B, G).
    """

    rows: jax.Array
    leading: tuple[int, ...] = flax.struct.field(pytree_node=False)

    def dense(self) -> jax.Array:
        return spread_listed(self.values, self.rows, self.at, (*self.leading, self.d_sae))

    def flat(self) -> "Latents":
        return Latents(self.dense(), None, self.d_sae).flat()

    def l0(self) -> jax.Array:
        return of_batch(self.active().astype(jnp.float32).sum()) / n_tokens(self.leading[0])

    def fired(self) -> jax.Array:
        return self.counts() > 0

    def counts(self) -> jax.Array:
        n_groups = 1 if len(self.leading) == 1 else self.leading[1]
        shape = (self.leading[0], n_groups, self.d_sae)
        own = tally_listed(self.active().astype(jnp.int32), self.rows, self.at, shape)
        return of_batch(own if len(self.leading) == 2 else own[0])

    @property
    def at(self) -> jax.Array:
        """`indices`, which a list always has."""
        assert self.indices is not None
        return self.indices
