"""Every metric against a few lines of float64 numpy, the splice against three separate runs, the gates."""

import dataclasses
import json
import math
import tracemalloc
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import products
from tiny.by_hand import (
    HOOK,
    ROW,
    SIDES,
    SPECIAL,
    Batch,
    arrays,
    captured_at,
    coder_of,
    documents,
    expected,
    gram_by_hand,
    in_turn_oracle,
    numpy_coder,
    oracle,
    pack_all,
    random_params,
    sites_of,
    source,
    splice_oracle,
    tiny_lm,
)

from saejax.capture import CaptureConfig, SelectingPacker
from saejax.capture.sinks import outliers
from saejax.coders import Coder, CoderConfig, Latents, Sites, build
from saejax.core.errors import ConfigError, DataError
from saejax.evals import (
    EvalConfig,
    Gate,
    GateConfig,
    Reconstruction,
    check_gates,
    check_warnings,
    decoder_gram_rms,
    ends_well,
    evaluate,
    evaluate_together,
    splice,
)
from saejax.evals.reconstruction import batch_sums, density_histogram, joined_sums
from saejax.evals.splice import splice_metrics
from saejax.lm import LanguageModel
from saejax.text import PackedRows, Packer
from saejax.trained import TrainedCoder

# ---------------------------------------------------------------------------------------------- reconstruction

WIDTH, LATENTS = 12, 30


def make_batch(seed: int, size: int, offset: float = 0.0, sparse: bool = False) -> Batch:
    """std about 1, mean about `offset` with both signs; a quarter masked; some kept sparse values are 0."""
    rng = np.random.default_rng(seed)
    mean = offset * np.where(np.arange(WIDTH) % 2, 1.0, -0.7)
    x = (mean + rng.normal(size=(size, WIDTH)) * np.linspace(0.5, 2, WIDTH)).astype(np.float32)
    x_hat = (x + 0.3 * rng.normal(size=x.shape) + 0.1).astype(np.float32)
    f = np.zeros((size, LATENTS), np.float32)
    indices = np.argsort(rng.random((size, LATENTS - 4)), axis=1)[:, :5]  # the last four are dead
    values = np.maximum(rng.normal(0.5, 1, size=indices.shape), 0).astype(np.float32)
    np.put_along_axis(f, indices, values, axis=1)
    keep = rng.random(size) < 0.75
    latents = (
        Latents(jnp.asarray(values), jnp.asarray(indices), LATENTS)
        if sparse
        else Latents(jnp.asarray(f), None, LATENTS)
    )
    return Batch(x, x_hat, latents, f, keep)


def measure(batches: list[Batch]) -> Reconstruction:
    total = Reconstruction()
    for b in batches:
        total.add(_sums(b.x, b.x_hat, b.latents, b.keep))
    return total


_sums = jax.jit(batch_sums)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("offset", [0.0, 100.0, 3e4], ids=["centred", "mean 100 std", "mean 30,000 std"])
def test_every_metric_equals_its_definition(offset: float, sparse: bool) -> None:
    batches = [make_batch(seed, size, offset, sparse) for seed, size in enumerate((64, 64, 64, 17))]
    batches[1].keep[:] = False  # nothing kept
    batches[2].keep[:] = True
    total = measure(batches)
    got, want = total.metrics(), oracle(batches)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=1e-4), name
    kept_f = np.concatenate([b.f[b.keep] for b in batches])
    np.testing.assert_array_equal(total.counts, (kept_f != 0).sum(0))
    assert total.counts.dtype == np.int64 and total.sums["n"] == len(kept_f)
    assert want["dead_fraction"] > 0 and 0 < want["r2"] < want["fve"] + 0.1 < 1.1


def test_the_variance_of_an_error_with_a_large_mean_is_its_own() -> None:
    """A coder without the bias of the activations: FVE says so, and dictionary_learning's is blind to it."""
    batches = [make_batch(seed, size) for seed, size in enumerate((64, 17))]
    for b in batches:
        b.x[:] = b.x + np.float32(3e4)
    got, want = measure(batches).metrics(), oracle(batches)
    for name in ("fve", "fve_centred_error", "r2"):
        assert got[name] == pytest.approx(want[name], rel=1e-4), name


@pytest.mark.parametrize("offset", [0.0, 3e4])
def test_sums_of_blocks_are_those_of_all_rows(offset: float) -> None:
    """As an evaluation takes them, whose last block is filled up with rows that do not count."""
    batches = [make_batch(seed, 32, offset) for seed in range(4)]
    batches[3].keep[:] = False
    blocks = [_sums(b.x, b.x_hat, b.latents, b.keep) for b in batches]
    total = Reconstruction()
    total.add(joined_sums(jax.tree.map(lambda *parts: jnp.stack(parts), *blocks)))
    want = oracle(batches)
    assert total.metrics() == pytest.approx(want, rel=1e-4)


def test_masked_rows_may_hold_anything() -> None:
    batches = [make_batch(seed, 64) for seed in (0, 1)]
    want = measure(batches).metrics()
    for b in batches:
        b.x[~b.keep], b.x_hat[~b.keep] = np.nan, -np.inf
        changed = np.where(b.keep[:, None], b.f, np.nan).astype(np.float32)
        object.__setattr__(b, "latents", Latents(jnp.asarray(changed), None, LATENTS))
    assert measure(batches).metrics() == pytest.approx(want, rel=1e-6)


def test_the_order_of_batches_changes_nothing() -> None:
    batches = [make_batch(seed, size, 3.0) for seed, size in enumerate((64, 17, 64))]
    forward, backward = measure(batches), measure(batches[::-1])
    assert forward.metrics() == pytest.approx(backward.metrics(), rel=1e-12)
    np.testing.assert_array_equal(forward.counts, backward.counts)


def with_reconstruction(b: Batch, x_hat: np.ndarray, shift: float = 0.0) -> Batch:
    return dataclasses.replace(b, x=b.x + np.float32(shift), x_hat=(x_hat + shift).astype(np.float32))


def test_a_perfect_reconstruction() -> None:
    b = make_batch(0, 64, 5.0)
    got = measure([with_reconstruction(b, b.x)]).metrics()
    for name in ("fve", "r2", "fve_centred_error", "cosine"):
        assert got[name] == pytest.approx(1, abs=1e-6), name
    for name in ("relative_error", "relative_norm_error", "mse"):
        assert got[name] == 0, name


def test_predicting_the_mean_explains_nothing() -> None:
    b = make_batch(0, 64, 5.0)
    mean = np.broadcast_to(b.x[b.keep].astype(np.float64).mean(0), b.x.shape)
    got = measure([with_reconstruction(b, mean)]).metrics()
    for name in ("fve", "r2", "fve_centred_error"):
        assert got[name] == pytest.approx(0, abs=1e-5), name


def test_fve_is_blind_to_where_zero_lies_and_the_uncentred_variant_is_not() -> None:
    b = make_batch(0, 64)
    plain, moved = with_reconstruction(b, b.x_hat), with_reconstruction(b, b.x_hat, shift=30.0)
    for name in ("fve", "r2", "fve_centred_error", "mse"):
        assert measure([moved]).metrics()[name] == pytest.approx(measure([plain]).metrics()[name], rel=1e-4), name

    def uncentred(c: Batch) -> float:
        x, x_hat = c.x[c.keep].astype(np.float64), c.x_hat[c.keep]
        return 1 - ((x - x_hat) ** 2).sum() / (x**2).sum()

    assert uncentred(moved) > uncentred(plain) + 0.05


def test_a_bias_costs_fve_but_not_the_centred_error_variant() -> None:
    b = make_batch(0, 64)
    plain, biased = with_reconstruction(b, b.x_hat), with_reconstruction(b, b.x_hat + 1.0)
    before, after = measure([plain]).metrics(), measure([biased]).metrics()
    assert after["fve"] < before["fve"] - 0.3
    assert after["fve_centred_error"] == pytest.approx(before["fve_centred_error"], abs=1e-5)


@pytest.mark.parametrize("value", [0.0, 1.1, -2.7, 30_000.1], ids=str)
def test_a_dimension_without_variance_is_left_out_of_r2(value: float) -> None:
    b = make_batch(0, 64)
    b.x[:, 3] = value
    want = np.mean(
        [1 - ((b.x - b.x_hat)[b.keep, j] ** 2).mean() / b.x[b.keep, j].var() for j in range(WIDTH) if j != 3]
    )
    assert measure([b]).metrics()["r2"] == pytest.approx(want, rel=1e-4)


def test_sums_are_float32_on_every_device() -> None:
    b = make_batch(0, 8)
    assert set(products(jax.make_jaxpr(batch_sums)(b.x, b.x_hat, b.latents, b.keep))) == {
        ("float32", jax.lax.Precision.HIGHEST)
    }


# ----------------------------------------------------------------------------------- decoder and density figures


@pytest.mark.parametrize("width", [5, 14])
@pytest.mark.parametrize("block_bytes", [1, 8 * 14 * 4, 2**20])
def test_gram_rms_equals_the_double_loop(width: int, block_bytes: int) -> None:
    """More rows than columns and fewer, in blocks of one, of some that do not divide, of all."""
    rows = np.random.default_rng(0).normal(size=(9, width)) * np.logspace(-3, 3, 9)[:, None]
    rows[4] = 0
    unit = [r / np.sqrt(r @ r) for r in rows if r.any()]
    squares = [(unit[i] @ unit[j]) ** 2 for i in range(8) for j in range(8) if i != j]
    assert decoder_gram_rms(rows, block_bytes) == pytest.approx(math.sqrt(sum(squares) / len(squares)), rel=1e-12)


@pytest.mark.parametrize("shape", [(8, 20_000), (20_000, 8), (600, 600)])
def test_gram_rms_needs_little_memory_whatever_the_shape(shape: tuple[int, int]) -> None:
    rows, bound = np.random.default_rng(2).normal(size=shape).astype(np.float32), 2**18
    tracemalloc.start()
    decoder_gram_rms(rows, bound)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 6 * bound


def test_gram_rms_at_its_ends() -> None:
    assert decoder_gram_rms(3 * np.eye(6, 8, dtype=np.float32)) == pytest.approx(0, abs=1e-8)
    assert decoder_gram_rms(np.ones((7, 4), np.float32)) == pytest.approx(1, rel=1e-12)
    assert decoder_gram_rms(-np.ones((2, 4)) * [[1], [-1]]) == pytest.approx(1, rel=1e-12)  # opposite: the same line
    assert decoder_gram_rms(np.zeros((3, 4))) == 0 and decoder_gram_rms(np.ones((1, 4))) == 0
    random = np.random.default_rng(1).normal(size=(2000, 64))
    assert decoder_gram_rms(random) == pytest.approx(1 / 8, rel=0.02)


@pytest.mark.parametrize("n", [1, 7, 1000, 10**6, 10**7, 123_456_789])
def test_density_histogram_holds_every_live_latent(n: int) -> None:
    counts = np.minimum(np.array([0, 0, 0, 1, 1, 3, n // 2, n - 1, n, n]), n)
    got = density_histogram(counts, n)
    assert sum(got["counts"]) == (counts > 0).sum() and got["dead"] == (counts == 0).sum()
    edges = np.array(got["log10_edges"])
    assert len(edges) == len(got["counts"]) + 1 == 41 and (np.diff(edges) > 0).all()
    assert edges[0] <= math.log10(1 / n) and edges[-1] == 0 and got["n_tokens"] == n
    assert json.loads(json.dumps(got)) == got
    assert got["counts"][-1] >= 2  # those that fire on every token


def test_density_histogram_of_nothing_but_dead_latents() -> None:
    got = density_histogram(np.zeros(5, np.int64), 100)
    assert sum(got["counts"]) == 0 and got["dead"] == 5


# --------------------------------------------------------------------------------------------- a language model

SITES = Sites((HOOK,), (HOOK,), (1.0,), (1.0,))


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_lm()


@pytest.fixture(scope="module")
def packed(lm: LanguageModel) -> PackedRows:
    return pack_all(lm)


def splice_sums(lm: LanguageModel, packed: PackedRows, sites: Sites, reconstruct: Any) -> tuple[Any, Any]:
    """(sums, clean activations) of both halves of the splice; `reconstruct` is given these."""
    rows = arrays(packed)
    sums, clean = splice.unspliced(lm, lm.params, sites, lambda seen: rows["keep"], rows)
    captured = clean["captured"]
    losses = clean["losses"] | splice.spliced(lm, lm.params, sites, splice.instead(reconstruct(captured)), clean, rows)
    return sums | {name: value.sum() for name, value in losses.items()}, captured


def spliced(lm: LanguageModel, packed: PackedRows, reconstruct: Any) -> dict[str, float]:
    sums, _ = splice_sums(lm, packed, SITES, lambda seen: {HOOK: reconstruct(seen[HOOK])})
    return splice_metrics({name: float(value) for name, value in sums.items()})


@pytest.fixture(scope="module")
def clean(lm: LanguageModel, packed: PackedRows) -> np.ndarray:
    _, captured = lm.run(packed.tokens, packed.positions, packed.segments, capture=[HOOK])
    return np.asarray(captured[HOOK])


def test_the_splice_equals_three_separate_runs(lm: LanguageModel, packed: PackedRows, clean: np.ndarray) -> None:
    noise = np.random.default_rng(1).normal(0, 2, clean.shape).astype(np.float32)
    got = spliced(lm, packed, lambda x: 0.8 * x + noise)
    want = splice_oracle(lm, packed, {HOOK: 0.8 * clean + noise})
    assert got == pytest.approx(want, rel=1e-4)
    assert want["kl"] > 0.01 and abs(want["ce_zero"] - want["ce_clean"]) > 0.01 < abs(1 - want["loss_recovered"])


def test_what_is_counted(lm: LanguageModel, packed: PackedRows) -> None:
    sums, captured = splice_sums(lm, packed, SITES, lambda seen: seen)
    pieces = {(r, s) for r, row in enumerate(packed.segments) for s in row if s >= 0}
    tokens = int((packed.segments >= 0).sum())
    assert int(sums["predicted"]) == tokens - len(pieces) < packed.tokens.size - len(packed.tokens)
    assert captured[HOOK].shape == (*packed.tokens.shape, lm.config.d_model)


def test_an_identical_reconstruction_loses_nothing(lm: LanguageModel, packed: PackedRows) -> None:
    got = spliced(lm, packed, lambda x: x)
    assert got["kl"] == pytest.approx(0, abs=1e-6)
    assert got["ce_sae"] == pytest.approx(got["ce_clean"], abs=1e-6)
    assert got["loss_recovered"] == pytest.approx(1, abs=1e-5)


def test_a_zero_reconstruction_recovers_nothing(lm: LanguageModel, packed: PackedRows) -> None:
    got = spliced(lm, packed, jnp.zeros_like)
    assert got["loss_recovered"] == pytest.approx(0, abs=1e-6) and got["kl"] > 0.01
    assert got["ce_sae"] == got["ce_zero"] != got["ce_clean"]


def test_bos_special_and_padding_tokens_are_not_replaced(lm: LanguageModel, packed: PackedRows) -> None:
    assert ((packed.tokens == SPECIAL) & (packed.segments >= 0)).any()
    keep = packed.keep[:, :, None]
    got = spliced(lm, packed, lambda x: jnp.where(keep, x, 1e3))
    assert got["kl"] == pytest.approx(0, abs=1e-6)
    changed = spliced(lm, packed, lambda x: jnp.where(keep, 1e3, x))
    assert changed["kl"] > 0.1


def test_loss_recovered_without_a_loss_to_recover_is_nan() -> None:
    sums = {"predicted": 2.0, "ce_clean": 3.0, "ce_sae": 4.0, "ce_zero": 3.0, "kl": 0.0}
    assert math.isnan(splice_metrics(sums)["loss_recovered"])


# ----------------------------------------------------------------------------------------------------- evaluate


def coder_and_params(preset: str, d_in: int) -> tuple[Coder, dict[str, np.ndarray]]:
    config = CoderConfig(preset=preset, d_sae=40, k=4, matmul_dtype="float32", encoder_centre=False)
    coder = build(config, d_in, 10)
    rng = np.random.default_rng(5)
    shapes = {"W_enc": (d_in, 40), "b_enc": (40,), "W_dec": (40, d_in), "b_dec": (d_in,)}
    params = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    params["b_enc"][-5:] = -1e3  # dead
    return coder, params


def numpy_latents(preset: str, params: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    p = {name: value.astype(np.float64) for name, value in params.items()}
    pre = (x - p["b_dec"]) @ p["W_enc"] + p["b_enc"]
    f = np.maximum(pre, 0)
    return np.where(pre >= np.sort(pre, axis=-1)[..., -4:-3], f, 0) if preset == "topk" else f


@pytest.mark.parametrize("preset", ["topk", "standard"])
def test_evaluate_equals_its_pieces_done_by_hand_at_once(
    lm: LanguageModel, packed: PackedRows, clean: np.ndarray, preset: str
) -> None:
    coder, params = coder_and_params(preset, lm.config.d_model)
    packer = Packer(source(documents()), lm.tokenizer, ROW)
    got = evaluate(TrainedCoder(coder, params, SITES), lm, packer, EvalConfig(tokens=10**6, batch_rows=4))

    x = clean.astype(np.float64)
    f = numpy_latents(preset, params, x)
    x_hat = f @ params["W_dec"].astype(np.float64) + params["b_dec"]
    flat_x, flat_x_hat, flat_f = (a.reshape(-1, a.shape[-1]) for a in (x, x_hat, f))
    flat = Batch(flat_x, flat_x_hat, Latents(jnp.asarray(flat_f), None, 40), flat_f, packed.keep.ravel())
    want = oracle([flat]) | splice_oracle(lm, packed, {HOOK: x_hat})
    want["gram_rms"] = decoder_gram_rms(params["W_dec"])
    assert got.metrics == pytest.approx(want, rel=1e-3)
    assert got.tokens == packed.keep.sum() == got.density["n_tokens"] and got.seconds > 0
    counts = (flat.f[flat.keep] != 0).sum(0)
    assert got.density == density_histogram(counts, got.tokens) and got.density["dead"] >= 5


def test_coders_evaluated_together_have_the_metrics_that_each_has_alone(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit; and the model runs once by itself and once with zeros, not once for each of them."""
    packer, config = Packer(source(documents()), lm.tokenizer, ROW), EvalConfig(tokens=10**6, batch_rows=4)
    saes = [TrainedCoder(*coder_and_params(preset, lm.config.d_model), SITES) for preset in ("topk", "standard")]
    alone = [evaluate(sae, lm, packer, config) for sae in saes]
    traced, apply = [], LanguageModel.apply
    monkeypatch.setattr(LanguageModel, "apply", lambda *a, **how: traced.append(a) or apply(*a, **how))
    together = evaluate_together(saes, lm, packer, config)
    assert len(traced) == len(saes) + 2
    assert [(done.metrics, done.density) for done in together] == [(done.metrics, done.density) for done in alone]
    assert alone[0].metrics["fve"] != alone[1].metrics["fve"]
    elsewhere = dataclasses.replace(saes[0], sites=Sites(("h",), ("h",), (1.0,), (1.0,)))
    with pytest.raises(ValueError, match="too many values"):
        evaluate_together([saes[0], elsewhere], lm, packer, config)


def test_evaluate_looks_at_the_tokens_that_a_capture_stores(
    lm: LanguageModel, packed: PackedRows, clean: np.ndarray
) -> None:
    coder, params = coder_and_params("topk", lm.config.d_model)
    drop = int(packed.tokens[packed.keep][0])
    selection = CaptureConfig(last_tokens=6, drop_ids=(drop,), max_norm_ratio=1.05, drop_first=3)
    plain = Packer(source(documents()), lm.tokenizer, ROW)
    packer = SelectingPacker(**vars(plain), selection=selection)
    config = EvalConfig(tokens=10**6, batch_rows=len(packed.tokens))
    got = evaluate(TrainedCoder(coder, params, SITES), lm, packer, config, selection.sinks)

    flat_x = clean.reshape(-1, clean.shape[-1])
    keep = packed.keep & (packed.tokens != drop) & (packed.to_end < 6)
    front = keep & (packed.positions < 3)
    far = outliers({HOOK: clean}, keep & ~front, 1.05)
    assert 0 < far.sum() < keep.sum() < packed.keep.sum() and front.any()
    everything, packed = dataclasses.replace(packed, keep=keep), dataclasses.replace(packed, keep=keep & ~far & ~front)
    f = numpy_latents("topk", params, flat_x.astype(np.float64))
    flat_x_hat = f @ params["W_dec"].astype(np.float64) + params["b_dec"]
    flat = Batch(flat_x, flat_x_hat, Latents(jnp.asarray(f), None, 40), f, packed.keep.ravel())
    want = oracle([flat]) | splice_oracle(lm, packed, {HOOK: flat_x_hat.reshape(clean.shape)})
    want["gram_rms"] = decoder_gram_rms(params["W_dec"])
    # The same figures of all tokens, the sinks among them.
    flat = dataclasses.replace(flat, keep=everything.keep.ravel())
    whole = oracle([flat]) | splice_oracle(lm, everything, {HOOK: flat_x_hat.reshape(clean.shape)})
    want |= {f"{name}_with_sinks": whole[name] for name in ("fve", "l0", "loss_recovered")}
    want["sinks"] = 1 - packed.keep.sum() / keep.sum()
    assert got.metrics == pytest.approx(want, rel=1e-3)
    assert abs(want["fve"] - want["fve_with_sinks"]) > 1e-3
    assert abs(want["loss_recovered"] - want["loss_recovered_with_sinks"]) > 1e-3
    assert got.tokens == packed.keep.sum()


@pytest.mark.parametrize("preset", ["topk", "standard"])
def test_evaluate_says_the_same_however_many_tokens_it_encodes_at_once(
    lm: LanguageModel, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latents of all tokens of a forward pass may be larger than all that training ever held."""
    coder, params = coder_and_params(preset, lm.config.d_model)
    packer = Packer(source(documents()), lm.tokenizer, ROW)
    found = []
    for few in (10**6, 7):  # 4 rows of 24 tokens in 14 blocks of 7, of which two are filled up
        monkeypatch.setattr(Coder, "few_tokens", few)
        found.append(evaluate(TrainedCoder(coder, params, SITES), lm, packer, EvalConfig(tokens=10**6, batch_rows=4)))
    assert found[1].metrics == pytest.approx(found[0].metrics, rel=1e-5)
    assert found[1].density == found[0].density and found[1].tokens == found[0].tokens


def test_tokens_that_are_not_finite_are_left_out_and_counted(
    lm: LanguageModel, packed: PackedRows, clean: np.ndarray
) -> None:
    """A model that overflows from one position on spoils the rows that reach it, and no figure of the others."""
    at = ROW - 1
    params = lm.params | {"W_pos": jnp.asarray(lm.params["W_pos"]).at[at].set(np.inf)}
    broken = dataclasses.replace(lm, params=params)
    spoilt = ((packed.positions >= at) & (packed.segments >= 0)).any(1)
    assert 0 < spoilt.sum() < len(spoilt) - 2
    coder, weights = coder_and_params("topk", lm.config.d_model)
    packer = Packer(source(documents()), lm.tokenizer, ROW)
    got = evaluate(TrainedCoder(coder, weights, SITES), broken, packer, EvalConfig(tokens=10**6, batch_rows=4))

    whole = dataclasses.replace(
        packed, keep=packed.keep & ~spoilt[:, None], segments=np.where(spoilt[:, None], np.int32(-1), packed.segments)
    )
    flat_x = clean.reshape(-1, clean.shape[-1])
    f = numpy_latents("topk", weights, flat_x.astype(np.float64))
    flat_x_hat = f @ weights["W_dec"].astype(np.float64) + weights["b_dec"]
    flat = Batch(flat_x, flat_x_hat, Latents(jnp.asarray(f), None, 40), f, whole.keep.ravel())
    want = oracle([flat]) | splice_oracle(lm, whole, {HOOK: flat_x_hat.reshape(clean.shape)})
    want["gram_rms"] = decoder_gram_rms(weights["W_dec"])
    assert got.metrics == pytest.approx(want, rel=1e-3)
    assert got.tokens == whole.keep.sum() and got.non_finite > (packed.keep & spoilt[:, None]).sum() > 0


def test_a_model_that_is_nowhere_finite_is_refused(lm: LanguageModel) -> None:
    coder, weights = coder_and_params("topk", lm.config.d_model)
    params = lm.params | {"W_pos": jnp.asarray(lm.params["W_pos"]).at[0].set(np.nan)}
    packer = Packer(source(documents()), lm.tokenizer, ROW)
    with pytest.raises(DataError, match=r"Not one of \d+ held-out tokens has finite activations.*lm.dtype=float32"):
        evaluate(
            TrainedCoder(coder, weights, SITES),
            dataclasses.replace(lm, params=params),
            packer,
            EvalConfig(batch_rows=4),
        )


def test_evaluate_stops_after_the_batch_that_is_enough(lm: LanguageModel) -> None:
    coder, params = coder_and_params("topk", lm.config.d_model)
    packer = Packer(source(documents()), lm.tokenizer, ROW)
    kept = [int(b.keep.sum()) for b in packer.batches("heldout", 4)]
    got = evaluate(TrainedCoder(coder, params, SITES), lm, packer, EvalConfig(tokens=kept[0] + 1, batch_rows=4))
    assert got.tokens == kept[0] + kept[1] < sum(kept)


@pytest.mark.parametrize("texts", [[], ["<mask> <mask>"]], ids=["none", "only special tokens"])
def test_evaluate_without_text_says_so(lm: LanguageModel, texts: list[str]) -> None:
    coder, params = coder_and_params("topk", lm.config.d_model)
    packer = Packer(source(texts), lm.tokenizer, ROW)
    with pytest.raises(DataError, match="no held-out text"):
        evaluate(TrainedCoder(coder, params, SITES), lm, packer, EvalConfig(tokens=100, batch_rows=4))


@pytest.mark.parametrize("bad", [{"tokens": 0}, {"batch_rows": 0}, {"tokens": -1}], ids=str)
def test_eval_config_refuses(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"eval\."):
        EvalConfig(**bad)


# ------------------------------------------------------------------------------- coders of other and several sites


@pytest.mark.parametrize(
    ("topology", "sparsity"),
    [
        ("transcoder", "topk"),
        ("skip_transcoder", "relu"),
        ("crosscoder", "topk"),
        ("clt", "topk"),
        ("skip_clt", "relu"),
        ("causal_crosscoder", "relu"),
        ("layernorm_autoencoder", "topk"),
    ],
)
def test_evaluate_of_every_topology_equals_its_pieces_done_by_hand(
    lm: LanguageModel, packed: PackedRows, topology: str, sparsity: str
) -> None:
    reads, writes = SIDES[topology]
    coder = coder_of(topology, sparsity, reads, writes)
    params = random_params(coder)
    packer = Packer(source(documents()), lm.tokenizer, ROW)
    got = evaluate(
        TrainedCoder(coder, params, sites_of(coder, reads, writes)), lm, packer, EvalConfig(tokens=10**6, batch_rows=4)
    )

    x, y = (captured_at(lm, packed, side) for side in (reads, writes))
    f, y_hat = numpy_coder(topology, sparsity, params, x)
    in_turn = topology in ("clt", "skip_clt", "causal_crosscoder")
    assert f.shape[1] == (80 if in_turn else 40)
    replaced = {name: y_hat[:, i].reshape(*packed.tokens.shape, -1) for i, name in enumerate(writes)}
    want = expected(packed, writes, f, y, y_hat) | splice_oracle(lm, packed, replaced)
    want["gram_rms"] = gram_by_hand([params[name] for name in coder.topology.decoders])
    if in_turn:
        want |= in_turn_oracle(lm, packed, topology, sparsity, params)
        assert abs(want["kl_in_turn"] - want["kl"]) > 0.005
    assert got.metrics == pytest.approx(want, rel=1e-3)
    assert ("fve/blocks.1.mlp_out" in got.metrics) == topology.endswith("clt")
    assert got.density == density_histogram((f[packed.keep.ravel()] != 0).sum(0), got.tokens)
    assert got.density["dead"] >= f.shape[1] // 8


@pytest.mark.parametrize("topology", list(SIDES))
def test_what_is_written_as_it_was_loses_nothing(lm: LanguageModel, packed: PackedRows, topology: str) -> None:
    """y_hat = y: also where a transcoder reads something else, and at several sites at once."""
    reads, writes = SIDES[topology]
    sites = Sites(reads, writes, (1.0,) * len(reads), (1.0,) * len(writes), len(reads) > 1)
    sums, captured = splice_sums(lm, packed, sites, lambda seen: {n: seen[n] for n in writes})
    got = splice_metrics({name: float(value) for name, value in sums.items()})
    assert set(captured) == {*reads, *writes}
    assert got["ce_sae"] == pytest.approx(got["ce_clean"], abs=1e-6) and got["kl"] == pytest.approx(0, abs=1e-6)
    assert got["loss_recovered"] == pytest.approx(1, abs=1e-5) and abs(got["ce_zero"] - got["ce_clean"]) > 0.01


@pytest.mark.parametrize("topology", ["transcoder", "clt"])
def test_a_coder_that_is_the_models_own_mlp_is_perfect(topology: str) -> None:
    """With a ReLU an MLP is a transcoder of its width; given the MLP's weights, it reconstructs exactly."""
    lm = tiny_lm(activation="relu")
    reads, writes = SIDES[topology]
    coder = coder_of(topology, "relu", reads, writes, width=24)
    mlps = [block["mlp"] for block in lm.params["blocks"]][: len(reads)]
    own = {
        "W_enc": np.stack([mlp["W_in"] for mlp in mlps]),
        "b_enc": np.stack([mlp["b_in"] for mlp in mlps]),
        "b_dec": np.stack([mlp["b_out"] for mlp in mlps]),
    }
    if topology == "transcoder":
        params = {name: value[0] for name, value in own.items()} | {"W_dec": mlps[0]["W_out"]}
    else:
        nothing = np.zeros_like(mlps[0]["W_out"])
        decoders = {"W_dec_0": np.stack([mlps[0]["W_out"], nothing], 1), "W_dec_1": mlps[1]["W_out"][:, None]}
        params = own | decoders
    packer = Packer(source(documents()), lm.tokenizer, ROW)
    got = evaluate(
        TrainedCoder(coder, params, sites_of(coder, reads, writes)), lm, packer, EvalConfig(tokens=10**6, batch_rows=4)
    )
    assert got.metrics["ce_sae"] == pytest.approx(got.metrics["ce_clean"], abs=1e-5)
    assert abs(got.metrics["ce_zero"] - got.metrics["ce_clean"]) > 0.01
    assert got.metrics["loss_recovered"] == pytest.approx(1, abs=1e-3)
    explained = [value for name, value in got.metrics.items() if name.startswith("fve")]
    assert explained == pytest.approx([1.0] * len(explained), abs=1e-5)
    assert got.metrics["relative_error"] < 1e-8 and got.metrics["kl"] == pytest.approx(0, abs=1e-6)
    if topology == "clt":
        assert got.metrics["kl_in_turn"] == pytest.approx(0, abs=1e-6)


# -------------------------------------------------------------------------------------------------------- gates

GOOD_METRICS = {"relative_error": 0.01, "fve": 0.95, "zero_fraction": 0.95, "gram_rms": 0.1, "loss_recovered": 0.98}
GOOD_ROWS: list[dict[str, Any]] = [
    *({"step": s, "train/loss": 1 / (1 + s)} for s in range(1, 101)),
    {"step": 1000, "val/r2": 0.9},
]


def gates(metrics: dict[str, Any] | None = None, rows: Any = None, **bars: Any) -> dict[str, Gate]:
    got = check_gates(
        GateConfig(**bars), GOOD_METRICS if metrics is None else metrics, GOOD_ROWS if rows is None else rows
    )
    return {gate.name: gate for gate in got}


def test_a_good_run_passes_all_six() -> None:
    got = gates()
    assert list(got) == ["loss_falls", "relative_error", "sparsity", "decorrelation", "r2", "loss_recovered"]
    assert all(gate.passed for gate in got.values())
    assert all(gate.title and gate.advice.endswith(".") for gate in got.values())


@pytest.mark.parametrize(
    ("name", "bar", "comparison"),
    [
        ("loss_falls", "loss_rise", "<"),
        ("relative_error", "relative_error", "<"),
        ("sparsity", "zero_fraction", ">"),
        ("decorrelation", "gram_rms", "<"),
        ("r2", "r2", ">"),
        ("loss_recovered", "loss_recovered", ">"),
    ],
)
def test_each_gate_on_both_sides_of_its_bar(name: str, bar: str, comparison: str) -> None:
    rising = [{"step": s, "train/loss": 1.0 if s < 50 else 1.2} for s in range(100)]
    rows = [*rising, *GOOD_ROWS[-1:]]
    value = gates(rows=rows)[name].value
    assert value is not None and value > 0
    below, at, above = (gates(None, rows, **{bar: value * f})[name] for f in (0.99, 1.0, 1.01))
    assert [below.passed, at.passed, above.passed] == (
        [False, False, True] if comparison == "<" else [True, False, False]
    )
    others = {n for n, g in gates(None, rows, **{bar: value * 0.99}).items() if n != name and not g.passed}
    assert others <= {"loss_falls"}  # moving one bar moves no other gate


def test_what_was_not_measured_says_what_would_measure_it() -> None:
    got = gates(metrics={}, rows=[])
    assert "loss_recovered" not in got, "a coder that does not touch the model's loss has none"
    for gate in got.values():
        assert (gate.value, gate.passed, gate.state, gate.ends_well) == (None, False, "not measured", True)
        assert gate.unmeasured.endswith(".")
    short = gates(rows=[{"step": s, "train/loss": 1 / s, "val/r2": 0.99} for s in range(1, 59, 10)])
    assert (short["r2"].state, short["r2"].value) == ("not measured", None), "58 steps are not 1,000"
    assert short["r2"].unmeasured == "The last validation was after 51 steps: train longer, or lower gates.r2_step."
    assert short["loss_falls"].unmeasured.startswith("It needs 11 logged steps, and there are 6: lower train.log_every")


def test_a_bar_that_was_set_must_be_measured() -> None:
    """A gate that nobody asked for may be left unmeasured by a short run; one that was asked for is not a pass."""
    rows = [{"step": s, "train/loss": 1.0, "val/r2": 0.99} for s in range(1, 9)]
    assert ends_well(gates(rows=rows).values())
    for bar in ({"r2": 0.3}, {"r2_step": 500}, {"loss_rise": 0.5}):
        got = gates(rows=rows, **bar)
        assert not ends_well(got.values()), bar
        assert [gate.state for gate in got.values() if not gate.ends_well] == ["not measured"]
    assert ends_well(gates(rows=rows, r2_step=8, r2=0.3).values())


def test_what_is_not_finite_was_measured_and_fails() -> None:
    names = ("relative_error", "sparsity", "decorrelation", "loss_recovered")
    for value in (float("nan"), None):  # NaN, and as JSON has it
        found = gates(metrics=dict.fromkeys(GOOD_METRICS, value))
        assert [found[name].state for name in names] == ["failed"] * 4 and not ends_well(found.values())
    assert Gate("x", "x", float("inf"), 1.0, ">", "x").state == "failed"
    diverged = gates(rows=[*GOOD_ROWS[:-1], {"step": 1000, "val/r2": None}])["r2"]
    assert (diverged.state, diverged.ends_well) == ("failed", False)


def test_the_error_is_relative_to_the_variance() -> None:
    """A mean that is large beside what varies is no reconstruction: 0.13 of the energy was lost, and R2 was 0.61."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 6)) + 5.0
    x_hat = x + rng.normal(size=x.shape)  # as wrong as the mean alone
    energy, variance = np.square(x).sum(), np.square(x - x.mean(0)).sum()
    error = np.square(x - x_hat).sum()
    metrics = GOOD_METRICS | {"relative_error": error / energy, "fve": 1 - error / variance}
    assert error / energy < 0.1 < error / variance
    gate = gates(metrics=metrics)["relative_error"]
    assert gate.value == pytest.approx(error / variance) and not gate.passed


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("bar", ["loss_rise", "gram_rms"])
def test_a_bar_is_a_finite_number(bar: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"gates\.{bar} is {value}; it must be finite, not negative"):
        GateConfig(**{bar: value})


def test_gates_survive_json() -> None:
    metrics = GOOD_METRICS | {"gram_rms": float("nan")}
    for gate in gates(metrics=metrics).values():
        text = json.dumps(gate.to_json(), allow_nan=False)
        raw = json.loads(text)
        assert (raw["passed"], raw["state"], raw["ends_well"]) == (gate.passed, gate.state, gate.ends_well)
        again = Gate.from_json(raw)
        assert again.passed == gate.passed and again.to_json() == gate.to_json()
        assert again == (dataclasses.replace(gate, value=None) if gate.name == "decorrelation" else gate)


def loss_rise(losses: Sequence[float | None]) -> float | None:
    return gates(rows=[{"step": i, "train/loss": loss} for i, loss in enumerate(losses)])["loss_falls"].value


def test_a_second_loss_is_none_of_the_gate_s() -> None:
    rows = [
        {"step": i, "train/loss": 1.0 if i < 50 else 2.0, "train/through_kl": None if i < 50 else 0.1}
        for i in range(100)
    ]
    assert gates(rows=rows)["loss_falls"].value == 0
    assert "second loss" in (gates(rows=rows[50:])["loss_falls"].unmeasured or "")


def test_steps_with_a_second_loss_have_a_pace_of_their_own() -> None:
    pace = [1.0] * 60 + [9.0] * 40
    rows: list[dict[str, Any]] = [
        {"step": i, "time": sum(pace[:i]), "train/loss": 1.0} | ({"train/through_kl": 0.1} if i > 60 else {})
        for i in range(101)
    ]
    assert "runtime" not in {gate.name for gate in check_warnings(GateConfig(runtime=1e-6), rows)}
    alike = [{key: row[key] for key in ("step", "time", "train/loss")} for row in rows]
    assert "runtime" in {gate.name for gate in check_warnings(GateConfig(runtime=1e-6), alike)}


def test_the_largest_rise_between_fifths() -> None:
    # The first tenth (10 of 100) is left out; the fifths of the remaining 90 have 18 rows.
    losses = [99.0] * 10 + [4.0] * 18 + [2.0] * 18 + [2.5] * 18 + [1.0] * 18 + [1.1] * 18
    assert loss_rise(losses) == pytest.approx(0.25)
    with_nulls: list[float | None] = [v for value in losses for v in (value, None)]
    assert loss_rise(with_nulls) == pytest.approx(0.25)
    assert loss_rise([float(100 - i) for i in range(100)]) < 0  # type: ignore[operator]
    assert loss_rise([1.0] * 100) == 0
    assert loss_rise([1.0] * 10) is None and loss_rise([1.0] * 11) == 0 and loss_rise([]) is None
    assert loss_rise([0.0] * 100) is not None  # no division by zero
    assert not gates(rows=[{"step": i, "train/loss": float(i > 50)} for i in range(100)])["loss_falls"].passed


def test_rows_of_other_kinds_between_do_not_matter() -> None:
    rows: list[dict[str, Any]] = []
    for i in range(100):
        rows += [{"step": i, "train/loss": 5.0 - i / 50}, {"step": i, "val/r2": i / 100}]
    assert gates(rows=rows)["loss_falls"].value == loss_rise([5.0 - i / 50 for i in range(100)])


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ([(250, 0.5), (1000, 0.8), (1250, 0.9)], 0.8),
        ([(250, 0.5), (999, 0.6), (1100, 0.9), (1200, 0.1)], 0.9),
        ([(250, 0.5), (500, 0.9)], None),  # a shorter run has not come so far
        ([(1000, None), (1250, 0.9)], 0.9),
        ([], None),
    ],
)
def test_r2_at_the_first_validation_from_the_step_on(
    values: list[tuple[int, float | None]], want: float | None
) -> None:
    assert gates(rows=[{"step": s, "val/r2": v} for s, v in values])["r2"].value == want


def times(seconds: Sequence[float], validated: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Rows of a training whose steps took so long."""
    rows = [{"step": i, "train/loss": 1.0, "time": float(t)} for i, t in enumerate(np.cumsum(seconds), 1)]
    return rows + [{"step": i, "val/r2": 0.9} for i in validated]


@pytest.mark.parametrize(
    ("seconds", "validated", "want"),
    [
        ([1.0] * 41, (), None),
        ([9.0] + [1.0] * 40, (), None),  # what came before the first logged step is no step
        ([1.0] * 31 + [2.0] * 10, (), 0.25),
        ([2.0] * 10 + [1.0] * 31, (), 9 / 40),  # from slow to fast: slower than most of it
        ([1.0] * 40 + [21.0], (), 0.5),  # one stall
        ([1.0 if i % 10 else 6.0 for i in range(1, 42)], (10, 20, 30, 40), None),  # validations take their time
        ([0.5] * 20 + [1.0] * 21, (), None),  # faster than its median pace is nothing to warn of
        ([1.0] * 9 + [100.0], (), None),  # too short to have a pace
    ],
)
def test_a_training_that_was_slowed_is_warned_of_and_no_gate(
    seconds: list[float], validated: tuple[int, ...], want: float | None
) -> None:
    rows = times(seconds, validated)
    found = check_warnings(GateConfig(), rows)
    assert [(one.name, one.value) for one in found] == ([] if want is None else [("runtime", pytest.approx(want))])
    assert check_warnings(GateConfig(runtime=10.0), rows) == []
    assert not {"runtime"} & set(gates(rows=rows))


def test_gate_config_refuses_a_negative_bar() -> None:
    with pytest.raises(ConfigError, match=r"gates\.r2 is -1"):
        GateConfig(r2=-1)
