"""A language model adapted to a dictionary: low-rank changes of the blocks behind it; the dictionary as it is, or too.

    minimise over A, B    L = mean over predicted tokens of sum_v p(v) (log p(v) - log p_sae(v))        kl, or ce

p is the model as it was, p_sae the model with the changes and with the reconstruction in place of what the dictionary
writes. Only blocks that read the reconstruction are changed, so what the dictionary reads is what it was trained on.
(Chen, Engels, Tegmark 2025, arXiv:2501.19406)

A dictionary that learns too has, in the same steps, the gradient of R + (R / L) L with R / L held as a number, as in
`train.through` with a weight of 1: R is the unexplained share of the variance of the tokens that are replaced. Its
encoder, decoder and biases learn, what selects (thresholds, gates) stays.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors
import safetensors.numpy

from saejax.capture import Sinks
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import write_bytes
from saejax.evals.evaluate import clean_run
from saejax.evals.splice import instead, spliced
from saejax.lm import LanguageModel
from saejax.lm.adapter import PROJECTIONS, Adaptable, Adapter
from saejax.through.loss import METRIC, reconstructions
from saejax.trained import TrainedCoder

_WARMUP = 0.05  # of the steps
State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """Settings of the changes and of their training.

    Attributes:
        kind: kl or ce.
        rank, alpha: s = alpha / rank.
        projections: names of `adapter.PROJECTIONS`.
        steps, rows, lr: of Adam; the rate rises over a twentieth of the steps, and falls to 0.
        dictionary_lr: the dictionary's; 0: it stays as it is.
    """

    kind: str = "kl"
    rank: int = 16
    alpha: float = 32.0
    projections: tuple[str, ...] = tuple(PROJECTIONS)
    steps: int = 200
    rows: int = 8
    lr: float = 1e-3
    dictionary_lr: float = 0.0
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The steps of one training, each a function of the state and its rows."""

    lm: LanguageModel
    sae: TrainedCoder
    how: Adaptation
    sinks: Sinks

    def __post_init__(self) -> None:
        writes = self.sae.sites.writes
        if len(writes) > 1:
            raise ConfigError(
                f"{self.sae!r} writes {len(writes)} hook points, and what it reads at the later ones would change with "
                "the model. Adapt to a dictionary that writes one; saejax.layers takes those apart that stand side by "
                "side."
            )
        if not self.lm.measures_loss(writes):
            raise ConfigError(f"Nothing that the model predicts depends on {writes[0]}: there is nothing to adapt to.")

    @property
    def adaptable(self) -> Adaptable:
        """The matrices of the blocks that read what the dictionary writes."""
        block, _, name = self.sae.sites.writes[0].rpartition(".")
        number = int(block.removeprefix("blocks."))
        first = number if name == "resid_pre" else number + 1
        return Adaptable.of(self.lm.config, self.lm.family, self.how.projections, first, self.how.rank)

    def start(self) -> State:
        learned: State = {"matrices": self.adaptable.fresh(self.how.seed), "dictionary": {}}
        if self.how.dictionary_lr:
            fixed = self.sae.coder.selecting()
            learned["dictionary"] = {n: jnp.asarray(v) for n, v in self.sae.params.items() if n not in fixed}
        return {"step": jnp.int32(0), **learned, "moments": self._optimizer.init(learned)}

    def step(self) -> Callable[[State, Mapping[str, jax.Array]], tuple[State, jax.Array]]:
        """jit of (state, packed rows) -> (state, loss)."""
        adaptable, clean = self.adaptable, clean_run(self.lm, self.sae.sites, self.sinks)
        lm, sites, coder, optimizer = self.lm, self.sae.sites, self.sae.coder, self._optimizer
        (write,), share = sites.writes, self.how.dictionary_lr / self.how.lr

        def loss(learned: Any, lm_params: Any, params: Any, packed: Any) -> tuple[jax.Array, jax.Array]:
            sums, seen = clean(lm_params, packed)
            values = reconstructions(coder, params | learned["dictionary"], sites, seen["captured"])
            adapted = adaptable.applied(lm_params, learned["matrices"], self.how.scale)
            losses = spliced(lm, adapted, sites, instead(values), seen, packed)
            value = losses[METRIC[self.how.kind]].sum() / jnp.maximum(sums["predicted"], 1)
            if not share:
                return value, value
            # Times L / R, which Adam does not see: the changes have the gradient that they have by themselves.
            unexplained = _unexplained(seen["captured"][write], values[write], seen["keep"])
            # Rows of padding have neither.
            size = jax.lax.stop_gradient(value / jnp.maximum(unexplained, 1e-12))
            return value + size * unexplained, value

        def step(state: State, packed: Any, lm_params: Any, params: Any) -> tuple[State, jax.Array]:
            learned = {name: state[name] for name in ("matrices", "dictionary")}
            (_, value), grads = jax.value_and_grad(loss, has_aux=True)(learned, lm_params, params, packed)
            updates, moments = optimizer.update(grads, state["moments"], learned)
            updates["dictionary"] = jax.tree.map(lambda u: share * u, updates["dictionary"])
            return {"step": state["step"] + 1, **optax.apply_updates(learned, updates), "moments": moments}, value

        compiled = jax.jit(step, donate_argnums=0)
        given = self.lm.params, {name: jnp.asarray(value) for name, value in self.sae.params.items()}
        return lambda state, packed: compiled(state, packed, *given)

    def adapter(self, state: State) -> Adapter:
        matrices = {module: (np.asarray(a), np.asarray(b)) for module, (a, b) in state["matrices"].items()}
        return Adapter(self.how.scale, matrices, self.adaptable.transposed)

    def dictionary(self, state: State) -> TrainedCoder:
        """The dictionary with what it has learned."""
        own = {name: np.asarray(value) for name, value in state["dictionary"].items()}
        return dataclasses.replace(self.sae, params=dict(self.sae.params) | own, figures={}) if own else self.sae

    def adapted(self, adapter: Adapter) -> LanguageModel:
        """The model with the changes in it."""
        matrices = {module: tuple(map(jnp.asarray, pair)) for module, pair in adapter.matrices.items()}
        params = jax.jit(self.adaptable.applied, static_argnums=2)(self.lm.params, matrices, adapter.scale)
        identity = self.lm.identity | {"adapter_sha256": adapter.sha256}
        return dataclasses.replace(self.lm, params=params, identity=identity)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        warm = max(1, round(_WARMUP * self.how.steps))
        rate = optax.join_schedules(
            [optax.linear_schedule(0, self.how.lr, warm), optax.linear_schedule(self.how.lr, 0, self.how.steps - warm)],
            [warm],
        )
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))


def _unexplained(y_RSD: jax.Array, y_hat_RSD: jax.Array, keep_RS: jax.Array) -> jax.Array:
    """sum ||y - y_hat||^2 / sum ||y - mean y||^2 over the tokens that are kept."""
    y_RSD, keep = y_RSD.astype(jnp.float32), keep_RS[:, :, None]
    mean_11D = jnp.where(keep, y_RSD, 0).sum((0, 1), keepdims=True) / jnp.maximum(keep_RS.sum(), 1)
    errors, all_of_it = (jnp.where(keep, jnp.square(y_RSD - other), 0).sum() for other in (y_hat_RSD, mean_11D))
    return errors / jnp.maximum(all_of_it, 1e-12)


def save(state: State, path: Path, of: str) -> None:
    """Write a state whole or not at all; `of` says what it is a state of."""
    leaves = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    write_bytes(path, safetensors.numpy.save(leaves, metadata={"of": of}))


def restore(like: State, path: Path, of: str) -> State | None:
    """The state of the file; None where there is none, or one of something else.

    Raises:
        DataError: it is damaged.
    """
    if not path.is_file():
        return None
    leaves, tree = jax.tree.flatten(like)
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            if (file.metadata() or {}).get("of") != of:
                return None
            found = [file.get_tensor(str(i)) for i in range(len(leaves))]
        if [(a.shape, a.dtype) for a in found] != [(np.shape(b), b.dtype) for b in leaves]:
            raise ValueError("its arrays are of other shapes")
        state: State = jax.tree.unflatten(tree, list(map(jnp.asarray, found)))
        return state
    except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise DataError(f"{path} is damaged ({error}); delete it, and the same command begins anew.") from None
