"""The parameters that a `DecoderConfig` implies: names, shapes, logical axes, initial distribution.

The one description that initialisation, reading of checkpoints and sharding share. It is no Flax module: the arrays
come from files, tensor by tensor and already sharded, before any module could run.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from saejax.lm.conventions import DecoderConfig
from saejax.parallel import sharding_of


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array: its shape, a logical name for each axis (None: never sharded), its mean and deviation at the start."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    mean: float = 0.0
    std: float = 0.0


Path = tuple[str | int, ...]  # as in ("blocks", 3, "attn", "W_Q")
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


def block_parameters(c: DecoderConfig) -> Spec:
    """One block; all blocks have the same. Attention's are per head: `W_Q` [M, H, D], `W_O` [H, D, M]."""
    spec: Spec = {"attn": _attention(c), "ln1": _norm(c, c.d_model, "d_model")}
    if c.residual != "parallel_one_norm":
        spec["ln2"] = _norm(c, c.d_model, "d_model")
    spec["mlp"] = _mlp(c)
    if c.post_norms:
        spec |= {"ln1_post": _norm(c, c.d_model, "d_model"), "ln2_post": _norm(c, c.d_model, "d_model")}
    return spec


def parameters(c: DecoderConfig) -> Spec:
    """The whole tree."""
    return outer_parameters(c) | {"blocks": [block_parameters(c) for _ in range(c.n_layer)]}


def leaves(c: DecoderConfig) -> Iterator[tuple[Path, Parameter]]:
    """(path, parameter) of the whole tree one by one: nothing as long as the number of layers is ever held."""
    yield from _flattened(outer_parameters(c))
    block = list(_flattened(block_parameters(c)))
    for i in range(c.n_layer):
        yield from ((("blocks", i, *path), parameter) for path, parameter in block)


def logical_axes(c: DecoderConfig) -> Any:
    """A tree like the parameters with a tuple of logical axis names for each array.

    The names are vocab, d_model, heads, kv_heads, d_head and d_mlp, and None for an axis that is never sharded.
    """
    return jax.tree.map(lambda parameter: parameter.axes, parameters(c))


def shard_params(c: DecoderConfig, params: Any, mesh: Mesh) -> Any:
    """`params` on the mesh ("data", "latent"): heads, d_mlp and vocab over "latent" where they divide, else whole.

    `decoder.run` gives the same with them, up to the order of sums; jit it, and XLA adds the collectives.
    """
    return jax.tree.map(
        lambda parameter, leaf: jax.device_put(leaf, sharding_of(mesh, parameter.shape, parameter.axes)),
        parameters(c),
        params,
    )


def _flattened(spec: Spec) -> Iterator[tuple[Path, Parameter]]:
    for name, value in spec.items():
        if isinstance(value, Parameter):
            yield (name,), value
        else:
            yield from (((name, *path), parameter) for path, parameter in _flattened(value))


def _norm(c: DecoderConfig, size: int, axis: str) -> Spec:
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


def _residual_std(c: DecoderConfig) -> float:
    return 0.02 / (2 * c.n_layer) ** 0.5
