"""The sizes of a language model, of the JAX decoder or of PyTorch, and what follows from them.

parameters            of one block, and of everything outside of the blocks
operations of a row   2 S P for P parameters that S tokens meet, and 4 S^2 H D a block for attention
key-value cache       2 S K D a block: K heads of keys and values, D numbers each
"""

import abc
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

_IN_BLOCK = re.compile(r"blocks\.(\d+)\.(\w+)")


@dataclasses.dataclass(frozen=True)
class ModelShape(abc.ABC):
    """Sizes of one language model: every model's `config` has them.

    Attributes:
        n_head, d_head, d_mlp: 0 where PyTorch runs the model and it does not say.
        n_kv_head: heads of keys and values, each shared by n_head / n_kv_head query heads; None: n_head.
        block, outer: parameters of one block that a token meets (their mean), and of all outside of the blocks.
        idle: parameters of all blocks that are not among those, as of experts that a token does not meet.
        model: the id or folder, where it is known.
        note: what to know of where this is from; empty where it is the model's own config.json.
    """

    n_layer: int
    d_model: int
    n_head: int
    d_head: int
    d_mlp: int
    vocab_size: int
    context_length: int
    n_kv_head: int | None = dataclasses.field(default=None, kw_only=True)
    block: int = dataclasses.field(default=0, kw_only=True, compare=False, repr=False)
    outer: int = dataclasses.field(default=0, kw_only=True, compare=False, repr=False)
    idle: int = dataclasses.field(default=0, kw_only=True, compare=False, repr=False)
    model: str = dataclasses.field(default="", kw_only=True, compare=False, repr=False)
    note: str = dataclasses.field(default="", kw_only=True, compare=False, repr=False)

    @abc.abstractmethod
    def hook_points(self) -> dict[str, int]:
        """{hook point: width}: those with one vector for each token."""

    @abc.abstractmethod
    def hook_point(self, name: str) -> str:
        """The canonical name of a hook point. Raises ConfigError where there is none."""

    def start_of(self, names: Sequence[str]) -> str:
        """The last hook point before which no edit at these is felt, whose activations a pass can go on from.

        Empty where each pass begins with the tokens.
        """
        return ""

    def in_one_line(self, lm: Any, family: str, backend: str, dtype: str) -> str:
        """Name, family, sizes and backend of the model `lm` of this shape, for its repr."""
        sizes = f"{self.n_layer} layers, width {self.d_model:,}, vocabulary {self.vocab_size:,}"
        name = lm.identity.get("model", "")
        return f"{type(lm).__name__}({name or 'no name'}: {family}, {sizes}, {backend}, {dtype})"

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def n_parameters(self) -> int:
        """Each counted once, also where embedding and unembedding are tied."""
        return self.outer + self.n_layer * self.block + self.idle

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
