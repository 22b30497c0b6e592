"""Make a trained coder of the arrays that a file holds, every shape and number checked; and the folds both ways."""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from saejax.coders import TOPOLOGIES, CrossLayerTranscoder
from saejax.coders.topologies import EPS
from saejax.core.errors import DataError
from saejax.core.files import replacing
from saejax.core.torch_file import write_torch
from saejax.interop.hooks import UNKNOWN
from saejax.interop.tensors import write_safetensors
from saejax.trained import Kind, Origin, TrainedCoder, coder_of, sites_of

NamedArrays = dict[str, np.ndarray]
# A path that reads and writes one hook point as a transcoder: its encoder sees x, not x - b_dec.
UNCENTRED = "autoencoder of x itself"


def assemble(
    path: Path,
    topology: str,
    sparsity: str,
    arrays: Mapping[str, np.ndarray],
    hook_points: Sequence[str] = (),
    *,
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    k: int | None = None,
    model: str = "",
    notes: tuple[str, ...] = (),
    centring: bool | None = None,
) -> TrainedCoder:
    """The coder with these parameters, float32: saejax's names and layouts, for raw activations.

    Args:
        path: the file, for messages.
        topology, sparsity: names of `TOPOLOGIES`, `SPARSITIES`.
        hook_points: what the user says, which counts where the file says nothing.
        reads, writes: hook points in saejax's names; empty where the file does not say.
        k: of sparsities that keep k latents.
        model: the language model.
        notes: for people, one sentence each.
        centring: `Origin.center_writing_weights`.

    Raises:
        DataError: a shape or a number that no such coder has; names the file.
    """
    if topology == "layernorm_autoencoder":  # no file says it: it is a constant of the projects' code
        arrays = {"ln_eps": np.full(1, EPS, np.float32)} | dict(arrays)
    kind = TOPOLOGIES[topology]
    W_dec_name = "W_dec_0" if issubclass(kind, CrossLayerTranscoder) else "W_dec"
    W_enc, W_dec = (arrays.get(name, np.zeros(0)) for name in ("W_enc", W_dec_name))
    if W_enc.ndim < 2 or W_dec.ndim < 2:
        raise DataError(f"{path} has no matrix for W_enc or {W_dec_name}: the file is damaged.")
    sites = W_enc.shape[0] if W_enc.ndim == 3 else 1
    reads = reads or tuple(hook_points)[: sites or 1] or (UNKNOWN,) * sites
    writes = writes or tuple(hook_points)[sites:] or (reads if kind.tied else (UNKNOWN,) * sites)
    d_in, d_sae, d_out = int(W_enc.shape[-2]), int(W_enc.shape[-1]), int(W_dec.shape[-1])
    if (kind.tied or (reads == writes and UNKNOWN not in reads)) and d_in != d_out:
        raise DataError(
            f"{path} has {W_enc.shape} for W_enc and {W_dec.shape} for W_dec: other widths at one hook point. "
            "The file is damaged."
        )
    if k is not None and not 1 <= k <= d_sae:
        raise DataError(f"{path} keeps k = {k} of {d_sae} latents: its configuration is damaged.")
    selection: dict[str, Any] = {"name": sparsity} | ({} if k is None else {"k": k})
    if sparsity == "jumprelu":
        selection |= {"threshold": 0.0, "bandwidth": 1.0, "through_input": False}
    sizes = {"d_in": d_in, "d_sae": d_sae, "d_out": d_out}
    description = {"topology": topology, "sparsity": selection, "reads": list(reads), "writes": list(writes), **sizes}
    try:
        coder, places = coder_of(description), sites_of(description)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{path} does not describe a dictionary ({error}).") from None
    params = _checked_params(path, arrays, jax.eval_shape(coder.init, jax.random.key(0)), f"{topology} with {sparsity}")
    return TrainedCoder(
        coder, params, places, Origin(model, source=str(path), saejax="", notes=notes, center_writing_weights=centring)
    )


def _checked_params(
    path: Path, arrays: Mapping[str, np.ndarray], shapes: Mapping[str, Any], kind: str
) -> dict[str, np.ndarray]:
    for name in sorted({*shapes, *arrays}):
        there, wanted = (of[name].shape if name in of else "nothing" for of in (arrays, shapes))
        if there != wanted:
            raise DataError(
                f"{path} has {there} for {name}; a {kind} of these sizes has {wanted}. The file is damaged, or its "
                "configuration belongs to another."
            )
    params = {name: np.ascontiguousarray(arrays[name], np.float32) for name in shapes}
    for name, value in params.items():
        if not np.isfinite(value).all():
            raise DataError(f"{path}: {name} holds NaN or infinity. Take another copy of the file.")
    return params


def coder_kind(sae: TrainedCoder) -> Kind:
    """(topology, sparsity) by name; a transcoder that writes what it reads is an UNCENTRED autoencoder.

    With an unrolled encoder it is a topology that no format has.
    """
    described = sae.describe()
    topology = described["topology"]
    if topology == "transcoder" and sae.sites.reads == sae.sites.writes:
        topology = UNCENTRED
    if sae.coder.lista.steps:
        topology += " with an unrolled encoder"
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


def check_free(folder: Path, mine: bool, what: str) -> None:
    """Raises DataError for a folder with something in it that is not `mine`: a `what`, which may be written over."""
    if folder.exists() and not (mine or (folder.is_dir() and not any(folder.iterdir()))):
        raise DataError(f"{folder} holds something other than a {what}. Choose another folder.")


def write_files(folder: Path, files: Mapping[str, Mapping[str, Any]], indent: int | None = None) -> None:
    """Write a folder as a whole: by their names, weights of PyTorch (.pt) and safetensors, and JSON objects.

    Raises:
        DataError: it cannot be written.
    """
    with replacing(folder) as beside:
        for name, content in files.items():
            if name.endswith(".json"):
                (beside / name).write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")
            else:
                (write_torch if name.endswith(".pt") else write_safetensors)(beside / name, content)


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
