"""f = relu(pre) where pre is among the k B largest of its batch of B tokens. (arXiv:2412.06410)"""

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from saejax.coders.latents import Latents, ListedLatents, Params
from saejax.coders.parts import register_sparsity
from saejax.coders.ramp import At, Ramp
from saejax.coders.sparsity.base import Keep, Sparsity
from saejax.coders.sparsity.jumprelu import JumpRelu
from saejax.coders.sparsity.topk import KSettings
from saejax.core.settings import Settings, setting
from saejax.kernels.batch import least_of_batch, n_tokens
from saejax.kernels.selection import largest_listed, largest_mask

UNSET = -1.0


@dataclasses.dataclass(frozen=True)
class BatchTopKSettings(KSettings):
    """k, and how the threshold follows."""

    threshold_decay: float = setting(
        0.99, "Decay of the moving average that is batchtopk's threshold after training.", low=0, below=1
    )
    threshold_warmed: bool = setting(
        True,
        "At first the decay of batchtopk's threshold is (1 + step) / (10 + step), if that is smaller, so that the "
        "start is forgotten.",
    )


@register_sparsity
@dataclasses.dataclass(frozen=True)
class BatchTopK(Sparsity[BatchTopKSettings]):
    """Keeps the k B G largest pre-activations of a batch (B tokens, G groups), exactly; positive ones only.

    A threshold follows the smallest kept value, theta <- d theta + (1 - d) min, starting at the first one; where a
    batch is selected in parts, min is the mean of theirs. After training a token stands alone: f = pre where
    pre > theta, a JumpReLU.

    The smallest value moves over the whole training, so theta must not look back to its start. `warmed`:
    d = min(decay, (1 + step) / (10 + step)). After t steps step s then has a weight near 9 s^8 / t^9, so the average
    is t / 10 steps old, until decay's own age, 1 / (1 - decay), is less.
    """

    k: Ramp
    decay: float
    warmed: bool = True
    name: ClassVar[str] = "batchtopk"
    settings: ClassVar[type[Settings]] = BatchTopKSettings
    provides: ClassVar[frozenset[str]] = frozenset({"dense", "k"})

    @classmethod
    def build(cls, settings: BatchTopKSettings, at: At) -> Self:
        return cls(settings.ramp(at), settings.threshold_decay, settings.threshold_warmed)

    @property
    def kept(self) -> int:
        return round(self.k.largest)

    def __call__(self, pre: jax.Array, keep: Keep, params: Params, step: jax.Array | int) -> Latents:
        positive = jax.nn.relu(pre)
        count = jnp.round(self.k(step) * n_tokens(pre.size // pre.shape[-1])).astype(jnp.int32)
        mask = largest_mask(jax.lax.stop_gradient(positive), count)
        return Latents(jnp.where(mask, positive, 0), None, pre.shape[-1])

    def for_loss(self, needs: frozenset[str]) -> Sparsity:
        """As one list, unless a term wants dense pre-activations, or another number of latents, with their gradient."""
        return self if needs else ListedBatchTopK(self.k, self.decay, self.warmed)

    def statistics(self) -> dict[str, float]:
        return {"threshold": UNSET}

    def seen(self, latents: Latents) -> dict[str, jax.Array]:
        """The smallest kept value, and 1 for having one; 0 and 0 where nothing is kept."""
        smallest = jnp.where(latents.values > 0, latents.values, jnp.inf).min()
        smallest = least_of_batch(jax.lax.stop_gradient(smallest))
        some = jnp.isfinite(smallest)
        return {"smallest": jnp.where(some, smallest, 0), "selections": some.astype(jnp.float32)}

    def follow(
        self, stats: dict[str, jax.Array], seen: dict[str, jax.Array], step: jax.Array | int
    ) -> dict[str, jax.Array]:
        old, n = stats["threshold"], seen["selections"]
        smallest = seen["smallest"] / jnp.maximum(n, 1)
        decay = jnp.minimum(self.decay, (1.0 + step) / (10.0 + step)) if self.warmed else self.decay
        new = jnp.where(old == UNSET, smallest, decay * old + (1 - decay) * smallest)
        return {"threshold": jnp.where(n > 0, new, old)}

    def inference(self, params: Params, stats: dict[str, jax.Array], shape: tuple[int, ...]) -> tuple[Any, Params]:
        threshold = jnp.full(shape, jnp.maximum(stats["threshold"], 0), jnp.float32)
        return JumpRelu(), params | {"threshold": threshold}


@dataclasses.dataclass(frozen=True)
class ListedBatchTopK(BatchTopK):
    """The same latents as a list of the k B G kept entries: what follows costs what is kept, forward and backward."""

    sparse: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, pre: jax.Array, keep: Keep, params: Params, step: jax.Array | int) -> Latents:
        n_rows = n_tokens(pre.size // pre.shape[-1])
        count = jnp.round(self.k(step) * n_rows).astype(jnp.int32)
        most = min(round(self.k.largest * n_rows), n_rows * pre.shape[-1])
        rows, indices = largest_listed(jax.lax.stop_gradient(pre), count, most)
        # A pair that there is not has no row, and no bias either.
        values = jnp.where(rows < pre.size // pre.shape[-1], jax.nn.relu(keep(indices, rows)), 0)
        return ListedLatents(values, indices, pre.shape[-1], rows, pre.shape[:-1])
