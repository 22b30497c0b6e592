"""A number that moves in a straight line over the steps of training: k, a sparsity weight, the power of a norm."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Ramp:
    """start + (end - start) clip((step + 1 - after) / over, 0, 1); `end` at once where `over` is 0."""

    start: float
    end: float
    over: int = 0
    after: int = 0

    @classmethod
    def constant(cls, value: float) -> "Ramp":
        return cls(value, value)

    @property
    def largest(self) -> float:
        return max(self.start, self.end) if self.over else self.end

    def __call__(self, step: jax.Array | int) -> jax.Array:
        """float32 scalar at `step`, the number of finished steps."""
        return self.at(self.done(step))

    def done(self, step: jax.Array | int) -> jax.Array:
        """The share of the way that is done at `step`: 0 to 1."""
        if not self.over:
            return jnp.float32(1)
        return jnp.clip((jnp.asarray(step) + 1 - self.after) / self.over, 0.0, 1.0)

    def at(self, done: jax.Array) -> jax.Array:
        if not self.over:
            return jnp.float32(self.end)
        return jnp.float32(self.start) + jnp.float32(self.end - self.start) * done


@dataclasses.dataclass(frozen=True)
class At:
    """The coder and training that a part is built for, besides its own settings.

    Attributes:
        d_in: width of a site that is read.
        width: number of latents (of a group).
        steps: of the training.
        warmup: steps over which sparsity weights rise from 0.
        kept: the most latents that are kept for a token; 0 where the sparsity keeps no number of them.
        neighbours: rows of a batch that are consecutive tokens of one document; 0 where no batch is spoken of.
    """

    d_in: int
    width: int
    steps: int
    warmup: int = 0
    kept: int = 0
    neighbours: int = 0
