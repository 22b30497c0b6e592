"""Make a trained coder of the arrays that a file holds, every shape and number checked; and the folds both ways."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from saejax.coders import TOPOLOGIES, CrossLayerTranscoder
from saejax.coders.topologies import EPS
from saejax.core.errors import DataError
from saejax.interop.hooks import UNKNOWN
from saejax.interop.tensors import stored_types
from saejax.trained import Kind, Origin, TrainedCoder, coder_of, sites_of

NamedArrays = dict[str, np.ndarray]
# A path that reads and writes one hook point as a transcoder: its encoder sees x, not x - b_dec.
UNCENTRED = "autoencoder of x itself"


@dataclasses.dataclass(frozen=True)
class CoderFile:
    """The description of a coder in a file.

    Attributes:
        path: the file, for messages.
        topology, sparsity: names of `TOPOLOGIES`, `SPARSITIES`.
        reads, writes: hook points in saejax's names; empty where the file does not say.
        k: of sparsities that keep k latents.
        model, revision: the language model.
        notes: for people, one sentence each.
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


def assemble(file: CoderFile, arrays: Mapping[str, np.ndarray], hook_points: Sequence[str] = ()) -> TrainedCoder:
    """The coder with these parameters, float32: saejax's names and layouts, for raw activations.

    Args:
        hook_points: what the user says, which counts where the file says nothing.
    """
    if file.topology == "layernorm_autoencoder":  # no file says it: it is a constant of the projects' code
        arrays = {"ln_eps": np.full(1, EPS, np.float32)} | dict(arrays)
    description = _description(file, arrays, hook_points)
    if file.k is not None and not 1 <= file.k <= description["d_sae"]:
        raise DataError(
            f"{file.path} keeps k = {file.k} of {description['d_sae']} latents: its configuration is damaged."
        )
    try:
        coder, sites = coder_of(description), sites_of(description)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{file.path} does not describe a dictionary ({error}).") from None
    shapes = jax.eval_shape(coder.init, jax.random.key(0))
    for name in sorted({*shapes, *arrays}):
        there = arrays[name].shape if name in arrays else "nothing"
        wanted = shapes[name].shape if name in shapes else "nothing"
        if there != wanted:
            raise DataError(
                f"{file.path} has {there} for {name}; a {file.topology} with {file.sparsity} of these sizes has "
                f"{wanted}. The file is damaged, or its configuration belongs to another."
            )
    params = {name: np.ascontiguousarray(arrays[name], np.float32) for name in shapes}
    for name, value in params.items():
        if not np.isfinite(value).all():
            raise DataError(f"{file.path}: {name} holds NaN or infinity. Take another copy of the file.")
    origin = Origin(file.model, file.revision, source=str(file.path), saejax="", notes=file.notes)
    return TrainedCoder(coder, params, sites, origin)


def _description(file: CoderFile, arrays: Mapping[str, np.ndarray], hook_points: Sequence[str]) -> dict[str, Any]:
    """The description that `coder_of` takes, with sizes from the arrays."""
    kind = TOPOLOGIES[file.topology]
    clt = issubclass(kind, CrossLayerTranscoder)
    names = {"W_enc": "W_enc", "W_dec": "W_dec_0" if clt else "W_dec"}
    W_enc, W_dec = (arrays.get(name, np.zeros(0)) for name in names.values())
    if W_enc.ndim < 2 or W_dec.ndim < 2:
        raise DataError(f"{file.path} has no matrix for {' or '.join(names.values())}: the file is damaged.")
    sites = W_enc.shape[0] if W_enc.ndim == 3 else 1
    reads = file.reads or tuple(hook_points)[: sites or 1] or (UNKNOWN,) * sites
    writes = file.writes or tuple(hook_points)[sites:] or (reads if kind.tied else (UNKNOWN,) * sites)
    numbers: dict[str, Any] = {"name": file.sparsity}
    if file.sparsity == "jumprelu":
        numbers |= {"threshold": 0.0, "bandwidth": 1.0, "through_input": False}
    if file.k is not None:
        numbers |= {"k": file.k}
    sizes = {"d_in": int(W_enc.shape[-2]), "d_sae": int(W_enc.shape[-1]), "d_out": int(W_dec.shape[-1])}
    one_place = kind.tied or (reads == writes and UNKNOWN not in reads)
    if one_place and sizes["d_in"] != sizes["d_out"]:
        raise DataError(
            f"{file.path} has {W_enc.shape} for W_enc and {W_dec.shape} for W_dec: other widths at one hook point. "
            "The file is damaged."
        )
    return {"topology": file.topology, "sparsity": numbers, "reads": list(reads), "writes": list(writes)} | sizes


def coder_kind(sae: TrainedCoder) -> Kind:
    """(topology, sparsity) by name; a transcoder that writes what it reads is an UNCENTRED autoencoder."""
    described = sae.describe()
    topology = described["topology"]
    if topology == "transcoder" and sae.sites.reads == sae.sites.writes:
        topology = UNCENTRED
    return topology, described["sparsity"]["name"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A format's names and axes of the parameters.

    Attributes:
        names: {its name: ours}, where they differ.
        transposed: its names of matrices that it holds the other way round.
        required: our names of those that must be there.
    """

    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    transposed: Collection[str] = ()
    required: Collection[str] = ()

    def read(self, path: Path, stored: Mapping[str, Any]) -> NamedArrays:
        """The file's tensors by our names and axes; a name that is not in the table stays."""
        arrays = {}
        for name, value in stored.items():
            if not isinstance(value, np.ndarray):
                raise DataError(f"{path}: {name} is a {type(value).__name__}, not a tensor. The file is damaged.")
            arrays[self.names.get(name, name)] = value.T if name in self.transposed else value
        if missing := set(self.required) - arrays.keys():
            raise DataError(f"{path} has no {', '.join(sorted(missing))}: it is damaged, or of another project.")
        return arrays

    def write(self, params: Mapping[str, Any]) -> NamedArrays:
        """The parameters by the format's names and axes."""
        theirs = {ours: name for name, ours in self.names.items()}
        named = {theirs.get(name, name): np.asarray(value) for name, value in params.items()}
        return {name: value.T if name in self.transposed else value for name, value in named.items()}


def half_precision_notes(*files: Path) -> tuple[str, ...]:
    """The remark on safetensors files with weights of 16 bits."""
    half = any(stored_types(file) & {"BF16", "F16"} for file in files)
    return ("The weights are of 16 bits; saejax multiplies in 32.",) if half else ()


def check_free(folder: Path, mine: bool, what: str) -> None:
    """Raises DataError for a folder with something in it that is not `mine`: a `what`, which may be written over."""
    if folder.exists() and not (mine or (folder.is_dir() and not any(folder.iterdir()))):
        raise DataError(f"{folder} holds something other than a {what}. Choose another folder.")


def weighted(arrays: Mapping[str, np.ndarray], factor_F: np.ndarray) -> NamedArrays:
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
