"""Latents: dense [B, F], or sparse as (values [B, K], indices [B, K]); with groups [B, G, F] and [B, G, K]."""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp


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
        zeros = jnp.zeros((*self.values.shape[:-1], self.d_sae), self.values.dtype)
        return jnp.put_along_axis(zeros, self.indices, self.values, axis=-1, inplace=False)

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
        return self.active().sum(dtype=jnp.float32) / self.values.shape[0]

    def fired(self) -> jax.Array:
        """bool [F] or [G, F]: latents that are non-zero for at least one token."""
        if self.indices is None:
            return self.active().any(0)
        return self._scatter(lambda at, active: jnp.zeros(self.d_sae, bool).at[at].max(active))

    def counts(self) -> jax.Array:
        """int32 [F] or [G, F]: tokens for which each latent is non-zero."""
        if self.indices is None:
            return self.active().sum(0, dtype=jnp.int32)
        return self._scatter(lambda at, active: jnp.zeros(self.d_sae, jnp.int32).at[at].add(active.astype(jnp.int32)))

    def _scatter(self, scatter: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        assert self.indices is not None
        if self.values.ndim == 2:
            return scatter(self.indices.ravel(), self.active().ravel())
        return jax.vmap(lambda at, active: scatter(at.ravel(), active.ravel()), in_axes=1)(self.indices, self.active())
