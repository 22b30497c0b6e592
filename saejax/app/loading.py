"""A trained coder back from its run, for notebooks and analysis: one CPU is enough, whatever it was trained on."""

import dataclasses
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.app.experiment import Experiment, from_json
from saejax.checkpoints import Checkpoints
from saejax.coders import Coder, CoderConfig, Latents, Sites, Topology, build
from saejax.core.errors import DataError
from saejax.core.files import read_json
from saejax.store import Statistics


@dataclasses.dataclass(frozen=True)
class LoadedCoder:
    """A sparse dictionary for raw activations: the training's input scales are folded into the weights.

    Attributes:
        params: {W_enc [D, F], b_enc [F], W_dec [F, D], b_dec [D], ...}, float32 numpy arrays. Averaged weights where
            the training averaged them; a batchtopk coder has become a jumprelu with `threshold`.
        config: the whole experiment it comes from.
        coder: the pure functions behind it, taking every token alone.
        sites: the hook points that it reads and writes.
        step: of the checkpoint.
        finished: training had come to its end there.
    """

    params: dict[str, np.ndarray]
    config: Experiment
    coder: Coder
    sites: Sites
    step: int
    finished: bool

    @property
    def hook_point(self) -> str:
        """The (first) hook point read."""
        return self.sites.reads[0]

    @property
    def n_latents(self) -> int:
        """All latents, of all layers."""
        return math.prod(self.coder.topology.latent_shape)

    def encode(self, x: Any) -> jax.Array:
        """Activations [..., D] -> latents [..., F], dense; [..., S, D] for coders of several sites.

        A cross-layer transcoder gives [..., L, F].
        """
        flat, outer = self._rows(x, self.coder.topology.in_shape, "activations")
        latents = self.coder.encode(self.params, flat).dense()
        return latents.reshape(*outer, *self.coder.topology.latent_shape)

    def decode(self, latents: Any, x: Any = None) -> jax.Array:
        """Latents -> what is written, [..., D] or [..., S, D]; a skip connection needs the activations x too."""
        f, outer = self._rows(latents, self.coder.topology.latent_shape, "latents")
        flat = None if x is None else self._rows(x, self.coder.topology.in_shape, "activations")[0]
        y_hat = self.coder.decode(self.params, Latents(f, None, self.coder.topology.d_sae), flat)
        return y_hat.reshape(*outer, *self.coder.topology.out_shape)

    def _rows(self, array: Any, shape: tuple[int, ...], what: str) -> tuple[jax.Array, tuple[int, ...]]:
        """([N, *shape], the axes before them)"""
        array = jnp.asarray(array, jnp.float32)
        if array.shape[-len(shape) :] != shape:
            raise DataError(f"The last axes of {what} must be {shape}; the array is {array.shape}.")
        return array.reshape(-1, *shape), array.shape[: -len(shape)]


def load(run: str | os.PathLike[str], step: int | str | None = None) -> LoadedCoder:
    """The coder of a run folder, at its newest checkpoint, at `step`, or with "best" at what train.keep_best kept.

    Raises:
        DataError: no run there, no such checkpoint, or a damaged one (the file is named).
    """
    run = Path(run)
    if not (run / "config.json").is_file():
        raise DataError(f"No run at {run}: config.json is missing. Give a folder such as runs/quickstart.")
    config = from_json(read_json(run / "config.json"))
    with Checkpoints(run / "checkpoints") as checkpoints:
        at = _best(run, checkpoints) if step == "best" else checkpoints.latest() if step is None else step
        if at is None or at not in checkpoints.steps():
            there = ", ".join(map(str, checkpoints.steps())) or "none"
            raise DataError(f"{run} has no checkpoint of step {at}; it has: {there}.")
        items, meta = checkpoints.restore_numpy(at, names=("params", "averaged", "stats"))
    topology_sites = sites_from_meta(meta)
    widths_in, widths_out = (list(meta[name]) for name in ("d_reads", "d_writes"))
    # Training may multiply in bfloat16; analysis does not.
    exact = dataclasses.replace(config.coder, matmul_dtype="float32")
    trained = build(exact, widths_in, config.train.steps, widths_out)
    coder, params = trained.inference(items["averaged"] or items["params"], items["stats"])
    folded = coder.topology.fold(params, topology_sites.read_scales, topology_sites.write_scales)
    finished = at >= config.train.steps or bool(meta.get("stopped_early"))
    as_numpy = {name: np.asarray(value) for name, value in folded.items()}
    return LoadedCoder(as_numpy, config, coder, unscaled(topology_sites), at, finished)


def _best(run: Path, checkpoints: Checkpoints) -> int:
    """The step of the best checkpoint. Each says which is the best up to it; asked is the newest whose meta is intact.

    Those passed over cost a warning.

    Raises:
        DataError: none was kept for being best, or the meta of all is damaged.
    """
    steps = checkpoints.steps()
    best: dict[str, Any] = {}
    for step in reversed(steps):
        try:
            best = checkpoints.restore_numpy(step, names=())[1].get("best", {})
            break
        except DataError as error:
            warnings.warn(f"{error} What it says of the best one is not used.", stacklevel=3)
    else:
        if steps:
            raise DataError(f"None of the checkpoints of {run} can say which is the best: {steps}; see the warnings.")
    if best.get("step") is None:
        there = ", ".join(map(str, steps)) or "none"
        raise DataError(f"{run} keeps no best checkpoint: train with train.keep_best=val/fve. It has steps: {there}.")
    return int(best["step"])


def make_sites(
    config: CoderConfig,
    topology: Topology,
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    statistics: Mapping[str, Statistics],
) -> Sites:
    """The sites of a coder, each with the scale that `normalize` asks for.

    Raises:
        DataError: a hook point where every token has the same activation, or zeros: it has no scale and no variance.
    """
    for name in dict.fromkeys((*reads, *writes)):
        s = statistics[name]
        # The difference of two float64 means: below this it is rounding.
        if not s.total_variance > 1e-9 * s.mean_squared_norm:
            what = "0" if s.mean_squared_norm == 0 else "the same"
            raise DataError(
                f"The activations of {name} are {what} for all {s.count:,} tokens of the training store: there is "
                "nothing to learn. Choose another hook point, or look at how the store was made."
            )
    scales = [tuple(raw_scale(config, statistics[name]) for name in names) for names in (reads, writes)]
    return Sites(reads, writes, scales[0], scales[1], topology.stacked)


def unscaled(sites: Sites) -> Sites:
    """The same hook points, for coders whose weights take raw activations."""
    ones = (1.0,) * len(sites.reads)
    return dataclasses.replace(sites, read_scales=ones, write_scales=(1.0,) * len(sites.writes))


def raw_scale(config: CoderConfig, statistics: Statistics) -> float:
    """What raw activations are multiplied by in training: sqrt(D) / E||x||, 1 / sqrt(E||x||^2), or 1."""
    norms = {
        "mean_norm": statistics.mean_norm / np.sqrt(len(statistics.mean)),
        "mean_square": np.sqrt(statistics.mean_squared_norm),
        "none": 1.0,
    }
    return float(1 / norms[config.resolved().normalize])


def sites_to_meta(sites: Sites, topology: Topology) -> dict[str, Any]:
    """What a checkpoint must say of its sites, as JSON."""
    n = len(sites.reads)
    return dataclasses.asdict(sites) | {"d_reads": [topology.d_in] * n, "d_writes": [topology.out_shape[-1]] * n}


def sites_from_meta(meta: Mapping[str, Any]) -> Sites:
    """Inverse of `sites_to_meta`."""
    reads, writes, read_scales, write_scales = (
        tuple(meta[name]) for name in ("reads", "writes", "read_scales", "write_scales")
    )
    return Sites(reads, writes, read_scales, write_scales, bool(meta["stacked"]))
