"""The sparse products equal their references and a float64 oracle: values, gradients, under jit and vmap."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from saejax.kernels import dead
from saejax.kernels.batch import DATA, LATENT, for_tokens, greatest_of_batch, least_of_batch, over_tokens
from saejax.kernels.dead import greatest_token
from saejax.kernels.dense import decode_dense, decode_dense_split, product
from saejax.kernels.groups import Groups
from saejax.kernels.sparse import (
    decode_groups,
    decode_rows,
    decode_rows_reference,
    kept_pre_activations,
    kept_pre_activations_reference,
    rows_of_columns,
)
from saejax.parallel import ParallelConfig, make_mesh, on_mesh

pytestmark = pytest.mark.usefixtures("by_blocks")
B, D, F = 6, 5, 9

# Both products are at most bilinear: a wide central difference is exact, and float32 noise small beside it.
_CHECK: dict[str, Any] = {"order": 1, "modes": ["rev"], "eps": 0.1, "rtol": 1e-3, "atol": 1e-4}

Arrays = dict[str, np.ndarray]


def _inputs(k: int, seed: int = 0) -> Arrays:
    """Latents that many tokens share (their gradients add up), exact zeros, every index once in a row."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(B, k)).astype(np.float32)
    values[::2, 0] = 0
    indices = np.stack([rng.permutation(F)[:k] for _ in range(B)]).astype(np.int32)
    indices[1], indices[2] = indices[0], indices[0][::-1]
    return {
        "values": values,
        "indices": indices,
        "W_FD": rng.normal(size=(F, D)).astype(np.float32),
        "x": rng.normal(size=(B, D)).astype(np.float32),
        "g_BD": rng.normal(size=(B, D)).astype(np.float32),
        "g_BK": rng.normal(size=(B, k)).astype(np.float32),
    }


def _oracle(a: Arrays) -> dict[str, np.ndarray]:
    """Both products and every gradient in float64, by loops."""
    a = {name: v if name == "indices" else v.astype(np.float64) for name, v in a.items()}
    k = a["indices"].shape[1]
    out, d_values, d_W = np.zeros((B, D)), np.zeros((B, k)), np.zeros((F, D))
    kept, d_W_enc = np.zeros((B, k)), np.zeros((D, F))
    for b in range(B):
        for j, f in enumerate(a["indices"][b]):
            out[b] += a["values"][b, j] * a["W_FD"][f]
            d_values[b, j] = a["g_BD"][b] @ a["W_FD"][f]
            d_W[f] += a["values"][b, j] * a["g_BD"][b]
            kept[b, j] = a["x"][b] @ a["W_FD"].T[:, f]
            d_W_enc[:, f] += a["g_BK"][b, j] * a["x"][b]
    return {"out": out, "d_values": d_values, "d_W": d_W, "kept": kept, "d_W_enc": d_W_enc}


def _decode(function: Any, a: Arrays) -> dict[str, jax.Array]:
    out, vjp = jax.vjp(lambda v, W: function(v, a["indices"], W), jnp.asarray(a["values"]), jnp.asarray(a["W_FD"]))
    d_values, d_W = vjp(jnp.asarray(a["g_BD"]))
    return {"out": out, "d_values": d_values, "d_W": d_W}


def _keep(function: Any, a: Arrays) -> dict[str, jax.Array]:
    pre_BF = jnp.asarray(a["x"]) @ jnp.asarray(a["W_FD"]).T
    kept, vjp = jax.vjp(
        lambda W: function(a["x"], rows_of_columns(W[None])[0], pre_BF, a["indices"]), jnp.asarray(a["W_FD"].T)
    )
    return {"kept": kept, "d_W_enc": vjp(jnp.asarray(a["g_BK"]))[0]}


def _assert_close(got: dict[str, jax.Array], want: dict[str, Any]) -> None:
    for name, value in got.items():
        np.testing.assert_allclose(value, want[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("k", [1, 4, F])
def test_values_and_gradients_equal_references_and_oracle(k: int) -> None:
    a = _inputs(k)
    fast = jax.jit(lambda a: _decode(decode_rows, a) | _keep(kept_pre_activations, a))
    plain = jax.jit(lambda a: _decode(decode_rows_reference, a) | _keep(kept_pre_activations_reference, a))
    _assert_close(fast(a), _oracle(a))
    _assert_close(plain(a), _oracle(a))


def test_outside_jit_with_numpy_arrays() -> None:
    a = _inputs(2)
    _assert_close(_decode(decode_rows, a) | _keep(kept_pre_activations, a), _oracle(a))
    _assert_close({"out": decode_rows(a["values"], a["indices"], a["W_FD"])}, _oracle(a))


def test_decode_rows_by_finite_differences() -> None:
    a = _inputs(3)
    check_grads(lambda v, W: decode_rows(v, a["indices"], W), (a["values"], a["W_FD"]), **_CHECK)


@pytest.mark.parametrize("decode", [decode_groups, decode_dense, decode_dense_split])
@pytest.mark.parametrize(("widths", "starts"), [((6, 4, 2), (0, 2, 4)), ((2, 2, 2), (0, 2, 4)), ((2, 3, 1), (3, 1, 4))])
def test_groups_add_at_their_columns(decode: Any, widths: Any, starts: Any) -> None:
    """Output and both gradients, against float64 with every row written out at full length."""
    k, rng, total = 3, np.random.default_rng(5), max(a + b for a, b in zip(widths, starts, strict=True))
    rows = tuple(rng.normal(size=(F, width)).astype(np.float32) for width in widths)
    values = rng.normal(size=(B, len(widths), k)).astype(np.float32)
    indices = np.argsort(rng.random((B, len(widths), F)), axis=2)[..., :k]
    g_BD = rng.normal(size=(B, total)).astype(np.float32)

    dense, kept = np.zeros((B, len(widths), F), np.float32), indices
    np.put_along_axis(dense, kept, values, axis=2)
    full = np.zeros((len(widths), F, total))
    for place, r, start in zip(full, rows, starts, strict=True):
        place[:, start : start + r.shape[1]] = r
    want = np.einsum("bgf,gfd->bd", dense.astype(np.float64), full)
    d_dense, d_full = np.einsum("bd,gfd->bgf", g_BD, full), np.einsum("bgf,bd->gfd", dense, g_BD)

    def out(v: jax.Array, rows: Any) -> jax.Array:
        return decode(v, jnp.asarray(indices), rows) if decode is decode_groups else decode(v, rows, "float32")

    given, of_given = (values, np.take_along_axis(d_dense, kept, 2)) if decode is decode_groups else (dense, d_dense)
    got, vjp = jax.vjp(jax.jit(out), jnp.asarray(given), Groups(tuple(map(jnp.asarray, rows)), starts))
    d_values, d_rows = vjp(jnp.asarray(g_BD))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(d_values, of_given, rtol=1e-5, atol=1e-5)
    for group, (start, width) in enumerate(zip(starts, widths, strict=True)):
        np.testing.assert_allclose(d_rows[group], d_full[group][:, start : start + width], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_rounds_its_operands_forward_and_nothing_backward(dtype: str) -> None:
    rng = np.random.default_rng(6)
    a_BN, W_NM, g_BM = (rng.normal(size=size).astype(np.float32) for size in ((B, D), (D, F), (B, F)))
    rounded = [np.asarray(jnp.asarray(v, dtype), np.float64) for v in (a_BN, W_NM)]
    got, vjp = jax.vjp(jax.jit(lambda a, W: product(a, W, dtype)), jnp.asarray(a_BN), jnp.asarray(W_NM))
    d_a, d_W = vjp(jnp.asarray(g_BM))
    assert {v.dtype for v in (got, d_a, d_W)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(got, rounded[0] @ rounded[1], rtol=0, atol=1e-5)
    np.testing.assert_allclose(d_a, g_BM.astype(np.float64) @ W_NM.T, rtol=0, atol=1e-5)
    np.testing.assert_allclose(d_W, a_BN.T.astype(np.float64) @ g_BM, rtol=0, atol=1e-5)


def test_kept_pre_activations_by_finite_differences() -> None:
    a = _inputs(3)

    def f(W_DF: jax.Array) -> jax.Array:
        return kept_pre_activations(a["x"], rows_of_columns(W_DF[None])[0], a["x"] @ W_DF, a["indices"])

    check_grads(f, (a["W_FD"].T,), **_CHECK)


def test_vmap_over_batches_of_tokens_and_over_weights() -> None:
    many = [_inputs(3, seed) for seed in range(4)]
    a = {name: np.stack([one[name] for one in many]) for name in many[0]}

    def both(a: Any) -> dict[str, jax.Array]:
        return _decode(decode_rows, a) | _keep(kept_pre_activations, a)

    got = jax.jit(jax.vmap(both))(a)
    for i, one in enumerate(many):
        _assert_close({name: value[i] for name, value in got.items()}, _oracle(one))


def test_kept_pre_activations_takes_values_from_pre_and_gives_it_no_gradient() -> None:
    a = _inputs(3)
    pre_BF = jnp.arange(B * F, dtype=jnp.float32).reshape(B, F)

    def f(x: jax.Array, pre: jax.Array) -> jax.Array:
        return kept_pre_activations(x, jnp.asarray(a["W_FD"]), pre, a["indices"]).sum()

    kept = kept_pre_activations(a["x"], a["W_FD"], pre_BF, a["indices"])
    np.testing.assert_array_equal(kept, np.take_along_axis(np.asarray(pre_BF), a["indices"], 1))
    d_x, d_pre = jax.grad(f, (0, 1))(jnp.asarray(a["x"]), pre_BF)
    assert not d_x.any() and not d_pre.any()


@pytest.mark.parametrize("name", ["decode_rows", "kept_pre_activations"])
def test_no_dense_latents_are_built_forward_or_backward(name: str) -> None:
    """No array [B, F] in the compiled program: the point of these kernels."""
    B, D, F, K = 48, 8, 1000, 4
    v, i = jnp.ones((B, K)), jnp.zeros((B, K), jnp.int32)
    pre_BF = jnp.zeros((B, F))
    if name == "decode_rows":
        f = jax.grad(lambda v, W: decode_rows(v, i, W).sum(), (0, 1))
        text = jax.jit(f).lower(v, jnp.ones((F, D))).as_text()
    else:  # of `pre`, which the caller has, only an empty part: its values do not matter here
        f = jax.grad(
            lambda x, W: jnp.square(kept_pre_activations(x, rows_of_columns(W[None])[0], pre_BF[:, :0], i)).sum(), 1
        )
        text = jax.jit(f).lower(jnp.ones((B, D)), jnp.ones((D, F))).as_text()
    assert f"{F}x{D}x" in text
    assert f"{B}x{F}x" not in text and f"{F}x{B}x" not in text


def test_least_and_greatest_values_are_those_of_all_devices_tokens() -> None:
    """As pmap has it, where each device sees its own tokens alone."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 5)), jnp.float32)
    mesh = Mesh(np.array(jax.devices()), (DATA,))
    for of_batch, whole in ((least_of_batch, x.min()), (greatest_of_batch, x.max())):

        def of_own_tokens(own: jax.Array, of_batch: Any = of_batch, whole: jax.Array = whole) -> jax.Array:
            return of_batch(own.min() if of_batch is least_of_batch else own.max())[None]

        found = jax.jit(jax.shard_map(of_own_tokens, mesh=mesh, in_specs=P(DATA), out_specs=P(DATA)))(x)
        np.testing.assert_array_equal(found, jnp.full(8, whole))


@pytest.mark.parametrize("shape", [(7, 5), (6, 3, 4), (1, 1)])
def test_sums_over_tokens_and_numbers_for_tokens_are_each_others_gradients(shape: tuple[int, ...]) -> None:
    """Against sums in float64, in a step for one coder and in one for several."""
    rng = np.random.default_rng(0)
    x, g, of_latents = (rng.normal(size=size).astype(np.float32) for size in (shape, shape[1:], shape[1:]))
    for vmapped in (False, True):
        wrapped = jax.vmap if vmapped else lambda f: f
        a, b, c = (v[None] if vmapped else v for v in (x, g, of_latents))
        total, of_x = jax.jit(wrapped(lambda x, g: (over_tokens(x), jax.vjp(over_tokens, x)[1](g)[0])))(a, b)
        spread, of_vector = jax.jit(
            wrapped(lambda v, x: (for_tokens(v, shape[0]), jax.vjp(lambda v: for_tokens(v, shape[0]), v)[1](x)[0]))
        )(c, a)
        sums = x.astype(np.float64).sum(0)
        np.testing.assert_allclose(np.reshape(total, shape[1:]), sums, rtol=0, atol=1e-5)
        np.testing.assert_allclose(np.reshape(of_vector, shape[1:]), sums, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(np.reshape(of_x, shape), np.broadcast_to(g, shape))
        np.testing.assert_array_equal(np.reshape(spread, shape), np.broadcast_to(of_latents, shape))


@pytest.mark.parametrize("wide", [0, 2**14])
@pytest.mark.parametrize("n_tokens", [16, 13])
def test_the_greatest_of_tokens(n_tokens: int, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both signs, tiny and huge; as one program has them, as every device for itself, and over two kinds of mesh."""
    monkeypatch.setattr(dead, "_WIDE", wide)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n_tokens, 2, 8)).astype(np.float32)
    x[:, 0, 0], x[:, 0, 1], x[:, 0, 2] = -np.abs(x[:, 0, 0]), -np.inf, rng.choice([-3e38, -1e-30], n_tokens)
    np.testing.assert_array_equal(jax.jit(greatest_token)(x), x.max(0))
    if n_tokens % 8 == 0:
        mine, theirs = make_mesh(ParallelConfig((4, 2))), Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
        placed = jax.device_put(x, jax.sharding.NamedSharding(mine, P(DATA, None, LATENT)))
        np.testing.assert_array_equal(jax.jit(on_mesh(greatest_token, mine))(placed), x.max(0))
        placed = jax.device_put(x, jax.sharding.NamedSharding(theirs, P("a", None, "b")))
        np.testing.assert_array_equal(jax.jit(greatest_token)(placed), x.max(0))
