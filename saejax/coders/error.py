"""The error of a reconstruction, which every loss begins with.

Sums run over the model width (and sites), means over tokens.
"""

import dataclasses
from typing import ClassVar

import jax

from saejax.coders.context import Context, squared_error
from saejax.coders.term import Term


@dataclasses.dataclass(frozen=True)
class Mse(Term):
    """mean_b sum_d (y - y_hat)^2"""

    name: ClassVar[str] = "mse"

    def __call__(self, c: Context) -> jax.Array:
        return self.of(c, c.y_hat)

    def of(self, c: Context, y_hat: jax.Array) -> jax.Array:
        return self.share(c, squared_error(c.y, y_hat))

    def share(self, c: Context, error: jax.Array) -> jax.Array:
        """The measure of a squared error of the batch."""
        return error


@dataclasses.dataclass(frozen=True)
class Fvu(Mse):
    """sum (y - y_hat)^2 / sum (y - mean y)^2 over the batch: 1 - FVE."""

    name: ClassVar[str] = "fvu"

    def share(self, c: Context, error: jax.Array) -> jax.Array:
        return error / c.variance


MSE = Mse()
RECONSTRUCTIONS: dict[str, type[Mse]] = {"fvu": Fvu, "mse": Mse}
