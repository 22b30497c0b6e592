"""The loss of the language model with a dictionary's reconstruction in it, and its gradient.

    kl    mean over predicted tokens of sum_v p(v) (log p(v) - log p_sae(v))
    ce    mean over predicted tokens of -log p_sae(next token)

p and p_sae, the tokens that are replaced and those that count are the evaluation's (`evals.splice`): all that the
dictionary writes is replaced at once, by reconstructions of what the model does by itself. The dictionary is the one
for after training, which takes each token alone; what follows the batches (a threshold) is a constant. Gradients flow
to its parameters alone. (Braun et al. 2024, arXiv:2405.12241, end-to-end; Karvonen 2025, arXiv:2503.17272, at the end
of a training)

Shape letters: R rows, S tokens, D width of a site.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from saejax.capture import Sinks
from saejax.coders import Coder, PerLayerTranscoder, Sites
from saejax.core.errors import ConfigError
from saejax.evals.evaluate import clean_run
from saejax.evals.in_turn import edits_in_turn, has_turns
from saejax.evals.splice import instead, spliced
from saejax.kernels.batch import DATA
from saejax.lm.forward import Model
from saejax.parallel import ParallelConfig
from saejax.through.text import ARRAYS, TEXT
from saejax.training import TrainConfig

# The evaluation's name of each.
METRIC = {"kl": "kl", "ce": "ce_sae"}


@dataclasses.dataclass(frozen=True)
class Through:
    """The second loss of a training: `training.beside.Beside`.

    Attributes:
        coder, sites: as the training has them.
        kind: kl or ce.
        parts: into which the rows are dealt, to take one after the other.
        errors: the error of the reconstruction stays, as a constant.
        in_turn: each place is rebuilt from what the replaced ones before it leave (`evals.in_turn`).
        sinks: those of the capture; they are not replaced.
    """

    lm: Model
    coder: Coder
    sites: Sites
    kind: str
    weight: float
    begins: int
    parts: int
    errors: bool
    in_turn: bool
    sinks: Sinks
    arrays: Mapping[str, tuple[tuple[int, ...], Any]]
    inputs: Any

    @classmethod
    def of(
        cls,
        t: TrainConfig,
        sinks: Sinks,
        lm: Model,
        lm_params: Any,
        context_length: int,
        coder: Coder,
        sites: Sites,
        mesh: Mesh,
    ) -> "Through":
        """The loss that section `train` asks for.

        Args:
            lm_params: of the model, as they lie on the mesh, or their shapes.

        Raises:
            ConfigError: no loss of this model sees what the coder writes; rows that cannot be dealt to the devices.
        """
        devices = mesh.shape[DATA]
        if not lm.pure:
            raise ConfigError(
                f"train.through={t.through} needs a model that JAX runs, and PyTorch runs this one: no gradient comes "
                "through it. Set train.through='', or use a model of a family that saejax's decoder knows."
            )
        if not lm.measures_loss(sites.writes):
            raise ConfigError(
                f"train.through={t.through}: nothing that this model predicts depends on {' and '.join(sites.writes)}, "
                "so no loss sees the reconstruction. Choose a hook point before the last block's end, of a model that "
                "predicts the next token."
            )
        if t.through_in_turn and not has_turns(coder, sites, lm):
            raise ConfigError(
                "train.through_in_turn is for dictionaries with groups of latents that read one place each, as a "
                "cross-layer transcoder's. Set it to False."
            )
        residual = [name for name in sites.writes if name.rpartition(".")[2].startswith("resid_")]
        if isinstance(coder.topology, PerLayerTranscoder) and len(residual) > 1 and not t.through_in_turn:
            raise ConfigError(
                f"train.through={t.through}: each dictionary is rebuilt from what the model computes by itself, so "
                f"that at {residual[-1]} hides those before it, and no loss would see them. Set "
                "train.through_in_turn=True."
            )
        if t.through_rows % (devices * t.through_parts):
            raise ConfigError(
                f"train.through_rows {t.through_rows} cannot be dealt to {devices} devices in {t.through_parts} parts: "
                f"set a multiple of {devices * t.through_parts}."
            )
        shape = t.through_rows, context_length
        return cls(
            lm,
            coder,
            sites,
            t.through,
            t.through_weight,
            first_step(t),
            t.through_parts,
            t.through_errors,
            t.through_in_turn,
            sinks,
            {TEXT + name: (shape, dtype) for name, dtype in ARRAYS.items()},
            lm_params,
        )

    @property
    def name(self) -> str:
        return f"through_{self.kind}"

    def gradient(self, params: Any, stats: Any, arrays: Mapping[str, jax.Array], inputs: Any) -> tuple[jax.Array, Any]:
        """(the mean over the predicted tokens, its gradient by the coder's parameters). Pure."""
        packed = {name: arrays[TEXT + name] for name in ARRAYS}
        # Rows r, r + parts, ...: each part has rows of every device.
        parts = {name: jnp.moveaxis(a.reshape(-1, self.parts, *a.shape[1:]), 1, 0) for name, a in packed.items()}
        of_part = jax.value_and_grad(self.total, has_aux=True)

        def add(sums: Any, part: dict[str, jax.Array]) -> tuple[Any, None]:
            (total, count), grads = of_part(params, stats, inputs, part)
            return jax.tree.map(jnp.add, sums, (total, count, grads)), None

        zeros = jnp.float32(0), jnp.int32(0), jax.tree.map(jnp.zeros_like, params)
        if self.parts == 1:
            (total, count, grads), _ = add(zeros, packed)
        else:
            (total, count, grads), _ = jax.lax.scan(add, zeros, parts)
        each = 1 / jnp.maximum(count, 1)
        return total * each, jax.tree.map(lambda g: g * each, grads)

    def total(self, params: Any, stats: Any, lm_params: Any, packed: Any) -> tuple[jax.Array, jax.Array]:
        """(sum of the loss over the predicted tokens of packed rows [R, S], how many these are). Pure."""
        sums, clean = clean_run(self.lm, self.sites, self.sinks)(lm_params, packed)
        if "centre" in params:  # a constant of the training
            params = params | {"centre": jax.lax.stop_gradient(params["centre"])}
        coder, params = self.coder.inference(params, stats)
        if self.in_turn:
            edits = edits_in_turn(coder, params, self.sites)
        else:
            edits = instead(reconstructions(coder, params, self.sites, clean["captured"], self.errors))
        losses = spliced(self.lm, lm_params, self.sites, edits, clean, packed)
        return losses[METRIC[self.kind]].sum(), sums["predicted"]


def reconstructions(
    coder: Coder, params: Any, sites: Sites, captured: Mapping[str, jax.Array], errors: bool = False
) -> dict[str, jax.Array]:
    """{hook point written: what is put there, [R, S, D]}, in the model's own scale. Pure.

    Args:
        coder: for after training.
        errors: the error of each is added as a constant.
    """
    x = sites.batch({name: value.reshape(-1, value.shape[-1]) for name, value in captured.items()})["x"]
    y_hat = coder.reconstruct(params, x)
    sides = [y_hat[:, i] for i in range(len(sites.writes))] if sites.stacked else [y_hat]
    values = {}
    for name, side, scale in zip(sites.writes, sides, sites.write_scales, strict=True):
        there = captured[name].astype(jnp.float32)
        value = (side / scale).reshape(there.shape)
        values[name] = value + jax.lax.stop_gradient(there - value) if errors else value
    return values


def first_step(t: TrainConfig) -> int:
    """The first step with the second loss."""
    return round(t.through_from * t.steps)


def refuse(t: TrainConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError for a training that no second loss can join; nothing is looked at but settings."""
    if parallel.mode != "jit":
        raise ConfigError(f"train.through={t.through} needs parallel.mode=jit, which spreads the language model too.")
    if parallel.processes or jax.process_count() > 1:
        raise ConfigError(
            f"train.through={t.through} is the work of one process, with all its devices: leave parallel.processes "
            "empty."
        )
