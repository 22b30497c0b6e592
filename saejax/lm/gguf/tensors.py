"""The tensors of a GGUF file under the names, shapes and orders of Hugging Face's checkpoints.

    W = dequantize(bytes), then what the conversion to GGUF did is undone:
    llama, mistral, smollm3   rows of q and k from pairs side by side to halves: [h, d/2, 2, in] -> [h, 2, d/2, in]
    gemma, gemma2, gemma3     the norms' weights minus 1, which the conversion adds
    gpt2                      weights of the blocks from [out, in] to Conv1D's [in, out]

Source: convert_hf_to_gguf.py of llama.cpp.
"""

import functools
import math
import re
from collections.abc import KeysView, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from saejax.core.errors import ConfigError, DataError
from saejax.core.extras import installing
from saejax.lm.gguf.header import Header, Stored, read_header

# The file in a folder that `as_folder` makes.
GGUF = "model.gguf"

# Llama's parts of a block; what a family calls otherwise, it overrides.
_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_GEMMA2 = _LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OUTSIDE_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_IN_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Frequencies of Llama 3's positions: the configuration has them.
FREQUENCIES = "rope_freqs.weight"


class GgufTensors:
    """As `TensorFiles`, of a GGUF file: each tensor is dequantized when it is read.

    Args:
        config: config.json of the folder, as `config_json` gives it.

    Raises:
        DataError: it cannot be read, or a tensor's numbers have no room in it.
        ConfigError: the gguf package is not installed.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self._header = read_header(path.resolve())  # of the file itself, not of a folder's link
        self._content = np.memmap(path, np.uint8, "r")
        self._heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
        self._family = config["model_type"]
        self._names = {_their_name(self._family, name): name for name in self._header.tensors if name != FREQUENCIES}

    @property
    def names(self) -> KeysView[str]:
        return self._names.keys()

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        stored = self._header.tensors[self._names[name]]
        shape = stored.shape[::-1] if self._is_conv(name, stored) else stored.shape
        return shape, _quantization(self._header.path, self._names[name], stored).name

    def holds_floats(self, name: str) -> bool:
        return not re.fullmatch(r"I\d+", self.header(name)[1])

    def read(self, name: str) -> np.ndarray:
        own = self._names[name]
        stored = self._header.tensors[own]
        value = dequantized(self._header, self._content, own)
        if self._is_conv(name, stored):
            return value.T
        if self._family in ("llama", "mistral", "smollm3") and (kind := re.search(r"\.([qk])_proj\.", name)):
            return _halves(value, self._heads[kind[1] == "k"], f"{self._header.path}: {own}")
        if self._family.startswith("gemma") and name.endswith("norm.weight"):
            return value - 1
        return value

    def are_equal(self, first: str, second: str) -> bool:
        return self.header(first)[0] == self.header(second)[0] and np.array_equal(self.read(first), self.read(second))

    def count(self) -> tuple[int, int]:
        return len(self._names), sum(math.prod(self.header(name)[0]) for name in self._names)

    def _is_conv(self, name: str, stored: Stored) -> bool:
        return self._family == "gpt2" and ".h." in name and len(stored.shape) == 2


def _their_name(family: str, name: str) -> str:
    """The name in a Hugging Face checkpoint; one that has none stays, and is then a tensor without a place."""
    blocks = {"gpt2": _GPT2, "gemma2": _GEMMA2, "gemma3_text": _GEMMA2, "olmo2": _GEMMA2}.get(family, _LLAMA)
    if (found := _IN_BLOCK.fullmatch(name)) and found[2] in blocks:
        return f"{'transformer.h' if family == 'gpt2' else 'model.layers'}.{found[1]}.{blocks[found[2]]}.{found[3]}"
    stem, _, part = name.rpartition(".")
    outside = _OUTSIDE_GPT2 if family == "gpt2" else _OUTSIDE
    return f"{outside[stem]}.{part}" if stem in outside else name


def _halves(value: np.ndarray, heads: Any, what: str) -> np.ndarray:
    if type(heads) is not int or heads <= 0 or value.shape[0] % (2 * heads):
        raise DataError(f"{what}: {value.shape[0]} rows are not {heads} heads of an even width.")
    return value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def dequantized(header: Header, content: np.ndarray, name: str) -> np.ndarray:
    """The numbers of a tensor, float32 unless it holds float16 or float64, in the file's order.

    Raises:
        DataError: it has no room in the file, or the package cannot expand its quantization.
    """
    stored = header.tensors[name]
    quantization = _quantization(header.path, name, stored)
    block, size = _library().GGML_QUANT_SIZES[quantization]
    blocks, left = divmod(stored.shape[-1], block)
    n_bytes = math.prod(stored.shape[:-1]) * blocks * size
    if left or stored.start + n_bytes > content.size:
        raise DataError(
            f"{header.path}: tensor {name!r} ({quantization.name}) of the shape {stored.shape} has no room: its "
            f"{n_bytes:,} bytes from {stored.start:,} on, in blocks of {block}, in a file of {content.size:,}. Fetch "
            "it again."
        )
    raw = content[stored.start : stored.start + n_bytes].reshape(*stored.shape[:-1], blocks * size)
    try:
        value: np.ndarray = _library().dequantize(raw, quantization).reshape(stored.shape)
    except (ValueError, NotImplementedError) as error:  # what the library says of a kind that it cannot expand
        raise DataError(
            f"{header.path}: tensor {name!r} cannot be read: the package gguf does not expand {quantization.name} "
            f"({error}). Give another quantization, such as Q8_0."
        ) from None
    return value


def _quantization(path: Path, name: str, stored: Stored) -> Any:
    try:
        return _library().GGMLQuantizationType(stored.kind)
    except ValueError:
        raise DataError(
            f"{path}: tensor {name!r} has the type {stored.kind}, which the package gguf does not know. Install a "
            "newer one, or give another quantization, such as Q8_0."
        ) from None


@functools.cache
def _library() -> Any:
    try:
        from gguf import quants
    except ImportError:
        raise ConfigError(f"Models in GGUF files need the package gguf: {installing('gguf')}") from None
    return quants
