"""Hugging Face model folders: config.json + safetensors, read into and written from the JAX decoder."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from saejax.core.errors import DataError
from saejax.lm import decoder
from saejax.lm.conventions import DecoderConfig, architecture


def read_config(folder: Path) -> tuple[dict[str, Any], DecoderConfig]:
    """(config.json as it is, the decoder's shapes).

    Raises:
        DataError: missing or malformed config.json, or an architecture the decoder does not know.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise DataError(f"No model at {folder}: config.json is missing. Give a Hugging Face model folder or id.")
    try:
        config_json = json.loads(path.read_bytes())
        config = architecture(config_json, str(path)).read_config(config_json)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError, ZeroDivisionError) as error:
        raise DataError(f"{path} is not a usable model configuration: {type(error).__name__} {error}.") from None
    if config.activation not in decoder.ACTIVATIONS:
        raise DataError(
            f"{path}: activation {config.activation!r} is not known; the decoder has {', '.join(decoder.ACTIVATIONS)}."
        )
    return config_json, config


def read_params(folder: Path, dtype: Any = jnp.float32) -> tuple[DecoderConfig, dict[str, Any]]:
    """(config, parameters as JAX arrays of `dtype`), one tensor at a time.

    Raises:
        DataError: no safetensors, a missing tensor, or one whose shape is not what config.json says.
    """
    folder = Path(folder)
    config_json, config = read_config(folder)
    where = _tensor_files(folder)
    handles = {}
    try:
        for path in set(where.values()):
            handles[path] = safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise DataError(f"{path} is not a readable safetensors file: {error}") from None

    def tensor(name: str) -> np.ndarray:
        for candidate in (name, f"transformer.{name}"):
            if candidate in where:
                try:
                    return handles[where[candidate]].get_tensor(candidate)
                except safetensors.SafetensorError as error:
                    raise DataError(f"{where[candidate]}: tensor {candidate!r} cannot be read: {error}") from None
        raise DataError(f"{folder}: tensor {name!r} is missing; there are {', '.join(sorted(where)[:5])}, ...")

    arch = architecture(config_json, str(folder))
    try:
        params = arch.read_params(config, tensor)
    except (ValueError, IndexError) as error:
        raise DataError(f"{folder}: a tensor does not have the shape that config.json gives it: {error}") from None
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    _check_shapes(folder, config, params)
    return config, params


def write(folder: Path, config_json: dict[str, Any], params: dict[str, Any]) -> None:
    """Write config.json and model.safetensors so that transformers and `read_params` both load them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arch = architecture(config_json, str(folder))
    tensors = arch.write_params(arch.read_config(config_json), jax.tree.map(np.asarray, params))
    weights = folder / "model.safetensors"
    safetensors.numpy.save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config_json, indent=2) + "\n")


def weights_sha256(folder: Path) -> str:
    """One hash over all weight files, part of a store's identity."""
    digest = hashlib.sha256()
    for path in sorted({*_tensor_files(Path(folder)).values()}):
        with path.open("rb") as handle:
            digest.update(path.name.encode() + hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()


def is_complete(folder: Path) -> bool:
    """Whether every file that `load_lm` reads is there."""
    try:
        return bool(_tensor_files(folder)) and all((folder / f).is_file() for f in ("config.json", "tokenizer.json"))
    except DataError:
        return False


def _tensor_files(folder: Path) -> dict[str, Path]:
    """{tensor name: safetensors file}, from one file or a sharded index."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = dict(json.loads(index.read_bytes())["weight_map"])
            files = {str(name) for name in weight_map.values()}
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise DataError(f"{index} is not a usable index: {type(error).__name__} {error}.") from None
        for name in sorted(files):
            if Path(name).name != name or not (folder / name).is_file():
                raise DataError(f"{index} names the file {name!r}, which is not in the folder.")
        return {tensor: folder / str(name) for tensor, name in weight_map.items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        raise DataError(f"No model.safetensors in {folder}; convert the checkpoint to safetensors first.")
    try:
        with safetensors.safe_open(single, framework="numpy") as handle:
            return dict.fromkeys(handle.keys(), single)
    except (safetensors.SafetensorError, OSError) as error:
        raise DataError(f"{single} is not a readable safetensors file: {error}") from None


def _check_shapes(folder: Path, config: DecoderConfig, params: dict[str, Any]) -> None:
    wanted = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))
    flat = dict(jax.tree_util.tree_flatten_with_path(params)[0])
    for path, leaf in jax.tree_util.tree_flatten_with_path(wanted)[0]:
        if path not in flat or flat[path].shape != leaf.shape:
            found = flat[path].shape if path in flat else "nothing"
            raise DataError(f"{folder}: {jax.tree_util.keystr(path)} is {found}, config.json says {leaf.shape}.")
