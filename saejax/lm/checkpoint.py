"""Hugging Face model folders: config.json + safetensors, read into and written from the JAX decoder."""

import collections
import dataclasses
import functools
import json
import operator
import re
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax.sharding import Mesh

from saejax.core.errors import DataError
from saejax.core.files import read_bounded
from saejax.core.places import what_is
from saejax.lm import decoder
from saejax.lm.adapter import AdaptedTensors, Adapter
from saejax.lm.conventions import DecoderConfig, Parameter, ParameterPath, leaves, tree_of
from saejax.lm.families import Architecture, architecture
from saejax.lm.gguf import GgufTensors
from saejax.lm.layouts import Layout
from saejax.lm.torch_hooks import ModuleTensors
from saejax.lm.weight_files import FLOATS, LARGEST_CONFIG, TensorFiles, open_tensors
from saejax.parallel import sharding_of

# Constants that older files hold beside the parameters.
_BUFFERS = re.compile(r"\.(attn|attention)\.(bias|masked_bias)$|(^|\.)rotary_emb\.inv_freq$")
TensorSource = TensorFiles | GgufTensors | ModuleTensors | AdaptedTensors
# The parameters of the head, which stands beside the model that the prefix names.
_UNEMBEDDING = ("W_U", "b_U")


def read_config(folder: Path) -> tuple[dict[str, Any], DecoderConfig]:
    """(config.json as it is, the decoder's shapes and conventions); refuses variants that the decoder does not know."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise DataError(
            f"No model at {folder}: config.json is missing, and {what_is(folder)}. Give the folder of a Hugging Face "
            "model, or its id."
        )
    try:
        config_json = json.loads(read_bounded(path, LARGEST_CONFIG))
    except (ValueError, RecursionError) as error:
        raise _unusable(str(path), error) from None
    return config_json, config_of(config_json, str(path))


def config_of(config_json: dict[str, Any], where: str) -> DecoderConfig:
    """The decoder's shapes and conventions by a config.json of `where`.

    Raises:
        DataError: a variant that the decoder does not know, or no usable configuration.
    """
    try:
        config = architecture(config_json, where).read_config(config_json)
        known = config.activation in decoder.ACTIVATIONS
    except DataError as error:
        raise DataError(_shortened(str(error))) from None
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError, ArithmeticError) as error:
        raise _unusable(where, error) from None
    if not known:
        raise DataError(
            f"{where}: activation {_shortened(repr(config.activation), 100)} is not known; the decoder has "
            f"{', '.join(decoder.ACTIVATIONS)}. Choose another checkpoint, or study this model through PyTorch hooks."
        )
    return config


def _unusable(where: str, error: Exception) -> DataError:
    reason = _shortened(f"{type(error).__name__} {error}")
    return DataError(f"{where} is not a usable model configuration: {reason}.")


def _shortened(text: str, length: int = 800) -> str:
    """A message without the middle of what a file put into it."""
    half = length // 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"


def read_params(
    folder: Path, dtype: Any = jnp.float32, mesh: Mesh | None = None, adapter: Adapter | None = None
) -> tuple[DecoderConfig, dict[str, Any]]:
    """(config, parameters as JAX arrays of `dtype`), one tensor at a time; float checkpoints of any precision.

    On a mesh each device gets its part of a tensor (`shard_params`), so that a model need not fit one device.

    The scales and shifts of norms are float32 whatever `dtype` is, because norms are computed so. Types and shapes of
    all tensors are compared with config.json by the files' headers, before the first tensor is read. Where config.json
    ties embedding and unembedding and the files hold two that differ, they are not tied, as in transformers.
    With an adapter its changes are in the parameters.

    Raises:
        ConfigError: the adapter is of another model.
        DataError: no safetensors, a tensor that is missing or left over, or one whose shape is not what config.json
            says, or whose numbers are not floats.
    """
    config_json, config = read_config(folder)
    files: TensorSource = open_tensors(Path(folder), config_json)
    files = files if adapter is None else AdaptedTensors(files, adapter, str(folder))
    return params_of(files, config_json, config, str(folder), dtype, mesh)


def params_of(
    files: TensorSource, config_json: dict[str, Any], config: DecoderConfig, where: str, dtype: Any, mesh: Mesh | None
) -> tuple[DecoderConfig, dict[str, Any]]:
    """`read_params` of opened tensors, whose config.json and what follows from it are `config_json` and `config`."""
    config, places = _places(where, files, architecture(config_json, where), config)
    tensor = functools.lru_cache(maxsize=2)(files.read)  # queries, keys and values may be parts of one weight and bias

    def leaf(path: ParameterPath, parameter: Parameter) -> jax.Array:
        names, layout = places[path]
        leaf_dtype = jnp.float32 if path[-1] in ("w", "b") else dtype  # of norms
        shape = parameter.shape[1:] if layout.many else parameter.shape
        values = [layout.read(tensor(name), shape) for name in names]
        value = np.stack(values) if layout.many else values[0]
        if mesh is None:
            return jnp.asarray(value, leaf_dtype)
        return jax.device_put(value.astype(leaf_dtype), sharding_of(mesh, parameter.shape, parameter.axes))

    return config, tree_of(config, leaf)


def stored(folder: Path) -> tuple[DecoderConfig, tuple[str, ...]]:
    """(config as `read_params` gives it, types of the weights' numbers, as in ("BF16", "F32")); no weights are kept.

    Where not all files are there: (what config.json says, ()).
    """
    folder = Path(folder)
    config_json, config = read_config(folder)
    try:
        files = open_tensors(folder, config_json)
    except DataError:
        return config, ()
    config, places = _places(str(folder), files, architecture(config_json, str(folder)), config)
    return config, tuple(sorted({files.header(name)[1] for names, _ in places.values() for name in names}))


def _places(
    where: str, files: TensorSource, arch: Architecture, config: DecoderConfig
) -> tuple[DecoderConfig, dict[ParameterPath, tuple[list[str], Layout]]]:
    """(config, {path: (tensors, layout)} of all parameters), every header compared with what it implies.

    The config is the given one, tied only where the files do not hold another unembedding.
    """

    def find(key: str, stem: str = "") -> str | None:
        """The tensor of a parameter of the table; a head has no prefix, and its usual name beside its own."""
        stem = stem or arch.tensors[key][0]
        head = key in _UNEMBEDDING
        second = stem.replace("embed_out.", "lm_head.") if head else f"{arch.prefix}{stem}"
        others = (f"{prefix}{stem}" for prefix in (arch.heads if head else arch.others))
        return next((name for name in (stem, second, *others) if name in files.names), None)

    places: dict[ParameterPath, tuple[list[str], Layout]] = {}
    used = set()
    if config.tied_embeddings:
        embedding, head = find("W_E"), find("W_U")
        if embedding and head and not files.are_equal(embedding, head):
            config = config.untied()
        used = {head} if head else set()
    for path, parameter in leaves(config):
        key, block = _key_and_block(path)
        tables = (table for table in arch.stacked if key in table and find(key, table[key][0].format(block)))
        stem, layout = next(tables, arch.tensors)[key]
        names: list[str] = []
        for part, wanted in pieces(stem, block, layout, parameter):
            # Of a tied embedding the unembedding's, where that is the one that is there.
            name = find(key, part) or (find("W_U") if config.tied_embeddings and key == "W_E" else None)
            if name is None:
                there = ", ".join(sorted(files.names)[:5])
                raise DataError(f"{where}: tensor {part!r} is missing; there are {there}, ...")
            _check_header(where, files, name, ".".join(map(str, path)), wanted)
            names.append(name)
        places[path] = names, layout
        used.update(names)
    # A tensor that has no place (a bias, a norm, a second head) means that the model computes something else.
    for name in sorted(files.names - used):
        if not _BUFFERS.search(name) and not name.startswith(arch.beside):
            raise DataError(
                f"{where}: config.json gives the tensor {_shortened(repr(name), 200)} no place, so this is a variant "
                "that the JAX decoder does not have. Check config.json, or study this model through PyTorch hooks."
            )
    return config, places


def _check_header(where: str, files: TensorSource, name: str, parameter: str, wanted: tuple[int, ...]) -> None:
    shape, dtype = files.header(name)
    if shape != wanted:
        raise DataError(
            f"{where}: tensor {name!r} does not have the shape that config.json gives it: {parameter} is {shape}, "
            f"config.json says {wanted}."
        )
    if not files.holds_floats(name):
        raise DataError(
            f"{where}: tensor {name!r} holds {dtype}; the JAX decoder reads {', '.join(FLOATS)}. Give the checkpoint "
            "before it was quantised."
        )


def pieces(stem: str, block: str, layout: Layout, parameter: Parameter) -> list[tuple[str, tuple[int, ...]]]:
    """(name without prefix, shape in the file) of each tensor in which a parameter lies."""
    if not layout.many:
        return [(stem.format(block), layout.stored(parameter.shape))]
    return [(stem.format(block, i), layout.stored(parameter.shape[1:])) for i in range(parameter.shape[0])]


def write(folder: Path, config_json: dict[str, Any], params: dict[str, Any]) -> None:
    """Write config.json and model.safetensors so that transformers and `read_params` both load them."""
    folder = Path(folder)
    arch = architecture(config_json, str(folder))
    if arch.beside:
        raise DataError(f"{folder}: {config_json['model_type']} has more than text, which saejax does not write.")
    folder.mkdir(parents=True, exist_ok=True)
    config, params = arch.read_config(config_json), jax.tree.map(np.asarray, params)
    # An unembedding beside a tied embedding is written too: `read_params` and transformers take both as they are.
    config = dataclasses.replace(config, tied_embeddings=config.tied_embeddings and "W_U" not in params)
    # Of a tensor with several parameters the parts, in the order of the table.
    parts: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    joined: dict[str, tuple[int | None, tuple[int, ...]]] = {}
    for path, parameter in leaves(config):
        key, block = _key_and_block(path)
        stem, layout = arch.tensors[key]
        # The head alone has no prefix; the embedding it may be tied to has one.
        value: Any = functools.reduce(operator.getitem, path, cast(Any, params))
        prefix, values = "" if key in _UNEMBEDDING else arch.prefix, value if layout.many else [value]
        for one, (name, shape) in zip(values, pieces(stem, block, layout, parameter), strict=True):
            joined[prefix + name] = layout.axis, shape
            parts[prefix + name].append(layout.write(one, shape))
    tensors = {
        name: np.ascontiguousarray((parts[name][0] if axis is None else np.stack(parts[name], axis)).reshape(shape))
        for name, (axis, shape) in joined.items()
    }
    weights = folder / "model.safetensors"
    safetensors.numpy.save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config_json, indent=2) + "\n")


def _key_and_block(path: ParameterPath) -> tuple[str, str]:
    """(the parameter's name in a table, which is one for all blocks; the number of its block, empty outside)."""
    return ".".join(part for part in path if isinstance(part, str)), str(path[1]) if path[0] == "blocks" else ""
