"""The shape of a language model: sizes, parameters and work, by its configuration alone.

parameters            of one block, and of everything outside of the blocks
operations of a row   2 S P for P parameters that S tokens meet, and 4 S^2 H D a block for attention
key-value cache       2 S K D a block: K heads of keys and values, D numbers each
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Protocol

from saejax.lm.conventions import DecoderConfig

_IN_BLOCK = re.compile(r"blocks\.(\d+)\.(\w+)")


class PointNames(Protocol):
    """Resolves hook points and knows their widths."""

    def hook_points(self) -> Mapping[str, int]: ...
    def hook_point(self, name: str) -> str: ...


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of one language model, of the JAX decoder or of PyTorch.

    Attributes:
        model: the id or folder.
        block, outer: parameters of one block, and of all outside of the blocks.
        kv_heads, d_head, n_head: of attention; 0 where PyTorch runs the model and it does not say.
        names: resolves hook points and knows their widths.
        config: the JAX decoder's; None where PyTorch runs the model.
        note: what to know of where this is from; empty where it is the model's own config.json.
    """

    model: str
    n_layer: int
    d_model: int
    d_mlp: int
    n_head: int
    kv_heads: int
    d_head: int
    vocab_size: int
    context_length: int
    block: int
    outer: int
    names: PointNames
    config: DecoderConfig | None
    note: str = ""

    @property
    def n_parameters(self) -> int:
        return self.outer + self.n_layer * self.block

    def depth(self, names: tuple[str, ...]) -> int:
        """Number of blocks that run for these hook points."""
        matches = [_IN_BLOCK.fullmatch(name) for name in names]
        if not matches or not all(matches):
            return self.n_layer
        return max(int(match[1]) + (match[2] != "resid_pre") for match in matches if match)

    def operations(self, length: int, depth: int | None = None) -> float:
        """Floating-point operations of a row of `length` tokens; without `depth` of the whole model, with logits."""
        blocks = self.n_layer if depth is None else depth
        attention = 4 * length**2 * self.n_head * self.d_head
        logits = 2 * length * self.d_model * self.vocab_size if depth is None else 0
        return blocks * (2 * length * self.block + attention) + logits

    def cache_bytes(self, length: int, width: int) -> int:
        """Bytes of the keys and values of one row of `length` tokens, in numbers of `width` bytes."""
        return 2 * self.n_layer * length * self.kv_heads * self.d_head * width
