"""The names of a decoder's hook points and what stands there, by its configuration alone."""

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence

from saejax.core.errors import ConfigError
from saejax.lm.shape import ModelShape

HOOK_NAMES = ("resid_pre", "attn_z", "attn_out", "resid_mid", "mlp_in", "mlp_act", "mlp_out", "resid_post")

# Those whose vectors are added to the residual stream as they are, and the matrix, by room and name, through which the
# others are where no norm follows it. What stands at mlp_in is read and goes no further.
ADDED = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
ADDED_THROUGH = {"attn_z": ("attn", "W_O"), "mlp_act": ("mlp", "W_out")}

# TransformerLens names of the same places. (Its ln2.hook_normalized is not here: it is taken before the
# norm's own scale and shift, so it is another tensor than mlp_in.)
TRANSFORMER_LENS = {
    "hook_resid_pre": "resid_pre",
    "ln1.hook_scale": "ln1_scale",
    "attn.hook_pattern": "attn_pattern",
    "attn.hook_z": "attn_z",  # there [B, S, H, D], here flat
    "ln1_post.hook_scale": "ln1_post_scale",
    "hook_attn_out": "attn_out",
    "hook_resid_mid": "resid_mid",
    "ln2.hook_scale": "ln2_scale",
    "mlp.hook_post": "mlp_act",
    "ln2_post.hook_scale": "ln2_post_scale",
    "hook_mlp_out": "mlp_out",
    "hook_resid_post": "resid_post",
}
# In the order in which a block computes them.
_IN_BLOCK = (
    *("resid_pre", "ln1_scale", "attn_pattern", "attn_z", "ln1_post_scale", "attn_out", "resid_mid"),
    *("ln2_scale", "mlp_in", "mlp_act", "ln2_post_scale", "mlp_out", "resid_post"),
)
_FINAL_SCALE = ("ln_final_scale", "ln_final.hook_scale")


@dataclasses.dataclass(frozen=True)
class HookPoint:
    """One place in a model.

    Attributes:
        name: as in `blocks.6.resid_pre`.
        shape: of what one token has there; "S" stands for the tokens of its row.
        stored: whether it is one vector a token, which can be captured; otherwise `lm.run` watches and edits it.
        alias: TransformerLens's name, which is taken as well; empty where it has none for this tensor.
        module: the module's path where PyTorch runs the model, with .in or .out; empty in JAX.
    """

    name: str
    shape: tuple[int | str, ...]
    stored: bool = True
    alias: str = ""
    module: str = ""


@dataclasses.dataclass(frozen=True)
class DecoderPoints(ModelShape):
    """The hook points of the JAX decoder, by its configuration; no parameters are needed.

    Attributes:
        residual: `sequential` (the MLP reads resid_mid), `parallel` (it reads resid_pre through a norm of its own), or
            `parallel_one_norm` (it reads what attention reads).
        sparse: for each layer whether its MLP consists of experts; it has no mlp_act then. Empty: none does.
        pre_norms: attention and MLP read the residual stream through a norm; otherwise as it is.
        post_norms: what attention and MLP add to the residual stream is normed once more.
    """

    residual: str = dataclasses.field(default="sequential", kw_only=True)
    sparse: tuple[bool, ...] = dataclasses.field(default=(), kw_only=True)
    pre_norms: bool = dataclasses.field(default=True, kw_only=True)
    post_norms: bool = dataclasses.field(default=False, kw_only=True)

    def points(self) -> Iterator[HookPoint]:
        """All of them, in the order in which the model computes them."""
        theirs = {ours: name for name, ours in TRANSFORMER_LENS.items()}
        for i in range(self.n_layer):
            for name, shape in self._shapes(i).items():
                alias = f"blocks.{i}.{theirs[name]}" if name in theirs else ""
                yield HookPoint(f"blocks.{i}.{name}", shape, name in HOOK_NAMES, alias)
        ours, alias = _FINAL_SCALE
        yield HookPoint(ours, (1,), False, alias)

    @property
    def layer_sparse(self) -> tuple[bool, ...]:
        """`sparse`, one for each layer."""
        return self.sparse or (False,) * self.n_layer

    def _shapes(self, layer: int) -> dict[str, tuple[int | str, ...]]:
        """{name in a block: shape of one token's value}, without what this block does not have."""
        shapes: dict[str, tuple[int | str, ...]] = dict.fromkeys(_IN_BLOCK, (self.d_model,))
        shapes |= dict.fromkeys(("ln1_scale", "ln2_scale", "ln1_post_scale", "ln2_post_scale"), (1,))
        shapes |= {"attn_pattern": (self.n_head, "S"), "attn_z": (self.n_head, self.d_head), "mlp_act": (self.d_mlp,)}
        absent = ["ln2_scale"] if self.residual == "parallel_one_norm" else []
        absent += ["mlp_act"] if self.layer_sparse[layer] else []
        absent += [] if self.pre_norms else ["ln1_scale", "ln2_scale"]
        absent += [] if self.post_norms else ["ln1_post_scale", "ln2_post_scale"]
        return {name: shape for name, shape in shapes.items() if name not in absent}

    def hook_points(self) -> dict[str, int]:
        widths = dict.fromkeys(HOOK_NAMES, self.d_model) | {"mlp_act": self.d_mlp, "attn_z": self.n_head * self.d_head}
        points = ((i, name) for i in range(self.n_layer) for name in HOOK_NAMES)
        return {f"blocks.{i}.{x}": widths[x] for i, x in points if x != "mlp_act" or not self.layer_sparse[i]}

    def start_of(self, names: Sequence[str]) -> str:
        places = [name.removeprefix("blocks.").split(".", 1) for name in names]
        first = min(int(block) for block, _ in places)
        whole = {name for block, name in places if int(block) == first} == {"resid_post"}
        return f"blocks.{first}.{'resid_post' if whole else 'resid_pre'}"

    def inner_points(self) -> tuple[str, ...]:
        """The other points: attention patterns [B, H, S, S], norms' scales [B, S, 1]."""
        inner = sorted((name for name in self._shapes(0) if name not in HOOK_NAMES), key=lambda name: name[:2] == "ln")
        return (*(f"blocks.{i}.{name}" for i in range(self.n_layer) for name in inner), _FINAL_SCALE[0])

    def hook_point(self, name: str) -> str:
        """The canonical name of a hook point; TransformerLens names are accepted."""
        canonical = _canonical(name)
        there = self.hook_points()
        if canonical not in there:
            close = difflib.get_close_matches(canonical, there, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            if canonical in self.inner_points():
                hint = " It can be watched and edited in `run`, but holds no vector for each token."
            if canonical.endswith(".mlp_act") and any(self.sparse):
                hint = " An MLP of experts has no one vector of activations for each token; take mlp_in or mlp_out."
            raise ConfigError(
                f"The model has no hook point {name!r}.{hint} There are blocks.0 to blocks.{self.n_layer - 1}, each "
                f"with {', '.join(HOOK_NAMES)}."
            )
        return canonical

    def any_point(self, name: str) -> str:
        """The canonical name of an inner point or a hook point."""
        canonical = _canonical(name)
        return canonical if canonical in self.inner_points() else self.hook_point(name)


def next_block(start: str) -> int:
    """The first block that runs behind a hook point of `start_of`."""
    place, _, name = start.rpartition(".")
    return int(place.removeprefix("blocks.")) + (name == "resid_post")


def _canonical(name: str) -> str:
    if name == _FINAL_SCALE[1]:
        return _FINAL_SCALE[0]
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    return f"blocks.{match[1]}.{TRANSFORMER_LENS.get(match[2], match[2])}" if match else name
