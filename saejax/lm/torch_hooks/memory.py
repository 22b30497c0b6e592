"""A module that a program holds: taken out of what wraps it, its tensors read, its weights named by a digest."""

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Collection, ItemsView, KeysView
from typing import Any

import numpy as np

from saejax.core.arrays import as_array
from saejax.core.errors import ConfigError, DataError
from saejax.lm.torch_hooks.hooks import evaluating, results_for

# {a module that is another one, run in its way: where it has that}; and where an object that is no module has its own.
_RUNNERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
_HOLDERS = ("_model", "_module", "model")
_FLOATS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# Of a configuration, what decides no number.
_UNDECIDING = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
_ADAPTERS = re.compile(r"\.(base_layer|lora_\w+)(\.|$)")
# The part of the norm of a token's logits that rounding may change, where one of two computations has this dtype.
ROUNDING = {"float64": 1e-4, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
_TOKENS = 16  # of the two texts by which a model is compared with its module


def held_module(model: Any) -> Any:
    """The PyTorch module that `model` is or, as nnsight's models do, holds; None for anything else."""
    torch = sys.modules.get("torch")
    if torch is None or isinstance(model, str):
        return None
    inner = (inspect.getattr_static(model, name, None) for name in _HOLDERS)
    module = model if isinstance(model, torch.nn.Module) else next((m for m in inner if _is_module(torch, m)), None)
    while (runs := _RUNNERS.get(type(module).__name__)) is not None:
        module = getattr(module, runs)
    return module


def _is_module(torch: Any, value: Any) -> bool:
    return isinstance(value, torch.nn.Module)


def check_tensors(module: Any) -> None:
    """Raises DataError for a module without parameters, or with some that have no numbers."""
    devices = {str(parameter.device) for parameter in module.parameters()}
    if not devices:
        raise DataError(f"{type(module).__name__} has no parameters; give a module that holds its weights.")
    if "meta" in devices:
        raise DataError(
            f"{type(module).__name__} has parameters on the device meta, which have no numbers. Load its weights first "
            "(nnsight: dispatch=True; accelerate: without offloading)."
        )


def config_json_of(module: Any) -> dict[str, Any]:
    """The config.json that transformers would write of the module; {} for a module of another kind."""
    config: Any = getattr(module, "config", None)
    return dict(json.loads(config.to_json_string())) if hasattr(config, "to_json_string") else {}


def why_not_decoded(module: Any, config_json: dict[str, Any], known: Collection[str]) -> str:
    """The reason, as the end of a sentence, why the JAX decoder does not read a module; empty where it does.

    Args:
        known: each `model_type` that the decoder has.
    """
    transformers, kind = sys.modules.get("transformers"), type(module).__name__
    if name := next((name for name in module.state_dict() if _ADAPTERS.search(name)), ""):
        return f"{kind} has an adapter that is not merged ({name}): give model.merge_and_unload()"
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return f"{kind} is no model of transformers"
    if config_json["model_type"] not in known:
        return f"{kind} is of model_type {config_json['model_type']!r}, and there are {', '.join(known)}"
    return "" if module.get_output_embeddings() is not None else f"{kind} has no head over the vocabulary"


def digest_of(module: Any, config_json: dict[str, Any]) -> str:
    """sha256 of the class, all parameters and buffers that a checkpoint would hold, and the configuration."""
    deciding = {key: value for key, value in config_json.items() if key not in _UNDECIDING}
    digest = hashlib.sha256(json.dumps([type(module).__qualname__, deciding], sort_keys=True).encode())
    for name, tensor in sorted(ModuleTensors(module).items()):
        numbers = tensor.detach().cpu().contiguous().reshape(-1).view(sys.modules["torch"].uint8).numpy()
        header = f"{name} {tensor.dtype} {list(tensor.shape)} "
        digest.update(header.encode() + hashlib.sha256(numbers.data).digest())
    return digest.hexdigest()


class ModuleTensors:
    """The tensors of a module's state by name, read as those of a file are; what is read is a copy."""

    def __init__(self, module: Any) -> None:
        self._tensors = {name: value for name, value in module.state_dict().items() if hasattr(value, "dtype")}

    def items(self) -> ItemsView[str, Any]:
        return self._tensors.items()

    @property
    def names(self) -> KeysView[str]:
        return self._tensors.keys()

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """(shape, type of the numbers) of a tensor."""
        kind = str(self._tensors[name].dtype).removeprefix("torch.")
        return tuple(self._tensors[name].shape), _FLOATS.get(kind, kind)

    def holds_floats(self, name: str) -> bool:
        return self.header(name)[1] in _FLOATS.values()

    def read(self, name: str) -> np.ndarray:
        return np.array(as_array(self._tensors[name], name))

    def are_equal(self, first: str, second: str) -> bool:
        """True where the numbers of two tensors are the same."""
        a, b = self._tensors[first], self._tensors[second]
        return a.shape == b.shape and bool((a == b.to(a.device)).all())


def sampled_results(module: Any, vocabulary: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(two texts of ids [2, T], what the module gives for them, float32 [2, T, V]), T at most `length`.

    Raises:
        DataError: it does not run.
    """
    # A model of images looks for them where their token stands.
    named = [value for key, value in config_json_of(module).items() if re.search(r"_token_(id|index)$", key)]
    ids = [i for i in range(vocabulary) if i not in named]
    tokens = np.random.default_rng(0).choice(ids, (2, min(_TOKENS, length))).astype(np.int64)
    with evaluating(module):
        return tokens, results_for(module, tokens)


def rounding_of(module: Any) -> float:
    """The part of the norm of a token's logits that the module's own arithmetic may change."""
    import torch

    products = {"high": "float16", "medium": "bfloat16"}.get(torch.get_float32_matmul_precision(), "float32")
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    return max(ROUNDING[products], ROUNDING[dtype])


def check_place(module: Any, dtype: str, device: str) -> str:
    """The module's dtype. Raises ConfigError for another than `dtype` or `device`, if not empty, or several devices."""
    weight, kind = next(module.parameters()), type(module).__name__
    there, number = weight.device, str(weight.dtype).removeprefix("torch.")
    if len(devices := {str(parameter.device) for parameter in module.parameters()}) > 1:
        raise ConfigError(
            f"{kind} lies on several devices ({', '.join(sorted(devices))}), and hooks watch one. Move it to one by "
            "module.to()."
        )
    if device not in ("", there.type, str(there)):
        raise ConfigError(f"lm.device is {device!r}, and {kind} in memory is on {there}. Move it by module.to().")
    if dtype not in ("", number):
        raise ConfigError(f"lm.dtype is {dtype!r}, and {kind} in memory has {number}. Change it by module.to().")
    return number
