"""Hugging Face model folders: config.json + safetensors, read into and written from the JAX decoder."""

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax.sharding import Mesh

from saejax.core.errors import DataError
from saejax.core.files import read_bounded
from saejax.core.places import what_is
from saejax.lm import decoder, parameters
from saejax.lm.conventions import DecoderConfig
from saejax.lm.families import ARCHITECTURES, Architecture, Layout, architecture
from saejax.lm.weight_files import LARGEST_CONFIG, tensor_files
from saejax.parallel import sharding_of

_FLOATS = ("F64", "F32", "F16", "BF16")
# Constants that older files hold beside the parameters.
_BUFFERS = re.compile(r"\.(attn|attention)\.(bias|masked_bias)$|(^|\.)rotary_emb\.inv_freq$")
# The parameters of the head, which stands beside the model that the prefix names.
_UNEMBEDDING = ("W_U", "b_U")
_ROWS_COMPARED = 4096  # of two matrices that are compared, at a time


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
        config = architecture(config_json, str(path)).read_config(config_json)
        known = config.activation in decoder.ACTIVATIONS
    except DataError as error:
        raise DataError(_shortened(str(error))) from None
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError, ArithmeticError) as error:
        reason = _shortened(f"{type(error).__name__} {error}")
        raise DataError(f"{path} is not a usable model configuration: {reason}.") from None
    if not known:
        raise DataError(
            f"{path}: activation {_shortened(repr(config.activation), 100)} is not known; the decoder has "
            f"{', '.join(decoder.ACTIVATIONS)}. Choose another checkpoint, or study this model through PyTorch hooks."
        )
    return config_json, config


def _shortened(text: str, length: int = 800) -> str:
    """A message without the middle of what a file put into it."""
    half = length // 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"


def read_params(
    folder: Path, dtype: Any = jnp.float32, mesh: Mesh | None = None
) -> tuple[DecoderConfig, dict[str, Any]]:
    """(config, parameters as JAX arrays of `dtype`), one tensor at a time; float checkpoints of any precision.

    On a mesh each device gets its part of a tensor (`shard_params`), so that a model need not fit one device.

    The scales and shifts of norms are float32 whatever `dtype` is, because norms are computed so. Types and shapes of
    all tensors are compared with config.json by the files' headers, before the first tensor is read. Where config.json
    ties embedding and unembedding and the files hold two that differ, they are not tied, as in transformers.

    Raises:
        DataError: no safetensors, a tensor that is missing or left over, or one whose shape is not what config.json
            says, or whose numbers are not floats.
    """
    folder = Path(folder)
    config_json, config = read_config(folder)
    files = _TensorFiles(folder, architecture(config_json, str(folder)))
    config, plan = files.plan(config)

    @functools.lru_cache(maxsize=2)  # queries, keys and values may be parts of one weight and one bias
    def tensor(name: str) -> np.ndarray:
        return files.read(name)

    params: dict[str, Any] = {"blocks": [{} for _ in range(config.n_layer)]}
    for path, parameter, name, layout in plan:
        leaf_dtype = jnp.float32 if path[-1] in ("w", "b") else dtype  # of norms
        value = layout.read(tensor(name), parameter.shape)
        if mesh is None:
            _put(params, path, jnp.asarray(value, leaf_dtype))
        else:
            _put(
                params,
                path,
                jax.device_put(value.astype(leaf_dtype), sharding_of(mesh, parameter.shape, parameter.axes)),
            )
    return config, params


def stored(folder: Path) -> tuple[DecoderConfig, tuple[str, ...]]:
    """(config as `read_params` gives it, types of the weights' numbers, as in ("BF16", "F32")); no weights are kept.

    Where not all files are there: (what config.json says, ()).
    """
    folder = Path(folder)
    config_json, config = read_config(folder)
    try:
        files = _TensorFiles(folder, architecture(config_json, str(folder)))
    except DataError:
        return config, ()
    config, plan = files.plan(config)
    return config, tuple(sorted({files.header(name)[1] for _, _, name, _ in plan}))


Planned = tuple[parameters.Path, parameters.Parameter, str, Layout]


@dataclasses.dataclass
class _TensorFiles:
    """The safetensors files of a folder, opened, read by tensor name."""

    folder: Path
    architecture: Architecture

    def __post_init__(self) -> None:
        self.where = tensor_files(self.folder)
        self.handles = {}
        for path in sorted(set(self.where.values())):
            try:
                self.handles[path] = safetensors.safe_open(path, framework="numpy")
            except (safetensors.SafetensorError, OSError) as error:
                raise DataError(f"{path} is not a readable safetensors file: {error}") from None

    def plan(self, config: DecoderConfig) -> tuple[DecoderConfig, list[Planned]]:
        """(config, (path, parameter, tensor, layout) of all parameters), every header compared with what it implies.

        The config is the given one, tied only where the files do not hold another unembedding.
        """
        plan = []
        used: set[str] = set()
        if config.tied_embeddings:
            embedding, head = self._find("W_E"), self._find("W_U")
            if embedding and head and not self._equal(embedding, head):
                config = dataclasses.replace(config, tied_embeddings=False)
            used = {head} if head else set()
        for path, parameter in parameters.leaves(config):
            _, layout = self.architecture.tensors[_key(path)]
            name = self._name(path, config.tied_embeddings)
            shape, dtype = self.header(name)
            if shape != layout.stored(parameter.shape):
                raise DataError(
                    f"{self.folder}: tensor {name!r} does not have the shape that config.json gives it: "
                    f"{'.'.join(map(str, path))} is {shape}, config.json says {layout.stored(parameter.shape)}."
                )
            if dtype not in _FLOATS:
                raise DataError(
                    f"{self.folder}: tensor {name!r} holds {dtype}; the JAX decoder reads {', '.join(_FLOATS)}. Give "
                    "the checkpoint before it was quantised."
                )
            plan.append((path, parameter, name, layout))
        self._refuse_left_over(used | {name for _, _, name, _ in plan})
        return config, plan

    def read(self, name: str) -> np.ndarray:
        try:
            return self.handles[self.where[name]].get_tensor(name)
        except safetensors.SafetensorError as error:
            raise DataError(f"{self.where[name]}: tensor {name!r} cannot be read: {error}") from None

    def _find(self, key: str, block: str = "") -> str | None:
        """The tensor of a parameter of the table, or None; a head has no prefix, and its usual name beside its own."""
        stem = self.architecture.tensors[key][0].format(block)
        second = stem.replace("embed_out.", "lm_head.") if key in _UNEMBEDDING else f"{self.architecture.prefix}{stem}"
        return next((name for name in (stem, second) if name in self.where), None)

    def _name(self, path: parameters.Path, tied: bool) -> str:
        """The tensor of a parameter; of a tied embedding the unembedding's, where that is the one that is there."""
        key = _key(path)
        tensor = self._find(key, _block_number(path)) or (self._find("W_U") if tied and key == "W_E" else None)
        if tensor is None:
            there = ", ".join(sorted(self.where)[:5])
            stem = self.architecture.tensors[key][0].format(_block_number(path))
            raise DataError(f"{self.folder}: tensor {stem!r} is missing; there are {there}, ...")
        return tensor

    def _equal(self, one: str, two: str) -> bool:
        """The numbers of two matrices are the same."""
        shape = self.header(one)[0]
        if len(shape) != 2 or shape != self.header(two)[0]:
            return False
        a, b = (self.handles[self.where[name]].get_slice(name) for name in (one, two))
        parts = [slice(start, min(start + _ROWS_COMPARED, shape[0])) for start in range(0, shape[0], _ROWS_COMPARED)]
        return all(np.array_equal(a[part], b[part]) for part in parts)

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        try:
            header = self.handles[self.where[name]].get_slice(name)
        except safetensors.SafetensorError as error:
            raise DataError(f"{self.where[name]}: tensor {name!r} cannot be read: {error}") from None
        return tuple(header.get_shape()), header.get_dtype()

    def _refuse_left_over(self, used: set[str]) -> None:
        """A tensor that has no place (a bias, a norm, a second head) means that the model computes something else."""
        for name in sorted(self.where.keys() - used):
            if not _BUFFERS.search(name):
                raise DataError(
                    f"{self.folder}: config.json gives the tensor {_shortened(repr(name), 200)} no place, so this is a "
                    "variant that the JAX decoder does not have. Check config.json, or study this model through "
                    "PyTorch hooks."
                )


def _put(params: dict[str, Any], path: parameters.Path, value: jax.Array) -> None:
    at: Any = params
    for part in path[:-1]:
        at = at[part] if isinstance(part, int) else at.setdefault(part, {})
    at[path[-1]] = value


def write(folder: Path, config_json: dict[str, Any], params: dict[str, Any]) -> None:
    """Write config.json and model.safetensors so that transformers and `read_params` both load them."""
    folder = Path(folder)
    arch = architecture(config_json, str(folder))
    if not arch.can_be_written:
        names = ", ".join(name for name, arch in ARCHITECTURES.items() if arch.can_be_written)
        raise DataError(f"A model of type {config_json['model_type']} can be read but not written; these can: {names}.")
    folder.mkdir(parents=True, exist_ok=True)
    config, params = arch.read_config(config_json), jax.tree.map(np.asarray, params)
    # An unembedding beside a tied embedding is written too: `read_params` and transformers take both as they are.
    config = dataclasses.replace(config, tied_embeddings=config.tied_embeddings and "W_U" not in params)
    tensors = arch.write_params(config, params) if arch.write_params else _by_table(arch, config, params)
    weights = folder / "model.safetensors"
    safetensors.numpy.save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config_json, indent=2) + "\n")


def _by_table(arch: Architecture, config: DecoderConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """{tensor name: array}, one tensor for each parameter."""
    tensors = {}
    for path, parameter in parameters.leaves(config):
        stem, layout = arch.tensors[_key(path)]
        value: Any = params
        for part in path:
            value = value[part]
        name = stem.format(_block_number(path))
        # The head alone has no prefix; the embedding it may be tied to has one.
        name = name if path[0] in _UNEMBEDDING else f"{arch.prefix}{name}"
        assert layout.write is not None
        tensors[name] = np.ascontiguousarray(layout.write(value, layout.stored(parameter.shape)))
    return tensors


def _key(path: parameters.Path) -> str:
    """The parameter's name in a table: that of the same parameter of every block."""
    return ".".join(str(part) for part in path if isinstance(part, str))


def _block_number(path: parameters.Path) -> str:
    """The number of the parameter's block, empty outside of the blocks."""
    return str(path[1]) if path[0] == "blocks" else ""
