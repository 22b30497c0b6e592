"""Names as in `blocks.3.mlp_out` for the modules of a foreign model, found by where its parts usually stand.

A place is a module's path with `.in` or `.out`. Several places may be candidates for a name. A forward pass decides:
what attention and MLP add must sum to the residual stream, as in

    resid_pre + attn_out = resid_mid        resid_mid + mlp_out = resid_post
    resid_pre + attn_out + mlp_out = resid_post     (parallel blocks, which have no resid_mid)

A name without such a candidate is not offered. (The module's own path still works.)
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from saejax.lm.points import HOOK_NAMES

# The layer list is the longest list of modules whose own name is one of these.
LISTS = ("layers", "h", "layer", "blocks", "block")
# Children of a layer (hook_...: TransformerLens's). Attention's last product, or the norm after it where there is one.
_ATTN_OUT = (
    "hook_attn_out.out",
    "post_attention_layernorm.out",
    "self_attn.o_proj.out",
    "self_attn.out_proj.out",
    "self_attn.dense.out",
    "self_attn.c_proj.out",
    "attn.c_proj.out",
    "attn.out_proj.out",
    "attn.attention.out_proj.out",
    "attn.Wo.out",
    "attention.dense.out",
    "self_attention.dense.out",
    "attention.output.dense.out",
    "attention.out_lin.out",
    "layer.0.SelfAttention.o.out",
    "self_attn.out",
    "attn.out",
    "attention.out",
)
_RESID_MID = (
    "hook_resid_mid.out",
    "pre_feedforward_layernorm.in",
    "post_attention_layernorm.in",
    "ln_2.in",
    "norm_2.in",
    "final_layer_norm.in",
    "self_attn_layer_norm.in",
    "sa_layer_norm.in",
    "attention.output.LayerNorm.in",
    "mlp_norm.in",
    "layer.1.layer_norm.in",
    "mlp.in",
)
_DOWN = (
    "mlp.down_proj",
    "mlp.c_proj",
    "mlp.dense_4h_to_h",
    "mlp.fc2",
    "mlp.fc_out",
    "mlp.Wo",
    "fc2",
    "ffn.down_proj",
    "ffn.lin2",
    "output.dense",
    "layer.1.DenseReluDense.wo",
)
# What the MLP adds, where it is not what the last product gives: a norm after it, or a mixture of experts.
_MLP_OUT = (
    "hook_mlp_out.out",
    "post_feedforward_layernorm.out",
    *(f"{name}.out" for name in _DOWN),
    "mlp.out",
    "block_sparse_moe.out",
)
_HOOK_POST = "mlp.hook_post.out"  # of TransformerLens, whose last product is no module
_MLP_IN = ("mlp.in", "block_sparse_moe.in", "ffn.in", "fc1.in", "intermediate.in", "layer.1.DenseReluDense.in")
_MLP_ENDS = ("out", "final_layer_norm.in", "output.LayerNorm.in", "output_layer_norm.in")


def find_aliases(layers: Sequence[str], seen: Mapping[str, np.ndarray], tolerance: float) -> dict[str, str]:
    """{`blocks.{i}.<name>`: place} for the layers at these paths, by the values `seen` [tokens, d] of one forward pass.

    `tolerance` is the relative rounding of the model's dtype.
    """
    aliases = {}
    for i, layer in enumerate(layers):
        in_layer = {place.removeprefix(f"{layer}."): x for place, x in seen.items() if place.startswith(f"{layer}.")}
        for name, place in _of_layer(in_layer, tolerance).items():
            aliases[f"blocks.{i}.{name}"] = f"{layer}.{place}"
    return aliases


def _of_layer(seen: Mapping[str, np.ndarray], tolerance: float) -> dict[str, str]:
    """{name: place within the layer}, in the order in which the model computes them."""
    names = {}
    attn_outs, mids, ends = (_there(places, seen) for places in (_ATTN_OUT, _RESID_MID, _MLP_ENDS))
    downs = _there([f"{name}.out" for name in _DOWN], seen)
    mlp_outs = _there(_MLP_OUT, seen)
    mlp_ins = _there(_MLP_IN, seen)[:1]

    def add_up(*parts_and_sum: Sequence[str]) -> tuple[str, ...] | None:
        for *parts, total in itertools.product(*parts_and_sum):
            if _is_sum([seen[place] for place in parts], seen[total], tolerance):
                return (*parts, total)
        return None

    if "in" in seen:
        names["resid_pre"] = "in"
        if sequential := add_up(["in"], attn_outs, mids):
            _, names["attn_out"], names["resid_mid"] = sequential
        elif parallel := add_up(["in"], attn_outs, mlp_outs, ["out"]):
            _, names["attn_out"], names["mlp_out"], _ = parallel
    if mlp_ins:
        names["mlp_in"] = mlp_ins[0]
    if downs:
        # What the last product reads: of a gated MLP the product of gate and value.
        act = downs[0].removesuffix(".out") + ".in"
        if act in seen:
            names["mlp_act"] = act
    elif _HOOK_POST in seen:
        names["mlp_act"] = _HOOK_POST
    starts = [names[name] for name in ("resid_mid", "mlp_in") if name in names]
    if "mlp_out" not in names and (after := add_up(starts, mlp_outs, ends)):
        names["mlp_out"] = after[1]
    if "out" in seen:
        names["resid_post"] = "out"
    return {name: names[name] for name in HOOK_NAMES if name in names}


def _there(places: Sequence[str], seen: Mapping[str, np.ndarray]) -> list[str]:
    return [place for place in places if place in seen]


def _is_sum(parts: Sequence[np.ndarray], total: np.ndarray, tolerance: float) -> bool:
    """True where the parts add up to the total, as closely as rounding lets each of them be known."""
    if any(part.shape != total.shape for part in parts):
        return False
    error = np.linalg.norm(sum(parts[1:], parts[0]) - total)
    # Relative to the smallest part: beside a large residual stream, a wrong small part is little of the total.
    smallest = min(float(np.linalg.norm(part)) for part in parts)
    return bool(error <= 1e-2 * smallest + tolerance * np.linalg.norm(total))
