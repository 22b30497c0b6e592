"""Models in GGUF files, as llama.cpp and what is built on it keep them."""

from saejax.lm.gguf.folder import as_folder
from saejax.lm.gguf.tensors import GGUF, GgufTensors

__all__ = ["GGUF", "GgufTensors", "as_folder"]
