"""Forms of a checkpoint's tensors, and tables that say which tensor holds which parameter.

A table is {parameter's path: (tensor name, layout)}; `{}` in a name stands for the block's number.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The form in which a checkpoint holds one parameter: its shape in the file, and its way from and to there.

    A tensor that holds several parameters has what `write` gives for each stacked along `axis`. Where one lies in
    many tensors, one for each number of its first axis, this is each of them; the tensors' name has a second `{}`.

    Attributes:
        read: of numpy's arrays, and under a trace of JAX's, as adapters are trained.
    """

    stored: Callable[[Shape], Shape]
    read: Callable[[Any, Shape], Any]
    write: Callable[[np.ndarray, Shape], np.ndarray]
    axis: int | None = None
    many: bool = False


def _transposed(x: np.ndarray, stored: Shape) -> np.ndarray:
    """[in, out], either of them over several axes, as a Linear of `stored` = (out, in)."""
    return x.reshape(stored[::-1]).T


AS_IS = Layout(lambda shape: shape, lambda x, shape: x, lambda x, stored: x)
PLUS_ONE = Layout(lambda shape: shape, lambda x, shape: x.astype(np.float32) + 1, lambda x, stored: x - 1)
FLAT = Layout(lambda shape: (math.prod(shape),), lambda x, shape: x.reshape(shape), np.reshape)
# PyTorch's Linear holds [out, in]; GPT-2's Conv1D [in, out].
LINEAR = Layout(lambda shape: (math.prod(shape[1:]), shape[0]), lambda x, shape: x.T.reshape(shape), _transposed)
LINEAR_OF_HEADS = Layout(
    lambda shape: (shape[-1], math.prod(shape[:-1])), lambda x, shape: x.T.reshape(shape), _transposed
)
CONV_OF_HEADS = Layout(lambda shape: (math.prod(shape[:-1]), shape[-1]), lambda x, shape: x.reshape(shape), np.reshape)
# Of experts: a Linear for each, or one stack of them.
LINEAR_OF_EACH = dataclasses.replace(LINEAR, many=True)
STACK = Layout(
    lambda shape: (shape[0], shape[2], shape[1]), lambda x, shape: x.swapaxes(1, 2), lambda x, stored: x.swapaxes(1, 2)
)


def half(part: int) -> Layout:
    """A stack of Linears, (expert, two of them one below the other, in): part 0 or 1. It is only read."""

    def read(x: np.ndarray, shape: Shape) -> np.ndarray:
        return x[:, part * shape[2] : (part + 1) * shape[2]].swapaxes(1, 2)

    return dataclasses.replace(STACK, stored=lambda shape: (shape[0], 2 * shape[2], shape[1]), read=read)


def third(part: int) -> Layout:
    """Queries, keys and values side by side, [..., (qkv, head, D)]: part 0, 1 or 2."""

    def read(x: np.ndarray, shape: Shape) -> np.ndarray:
        return x.reshape(*shape[:-2], 3, *shape[-2:])[..., part, :, :]

    return Layout(
        lambda shape: (*shape[:-2], 3 * math.prod(shape[-2:])), read, lambda x, stored: x.reshape(*stored[:-1], -1), -2
    )


def third_of_each_head(part: int) -> Layout:
    """Queries, keys and values of each head side by side, [(head, qkv, D), ...]: part 0, 1 or 2."""

    def read(x: np.ndarray, shape: Shape) -> np.ndarray:
        return x.T.reshape(*shape[:-1], 3, shape[-1])[..., part, :]

    def write(x: np.ndarray, stored: Shape) -> np.ndarray:
        return np.moveaxis(x, (-2, -1), (0, 1))

    return Layout(lambda shape: (3 * math.prod(shape[-2:]), *shape[:-2]), read, write, 1)


Tensors = Mapping[str, tuple[str, Layout]]


def norm_tensors(names: Mapping[str, str], layout: Layout = AS_IS) -> dict[str, tuple[str, Layout]]:
    parts = {"w": ("weight", layout), "b": ("bias", AS_IS)}
    return {
        f"{ours}.{w}": (f"{theirs}.{part}", how) for ours, theirs in names.items() for w, (part, how) in parts.items()
    }


def linear_tensors(names: Mapping[str, str], layout: Layout, bias: Layout = AS_IS) -> dict[str, tuple[str, Layout]]:
    """{in `blocks`, name without W_ or b_: tensor name without .weight or .bias}."""
    out: dict[str, tuple[str, Layout]] = {}
    for ours, theirs in names.items():
        room, name = ours.rsplit(".", 1)
        out[f"{room}.W_{name}"] = (f"{theirs}.weight", layout)
        out[f"{room}.b_{name}"] = (f"{theirs}.bias", bias)
    return out


def fused_tensors(theirs: str, part: Callable[[int], Layout]) -> dict[str, tuple[str, Layout]]:
    out: dict[str, tuple[str, Layout]] = {}
    for i, name in enumerate("QKV"):
        out |= linear_tensors({f"blocks.attn.{name}": theirs}, part(i), part(i))
    return out


def separate_tensors(folder: str) -> dict[str, tuple[str, Layout]]:
    return linear_tensors({f"blocks.attn.{x}": f"{folder}.{x.lower()}_proj" for x in "QKV"}, LINEAR, FLAT)
