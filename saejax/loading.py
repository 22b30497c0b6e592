"""A trained coder back from its run, for notebooks and analysis: one CPU is enough, whatever it was trained on."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.checkpoints import Checkpoints
from saejax.coders import Coder, CoderConfig, Latents, build, fold_input_scale
from saejax.core.errors import DataError
from saejax.core.files import read_json
from saejax.experiment import Experiment, from_json
from saejax.store import Statistics


@dataclasses.dataclass(frozen=True)
class LoadedCoder:
    """A sparse dictionary for raw activations: the training's input scale is folded into the weights.

    Attributes:
        params: {W_enc [D, F], b_enc [F], W_dec [F, D], b_dec [D], ...}, float32 numpy arrays.
        config: the whole experiment it comes from.
        coder: the pure functions behind it.
        hook_point: what it reads.
        step: of the checkpoint.
    """

    params: dict[str, np.ndarray]
    config: Experiment
    coder: Coder
    hook_point: str
    step: int

    def encode(self, x: Any) -> jax.Array:
        """Activations [..., D] -> latents [..., F], dense."""
        x = jnp.asarray(x, jnp.float32)
        self._check(x, self.coder.topology.d_in, "d_in")
        latents = self.coder.encode(self.params, x.reshape(-1, x.shape[-1])).dense()
        return latents.reshape(*x.shape[:-1], -1)

    def decode(self, latents: Any) -> jax.Array:
        """Latents [..., F] -> reconstructed activations [..., D]."""
        f = jnp.asarray(latents, jnp.float32)
        self._check(f, self.coder.topology.d_sae, "d_sae")
        flat = Latents(f.reshape(-1, f.shape[-1]), None, self.coder.topology.d_sae)
        return self.coder.decode(self.params, flat).reshape(*f.shape[:-1], -1)

    def _check(self, array: jax.Array, width: int, name: str) -> None:
        if array.ndim < 1 or array.shape[-1] != width:
            raise DataError(f"The last dimension must be {name} = {width}; the array is {array.shape}.")


def load(run: str | os.PathLike[str], step: int | None = None) -> LoadedCoder:
    """The coder of a run folder, at its newest checkpoint or at `step`.

    Raises:
        DataError: no run there, no such checkpoint, or a damaged one (the file is named).
    """
    run = Path(run)
    if not (run / "config.json").is_file():
        raise DataError(f"No run at {run}: config.json is missing. Give a folder such as runs/quickstart.")
    config = from_json(read_json(run / "config.json"))
    with Checkpoints(run / "checkpoints") as checkpoints:
        at = checkpoints.latest() if step is None else step
        if at is None or at not in checkpoints.steps():
            there = ", ".join(map(str, checkpoints.steps())) or "none"
            raise DataError(f"{run} has no checkpoint of step {at}; it has: {there}.")
        items, meta = checkpoints.restore_numpy(at, names=("params",))
    params = items["params"]
    # Training may multiply in bfloat16; analysis does not.
    exact = dataclasses.replace(config.coder, matmul_dtype="float32")
    coder = build(exact, params["W_enc"].shape[0], config.train.steps)
    folded = fold_input_scale(params, float(meta["scale"]))
    return LoadedCoder(folded, config, coder, meta["hook_point"], at)


def raw_scale(config: CoderConfig, statistics: Statistics) -> float:
    """What raw activations are multiplied by in training: sqrt(D) / E||x||, or 1."""
    if config.normalize == "none":
        return 1.0
    return float(np.sqrt(len(statistics.mean)) / statistics.mean_norm)
