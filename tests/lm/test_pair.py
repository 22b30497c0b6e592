"""Two models on the same tokens: the activations of each, row by row in one store, and what a coder of both is told."""

import dataclasses
import functools
import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny.by_hand import (
    HOOK,
    ROW,
    arrays,
    captured_at,
    coder_of,
    documents,
    expected,
    gram_by_hand,
    numpy_coder,
    pack_all,
    random_params,
    sites_of,
    source,
    splice_oracle,
    tiny_lm,
)

from saejax.analysis import ReportConfig, collect_features
from saejax.analysis.features import promoted_logits
from saejax.capture import CaptureConfig, capture, store_identity
from saejax.core.errors import ConfigError, DataError
from saejax.evals import EvalConfig, evaluate
from saejax.evals.evaluate import Evaluated
from saejax.lm import LanguageModel
from saejax.lm.pair import ModelPair
from saejax.parallel import ParallelConfig, make_mesh
from saejax.store import StoreReader
from saejax.text import PackedRows, Packer, TextConfig
from saejax.trained import TrainedCoder

SECOND = f"second.{HOOK}"
BOTH = (HOOK, SECOND)
TEXT = TextConfig(context_length=ROW)
N_TOKENS = 300
# Several shards, so that a capture can stop between two.
CAPTURE = CaptureConfig(BOTH, tokens=N_TOKENS, batch_rows=4, shard_rows=64, chunk_rows=16)


@functools.cache
def pair() -> ModelPair:
    """Two models of the same shape and tokenizer with other weights."""
    return ModelPair(tiny_lm(), tiny_lm(seed=1))


@pytest.fixture(scope="module")
def packed() -> PackedRows:
    return pack_all(pair().first)


def rows_of(packed: PackedRows) -> list[jax.Array]:
    return [arrays(packed)[name] for name in ("tokens", "positions", "segments")]


# --------------------------------------------------------------------------------------------- the two as one model


def test_each_hook_point_has_what_its_own_model_has_there(packed: PackedRows) -> None:
    rows = rows_of(packed)
    logits, seen = pair().apply(pair().params, *rows, BOTH)
    assert set(seen) == set(BOTH)
    for name, model in ((HOOK, pair().first), (SECOND, pair().second)):
        alone_logits, alone = model.run(*rows, capture=[HOOK])
        np.testing.assert_array_equal(seen[name], alone[HOOK])
        assert np.array_equal(logits, alone_logits) == (model is pair().first)
    assert not np.allclose(seen[HOOK], seen[SECOND], atol=0.1)


def test_an_edit_goes_to_the_model_that_it_names(packed: PackedRows) -> None:
    rows = rows_of(packed)
    after = "blocks.1.resid_post"
    wanted = [after, f"second.{after}"]
    logits, clean = pair().apply(pair().params, *rows, wanted)
    for name, model in ((HOOK, pair().first), (SECOND, pair().second)):
        got_logits, got = pair().apply(pair().params, *rows, wanted, {name: jnp.zeros_like})
        alone = model.run(*rows, capture=[after], edits={HOOK: jnp.zeros_like})[1][after]
        own = f"second.{after}" if model is pair().second else after
        other = next(at for at in wanted if at != own)
        np.testing.assert_array_equal(got[own], alone)
        np.testing.assert_array_equal(got[other], clean[other])
        assert not np.array_equal(got[own], clean[own])
        assert np.array_equal(got_logits, logits) == (model is pair().second)


def test_the_second_model_runs_only_when_something_of_it_is_captured(packed: PackedRows) -> None:
    """Without it in the parameters its run would fail."""
    rows = rows_of(packed)
    only_first = {"first": pair().params["first"]}
    _, seen = pair().apply(only_first, *rows, [HOOK], {SECOND: jnp.zeros_like})
    assert list(seen) == [HOOK]
    with pytest.raises(KeyError, match="second"):
        pair().apply(only_first, *rows, [SECOND])


def test_names_and_widths_of_both() -> None:
    points = pair().hook_points()
    first = pair().first.hook_points()
    assert points == first | {f"second.{name}": width for name, width in pair().second.hook_points().items()}
    assert len(points) == 2 * len(first)
    assert pair().hook_point("blocks.0.hook_mlp_out") == "blocks.0.mlp_out"
    assert pair().hook_point("second.blocks.0.hook_mlp_out") == "second.blocks.0.mlp_out"
    assert pair().owner(HOOK) is pair().first and pair().owner(SECOND) is pair().second


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blocks.7.resid_post", r"no hook point 'blocks\.7\.resid_post'.*blocks\.0 to blocks\.1"),
        (
            "second.blocks.7.resid_post",
            r"'second.blocks\.7\.resid_post', of lm\.second tiny1: .*blocks\.0 to blocks\.1",
        ),
        ("third/blocks.0.resid_post", r"no hook point 'third/"),
    ],
)
def test_a_hook_point_that_neither_has_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pair().hook_point(name)


def test_the_context_is_what_both_can_read() -> None:
    short = dataclasses.replace(
        pair().second, config=dataclasses.replace(pair().second.config, context_length=ROW - 4, d_model=99)
    )
    for two in (ModelPair(pair().first, short), ModelPair(short, pair().first)):
        assert two.config.context_length == ROW - 4 and two.config.d_model == two.first.config.d_model
    with pytest.raises(ConfigError, match=rf"context_length is {ROW}, but the model reads at most {ROW - 4}"):
        run_capture(Path("never"), ModelPair(pair().first, short))


def test_two_tokenizers_are_refused() -> None:
    other = dataclasses.replace(pair().second, tokenizer=dataclasses.replace(pair().second.tokenizer, sha256="another"))
    with pytest.raises(ConfigError, match=r"lm\.model tiny and lm\.second tiny1 have different tokenizers.*Choose two"):
        ModelPair(pair().first, other)


# ---------------------------------------------------------------------------------------------------------- capture


def run_capture(path: Path, lm: LanguageModel | ModelPair, config: CaptureConfig = CAPTURE) -> Any:
    mesh = make_mesh(ParallelConfig((1, 1)))
    return capture(path, lm, source(documents()), TEXT, config, mesh, split="heldout", n_tokens=N_TOKENS, seed=0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair") / "store"
    assert run_capture(path, pair()).rows == N_TOKENS
    return path


def test_one_store_holds_each_models_own_activations_row_by_row(store: Path, packed: PackedRows) -> None:
    """A row's document, position and token say where it is in the text; both columns are found there."""
    rows = StoreReader.open(store).rows(0, N_TOKENS, metadata=True)
    places: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for at in map(tuple, np.argwhere(packed.keep)):
        places.setdefault(tuple(int(a[at]) for a in (packed.documents, packed.positions, packed.tokens)), []).append(at)
    own = {name: m.run(*rows_of(packed), capture=[HOOK])[1][HOOK] for name, m in zip(BOTH, _models(), strict=True)}
    sure = 0
    for row in range(N_TOKENS):
        found = places[tuple(int(rows[name][row]) for name in ("document", "position", "token_id"))]
        # Both columns come from one place, not each from some place.
        assert any(
            all(np.allclose(rows[n][row].astype(np.float32), own[n][at], rtol=8e-3, atol=1e-3) for n in BOTH)
            for at in found
        ), row
        sure += len(found) == 1
    assert sure > N_TOKENS // 2  # a document in several pieces has its positions several times


def _models() -> tuple[LanguageModel, LanguageModel]:
    return pair().first, pair().second


def test_the_columns_are_those_of_two_captures_of_one_model(store: Path, tmp_path: Path) -> None:
    both = StoreReader.open(store).rows(0, N_TOKENS, metadata=True)
    one_site = dataclasses.replace(CAPTURE, hook_points=(HOOK,))
    for name, model in zip(BOTH, _models(), strict=True):
        path = tmp_path / model.identity["model"]
        run_capture(path, model, one_site)
        alone = StoreReader.open(path).rows(0, N_TOKENS, metadata=True)
        for column in ("document", "position", "token_id"):
            np.testing.assert_array_equal(alone[column], both[column])
        # One program for both models may add in another order, before the rounding to bfloat16.
        got, want = (value.astype(np.float32) for value in (both[name], alone[HOOK]))
        np.testing.assert_allclose(got, want, rtol=8e-3, atol=1e-3)


def test_a_store_of_two_models_belongs_to_both(store: Path) -> None:
    assert run_capture(store, pair()).already_complete
    for lm, what in (
        (ModelPair(pair().first, tiny_lm(seed=2)), "tiny2"),
        (ModelPair(tiny_lm(seed=2), pair().second), "tiny2"),
        (ModelPair(pair().second, pair().first), "tiny1"),
    ):
        with pytest.raises(DataError, match=rf"made for something else:(.|\n)*{what}"):
            run_capture(store, lm)
    identity = store_identity(pair(), source([]), TEXT, "train")["lm"]
    assert (identity["model"], identity["second"]) == ("tiny", {"model": "tiny1"})
    assert store_identity(pair().first, source([]), TEXT, "train")["lm"] == {"model": "tiny"}


@pytest.mark.ci
def test_a_stopped_capture_of_two_models_continues_to_the_same_store(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By name: `saejax.capture.capture` as an attribute is the function.
    module = importlib.import_module("saejax.capture.capture")
    append, calls = module._append, []

    def stop_at_the_third(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        append(*arguments)

    monkeypatch.setattr(module, "_append", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        run_capture(tmp_path / "store", pair())
    monkeypatch.undo()
    with pytest.raises(DataError, match="made for something else"):
        run_capture(tmp_path / "store", ModelPair(pair().first, tiny_lm(seed=2)))
    result = run_capture(tmp_path / "store", pair())
    assert result.rows == N_TOKENS and 0 < result.tokens < N_TOKENS
    want, got = (StoreReader.open(path).rows(0, N_TOKENS, metadata=True) for path in (store, tmp_path / "store"))
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


# ------------------------------------------------------------------------------------------- evaluation and report


def evaluated(topology: str, names: tuple[str, ...], lm: LanguageModel | ModelPair) -> tuple[Evaluated, Any]:
    coder = coder_of(topology, "topk", names, names)
    params = random_params(coder)
    packer = Packer(source(documents()), lm.tokenizer, ROW)
    config = EvalConfig(tokens=10**6, batch_rows=4)
    return evaluate(TrainedCoder(coder, params, sites_of(coder, names, names)), lm, packer, config), params


def test_evaluate_of_a_crosscoder_of_two_models(packed: PackedRows) -> None:
    """Reconstruction of both; the loss is the first model's, with its own site replaced."""
    got, params = evaluated("crosscoder", BOTH, pair())
    x = captured_at(pair(), packed, BOTH)
    f, x_hat = numpy_coder("crosscoder", "topk", params, x)
    first = x_hat[:, 0].reshape(*packed.tokens.shape, -1)
    want = expected(packed, BOTH, f, x, x_hat) | splice_oracle(pair().first, packed, {HOOK: first})
    want["gram_rms"] = gram_by_hand([params["W_dec"]])
    assert got.metrics == pytest.approx(want, rel=1e-3)
    assert f"fve/{SECOND}" in got.metrics


def test_of_a_coder_of_the_second_model_alone_nothing_is_said_of_the_first_models_loss(packed: PackedRows) -> None:
    got, _ = evaluated("autoencoder", (SECOND,), pair())
    alone, _ = evaluated("autoencoder", (HOOK,), pair().second)
    assert alone.metrics.keys() - got.metrics.keys() == {"ce_sae", "ce_zero", "loss_recovered", "kl"}
    about_the_model = {name for name in alone.metrics if name.startswith("ce_")}
    for name in got.metrics.keys() - about_the_model:
        assert got.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-4), name
    zeros = np.zeros((*packed.tokens.shape, 16), np.float32)
    want = splice_oracle(pair().first, packed, {HOOK: zeros})["ce_clean"]
    assert got.metrics["ce_clean"] == pytest.approx(want, rel=1e-4)
    assert abs(got.metrics["ce_clean"] - alone.metrics["ce_clean"]) > 0.01


def test_promoted_logits_are_of_the_model_that_has_the_last_site() -> None:
    """A decoder row says something about the unembedding of its own model only."""
    config = ReportConfig(tokens=100, examples=1, logits=5, batch_rows=4)
    packer = Packer(source(documents()), pair().tokenizer, ROW)
    for names, model in (((HOOK, SECOND), pair().second), ((SECOND, HOOK), pair().first)):
        coder = coder_of("crosscoder", "topk", names, names)
        params = random_params(coder)
        content, _, _ = collect_features(
            TrainedCoder(coder, params, sites_of(coder, names, names)), pair(), packer, config
        )
        assert content["hook_point"] == ", ".join(names) and content["model"] == "tiny"
        shown = [[token for token, _ in feature["top_logits"]] for feature in content["features"]]
        strings = model.tokenizer.token_strings
        wanted, others = (
            [strings(ids) for ids, _ in promoted_logits(of, params["W_dec"][:, -1], 5)[0]]
            for of in (model, next(m for m in _models() if m is not model))
        )
        assert shown == wanted != others
