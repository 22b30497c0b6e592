"""A trained coder as a folder: coder.safetensors, saejax.json and a model card. No pickle.

saejax.json says what the coder is and the sha256 of its weights. It is written into a folder beside the wanted one,
which takes the wanted one's place when all of it is there.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import safetensors
import safetensors.numpy

from saejax.coders import SPARSITIES, TOPOLOGIES, Coder, Sites
from saejax.coders.lista import LINEAR, MOST_STEPS, Lista
from saejax.coders.parts import is_outside, unregistered
from saejax.coders.ramp import Ramp
from saejax.core.config import nearest
from saejax.core.errors import DataError
from saejax.core.files import finite, read_bounded, read_json, replacing, write_json
from saejax.trained.card import model_card

WEIGHTS, DESCRIPTION, CARD = "coder.safetensors", "saejax.json", "README.md"
FORMAT = {"name": "saejax-coder", "version": 1}
_LARGEST_DESCRIPTION = 16 << 20
_LARGEST_HEADER = 1 << 20  # of a safetensors file: a name and a shape for each parameter
_MOST_SITES = 1024

Extra = TypeVar("Extra")


def is_saved(folder: str | os.PathLike[str]) -> bool:
    """True where the folder holds what `write_folder` writes."""
    return (Path(folder) / DESCRIPTION).exists()


def write_folder(folder: str | os.PathLike[str], described: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    """Write a coder, which `describe` has described and the caller has added to, as a whole or not at all."""
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and (is_saved(folder) or not any(folder.iterdir()))):
        raise DataError(f"{folder} holds something other than a saved coder. Choose another folder.")
    described = json.loads(json.dumps(finite(dict(described))))
    arrays = {name: np.ascontiguousarray(value, np.float32) for name, value in params.items()}
    raw = safetensors.numpy.save(arrays, metadata={"format": "saejax"})
    with replacing(folder) as beside:
        (beside / WEIGHTS).write_bytes(raw)
        (beside / CARD).write_text(model_card(described), encoding="utf-8")
        write_json(beside / DESCRIPTION, {"format": FORMAT, **described, "sha256": hashlib.sha256(raw).hexdigest()})


def read_folder(
    folder: str | os.PathLike[str], also: Callable[[Mapping[str, Any]], Extra]
) -> tuple[Coder, Sites, dict[str, np.ndarray], Extra]:
    """(coder, sites, params, also(description)) of a folder that `write_folder` wrote, bit for bit."""
    path = Path(folder) / DESCRIPTION
    described = read_json(path, _LARGEST_DESCRIPTION)
    remedy = "Restore it, or save the coder again."
    if not isinstance(described, dict) or not isinstance(described.get("format"), dict):
        raise DataError(f"{path} does not describe a coder. {remedy}")
    if (format := described["format"]) != FORMAT:
        newer = (
            format.get("name") == FORMAT["name"] and isinstance(format.get("version"), int) and format["version"] > 1
        )
        what = "was written by a newer version of saejax: update it" if newer else f"has the unknown format {format!r}"
        raise DataError(f"{path} {what}. This version reads {FORMAT['name']} {FORMAT['version']}.")
    try:
        coder, sites, more = coder_of(described), sites_of(described), also(described)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}). {remedy}") from None
    return coder, sites, _params(Path(folder) / WEIGHTS, coder, described.get("sha256")), more


# --- the description -------------------------------------------------------------------------------------------


def describe(coder: Coder, sites: Sites) -> dict[str, Any]:
    """The coder after training, as JSON."""
    topology, sparsity = coder.topology, coder.sparsity
    # That every sparsity is a dataclass is its contract, which mypy does not see.
    numbers = {f.name: getattr(sparsity, f.name) for f in dataclasses.fields(sparsity)}  # type: ignore[arg-type]
    return {
        "topology": next(name for name, known in TOPOLOGIES.items() if known is type(topology)),
        "sparsity": {"name": sparsity.name}
        | ({"module": type(sparsity).__module__} if is_outside(type(sparsity)) else {})
        | {name: value.end if isinstance(value, Ramp) else value for name, value in numbers.items()},
        "d_in": topology.d_in,
        "d_sae": topology.d_sae,
        "d_out": topology.out_shape[-1],
        "latent_shape": list(topology.latent_shape),
        "reads": list(sites.reads),
        "writes": list(sites.writes),
    } | ({"lista": dataclasses.asdict(coder.lista)} if coder.lista.steps else {})


def coder_of(described: Mapping[str, Any]) -> Coder:
    """The inference coder of a description.

    Raises:
        DataError: a topology or sparsity that this version does not know.
        LookupError, TypeError, ValueError: contradictions.
    """
    numbers_json = dict(described["sparsity"])
    names = (described["topology"], numbers_json.pop("name"))
    if missing := unregistered({names[1]: numbers_json.pop("module")} if "module" in numbers_json else {}):
        raise DataError(missing)
    tables: tuple[Mapping[str, Any], ...] = (TOPOLOGIES, SPARSITIES)
    for name, known in zip(names, tables, strict=True):
        if not isinstance(name, str) or name not in known:
            raise DataError(f"This version of saejax does not know the coder's {name!r}.{nearest(str(name), known)}")
    sizes = {name: described[name] for name in ("d_in", "d_sae", "d_out")} | {"sites": len(described["reads"])}
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size < 2**31 or (name == "sites" and size > _MOST_SITES):
            raise ValueError(f"{name} is {size!r}")
    kind = SPARSITIES[names[1]]
    types = {f.name: f.type for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if numbers_json.keys() != types.keys():
        raise ValueError(f"{names[1]} has the numbers {sorted(types)}, not {sorted(numbers_json)}")
    numbers = {name: Ramp.constant(value) if types[name] is Ramp else value for name, value in numbers_json.items()}
    if not all(isinstance(value, bool | int | float) and value >= 0 for value in numbers_json.values()):
        raise ValueError(f"the numbers of {names[1]} are {numbers_json}")
    return Coder(
        # The init is never run; uniform is one that every pair of shapes has.
        topology=TOPOLOGIES[names[0]](**sizes, init_name="uniform", matmul_dtype="float32"),
        sparsity=kind(**numbers),
        terms=(),
        unit_decoder_every=0,
        dead_after_tokens=1,
        lista=_lista_of(described),
    )


def _lista_of(described: Mapping[str, Any]) -> Lista:
    """Raises ValueError, KeyError or TypeError for what no `describe` wrote."""
    if "lista" not in described:
        return LINEAR
    lista = Lista(**described["lista"])
    steps, rate = lista.steps, lista.rate
    if type(steps) is not int or not 1 <= steps <= MOST_STEPS or not isinstance(rate, float) or not 0 < rate <= 2:
        raise ValueError(f"lista is {described['lista']!r}")
    return dataclasses.replace(lista, own=lista.own is True)


def sites_of(described: Mapping[str, Any]) -> Sites:
    reads, writes = (tuple(described[name]) for name in ("reads", "writes"))
    stacked = TOPOLOGIES[described["topology"]].stacked
    if not all(isinstance(name, str) for name in (*reads, *writes)) or len(reads) != len(writes):
        raise ValueError(f"reads {reads!r}, writes {writes!r}")
    if not stacked and len(reads) != 1:
        raise ValueError(f"one site is read, not {len(reads)}")
    return Sites(reads, writes, (1.0,) * len(reads), (1.0,) * len(writes), stacked)


# --- the weights -----------------------------------------------------------------------------------------------


def _params(path: Path, coder: Coder, sha256: Any) -> dict[str, np.ndarray]:
    """The parameters, after the file's length, its sha256 and every shape were compared."""
    shapes = jax.eval_shape(coder.init, jax.random.key(0))
    size = sum(4 * leaf.size for leaf in shapes.values())
    remedy = "It is damaged, or belongs to another saejax.json: restore it, or save the coder again."
    raw = read_bounded(path, size + _LARGEST_HEADER)
    if hashlib.sha256(raw).hexdigest() != sha256:
        raise DataError(f"{path} is not the file that was saved: its sha256 is another. {remedy}")
    try:
        params = safetensors.numpy.load(raw)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise DataError(f"{path} is no safetensors file ({error}). {remedy}") from None
    for name in sorted({*shapes, *params}):
        there = (params[name].shape, str(params[name].dtype)) if name in params else "nothing"
        wanted = (shapes[name].shape, "float32") if name in shapes else "nothing"
        if there != wanted:
            raise DataError(f"{path} has {there} for {name}; saejax.json asks for {wanted}. {remedy}")
        if not np.isfinite(params[name]).all():
            raise DataError(f"{path}: {name} holds NaN or infinity. {remedy}")
    return params
