"""The table format x coder: what is read, what is written, or why not."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from saejax.coders import SPARSITIES, TOPOLOGIES
from saejax.coders.layernorm import EPS
from saejax.interop.making import kind_of
from saejax.trained import FORMATS, Format, Kind, TrainedCoder, coder_of, sites_of

_WIDTH = 4


def format_table() -> Iterator[tuple[Format, dict[Kind, tuple[bool, str]]]]:
    """For each format {(topology, sparsity): (it is read, why it is not written)}; "" is written."""
    for format in FORMATS.values():
        yield format, {kind_of(sae): (kind_of(sae) in format.reads, format.refuses(sae)) for sae in examples()}


@functools.cache
def examples(d_out: int = _WIDTH) -> tuple[TrainedCoder, ...]:
    """One small coder of each topology and sparsity that there is after training, and of x itself.

    Args:
        d_out: width of what is written, where it may differ from what is read.
    """
    after = [name for name in SPARSITIES if name != "batchtopk"]  # which becomes a jumprelu
    made = [_example(topology, sparsity, False, d_out) for topology in TOPOLOGIES for sparsity in after]
    return (*made, *(_example("transcoder", sparsity, True, d_out) for sparsity in after))


def _example(topology: str, sparsity: str, same: bool, d_out: int) -> TrainedCoder:
    stacked = TOPOLOGIES[topology].stacked
    names = ["blocks.0.mlp_in", "blocks.1.mlp_in"][: 1 + stacked]
    tied = TOPOLOGIES[topology].tied or same
    kind = SPARSITIES[sparsity]
    numbers: dict[str, Any] = {"k": 2} if "k" in kind.provides else {}
    if sparsity == "jumprelu":
        numbers = {"threshold": 0.0, "bandwidth": 1.0, "through_input": False}
    described = {
        "topology": topology,
        "sparsity": {"name": sparsity, **numbers},
        **{"d_in": _WIDTH, "d_sae": 6, "d_out": _WIDTH if tied else d_out},
        "reads": names,
        "writes": names if tied else [name.replace("mlp_in", "mlp_out") for name in names],
    }
    coder, rng = coder_of(described), np.random.default_rng(0)
    shapes = jax.eval_shape(coder.init, jax.random.key(0))
    params = {name: rng.normal(size=leaf.shape).astype(np.float32) for name, leaf in shapes.items()}
    if "ln_eps" in params:  # a constant, not a weight
        params["ln_eps"] = np.full((1,), EPS, np.float32)
    return TrainedCoder(coder, params, sites_of(described))
