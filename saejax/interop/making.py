"""From arrays that a file holds to a trained coder, with every shape and number checked; and the folds both ways."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from saejax.coders import TOPOLOGIES, CrossLayerTranscoder
from saejax.coders.layernorm import EPS
from saejax.core.errors import DataError
from saejax.interop.hooks import UNKNOWN
from saejax.trained import Kind, Origin, TrainedCoder, coder_of, sites_of

Arrays = dict[str, np.ndarray]
# A path that reads and writes one hook point as a transcoder: its encoder sees x, not x - b_dec.
UNCENTRED = "autoencoder of x itself"


@dataclasses.dataclass(frozen=True)
class Found:
    """What a file says of a coder.

    Attributes:
        path: the file, for messages.
        topology, sparsity: names of `TOPOLOGIES`, `SPARSITIES`.
        reads, writes: hook points in saejax's names; empty where the file does not say.
        k: of sparsities that keep k latents.
        model, revision: the language model.
        notes: what people must know of this reading, one sentence each.
    """

    path: Path
    topology: str
    sparsity: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    k: int | None = None
    model: str = ""
    revision: str = ""
    notes: tuple[str, ...] = ()


def made(found: Found, arrays: Mapping[str, np.ndarray], hook_points: Sequence[str] = ()) -> TrainedCoder:
    """The coder with these parameters, float32: saejax's names and layouts, for raw activations.

    Args:
        hook_points: what the user says, which counts where the file says nothing.

    Raises:
        DataError: a parameter that is missing or left over, of another shape, NaN or infinite; names it.
    """
    if found.topology == "layernorm_autoencoder":  # no file says it: it is a constant of the projects' code
        arrays = {"ln_eps": np.full(1, EPS, np.float32)} | dict(arrays)
    described = _described(found, arrays, hook_points)
    if found.k is not None and not 1 <= found.k <= described["d_sae"]:
        raise DataError(
            f"{found.path} keeps k = {found.k} of {described['d_sae']} latents: its configuration is damaged."
        )
    try:
        coder, sites = coder_of(described), sites_of(described)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{found.path} does not describe a dictionary ({error}).") from None
    shapes = jax.eval_shape(coder.init, jax.random.key(0))
    for name in sorted({*shapes, *arrays}):
        there = arrays[name].shape if name in arrays else "nothing"
        wanted = shapes[name].shape if name in shapes else "nothing"
        if there != wanted:
            raise DataError(
                f"{found.path} has {there} for {name}; a {found.topology} with {found.sparsity} of these sizes has "
                f"{wanted}. The file is damaged, or its configuration belongs to another."
            )
    params = {name: np.ascontiguousarray(arrays[name], np.float32) for name in shapes}
    for name, value in params.items():
        if not np.isfinite(value).all():
            raise DataError(f"{found.path}: {name} holds NaN or infinity. Take another copy of the file.")
    origin = Origin(found.model, found.revision, source=str(found.path), saejax="", notes=found.notes)
    return TrainedCoder(coder, params, sites, origin)


def _described(found: Found, arrays: Mapping[str, np.ndarray], hook_points: Sequence[str]) -> dict[str, Any]:
    """The description that `coder_of` takes, with sizes from the arrays."""
    kind = TOPOLOGIES[found.topology]
    clt = issubclass(kind, CrossLayerTranscoder)
    names = {"W_enc": "W_enc", "W_dec": "W_dec_0" if clt else "W_dec"}
    W_enc, W_dec = (arrays.get(name, np.zeros(0)) for name in names.values())
    if W_enc.ndim < 2 or W_dec.ndim < 2:
        raise DataError(f"{found.path} has no matrix for {' or '.join(names.values())}: the file is damaged.")
    sites = W_enc.shape[0] if W_enc.ndim == 3 else 1
    given = tuple(hook_points)
    reads = found.reads or given[: sites or 1] or (UNKNOWN,) * sites
    writes = found.writes or given[sites:] or (reads if kind.tied else (UNKNOWN,) * sites)
    numbers: dict[str, Any] = {"name": found.sparsity}
    if found.sparsity == "jumprelu":
        numbers |= {"threshold": 0.0, "bandwidth": 1.0, "through_input": False}
    if found.k is not None:
        numbers |= {"k": found.k}
    sizes = {"d_in": int(W_enc.shape[-2]), "d_sae": int(W_enc.shape[-1]), "d_out": int(W_dec.shape[-1])}
    one = kind.tied or (reads == writes and UNKNOWN not in reads)
    if one and sizes["d_in"] != sizes["d_out"]:
        raise DataError(
            f"{found.path} has {W_enc.shape} for W_enc and {W_dec.shape} for W_dec: other widths at one hook point. "
            "The file is damaged."
        )
    return {
        "topology": found.topology,
        "sparsity": numbers,
        **sizes,
        "reads": list(reads),
        "writes": list(writes),
    }


def kind_of(sae: TrainedCoder) -> Kind:
    """(topology, sparsity) by name; a transcoder that writes what it reads is an UNCENTRED autoencoder."""
    described = sae.describe()
    topology = described["topology"]
    if topology == "transcoder" and sae.sites.reads == sae.sites.writes:
        topology = UNCENTRED
    return topology, described["sparsity"]["name"]


def check_free(folder: Path, mine: bool, what: str) -> None:
    """Raises DataError for a folder with something in it that is not `mine`: a `what`, which may be written over."""
    if folder.exists() and not (mine or (folder.is_dir() and not any(folder.iterdir()))):
        raise DataError(f"{folder} holds something other than a {what}. Choose another folder.")


def weighted(arrays: Mapping[str, np.ndarray], factor_F: np.ndarray) -> Arrays:
    """Latents times `factor`, the same reconstructions: for files whose latents are not what multiplies W_dec.

    A latent whose factor is 0 (its decoder row is) becomes one that is never on.
    """
    factor_F = factor_F.astype(np.float64)
    out = dict(arrays)
    for name in ("W_enc", "b_enc", "b_mag", "threshold"):
        if name in arrays:
            out[name] = (arrays[name] * factor_F).astype(np.float32)
    rows = np.where(factor_F > 0, factor_F, 1).reshape(-1, *[1] * (arrays["W_dec"].ndim - 1))
    return out | {"W_dec": (arrays["W_dec"] / rows).astype(np.float32)}
