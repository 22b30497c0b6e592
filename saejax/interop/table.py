"""The table format x coder: read, written, or the reason why not."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from saejax.coders import SPARSITIES, TOPOLOGIES
from saejax.coders.topologies import EPS
from saejax.interop.assemble import coder_kind
from saejax.trained import FORMATS, Format, Kind, TrainedCoder, coder_of, sites_of

_D_IN = 4


def format_table() -> Iterator[tuple[Format, dict[Kind, tuple[bool, str]]]]:
    """For each format {(topology, sparsity): (it is read, why it is not written)}; "" is written."""
    for format in FORMATS.values():
        yield format, {coder_kind(sae): (coder_kind(sae) in format.reads, format.refuses(sae)) for sae in examples()}


@functools.cache
def examples(d_out: int = _D_IN) -> tuple[TrainedCoder, ...]:
    """One small coder of each topology and sparsity that there is after training, and of x itself; `d_out` wide where
    it may write another width than it reads.
    """
    after = [name for name in SPARSITIES if name != "batchtopk"]  # which becomes a jumprelu
    all_pairs = [_example(topology, sparsity, False, d_out) for topology in TOPOLOGIES for sparsity in after]
    return (*all_pairs, *(_example("transcoder", sparsity, True, d_out) for sparsity in after))


def _example(topology: str, sparsity: str, same: bool, d_out: int) -> TrainedCoder:
    stacked = TOPOLOGIES[topology].stacked
    names = ["blocks.0.mlp_in", "blocks.1.mlp_in"][: 1 + stacked]
    tied = TOPOLOGIES[topology].tied or same
    kind = SPARSITIES[sparsity]
    numbers: dict[str, Any] = {"k": 2} if "k" in kind.provides else {}
    if sparsity == "jumprelu":
        numbers = {"threshold": 0.0, "bandwidth": 1.0, "through_input": False}
    description = {
        "topology": topology,
        "sparsity": {"name": sparsity, **numbers},
        **{"d_in": _D_IN, "d_sae": 6, "d_out": _D_IN if tied else d_out},
        "reads": names,
        "writes": names if tied else [name.replace("mlp_in", "mlp_out") for name in names],
    }
    coder, rng = coder_of(description), np.random.default_rng(0)
    shapes = jax.eval_shape(coder.init, jax.random.key(0))
    params = {name: rng.normal(size=leaf.shape).astype(np.float32) for name, leaf in shapes.items()}
    if "ln_eps" in params:  # a constant, not a weight
        params["ln_eps"] = np.full((1,), EPS, np.float32)
    return TrainedCoder(coder, params, sites_of(description))
