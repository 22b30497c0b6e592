"""Low-rank adapters of a language model (LoRA), in the files of PEFT.

    W' = W + s B A       A [r, in], B [out, r] of a matrix W [out, in]; s = alpha / r, or alpha / sqrt(r) (rslora)

A matrix is a tensor of the checkpoint, by its module's name there: queries, keys and values that lie in one tensor have
one A and one B. (Hu et al. 2021, arXiv:2106.09685; PEFT 0.21.2, adapter_config.json and adapter_model.safetensors)
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_bounded, write_bytes, write_json
from saejax.lm.conventions import DecoderConfig, leaves
from saejax.lm.families import architecture
from saejax.lm.layouts import Layout

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LARGEST_CONFIG = 1 << 20
_IN_FRONT = "base_model.model."
# Parameters with a matrix that an adapter can change, by what `projections` calls them.
PROJECTIONS = {name: f"blocks.attn.W_{name}" for name in "QKVO"} | {
    name: f"blocks.mlp.W_{name}" for name in ("in", "gate", "out")
}
# Of PEFT's settings those that would make another function of it: what they must be where they say anything.
_PLAIN_LORA: dict[str, Any] = {"peft_type": "LORA", "bias": "none"} | dict.fromkeys(
    (
        *("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias", "trainable_token_indices"),
        *("alora_invocation_tokens", "target_parameters", "use_qalora", "arrow_config", "layer_replication"),
    )
)
# What damaged or foreign files raise on the way.
_RAISED = (
    *(ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError),
    safetensors.SafetensorError,
)
_CONV = ("gpt2",)  # of these the checkpoint holds [in, out]: PEFT's fan_in_fan_out


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Low-rank changes of matrices.

    Attributes:
        scale: s.
        matrices: {module, as model.layers.3.self_attn.q_proj: (A [r, in], B [out, r]) float32}.
        transposed: tensors of the checkpoint are [in, out].
    """

    scale: float
    matrices: Mapping[str, tuple[np.ndarray, np.ndarray]]
    transposed: bool = False

    @classmethod
    def read(cls, folder: str | Path) -> "Adapter":
        """The adapter that PEFT, or `write`, has saved.

        Raises:
            DataError: no such files, a damaged one, or an adapter of another kind.
        """
        folder = Path(folder)
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise DataError(f"No adapter at {folder}: {name} is missing. Give a folder that PEFT has saved.")
        try:
            config = json.loads(read_bounded(folder / CONFIG, _LARGEST_CONFIG))
            with safetensors.safe_open(folder / WEIGHTS, framework="numpy") as file:  # its other reader has no bfloat16
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dictionary
            for key, plain in _PLAIN_LORA.items():
                if (value := config.get(key)) and value != plain:
                    raise DataError(f"{folder}: {key} is {value}, and saejax reads plain LoRA alone. Merge it by PEFT.")
            rank = int(config["r"])
            scale = float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)
            matrices = _matrices(folder, tensors, rank)
        except _RAISED as error:
            raise DataError(f"{folder} is no adapter, or it is damaged: {type(error).__name__} {error}") from None
        return cls(scale, matrices, bool(config.get("fan_in_fan_out")))

    def write(self, folder: str | Path, base: str) -> None:
        """Write the files that PEFT reads; `base` is its base_model_name_or_path."""
        rank = next(iter(self.matrices.values()))[0].shape[0]
        tensors = {}
        for module, (a, b) in sorted(self.matrices.items()):
            tensors[f"{_IN_FRONT}{module}.lora_A.weight"] = np.ascontiguousarray(a, np.float32)
            tensors[f"{_IN_FRONT}{module}.lora_B.weight"] = np.ascontiguousarray(b, np.float32)
        write_bytes(Path(folder) / WEIGHTS, safetensors.numpy.save(tensors, metadata={"format": "pt"}))
        config = {
            "peft_type": "LORA",
            "bias": "none",
            "base_model_name_or_path": base,
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
            "r": rank,
            "lora_alpha": self.scale * rank,
            "lora_dropout": 0.0,
            "use_rslora": False,
            "init_lora_weights": True,
            "fan_in_fan_out": self.transposed,
            "target_modules": sorted(self.matrices),
        }
        write_json(Path(folder) / CONFIG, config)

    @property
    def sha256(self) -> str:
        """Of all that decides the changes."""
        of_all = hashlib.sha256(repr((self.scale, self.transposed)).encode())
        for module in sorted(self.matrices):
            of_all.update(module.encode())
            for side in self.matrices[module]:
                of_all.update(repr(side.shape).encode() + np.ascontiguousarray(side, np.float32).tobytes())
        return of_all.hexdigest()

    def delta(self, module: str) -> np.ndarray:
        """s B A as the checkpoint holds the matrix, float32."""
        a, b = self.matrices[module]
        change: np.ndarray = self.scale * (b @ a)
        return change.T if self.transposed else change


def _matrices(folder: Path, tensors: Mapping[str, np.ndarray], rank: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    sides: dict[str, dict[str, np.ndarray]] = {}
    for name, value in tensors.items():
        module, dot, side = name.removeprefix(_IN_FRONT).removesuffix(".weight").rpartition(".")
        numbers = value.astype(np.float32)
        if not dot or side not in ("lora_A", "lora_B") or numbers.ndim != 2 or not np.isfinite(numbers).all():
            raise DataError(f"{folder}: the tensor {name!r} {list(value.shape)} is no side of a plain LoRA.")
        sides.setdefault(module, {})[side] = numbers
    for module, pair in sides.items():
        if len(pair) < 2 or pair["lora_A"].shape[0] != rank or pair["lora_B"].shape[1] != rank:
            raise DataError(f"{folder}: {module} has not both sides of rank {rank}.")
    if not sides:
        raise DataError(f"{folder} changes no matrix.")
    return {module: (pair["lora_A"], pair["lora_B"]) for module, pair in sides.items()}


def _same(module: str, tensor: str) -> bool:
    """A tensor's name, with or without the prefix of a whole model, is that of a module's weight."""
    name = tensor.removesuffix(".weight")
    return module == name or module.endswith(f".{name}") or name.endswith(f".{module}")


class AdaptedTensors:
    """The tensors of a checkpoint with an adapter's changes in them, as its other readers show them.

    Raises:
        ConfigError: the adapter is of another model.
    """

    def __init__(self, files: Any, adapter: Adapter, where: str) -> None:
        self._files, self._adapter = files, adapter
        self._modules = {
            name: module
            for module in adapter.matrices
            for name in files.names
            if name.endswith(".weight") and _same(module, name)
        }
        if strangers := sorted(adapter.matrices.keys() - self._modules.values()):
            raise ConfigError(
                f"lm.adapter changes {strangers[0]}, which {where} has not: it is an adapter of another model, or of "
                "something that the JAX decoder has not."
            )
        for name, module in self._modules.items():
            a, b = adapter.matrices[module]
            shape = (a.shape[1], b.shape[0]) if adapter.transposed else (b.shape[0], a.shape[1])
            if (stored := files.header(name)[0]) != shape:
                raise ConfigError(f"lm.adapter: {module} is {list(shape)} there, and {list(stored)} in {where}.")

    def __getattr__(self, name: str) -> Any:
        """Names, headers and types are the files' own."""
        return getattr(self._files, name)

    def are_equal(self, first: str, second: str) -> bool:
        """As the files; two of which one is changed are not, such as an unembedding beside its embedding."""
        changed = {first, second} & self._modules.keys()
        return not changed and bool(self._files.are_equal(first, second))

    def read(self, name: str) -> np.ndarray:
        value: np.ndarray = self._files.read(name)
        module = self._modules.get(name)
        return value if module is None else value.astype(np.float32) + self._adapter.delta(module)


@dataclasses.dataclass(frozen=True)
class Adaptable:
    """The matrices of a model that an adapter is trained for.

    Attributes:
        shapes: {module: ((r, in), (out, r))}.
        places: {path of a parameter: (module, layout, shape)}.
    """

    shapes: Mapping[str, tuple[tuple[int, int], tuple[int, int]]]
    places: Mapping[tuple[Any, ...], tuple[str, Layout, tuple[int, ...]]]
    transposed: bool

    @classmethod
    def of(cls, config: DecoderConfig, family: str, projections: tuple[str, ...], first: int, rank: int) -> "Adaptable":
        """Those `projections` of the blocks from `first` on.

        Raises:
            ConfigError: none of the model's matrices is meant.
        """
        if not family:
            raise ConfigError("The model does not say its family, so its matrices have no names. Load it by load_lm.")
        arch, wanted = architecture({"model_type": family}, "the model"), {PROJECTIONS[name] for name in projections}
        transposed = family in _CONV
        shapes, places = {}, {}
        for path, parameter in leaves(config):
            key = ".".join(part for part in path if isinstance(part, str))
            if key not in wanted or int(path[1]) < first:
                continue
            stem, layout = arch.tensors[key]
            module = f"{arch.prefix}{stem.format(path[1]).removesuffix('.weight')}"
            out, into = layout.stored(parameter.shape)[:: -1 if transposed else 1]
            shapes[module] = (rank, into), (out, rank)
            places[path] = module, layout, parameter.shape
        if not shapes:
            raise ConfigError(
                f"No block from {first} on has a matrix {', '.join(projections)}: nothing is left to adapt."
            )
        return cls(shapes, places, transposed)

    def fresh(self, seed: int) -> dict[str, tuple[jax.Array, jax.Array]]:
        """A uniform in +-1 / sqrt(in), as PEFT's; B 0, so that the model begins as it is."""
        keys = jax.random.split(jax.random.key(seed), len(self.shapes))
        return {
            module: (jax.random.uniform(key, a, minval=-(a[1] ** -0.5), maxval=a[1] ** -0.5), jnp.zeros(b))
            for key, (module, (a, b)) in zip(keys, sorted(self.shapes.items()), strict=True)
        }

    def applied(self, params: Any, matrices: Any, scale: float) -> Any:
        """The model's parameters with the changes in them. Pure."""
        blocks = [{room: dict(of) if isinstance(of, dict) else of for room, of in b.items()} for b in params["blocks"]]
        for (_, block, room, name), (module, layout, shape) in self.places.items():
            a, b = matrices[module]
            change = scale * (b @ a)
            value = layout.read(change.T if self.transposed else change, shape)
            before = blocks[block][room][name]
            blocks[block][room][name] = (before.astype(jnp.float32) + value).astype(before.dtype)
        return params | {"blocks": blocks}
