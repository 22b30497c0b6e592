"""The scales of a coder's sites: chosen from the data, written into checkpoints, and gone once they are folded in."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from saejax.coders import CoderConfig, Sites, Topology
from saejax.core.errors import DataError
from saejax.store import Statistics


def make_sites(
    config: CoderConfig,
    topology: Topology,
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    statistics: Mapping[str, Statistics],
) -> Sites:
    """The sites of a coder, each with the scale that `normalize` asks for."""
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


def raw_scale(config: CoderConfig, statistics: Statistics) -> float:
    """The factor on raw activations in training: sqrt(D) / E||x||, 1 / sqrt(E||x||^2), or 1."""
    norms = {
        "mean_norm": statistics.mean_norm / np.sqrt(len(statistics.mean)),
        "mean_square": np.sqrt(statistics.mean_squared_norm),
        "none": 1.0,
    }
    return float(1 / norms[config.resolved().normalize])


def unscaled(sites: Sites) -> Sites:
    """The same hook points, for coders whose weights take raw activations."""
    ones = (1.0,) * len(sites.reads)
    return dataclasses.replace(sites, read_scales=ones, write_scales=(1.0,) * len(sites.writes), latent_scale=1.0)


def sites_to_meta(sites: Sites, topology: Topology) -> dict[str, Any]:
    """The sites as JSON, for a checkpoint."""
    n = len(sites.reads)
    return dataclasses.asdict(sites) | {"d_reads": [topology.d_in] * n, "d_writes": [topology.out_shape[-1]] * n}


def sites_from_meta(meta: Mapping[str, Any]) -> Sites:
    """Inverse of `sites_to_meta`."""
    reads, writes, read_scales, write_scales = (
        tuple(meta[name]) for name in ("reads", "writes", "read_scales", "write_scales")
    )
    return Sites(reads, writes, read_scales, write_scales, bool(meta["stacked"]), float(meta["latent_scale"]))


def check_widths(what: str, widths: Mapping[str, int], other: str, there: Mapping[str, int]) -> None:
    """Raises DataError where `what` has another width than `other` at one of its hook points."""
    for name, width in widths.items():
        if width != there[name]:
            raise DataError(
                f"{what} is {width} wide at {name}, {other} {there[name]}: they do not belong together. Choose those "
                "that do."
            )


def centred(params: Mapping[str, Any], sign: int) -> dict[str, Any]:
    """b_enc + sign * b_dec W_enc, so that an encoder of x - b_dec (sign 1) or of x (sign -1) does the same.

    The gate's two biases move alike: b_mag by exp(r_mag) times as much. Computed in float64.
    """
    shift_F = sign * (params["b_dec"].astype(np.float64) @ params["W_enc"].astype(np.float64))
    moved = dict(params) | {"b_enc": (params["b_enc"] + shift_F).astype(np.float32)}
    if "b_mag" in params:
        scale_F = np.exp(params["r_mag"].astype(np.float64))
        moved["b_mag"] = (params["b_mag"] + scale_F * shift_F).astype(np.float32)
    return moved
