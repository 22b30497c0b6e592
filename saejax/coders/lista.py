"""An unrolled encoder: what a linear one leaves over is encoded as well.

    u_0 = x,   u_{t+1} = u_t + rate min(1, ||x - x_0|| / ||e_t||) e_t,   e_t = x - x_hat_t,   f = latents of u_T

x_hat_t is what the latents of u_t reconstruct, x_0 what no latents do (b_dec). The encoder is linear in what it
reads, so this is T steps of iterative thresholding: pre_{t+1} = pre_t + rate e_t W_enc. In training no gradient flows
through u: the dictionary learns as if u were given. (LISTA: Gregor and LeCun, ICML 2010, with W_enc and W_dec in
place of their own matrices. That one step helps sparse autoencoders: github.com/chanind/claude-auto-research-
synthsaebench, whose rate this is; there the gradient flows through it.)

An error larger than that of no latents counts as if it were as large. Without this bound a training can run away: where
x_hat_0 grows s times as fast as x in some direction, each step multiplies the distance of u_1 from x there by rate s.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp

from saejax.coders.latents import Params

MOST_STEPS = 8


@dataclasses.dataclass(frozen=True)
class Lista:
    """The steps of an unrolled encoder.

    Attributes:
        steps: T; 0 is the linear encoder.
        rate: of the error that is added before the next step.
        own: every step selects by numbers of its own, as a BatchTopK does after its training: parameters called
            `threshold_0` to `threshold_<T - 1>`. Those of the last latents have no number.
    """

    steps: int = 0
    rate: float = 0.3
    own: bool = False

    def share(self, error: jax.Array, at_rest: jax.Array) -> jax.Array:
        """rate min(1, ||x - x_0|| / ||e||) of each token, [B, 1, ...], from e = x - x_hat_t and x - x_0."""
        size, largest = _lengths(error), _lengths(at_rest)
        return self.rate * jnp.minimum(1.0, largest / size)

    def names(self, of: Iterable[str]) -> Iterator[tuple[int, str, str]]:
        """(step, name, its name at that step), for all names and all steps but the last latents'."""
        return ((t, name, f"{name}_{t}") for t in range(self.steps) for name in of)

    def at(self, t: int, params: Params, of: Iterable[str]) -> Params:
        """The parameters with which step t selects."""
        return params | {name: params[f"{name}_{t}"] for name in of} if self.own else params


def _lengths(error: jax.Array) -> jax.Array:
    squares = jnp.square(error).sum(tuple(range(1, error.ndim)), keepdims=True)
    return jnp.sqrt(jnp.maximum(squares, 1e-30))  # the root has a gradient at 0 then


LINEAR = Lista()
