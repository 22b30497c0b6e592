"""Latents: dense [B, F], or sparse as (values [B, K], indices [B, K])."""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Latents:
    """The code of B tokens.

    Attributes:
        values: [B, F] when dense; [B, K] when sparse.
        indices: None when dense; int32 [B, K], distinct within a row, when sparse. A kept latent may be 0.
        d_sae: F.
    """

    values: jax.Array
    indices: jax.Array | None
    d_sae: int = flax.struct.field(pytree_node=False)

    def dense(self) -> jax.Array:
        """[B, F], zeros where nothing was kept."""
        if self.indices is None:
            return self.values
        rows_B1 = jnp.arange(self.values.shape[0])[:, None]
        zeros_BF = jnp.zeros((self.values.shape[0], self.d_sae), self.values.dtype)
        return zeros_BF.at[rows_B1, self.indices].set(self.values)

    def active(self) -> jax.Array:
        """Non-zero entries: bool, of the shape of `values`."""
        return self.values != 0

    def fired(self) -> jax.Array:
        """bool [F]: latents that are non-zero for at least one token."""
        if self.indices is None:
            return self.active().any(0)
        return jnp.zeros(self.d_sae, bool).at[self.indices.ravel()].max(self.active().ravel())

    def counts(self) -> jax.Array:
        """int32 [F]: tokens for which each latent is non-zero."""
        if self.indices is None:
            return self.active().sum(0, dtype=jnp.int32)
        active = self.active().ravel().astype(jnp.int32)
        return jnp.zeros(self.d_sae, jnp.int32).at[self.indices.ravel()].add(active)
