"""Every topology with every sparsity: what a coder promises, and every gradient against a dense reference.

The reference is NumPy in complex128: derivatives come from the imaginary part of loss(p + ih), exact to the last
digits. Where the loss holds something constant, the reference takes it from the parameters at the start, which do not
vary; where a gradient is a convention and not a derivative, the reference is the linear function that has it.

The programs run operation by operation (`jax.disable_jit`), which for 60 combinations of a few small arrays is a tenth
of compiling them; compiled ones are tested at the end, and in test_coders.py, test_planted.py and test_parallel.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny.covering import covering, rest_in

from saejax.coders import SPARSITIES, TOPOLOGIES, Coder, CoderConfig, Latents, build
from saejax.coders.sparsity.jumprelu import JumpRelu

Tree = dict[str, Any]
Arrays = dict[str, np.ndarray]

B, D, OUT, F, K, S, STEPS = 6, 5, 4, 12, 3, 3, 10
N_DEAD, DEAD_AFTER, AUXK_K, STEP = 4, 100, 2, jnp.int32(4)
PREFIXES = (3, 7, F)
EVERY = 2
CODES: dict[str, Tree] = {
    "whole": {},
    "matryoshka": {"prefixes": PREFIXES},
    "hierarchical": {"hierarchical_every": EVERY},
}
THETA, EPS, TARGET, P_END, LIFT = 0.3, 1.5, 4.0, 0.5, 0.2
LN, CONSTANTS = "layernorm_autoencoder", {"ln_eps", "centre"}  # parameters without a gradient


# What each sparsity's own losses are; AuxK and Lift beside them always.
LOSSES: dict[str, Tree] = {
    "relu": {"l1_coefficient": 0.3, "lp_coefficient": 0.5, "lp_end": P_END, "lp_updates": 2, "lp_after_fraction": 0.0},
    "gated": {"l1_coefficient": 0.3, "gate_coefficient": 0.7},
    "topk": {"multi_topk_coefficient": 0.25, "multi_topk_factor": 2},
    "abs_topk": {"multi_topk_coefficient": 0.25, "multi_topk_factor": 2},
    "batchtopk": {"multi_topk_coefficient": 0.25, "multi_topk_factor": 2},
    "jumprelu": {
        "target_l0_coefficient": 0.5,
        "target_l0": TARGET,
        "frequency_coefficient": 0.1,
        "frequency_scale": 0.2,
        "pre_activation_coefficient": 0.2,
    },
}
PER_LAYER = ("per_layer_autoencoder", "per_layer_transcoder")
CLTS = ("clt", "skip_clt", "causal_crosscoder", *PER_LAYER)
# Every topology and every sparsity once; the other pairs in .ci/run.
ONCE = [("autoencoder", sparsity) for sparsity in SPARSITIES] + [(topology, "batchtopk") for topology in TOPOLOGIES]
every_combination = pytest.mark.parametrize(
    ("topology", "sparsity"), rest_in("ci", itertools.product(TOPOLOGIES, SPARSITIES), ONCE)
)
# Where a topology and a sparsity meet only in the arrays that they hand on: both ways through a topology with every
# sparsity, both forms of a selection with every topology, in .ci/run but for ONCE; the rest in the soak.
most_combinations = pytest.mark.parametrize(
    ("topology", "sparsity"),
    [
        pytest.param(
            topology,
            sparsity,
            marks=[]
            if (topology, sparsity) in ONCE
            else [pytest.mark.ci]
            if topology in ("autoencoder", "clt") or sparsity in ("topk", "batchtopk")
            else [pytest.mark.soak],
        )
        for topology, sparsity in itertools.product(TOPOLOGIES, SPARSITIES)
    ],
)


def _config(topology: str, sparsity: str, **changes: Any) -> CoderConfig:
    settings: Tree = {"d_sae": F, "k": K, "auxk_coefficient": 0.5, "auxk_k": AUXK_K, "dead_after_tokens": DEAD_AFTER}
    settings |= {
        "threshold_init": THETA,
        "bandwidth": EPS,
        "init": "uniform",
        "encoder_scale": 1.0,
        "unit_decoder_every": 0,
    }
    settings |= {"sparsity_warmup_fraction": 0.0, "matmul_dtype": "float32", "lift_coefficient": LIFT} | LOSSES[
        sparsity
    ]
    return CoderConfig("topk", topology=topology, sparsity=sparsity, **(settings | changes))


@functools.cache
def _coder(topology: str, sparsity: str, **changes: Any) -> Coder:
    return build(_config(topology, sparsity, **changes), *_widths(topology))


def _widths(topology: str) -> tuple[Any, int, Any]:
    """d_in, steps, d_out: three sites where there are several, another width out where it may be."""
    kind = TOPOLOGIES[topology]
    sites, out = S if kind.stacked else 1, D if kind.tied else OUT
    return (D,) * sites, STEPS, (out,) * sites


def _params(coder: Coder, seed: int = 0) -> Tree:
    """Nothing in a special position; the shapes are those of an init that makes no arrays."""
    shapes, rng = jax.eval_shape(coder.init, jax.random.key(0)), np.random.default_rng(seed)
    params = {name: jnp.asarray(rng.normal(size=s.shape) * 0.6, jnp.float32) for name, s in shapes.items()}
    return params | {name: jnp.abs(params[name]) for name in ("threshold", "ln_eps") if name in params}


def _batch(coder: Coder) -> Tree:
    rng, kind = np.random.default_rng(1), coder.topology
    x = jnp.asarray(rng.normal(size=(B, *kind.in_shape)), jnp.float32)
    return {"x": x, "y": x if kind.tied else jnp.asarray(rng.normal(size=(B, *kind.out_shape)), jnp.float32)}


def _stats(coder: Coder, n_dead: int) -> Tree:
    """The first `n_dead` latents (of each group) are dead, just; 5 tokens less for the rest."""
    since = jnp.full(coder.topology.latent_shape, DEAD_AFTER - 5, jnp.int32)
    return coder.init_stats() | {"tokens_since_fired": since.at[..., :n_dead].set(DEAD_AFTER)}


def _loss_and_grads(coder: Coder, p: Tree, n_dead: int) -> Any:
    with jax.disable_jit():
        return jax.value_and_grad(coder.loss, has_aux=True)(p, _batch(coder), _stats(coder, n_dead), STEP)


def _encode(coder: Coder, p: Tree, x: jax.Array) -> Latents:
    with jax.disable_jit():
        return coder.encode(p, x)


# --- the reference -----------------------------------------------------------------------------------------


def _pre(topology: str, p: Arrays, x: np.ndarray) -> np.ndarray:
    """[B, F]; [B, G, F] for a clt."""
    x = x - p["centre"] if "centre" in p else x
    if topology in ("crosscoder", *CLTS):
        return np.einsum("bsd,sdf->bf" if topology == "crosscoder" else "bsd,sdf->bsf", x, p["W_enc"]) + p["b_enc"]
    if topology == LN:
        x = (x - x.mean(1, keepdims=True)) / (_size(topology, x) + p["ln_eps"])
    sees_b_dec = topology in ("autoencoder", LN) and "centre" not in p
    return (x - p["b_dec"] if sees_b_dec else x) @ p["W_enc"] + p["b_enc"]


def _size(topology: str, x: np.ndarray) -> Any:
    """What a token's reconstruction is multiplied by."""
    return x.std(1, ddof=1, keepdims=True) if topology == LN else 1


def _written(topology: str, p: Arrays, f: np.ndarray) -> np.ndarray:
    """f W_dec, without bias."""
    if topology in CLTS:
        writers = [[m] if topology in PER_LAYER else range(m + 1) for m in range(S)]
        layers = [sum(f[:, i] @ p[f"W_dec_{i}"][:, m - i] for i in writers[m]) for m in range(S)]
        return np.stack(layers, axis=1)
    return np.einsum("bf,f...->b...", f, p["W_dec"])


def _y_hat(topology: str, p: Arrays, f: np.ndarray, x: np.ndarray) -> np.ndarray:
    skip = np.einsum("bd,de->be" if x.ndim == 2 else "bsd,sde->bse", x, p["W_skip"]) if "W_skip" in p else 0
    y_hat = _size(topology, x) * (_written(topology, p, f) + p["b_dec"])
    return y_hat + skip + (x.mean(1, keepdims=True) if topology == LN else 0)


def _norms(topology: str, p: Arrays) -> np.ndarray:
    """Length of all that a latent writes; for a crosscoder the sum of its lengths at the sites."""
    if topology in CLTS:
        return np.stack([np.sqrt((p[f"W_dec_{i}"] ** 2).sum((1, 2))) for i in range(S)])
    lengths = np.sqrt((p["W_dec"] ** 2).sum(-1))
    return lengths.sum(1) if topology == "crosscoder" else lengths


def _among_largest(score: np.ndarray, k: int) -> np.ndarray:
    return score >= np.sort(score, axis=-1)[..., -k, None]


def _latents(sparsity: str, pre: np.ndarray, pre0: np.ndarray, p: Arrays, p0: Arrays, k: int = K) -> np.ndarray:
    """f of `pre`, with every choice made by `pre0`, the same at the start."""
    if sparsity == "gated":
        magnitude, at_start = (np.exp(q["r_mag"]) * (a - q["b_enc"]) + q["b_mag"] for q, a in ((p, pre), (p0, pre0)))
        return np.where((pre0 > 0) & (at_start > 0), magnitude, 0)
    if sparsity == "jumprelu":
        moved = p["threshold"] - p0["threshold"]
        return np.where(pre0 > p0["threshold"], pre, 0) - p0["threshold"] * moved * _rect(pre0, p0) / EPS
    chosen = {
        "relu": lambda: pre0 > 0,
        "topk": lambda: _among_largest(pre0, k) & (pre0 > 0),
        "abs_topk": lambda: _among_largest(np.abs(pre0), k),
        "batchtopk": lambda: _among_largest(pre0.ravel(), k * pre0.size // F).reshape(pre0.shape) & (pre0 > 0),
    }[sparsity]()
    return np.where(chosen, pre, 0)


def _rect(pre0: np.ndarray, p0: Arrays) -> np.ndarray:
    return np.abs(pre0 - p0["threshold"]) < EPS / 2


def _fvu(y: np.ndarray, y_hat: np.ndarray) -> Any:
    return ((y - y_hat) ** 2).sum() / ((y - y.mean(0)) ** 2).sum()


def _reference(topology: str, sparsity: str, code: str, n_dead: int, p: Arrays, p0: Arrays, x: Any, y: Any) -> Any:
    p = p | {name: p0[name] for name in CONSTANTS & p.keys()}
    pre, pre0 = (_pre(topology, q, x) for q in (p, p0))
    f, f0, norms = _latents(sparsity, pre, pre0, p, p0), _latents(sparsity, pre0, pre0, p0, p0), _norms(topology, p)
    levels = [f]
    if code == "matryoshka":
        levels = [np.where(np.arange(F) < m, f, 0) for m in PREFIXES]
    if code == "hierarchical":
        levels = [np.where(_among_largest(np.abs(f0), j), f, 0) for j in range(K, 0, -EVERY)]
    loss = sum(_fvu(y, _y_hat(topology, p, level, x)) for level in levels) / len(levels)

    if sparsity == "relu":  # p falls from 1 to 0.5 in two updates over 10 steps; at step 4 half of it is done
        w, power = f * norms, 1 + 0.5 * (P_END - 1)
        loss += 0.3 * w.sum() / B + 0.5 * np.where(f0 > 0, np.where(f0 > 0, w, 1) ** power, 0).sum() / B
    if sparsity == "gated":
        gate = np.where(pre0 > 0, pre, 0)
        loss += 0.3 * (gate * norms).sum() / B + 0.7 * ((y - _y_hat(topology, p0, gate, x)) ** 2).sum() / B
    if "multi_topk_coefficient" in LOSSES[sparsity]:
        loss += 0.25 * _fvu(y, _y_hat(topology, p, _latents(sparsity, pre, pre0, p, p0, 2 * K), x))
    if sparsity == "jumprelu":
        soft = (pre0 > p0["threshold"]) - (p["threshold"] - p0["threshold"]) * _rect(pre0, p0) / EPS
        below = np.where(pre0 < p0["threshold"], p["threshold"] - pre, 0) * norms
        loss += 0.5 * (soft.sum() / B / TARGET - 1) ** 2 + 0.1 * (soft.mean(0) ** 2).sum() / 0.2 + 0.2 * below.sum() / B
    if n_dead:
        e, resting = y - _y_hat(topology, p0, f0, x), p | {"b_dec": p0["b_dec"]}
        score = np.where(np.arange(F) < n_dead, pre0, -np.inf)
        chosen = _among_largest(score, min(AUXK_K, n_dead)) & (pre0 > 0)
        e_hat = _size(topology, x) * _written(topology, resting, np.where(chosen, _pre(topology, resting, x), 0))
        loss += 0.5 * _fvu(e, e_hat)
        dead, highest = np.arange(F) < n_dead, pre0.max(0)
        raised = sum(p[name] - p0[name] for name in ("b_enc", "b_mag") if name in p)
        loss += LIFT * np.where(dead & (highest <= 0), -highest - raised, 0).sum()
        if sparsity == "jumprelu":
            loss += LIFT * np.where(dead & (highest < p0["threshold"]), p["threshold"] - highest, 0).sum()
    return loss


def _reference_gradients(p0: Arrays, *case: Any, x: Any, y: Any) -> tuple[float, Arrays]:
    """(loss, its derivative by every entry of every parameter)"""
    h, grads = 1e-30, {name: np.zeros(value.shape) for name, value in p0.items()}
    p = {name: value.astype(np.complex128) for name, value in p0.items()}
    for name, value in p.items():
        for i in np.ndindex(value.shape):
            value[i] += 1j * h
            grads[name][i] = _reference(*case, p, p0, x, y).imag / h
            value[i] = p0[name][i]
    return float(_reference(*case, p, p0, x, y).real), grads


def _possible(topology: str, sparsity: str, code: str) -> bool:
    return code != "hierarchical" or "ranks" in SPARSITIES[sparsity].provides


# Those that compute as a clt does: a skip adds nothing to what is selected, a causal crosscoder has y = x, and a layer
# alone has one target.
LIKE_CLT = {"skip_clt": ("relu", "topk"), "causal_crosscoder": ("jumprelu",), PER_LAYER[0]: ("batchtopk", "gated")}
LIKE_CLT |= {PER_LAYER[1]: ("topk", "jumprelu")}


# Every sparsity in an autoencoder, every other topology and code once.
QUICK = [
    *(("autoencoder", sparsity, "whole") for sparsity in SPARSITIES),
    ("transcoder", "gated", "matryoshka"),
    ("skip_transcoder", "jumprelu", "matryoshka"),
    (LN, "topk", "hierarchical"),
    ("crosscoder", "batchtopk", "matryoshka"),
    ("clt", "topk", "whole"),
    ("skip_clt", "relu", "whole"),
    ("causal_crosscoder", "jumprelu", "whole"),
    ("per_layer_autoencoder", "batchtopk", "whole"),
    ("per_layer_transcoder", "topk", "whole"),
]


def _cases() -> Iterator[Any]:
    """QUICK; in .ci/run every two of topology, sparsity and code; in the soak all three, and those like a clt."""
    rows = set(covering([t for t in TOPOLOGIES if t not in LIKE_CLT], SPARSITIES, CODES, possible=_possible))
    rows |= {(topology, sparsity, "whole") for topology, few in LIKE_CLT.items() for sparsity in few}
    for row in itertools.product(TOPOLOGIES, SPARSITIES, CODES):
        if _possible(*row):
            marks = [] if row in QUICK else [pytest.mark.ci] if row in rows else [pytest.mark.soak]
            yield pytest.param(*row, id="-".join(row), marks=marks)


@pytest.mark.parametrize(("topology", "sparsity", "code"), list(_cases()))
def test_loss_and_every_gradient_equal_the_dense_reference(topology: str, sparsity: str, code: str) -> None:
    """More dead latents than AuxK takes for a token with all of F, fewer with prefixes: both of its branches."""
    coder, n_dead = _coder(topology, sparsity, **CODES[code]), N_DEAD if code == "whole" else 1
    p, batch = _params(coder), _batch(coder)
    (loss, (metrics, stats)), grads = _loss_and_grads(coder, p, n_dead)
    p0, x, y = ({k: np.array(v, np.float64) for k, v in t.items()} for t in (p, batch, batch))
    x, y = x["x"], y["y"]
    want_loss, want = _reference_gradients(p0, topology, sparsity, code, n_dead, x=x, y=y)
    assert float(loss) == pytest.approx(want_loss, rel=1e-5)
    assert grads.keys() == want.keys() == p.keys()
    for name in want:
        assert grads[name].shape == p[name].shape
        assert np.abs(want[name]).max() > 1e-3 or name in CONSTANTS, f"{name} is not tested"
        np.testing.assert_allclose(grads[name], want[name], rtol=0, atol=1e-4 * np.abs(want[name]).max(), err_msg=name)

    f = _latents(sparsity, *(_pre(topology, p0, x),) * 2, p0, p0)
    fired = (f != 0).any(0)
    assert float(metrics["l0"]) == pytest.approx((f != 0).sum() / B)
    assert int(metrics["dead"]) == n_dead * (S if topology in CLTS else 1)
    since = np.where(np.arange(F) < n_dead, DEAD_AFTER, DEAD_AFTER - 5) + B
    np.testing.assert_array_equal(stats["tokens_since_fired"], np.where(fired, 0, since))
    # What comes out can go in again: the same program serves the next step.
    before = _stats(coder, n_dead)
    assert {k: v.aval for k, v in stats.items()} == {k: v.aval for k, v in before.items()}


def _large_cases() -> Iterator[Any]:
    for topology, sparsity in itertools.product(TOPOLOGIES, ("topk", "abs_topk", "batchtopk")):
        short = {("clt", "batchtopk"): [], ("autoencoder", "topk"): [pytest.mark.ci]}
        yield pytest.param(topology, sparsity, marks=short.get((topology, sparsity), [pytest.mark.soak]))


@pytest.mark.usefixtures("by_blocks")
@pytest.mark.parametrize(("topology", "sparsity"), list(_large_cases()))
def test_so_they_do_where_kept_entries_are_taken_by_blocks(topology: str, sparsity: str) -> None:
    """A list over the batch with groups; in .ci/run one of each row without; the other pairs in the soak."""
    test_loss_and_every_gradient_equal_the_dense_reference(topology, sparsity, "whole")


# --- shapes, latents, files --------------------------------------------------------------------------------


@every_combination
def test_no_sum_over_tokens_of_latents_is_left_to_xla(topology: str, sparsity: str) -> None:
    """Of wide dictionaries it takes a CPU 20 to 40 times as long as a product with ones (`kernels.batch`)."""
    coder = _coder(topology, sparsity)
    loss = jax.jit(jax.value_and_grad(coder.loss, has_aux=True))
    text = loss.lower(_params(coder), _batch(coder), _stats(coder, N_DEAD), STEP).as_text()
    sums = re.findall(r"applies stablehlo.add across dimensions = \[0\] : \(tensor<([0-9x]+)xf32>", text)
    assert not [sum_ for sum_ in sums if sum_.startswith(f"{B}x") and sum_.endswith(f"x{F}")], sums


@most_combinations
def test_axes_and_shapes(topology: str, sparsity: str) -> None:
    coder = _coder(topology, sparsity)
    shapes = jax.eval_shape(coder.init, jax.random.key(0))
    stats = jax.eval_shape(coder.init_stats)
    axes = coder.logical_axes()
    assert axes.keys() == shapes.keys() | stats.keys()
    latent_shape = coder.topology.latent_shape
    for name, leaf in (shapes | stats).items():
        assert len(axes[name]) == len(leaf.shape), name
        # The axis called latent is as long as a group has latents, and no other is called so.
        assert [leaf.shape[i] for i, axis in enumerate(axes[name]) if axis == "latent"] in ([], [F]), name
        assert leaf.dtype == (jnp.int32 if name == "tokens_since_fired" else jnp.float32)
        assert not leaf.weak_type, f"{name}: a step would be compiled for it, and again for what comes out"
    assert latent_shape == stats["tokens_since_fired"].shape == ((S, F) if topology in CLTS else (F,))
    assert "latent" not in axes["b_dec"] and axes["W_enc"][-1] == "latent" and axes["b_enc"][-1] == "latent"
    assert all(axes[name][0] == "latent" for name in coder.topology.decoders)
    latents = jax.eval_shape(coder.encode, shapes, jnp.zeros((B, *coder.topology.in_shape)))
    assert latents.values.shape == (B, *latent_shape[:-1], K if coder.sparsity.sparse else F)
    rows = jax.eval_shape(coder.topology.decoder_rows, shapes)
    assert len(rows) == (S if topology in CLTS else 1) and {r.shape[0] for r in rows} == {F}
    assert jax.eval_shape(coder.topology.decoder_norms, shapes).shape == latent_shape


@most_combinations
def test_sparse_latents_are_the_dense_ones_and_survive_a_file(topology: str, sparsity: str, tmp_path: Path) -> None:
    coder, x = _coder(topology, sparsity), _batch(_coder(topology, sparsity))["x"]
    p = _params(coder)
    latents = _encode(coder, p, x)
    dense = Latents(latents.dense(), None, F)
    assert latents.dense().shape == (B, *coder.topology.latent_shape)
    for method in ("l0", "fired", "counts"):
        np.testing.assert_array_equal(getattr(latents, method)(), getattr(dense, method)())
    with jax.disable_jit():
        whole = coder.decode(p, latents, x)
        np.testing.assert_allclose(whole, coder.decode(p, dense, x), rtol=1e-4, atol=1e-5)
    assert whole.shape == (B, *coder.topology.out_shape)

    np.savez(tmp_path / "params.npz", **{name: np.asarray(value) for name, value in p.items()})
    fields = dataclasses.asdict(_config(topology, sparsity).resolved())
    again = build(CoderConfig(**fields), *_widths(topology))
    with np.load(tmp_path / "params.npz") as file:
        loaded = {name: jnp.asarray(file[name]) for name in file}
    np.testing.assert_array_equal(_encode(again, loaded, x).dense(), latents.dense())


# --- after training ----------------------------------------------------------------------------------------


@most_combinations
def test_inference_takes_every_token_alone(topology: str, sparsity: str) -> None:
    """Latents of a token do not depend on its batch; batchtopk becomes a JumpReLU at the threshold it followed."""
    coder = _coder(topology, sparsity)
    p, x = _params(coder), _batch(coder)["x"]
    stats = coder.init_stats() | ({"threshold": jnp.float32(0.4)} if sparsity == "batchtopk" else {})
    alone, own = coder.inference(p, stats)
    together = np.asarray(_encode(alone, own, x).dense())
    parts = [np.asarray(_encode(alone, own, x[i : i + 3]).dense()) for i in (0, 3)]
    np.testing.assert_allclose(np.concatenate(parts), together, rtol=1e-5, atol=1e-6)
    assert alone.terms == () and "centre" not in own
    if sparsity == "batchtopk":
        with jax.disable_jit():
            pre = np.asarray(coder.topology.pre_activations(p, x))
        assert isinstance(alone.sparsity, JumpRelu)
        assert own["threshold"].shape == coder.topology.latent_shape
        np.testing.assert_allclose(together, np.where(pre > np.float32(0.4), pre, 0), rtol=1e-5, atol=1e-6)
        singly = np.concatenate([np.asarray(_encode(coder, p, x[i : i + 1]).dense()) for i in range(len(x))])
        whole = np.asarray(_encode(coder, p, x).dense())
        assert ((singly != 0) != (whole != 0)).any()  # in training it is not so, of one token or another
    else:
        np.testing.assert_allclose(together, _encode(coder, p, x).dense(), rtol=1e-5, atol=2e-6)
        plain = _coder(topology, sparsity, encoder_centre=False)
        assert plain.inference(own, stats)[1] is own  # nothing to fold


@most_combinations
def test_fold_moves_each_sites_scale_into_the_weights(topology: str, sparsity: str) -> None:
    coder = _coder(topology, sparsity)
    p, raw, kind = _params(coder), _batch(coder)["x"] * 3, coder.topology
    reads = (0.5, 2.0, 0.3) if kind.stacked else (0.5,)
    writes = reads if kind.tied else tuple(3.0 / s for s in reads)
    scale_in, scale_out = (jnp.asarray(s, jnp.float32) for s in (reads, writes))
    if kind.stacked:
        scale_in, scale_out = scale_in[None, :, None], scale_out[None, :, None]
    else:
        scale_in, scale_out = scale_in[None], scale_out[None]
    folded = kind.fold(p, reads, writes)
    want, got = _encode(coder, p, raw * scale_in), _encode(coder, folded, raw)
    assert float(want.l0()) > 0
    np.testing.assert_allclose(got.dense(), want.dense(), rtol=1e-4, atol=1e-5)
    with jax.disable_jit():
        y, y_raw = coder.decode(p, want, raw * scale_in), coder.decode(folded, got, raw)
    np.testing.assert_allclose(y_raw, y / scale_out, rtol=1e-4, atol=1e-4)
    assert {k: v.shape for k, v in folded.items()} == {k: v.shape for k, v in p.items()}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_aim_points_unit_weights_at_tokens(topology: str) -> None:
    coder = _coder(topology, "relu")
    p, kind, rng = _params(coder), coder.topology, np.random.default_rng(4)
    x, y = (rng.normal(size=(*kind.latent_shape, *s)).astype(np.float32) for s in (kind.in_shape, kind.out_shape))
    aimed = jax.jit(kind.aim)(p, x, y)
    assert {k: v.shape for k, v in aimed.items()} == {k: p[k].shape for k in ("W_enc", *kind.decoders)}
    if topology == LN:
        x, y = ((a - a.mean(1, keepdims=True)) / (_size(topology, a) + np.asarray(p["ln_eps"])) for a in (x, y))
    wanted_in = x - np.asarray(p["b_dec"] if topology == LN else p["centre"])
    for latent in range(F):
        if topology in CLTS:
            for layer in range(S):
                _assert_unit_along(aimed["W_enc"][layer, :, latent], wanted_in[layer, latent, layer])
                rows = (y[layer, latent] - np.asarray(p["b_dec"]))[layer : layer + 1 if topology in PER_LAYER else S]
                _assert_unit_along(aimed[f"W_dec_{layer}"][latent], rows)
        else:
            _assert_unit_along(aimed["W_enc"][..., latent], wanted_in[latent])
            _assert_unit_along(aimed["W_dec"][latent], y[latent] - np.asarray(p["b_dec"]))


def _assert_unit_along(got: Any, direction: np.ndarray) -> None:
    np.testing.assert_allclose(got, direction / np.linalg.norm(direction), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_unit_rows_every_three_steps_and_gradients_across_them(topology: str) -> None:
    coder = dataclasses.replace(_coder(topology, "relu"), unit_decoder_every=3)
    p, g, decoders = _params(coder), _params(coder, 1), coder.topology.decoders
    p[decoders[0]] = p[decoders[0]].at[0].set(0)  # a row of zeros stays one, and is no NaN
    projected, constrain = jax.jit(coder.project_gradients)(p, g), jax.jit(coder.constrain)
    for name in decoders:
        rows, across = (np.asarray(v[name]).reshape(F, -1) for v in (p, projected))
        np.testing.assert_allclose((rows * across).sum(1), 0, atol=1e-5)
        assert np.abs(across).max() > 0.1
    for step, due in ((0, False), (1, False), (2, True), (3, False), (5, True)):
        after = constrain(p, jnp.int32(step))
        for name in p:
            if due and name in decoders:
                lengths = np.linalg.norm(np.asarray(after[name]).reshape(F, -1), axis=1)
                want = np.ones(F)
                want[0] = 0 if name == decoders[0] else 1
                np.testing.assert_allclose(lengths, want, rtol=1e-5)
            else:
                np.testing.assert_array_equal(after[name], p[name])
    free = dataclasses.replace(coder, unit_decoder_every=0)
    assert free.constrain(p, jnp.int32(2)) is p and free.project_gradients(p, g) is g


# --- training ----------------------------------------------------------------------------------------------


def _planted(coder: Coder, step: int) -> Tree:
    """Sums of 3 of 10 fixed directions: y is another linear image of the same magnitudes."""
    fixed, rng = np.random.default_rng(7), np.random.default_rng(100 + step)
    directions = [fixed.normal(size=(10, *s)) / np.sqrt(D) for s in (coder.topology.in_shape, coder.topology.out_shape)]
    codes = (rng.random((B, 10)) < 0.3) * rng.uniform(0.5, 1.5, (B, 10))
    x, y = (jnp.asarray(np.tensordot(codes, d, 1), jnp.float32) for d in directions)
    return {"x": x, "y": x if coder.topology.tied else y}


def _adam_step(coder: Coder, optimizer: Any) -> Any:
    def step(p: Tree, opt_state: Any, batch: Tree, stats: Tree, i: jax.Array) -> Any:
        (_, (metrics, stats)), g = jax.value_and_grad(coder.loss, has_aux=True)(p, batch, stats, i)
        updates, opt_state = optimizer.update(coder.project_gradients(p, g), opt_state, p)
        return coder.constrain(optax.apply_updates(p, updates), i), opt_state, stats, metrics

    return step


@pytest.mark.soak  # the gradients are those of the reference, and the diagonal below is trained
@every_combination
def test_the_error_falls_in_a_few_steps_of_adam(topology: str, sparsity: str) -> None:
    coder, optimizer, errors = _coder(topology, sparsity), optax.adam(0.03), []
    p, stats = _params(coder), _stats(coder, 0)
    opt_state, step = optimizer.init(p), _adam_step(coder, optimizer)
    with jax.disable_jit():
        for i in range(4):
            p, opt_state, stats, metrics = step(p, opt_state, _planted(coder, 0), stats, jnp.int32(i))
            errors.append(1 - float(metrics["fve"]))
    assert errors[-1] < 0.85 * errors[0]


# Each topology and each sparsity once, compiled; where b_enc of the dead begins, so that they are beside the living. A
# latent that is never above 0 has no gradient from AuxK: where firing means being above 0, others bring it back.
OWN_WAYS = [name for name in TOPOLOGIES if name not in ("causal_crosscoder", *PER_LAYER)]  # these compute as a clt
DIAGONAL = list(zip(OWN_WAYS, itertools.cycle(SPARSITIES), strict=False))
DEAD_BIAS = {"relu": -0.5, "gated": -0.5, "topk": -0.1, "abs_topk": -0.15, "batchtopk": -0.2, "jumprelu": -0.4}
OTHERS = {
    "relu": {"ghost_coefficient": 1.0, "auxk_coefficient": 0.0, "lift_coefficient": 0.0},
    "gated": {"lift_coefficient": 0.01, "auxk_coefficient": 0.0},
}
AUXK = {"threshold_init": 0.3, "pre_activation_coefficient": 0.0, "lift_coefficient": 0.0}


@pytest.mark.usefixtures("by_blocks")
@pytest.mark.parametrize(("topology", "sparsity"), rest_in("ci", DIAGONAL, DIAGONAL[:3]))
def test_training_compiles_once_and_dead_latents_come_back(topology: str, sparsity: str) -> None:
    coder = _coder(topology, sparsity, **OTHERS.get(sparsity, AUXK))
    shapes, p = jax.eval_shape(coder.init, jax.random.key(0)), jax.jit(coder.init)(jax.random.key(0))
    assert {k: (v.shape, v.dtype) for k, v in p.items()} == {k: (v.shape, v.dtype) for k, v in shapes.items()}
    assert all((p[k] == v).all() for k, v in coder.sparsity.parameters().items())
    back, errors, traces = _trained(coder, p, DEAD_BIAS[sparsity])
    assert traces == 1
    assert back[0] == 0 and max(back) >= 1
    assert np.mean(errors[-5:]) < 0.8 * np.mean(errors[:5])


@pytest.mark.parametrize(("sparsity", "lift", "returns"), [("topk", 0.01, 1), ("topk", 0.0, 0), ("jumprelu", 0.01, 1)])
def test_lift_brings_back_what_auxk_does_not_reach(sparsity: str, lift: float, returns: int) -> None:
    coder = _coder("autoencoder", sparsity, lift_coefficient=lift, pre_activation_coefficient=0.0)
    back, _, _ = _trained(coder, jax.jit(coder.init)(jax.random.key(0)), -4.0, lr=0.1)
    assert back[0] == 0 and (max(back) >= 1) == bool(returns)


def _trained(coder: Coder, p: Tree, dead_bias: float, lr: float = 0.03) -> tuple[list[int], list[float], int]:
    """(how many of the dead are back, the error) after each of 60 steps, and how often it was traced."""
    optimizer, traces, stats = optax.adam(lr), 0, _stats(coder, N_DEAD)
    step, p = (
        _adam_step(coder, optimizer),
        p | {"b_enc": jnp.full_like(p["b_enc"], 0.5).at[..., :N_DEAD].set(dead_bias)},
    )

    @jax.jit
    def counted(*args: Any) -> Any:
        nonlocal traces
        traces += 1
        return step(*args)

    opt_state, back, errors = optimizer.init(p), [], []
    for i in range(60):
        p, opt_state, stats, metrics = counted(p, opt_state, _planted(coder, i), stats, jnp.int32(i))
        back.append(int((stats["tokens_since_fired"][..., :N_DEAD] < DEAD_AFTER).sum()))
        errors.append(1 - float(metrics["fve"]))
    return back, errors, traces
