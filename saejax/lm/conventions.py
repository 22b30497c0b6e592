"""The differences between decoder architectures, as data: `DecoderConfig`.

`families.py` reads it from a checkpoint's config.json, `parameters.py` derives the parameters from it, and
`decoder.py` computes what it says. None of those two knows a family's name.
"""

import dataclasses

import numpy as np

from saejax.core.errors import DataError

# Published models have little more than a hundred. A file that claims a million costs minutes to list.
MOST_LAYERS = 4096
_SIZES = ("d_model", "n_head", "kv_heads", "d_head", "d_mlp", "vocab_size", "context_length")
_FLAGS = (
    "tied_embeddings",
    "qkv_bias",
    "attn_out_bias",
    "mlp_bias",
    "unembed_bias",
    "qk_norm",
    "gated_mlp",
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
class DecoderConfig:
    """Shapes and conventions of one decoder; always read from the checkpoint. The defaults are GPT-2's.

    Attributes:
        activation: of the MLP; a key of `decoder.ACTIVATIONS`.
        n_kv_head: heads of keys and values, each shared by n_head / n_kv_head query heads; None: n_head.
        norm: `layer` (mean subtracted, a shift) or `rms`. A scale stored as w of 1 + w has its 1 added on reading.
        residual: `sequential` (the MLP reads resid_mid), `parallel` (it reads resid_pre through a norm of its own), or
            `parallel_one_norm` (it reads what attention reads).
        post_norms: what attention and MLP add to the residual stream is normed once more.
        rope: rotary positions; None: a table of learned ones.
        windows: for each layer the number of positions that attention sees, itself included; None: all. Empty: all.
        attn_scale: factor on q k^T; None: d_head^-1/2.
        attn_softcap, logit_softcap: cap in x -> cap tanh(x / cap), on attention scores and logits; None: no cap.
        embed_scale: factor on the token embeddings.

    Raises:
        DataError: a value that no decoder can have.
    """

    n_layer: int
    d_model: int
    n_head: int
    d_head: int
    d_mlp: int
    vocab_size: int
    context_length: int
    activation: str
    norm_eps: float
    tied_embeddings: bool
    n_kv_head: int | None = None
    norm: str = "layer"
    residual: str = "sequential"
    post_norms: bool = False
    rope: Rope | None = None
    windows: tuple[int | None, ...] = ()
    qkv_bias: bool = True
    attn_out_bias: bool = True
    mlp_bias: bool = True
    unembed_bias: bool = False
    qk_norm: bool = False
    gated_mlp: bool = False
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
        if self.rope is not None and self.rope.width > self.d_head:
            raise DataError(f"config.json: {self.rope.width} numbers of each head are rotated; it has {self.d_head}.")
        if self.windows and len(self.windows) != self.n_layer:
            raise DataError(f"config.json: {len(self.windows)} attention windows for {self.n_layer} layers.")
        for window in set(self.windows) - {None}:
            check_size("sliding_window", window)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head
