"""An unrolled encoder: what a linear one leaves over is encoded as well.

    u_0 = x,   u_{t+1} = u_t + rate (x - x_hat_t),   x_hat_t what the latents of u_t reconstruct,   f = latents of u_T

The encoder is linear in what it reads, so this is T steps of iterative thresholding: pre_{t+1} = pre_t + rate (x -
x_hat_t) W_enc. In training no gradient flows through u: the dictionary learns as if u were given. (LISTA: Gregor and
LeCun, ICML 2010, with W_enc and W_dec in place of their own matrices. That one step helps sparse autoencoders:
github.com/chanind/claude-auto-research-synthsaebench, whose rate this is; there the gradient flows through it.)
"""

import dataclasses
from collections.abc import Iterable, Iterator

from saejax.coders.latents import Params

MOST_STEPS = 8
# If the reconstruction of x grows s times as fast as x in some direction, each training step multiplies the distance of
# u_1 from x there by rate s: it runs away where s > 1 / rate. No k bounds s for a jumprelu: on a layer of SmolLM2 one
# of two trainings at a rate of 0.3 ended without latents, and did not at 0.1.
JUMPRELU_RATE = 0.1


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

    def names(self, of: Iterable[str]) -> Iterator[tuple[int, str, str]]:
        """(step, name, its name at that step), for all names and all steps but the last latents'."""
        return ((t, name, f"{name}_{t}") for t in range(self.steps) for name in of)

    def at(self, t: int, params: Params, of: Iterable[str]) -> Params:
        """The parameters with which step t selects."""
        return params | {name: params[f"{name}_{t}"] for name in of} if self.own else params


LINEAR = Lista()
