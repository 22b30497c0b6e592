"""The differences between decoder architectures, as data: `DecoderConfig`, and the parameters that it implies.

`families.py` reads it from a checkpoint's config.json, and `decoder.py` computes what it says, without the name of any
family. Names, shapes, logical axes and initial distribution of the parameters are one description, which
initialisation, reading of checkpoints and sharding share. It is no Flax module: the arrays come from files, tensor by
tensor and already sharded, before any module could run.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from saejax.core.errors import DataError
from saejax.lm.points import DecoderPoints
from saejax.parallel import sharding_of

# Published models have little more than a hundred. A file that claims a million costs minutes to list.
MOST_LAYERS = 4096
_SIZES = ("d_model", "n_head", "kv_heads", "d_head", "d_mlp", "vocab_size", "context_length")
_BY_LAYER = ("ropes", "windows", "sparse")
_FLAGS = (
    "tied_embeddings",
    "qkv_bias",
    "attn_out_bias",
    "mlp_bias",
    "unembed_bias",
    "qk_norm",
    "qk_norm_of_all",
    "gated_mlp",
    "pre_norms",
    "post_norms",
)
_TINY, _HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
NORMS = ("layer", "rms")
RESIDUALS = ("sequential", "parallel", "parallel_one_norm")


def check_size(name: str, value: object, largest: int = 2**20) -> int:
    """`value`, if it is an integer in [1, largest]: a hostile config.json is refused before anything is allocated."""
    if type(value) is not int or not 0 < value <= largest:
        power = f"2^{largest.bit_length() - 1}"
        raise DataError(f"config.json: {name} is {value!r}; it must be a positive integer up to {power}.")
    return value


def check_positive(name: str, value: object) -> float:
    """`value` as a float, if it is a number above zero that float32, in which the decoder computes, can hold."""
    # Not a bool, which Python counts among the integers: `true` is no size.
    if isinstance(value, bool) or not isinstance(value, int | float) or not _TINY <= float(value) <= _HUGE:
        raise DataError(f"config.json: {name} is {value!r}; it must be a finite number above 0, of float32's range.")
    return float(value)


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Slow frequencies are divided by `factor`, fast ones kept, those between interpolated (Llama 3.1, 2024).

    Slow: less than `low` turns in `context` positions, the length of pre-training; fast: more than `high`.
    """

    low: float
    high: float
    context: int

    def __post_init__(self) -> None:
        check_positive("rope low_freq_factor", self.low)
        check_size("rope original_max_position_embeddings", self.context)
        if not check_positive("rope high_freq_factor", self.high) > self.low:
            raise DataError(f"config.json: rope high_freq_factor {self.high} must be above low_freq_factor {self.low}.")


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al. 2021) on the first `width` numbers of each head, in two halves (not pairs).

    Pair j of `width / 2` turns by theta^(-2j / width) a position, divided by `factor`: for all j where `llama3` is None
    (linear scaling), otherwise as `Llama3Scaling` says.
    """

    theta: float
    width: int
    factor: float = 1.0
    llama3: Llama3Scaling | None = None

    def __post_init__(self) -> None:
        check_positive("rope theta", self.theta)
        check_positive("rope factor", self.factor)
        check_size("the rotary part of a head", self.width, 2**14)
        if self.width % 2:
            raise DataError(f"config.json: {self.width} numbers of each head are rotated; it must be an even number.")
        with np.errstate(over="ignore"):
            turned = float(self.frequencies().max(initial=0)) * 2**20  # the longest context
        if not turned <= _HUGE:
            raise DataError(f"config.json: rope theta {self.theta} and factor {self.factor} turn beyond all numbers.")

    def frequencies(self) -> np.ndarray:
        """Radians a position, float32 [width / 2]."""
        plain = self.theta ** (-np.arange(0, self.width, 2, dtype=np.float64) / self.width)
        unscaled = np.zeros_like(plain)
        if self.llama3 is not None:
            turns = self.llama3.context * plain / (2 * np.pi)
            unscaled = np.clip((turns - self.llama3.low) / (self.llama3.high - self.llama3.low), 0, 1)
        return (plain * (unscaled + (1 - unscaled) / self.factor)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Experts:
    """Of `count` MLPs, each `width` wide, a router chooses `used` for each token; `experts.py` has the equations."""

    count: int
    used: int
    width: int
    normed: bool

    def __post_init__(self) -> None:
        check_size("the number of experts", self.count, 2**12)
        check_size("num_experts_per_tok", self.used, self.count)
        check_size("the width of an expert", self.width)
        if type(self.normed) is not bool:
            raise DataError(f"config.json: norm_topk_prob is {self.normed!r}; it must be true or false.")


@dataclasses.dataclass(frozen=True)
class DecoderConfig(DecoderPoints):
    """Shapes and conventions of one decoder; always read from the checkpoint. The defaults are GPT-2's.

    Attributes:
        activation: of the MLP; a key of `decoder.ACTIVATIONS`.
        norm: `layer` (mean subtracted, a shift) or `rms`. A scale stored as w of 1 + w has its 1 added on reading.
        rope: rotary positions; None: a table of learned ones.
        ropes: for each layer its rotary positions, where they differ; None: that layer has none. Empty: `rope` in all.
        windows: for each layer the number of positions that attention sees, itself included; None: all. Empty: all.
        qk_norm, qk_norm_of_all: queries and keys are normed, each head by itself, or all heads of a token as one.
        experts: of the layers that are `sparse`.
        attn_scale: factor on q k^T; None: d_head^-1/2.
        attn_softcap, logit_softcap: cap in x -> cap tanh(x / cap), on attention scores and logits; None: no cap.
        embed_scale: factor on the token embeddings.

    Raises:
        DataError: a value that no decoder can have.
    """

    activation: str
    norm_eps: float
    tied_embeddings: bool
    norm: str = "layer"
    rope: Rope | None = None
    ropes: tuple[Rope | None, ...] = ()
    windows: tuple[int | None, ...] = ()
    qkv_bias: bool = True
    attn_out_bias: bool = True
    mlp_bias: bool = True
    unembed_bias: bool = False
    qk_norm: bool = False
    qk_norm_of_all: bool = False
    gated_mlp: bool = False
    experts: Experts | None = None
    attn_scale: float | None = None
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    embed_scale: float = 1.0

    def __post_init__(self) -> None:
        for field in _SIZES:
            check_size(field, getattr(self, field))
        check_size("n_layer", self.n_layer, MOST_LAYERS)
        for field in _FLAGS:
            if type(getattr(self, field)) is not bool:
                raise DataError(f"config.json: {field} is {getattr(self, field)!r}; it must be true or false.")
        for field in ("attn_scale", "attn_softcap", "logit_softcap", "embed_scale"):
            if getattr(self, field) is not None:
                check_positive(field, getattr(self, field))
        if type(self.norm_eps) not in (int, float) or not 0 <= self.norm_eps < 1:
            raise DataError(f"config.json: the norm's epsilon is {self.norm_eps!r}; it must be a number in [0, 1).")
        if self.norm not in NORMS or self.residual not in RESIDUALS:
            raise DataError(f"norm {self.norm!r} is one of {NORMS}, residual {self.residual!r} one of {RESIDUALS}.")
        if self.n_head % self.kv_heads:
            raise DataError(f"config.json: {self.n_head} heads cannot share {self.kv_heads} heads of keys and values.")
        for rope in set(self.layer_ropes):
            if rope is not None and rope.width > self.d_head:
                raise DataError(f"config.json: {rope.width} numbers of each head are rotated; it has {self.d_head}.")
        for field in _BY_LAYER:
            if len(getattr(self, field)) not in (0, self.n_layer):
                raise DataError(f"config.json: {len(getattr(self, field))} {field} for {self.n_layer} layers.")
        for window in set(self.windows) - {None}:
            check_size("sliding_window", window)
        if any(self.sparse) and self.experts is None:
            raise DataError("Layers are sparse, yet there are no experts.")
        self._count_parameters()

    def _count_parameters(self) -> None:
        sizes = {kind: _numbers(block_parameters(self, kind)) for kind in dict.fromkeys(self.layer_sparse)}
        met = dict(sizes)
        if self.experts is not None and True in met:
            met[True] -= 3 * (self.experts.count - self.experts.used) * self.d_model * self.experts.width
        block = sum(met[kind] for kind in self.layer_sparse) // self.n_layer
        idle = sum(sizes[kind] for kind in self.layer_sparse) - self.n_layer * block
        for field, value in (("outer", _numbers(outer_parameters(self))), ("block", block), ("idle", idle)):
            object.__setattr__(self, field, value)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """`windows`, one for each layer."""
        return self.windows or (None,) * self.n_layer

    @property
    def layer_ropes(self) -> tuple[Rope | None, ...]:
        """`ropes`, one for each layer; None: learned positions, or none."""
        return self.ropes or (self.rope,) * self.n_layer

    def untied(self) -> "DecoderConfig":
        """The same with an unembedding of its own."""
        return dataclasses.replace(self, tied_embeddings=False)

    def of_first(self, n_layer: int) -> "DecoderConfig":
        """The model of its first layers."""
        return dataclasses.replace(self, n_layer=n_layer, **{x: getattr(self, x)[:n_layer] for x in _BY_LAYER})


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array: its shape, a logical name for each axis (None: never sharded), its mean and deviation at the start."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    mean: float = 0.0
    std: float = 0.0


ParameterPath = tuple[str | int, ...]  # as in ("blocks", 3, "attn", "W_Q")
Spec = dict[str, Any]  # a tree of Parameter, shaped as the parameters are


def outer_parameters(c: DecoderConfig) -> Spec:
    """All outside the blocks: `W_E` [V, M], `W_pos` [context, M], `ln_final`, `W_U` [M, V], `b_U` [V]."""
    spec: Spec = {"W_E": Parameter((c.vocab_size, c.d_model), ("vocab", "d_model"), std=0.02)}
    if c.rope is None:
        spec["W_pos"] = Parameter((c.context_length, c.d_model), (None, "d_model"), std=0.01)
    spec["ln_final"] = _norm(c, c.d_model, "d_model")
    if not c.tied_embeddings:
        spec["W_U"] = Parameter((c.d_model, c.vocab_size), ("d_model", "vocab"), std=0.02)
    if c.unembed_bias:
        spec["b_U"] = Parameter((c.vocab_size,), ("vocab",))
    return spec


def block_parameters(c: DecoderConfig, sparse: bool = False) -> Spec:
    """One block; all of a kind have the same. Attention's are per head: `W_Q` [M, H, D], `W_O` [H, D, M]."""
    spec: Spec = {"attn": _attention(c)}
    if c.pre_norms:
        spec["ln1"] = _norm(c, c.d_model, "d_model")
    if c.pre_norms and c.residual != "parallel_one_norm":
        spec["ln2"] = _norm(c, c.d_model, "d_model")
    spec |= {"experts": _experts(c)} if sparse else {"mlp": _mlp(c)}
    if c.post_norms:
        spec |= {"ln1_post": _norm(c, c.d_model, "d_model"), "ln2_post": _norm(c, c.d_model, "d_model")}
    return spec


def leaves(c: DecoderConfig) -> Iterator[tuple[ParameterPath, Parameter]]:
    """(path, parameter) of the whole tree one by one: nothing as long as the number of layers is ever held."""
    yield from _flattened(outer_parameters(c))
    blocks = {kind: list(_flattened(block_parameters(c, kind))) for kind in dict.fromkeys(c.layer_sparse)}
    for i, kind in enumerate(c.layer_sparse):
        yield from ((("blocks", i, *path), parameter) for path, parameter in blocks[kind])


def tree_of(c: DecoderConfig, leaf: Callable[[ParameterPath, Parameter], Any]) -> dict[str, Any]:
    """The tree of parameters, with `leaf` of each in its place, made one by one in the order of `leaves`."""
    tree: dict[str, Any] = {"blocks": [{} for _ in range(c.n_layer)]}
    for path, parameter in leaves(c):
        at: Any = tree
        for part in path[:-1]:
            at = at[part] if isinstance(part, int) else at.setdefault(part, {})
        at[path[-1]] = leaf(path, parameter)
    return tree


def logical_axes(c: DecoderConfig) -> dict[str, Any]:
    """A tree like the parameters with a tuple of logical axis names for each array.

    The names are vocab, d_model, heads, kv_heads, d_head and d_mlp, and None for an axis that is never sharded.
    """
    return tree_of(c, lambda path, parameter: parameter.axes)


def shard_params(c: DecoderConfig, params: Any, mesh: Mesh) -> Any:
    """`params` on the mesh ("data", "latent"): heads, d_mlp and vocab over "latent" where they divide, else whole.

    `decoder.run` gives the same with them, up to the order of sums; jit it, and XLA adds the collectives.
    """
    shardings = tree_of(c, lambda path, parameter: sharding_of(mesh, parameter.shape, parameter.axes))
    return jax.tree.map(jax.device_put, params, shardings)


def _flattened(spec: Spec) -> Iterator[tuple[ParameterPath, Parameter]]:
    for name, value in spec.items():
        if isinstance(value, Parameter):
            yield (name,), value
        else:
            yield from (((name, *path), parameter) for path, parameter in _flattened(value))


def _numbers(spec: Spec) -> int:
    return sum(math.prod(parameter.shape) for _, parameter in _flattened(spec))


def _norm(c: DecoderConfig, size: int, axis: str | None) -> Spec:
    scale: Spec = {"w": Parameter((size,), (axis,), mean=1.0)}
    return scale | ({"b": Parameter((size,), (axis,))} if c.norm == "layer" else {})


def _attention(c: DecoderConfig) -> Spec:
    spec: Spec = {}
    for name, count, axis in (("Q", c.n_head, "heads"), ("K", c.kv_heads, "kv_heads"), ("V", c.kv_heads, "kv_heads")):
        spec[f"W_{name}"] = Parameter((c.d_model, count, c.d_head), ("d_model", axis, "d_head"), std=0.02)
        if c.qkv_bias:
            spec[f"b_{name}"] = Parameter((count, c.d_head), (axis, "d_head"))
    spec["W_O"] = Parameter((c.n_head, c.d_head, c.d_model), ("heads", "d_head", "d_model"), std=_residual_std(c))
    if c.attn_out_bias:
        spec["b_O"] = Parameter((c.d_model,), ("d_model",))
    if c.qk_norm:
        spec |= {"q_norm": _norm(c, c.d_head, "d_head"), "k_norm": _norm(c, c.d_head, "d_head")}
    if c.qk_norm_of_all:
        spec |= {"q_norm": _norm(c, c.n_head * c.d_head, None), "k_norm": _norm(c, c.kv_heads * c.d_head, None)}
    return spec


def _mlp(c: DecoderConfig) -> Spec:
    """`W_in` [M, F] is the linear branch and `W_gate` [M, F] the one with the activation, where there are two."""
    names = ("in", "gate") if c.gated_mlp else ("in",)
    spec: Spec = {f"W_{name}": Parameter((c.d_model, c.d_mlp), ("d_model", "d_mlp"), std=0.02) for name in names}
    spec["W_out"] = Parameter((c.d_mlp, c.d_model), ("d_mlp", "d_model"), std=_residual_std(c))
    if c.mlp_bias:
        spec |= {f"b_{name}": Parameter((c.d_mlp,), ("d_mlp",)) for name in names}
        spec["b_out"] = Parameter((c.d_model,), ("d_model",))
    return spec


def _experts(c: DecoderConfig) -> Spec:
    """`W_router` [M, E], and of each expert what `_mlp` has: `W_gate` and `W_in` [E, M, F], `W_out` [E, F, M]."""
    assert c.experts is not None
    count, width = c.experts.count, c.experts.width
    into, out = (count, c.d_model, width), (count, width, c.d_model)
    return {
        "W_router": Parameter((c.d_model, count), ("d_model", None), std=0.02),
        **{f"W_{name}": Parameter(into, (None, "d_model", "d_mlp"), std=0.02) for name in ("in", "gate")},
        "W_out": Parameter(out, (None, "d_mlp", "d_model"), std=_residual_std(c)),
    }


def _residual_std(c: DecoderConfig) -> float:
    return 0.02 / (2 * c.n_layer) ** 0.5
