"""The k largest of the dead: value and gradients equal a float64 loop, on meshes, in groups, with ties, under vmap."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saejax.kernels.dead import decode_largest, decode_largest_reference
from saejax.kernels.groups import Groups
from saejax.kernels.sparse import rows_of_columns
from saejax.parallel import ParallelConfig, make_mesh, on_mesh, replicated

B, G, N, F, R = 8, 2, 3, 24, 4
LENGTHS = (R, R - 1)
Arrays = dict[str, Any]

DEAD = {
    "none": [[], []],
    "fewer than k": [[5], [0, 23]],
    "as many as k": [[1, 2, 5, 7], [0, 6, 12, 23]],
    "more in one group": [list(range(0, 24, 2)), [3]],
    "all": [list(range(F)), list(range(F))],
}


def _arrays(values: str, dead: list[list[int]]) -> Arrays:
    """Dyadic numbers where there are ties: sums are exact, so that a float64 oracle sees the same ties."""
    rng = np.random.default_rng(0)
    pre = {
        "all different": lambda: rng.normal(size=(B, G, F)),
        "few values": lambda: rng.integers(-2, 3, size=(B, G, F)) / 4,
        "all equal": lambda: np.full((B, G, F), 0.5),
        "nothing above 0": lambda: -np.abs(rng.normal(size=(B, G, F))) * (rng.random((B, G, F)) < 0.7),
    }[values]()
    is_dead = np.zeros((G, F), bool)
    for group, latents in enumerate(dead):
        is_dead[group, latents] = True
    return {
        "x": rng.normal(size=(B, G, N)).astype(np.float32),
        "pre": pre.astype(np.float32),
        "dead": is_dead,
        "rows": tuple(rng.normal(size=(F, length)).astype(np.float32) for length in LENGTHS),
        "g": rng.normal(size=(B, R)).astype(np.float32),
    }


def _oracle(a: Arrays, k: int) -> Arrays:
    out, of_W, of_b = np.zeros((B, R)), np.zeros((G, N, F)), np.zeros((G, F))
    of_rows = [np.zeros((F, length)) for length in LENGTHS]
    for b, group in np.ndindex(B, G):
        pre, rows = a["pre"][b, group].astype(np.float64), a["rows"][group].astype(np.float64)
        g = a["g"][b, R - LENGTHS[group] :].astype(np.float64)
        for f in sorted(np.flatnonzero(a["dead"][group]), key=lambda f, pre=pre: (-pre[f], f))[:k]:  # type: ignore[misc]
            if pre[f] > 0:
                out[b, R - LENGTHS[group] :] += pre[f] * rows[f]
                of_rows[group][f] += pre[f] * g
                of_W[group, :, f] += a["x"][b, group] * (g @ rows[f])
                of_b[group, f] += g @ rows[f]
    return {"out": out, "W": of_W, "b": of_b, "rows": of_rows}


def _call(k: int, dtype: str = "float32", block: int | None = 5) -> Any:
    def call(a: Arrays) -> Arrays:
        W, b = jnp.zeros((G, N, F)), jnp.zeros((G, F))  # their values do not matter: pre is known

        def value(W: jax.Array, b: jax.Array, tables: Any) -> jax.Array:
            rows = Groups(tuple(tables), tuple(R - length for length in LENGTHS))
            return decode_largest(
                a["x"], rows_of_columns(W), b, (a["pre"][:, 0], a["pre"][:, 1]), a["dead"], rows, k, dtype, block
            )

        out, pull = jax.vjp(value, W, b, a["rows"])
        return {"out": out, **dict(zip(("W", "b", "rows"), pull(a["g"]), strict=True))}

    return call


@functools.cache
def _compiled(k: int, shape: tuple[int, int] | None = None) -> Any:
    """Compiled once for a mesh: which are dead is data."""
    if shape is None:
        return jax.jit(_call(k))
    mesh = make_mesh(ParallelConfig(shape))
    run = jax.jit(on_mesh(_call(k), mesh))
    return lambda a: run(jax.tree.map(lambda leaf: jax.device_put(leaf, replicated(mesh)), a))


def _same(got: Arrays, want: Arrays, tolerance: float = 2e-6) -> None:
    for found, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * 4)


VALUES = ("all different", "few values", "all equal", "nothing above 0")


@pytest.mark.parametrize("dead", DEAD)
@pytest.mark.parametrize("values", VALUES)
def test_value_and_gradients_equal_a_loop(values: str, dead: str) -> None:
    """Blocks of 5 of 24 latents, k 4: one block and several, a last one that is not full."""
    a = _arrays(values, DEAD[dead])
    want = _oracle(a, 4)
    _same(_compiled(4)(a), want)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: leaf.astype(np.float64) if leaf.dtype == np.float32 else leaf, a)
        rows = Groups(tuple(wide["rows"]), tuple(R - length for length in LENGTHS))
        _same(decode_largest_reference(wide["pre"], wide["dead"], rows, 4), want["out"], 1e-12)


@pytest.mark.parametrize("shape", [(8, 1), (4, 2), (1, 8)])
def test_meshes_choose_the_same(shape: tuple[int, int]) -> None:
    """Devices with and without dead latents; ties that lie on several of them."""
    for values in VALUES[:3]:
        for dead in DEAD.values():
            a = _arrays(values, dead)
            _same(_compiled(4, shape)(a), _oracle(a, 4))


def test_members_of_a_vmap_have_their_own_dead() -> None:
    members = [
        _arrays(values, DEAD[dead]) for values, dead in zip(VALUES, ("none", "all", "fewer than k"), strict=False)
    ]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *members)
    got = jax.jit(jax.vmap(_call(4)))(stacked)
    for i, a in enumerate(members):
        _same(jax.tree.map(lambda leaf, i=i: leaf[i], got), _oracle(a, 4))


def test_a_number_that_is_no_number_is_not_lost() -> None:
    a = _arrays("all different", DEAD["all"])
    a["pre"][3, 0, 7] = np.nan
    assert np.isnan(np.asarray(_compiled(4)(a)["out"])[3]).all()


def test_operands_are_rounded_and_gradients_are_not() -> None:
    a = _arrays("all different", DEAD["all"])
    got, exact = jax.jit(_call(4, "bfloat16"))(a), _oracle(a, 4)
    rounded = a | {"rows": tuple(np.asarray(jnp.bfloat16(rows)).astype(np.float32) for rows in a["rows"])}
    rounded["pre"] = np.asarray(jnp.bfloat16(a["pre"])).astype(np.float32)
    assert (np.sort(rounded["pre"], axis=-1)[..., -4] > np.sort(rounded["pre"], axis=-1)[..., -5]).all()  # no new ties
    np.testing.assert_allclose(got["out"], _oracle(rounded, 4)["out"], rtol=1e-5, atol=1e-5)
    assert np.abs(got["out"] - exact["out"]).max() > 1e-3
    _same({name: got[name] for name in ("W", "b", "rows")}, {name: exact[name] for name in ("W", "b", "rows")})


def test_products_take_blocks_of_the_dead_and_not_all_latents() -> None:
    a = jax.tree.map(jnp.asarray, _arrays("all different", DEAD["all"]))
    products = [line for line in jax.jit(_call(4)).lower(a).as_text().splitlines() if "dot_general" in line]
    assert products and not [line for line in products if f"tensor<{B}x{F}x" in line or f"tensor<{F}x" in line]
