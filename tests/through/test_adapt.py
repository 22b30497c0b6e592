"""A language model adapted to a dictionary: its loss, its place in a folder, and how it goes on."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import tiny_experiment
from tiny.attributed import LAYERS, dictionary, mlp_dictionaries
from tiny.attributed import lm_of as nameless
from tiny.commands import run_command

import saejax
from saejax.app import adapt
from saejax.app.adapt import run_adapt
from saejax.app.experiment import Experiment
from saejax.app.stages import run_capture, run_evaluate, run_train
from saejax.app.workspace import Workspace
from saejax.capture import Sinks
from saejax.coders.lista import Lista
from saejax.commands.adapt import Adapt
from saejax.core.errors import ConfigError, DataError
from saejax.lm import LanguageModel
from saejax.lm.adapter import WEIGHTS, Adapter
from saejax.through.adapt import Adaptation, Trainer, restore, save
from saejax.trained import TrainedCoder

HOW = Adaptation(rank=2, alpha=4.0, steps=6, rows=2, lr=3e-3)
POINT = ("blocks.0.resid_post",)


def lm_of(family: str) -> LanguageModel:
    return dataclasses.replace(nameless(family), family=family)


def sae_at(point: tuple[str, ...] = POINT) -> TrainedCoder:
    return dictionary("autoencoder", point, point)


def rows(family: str = "gpt2", seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    segments = np.array([[0] * 8, [0, 0, 0, 0, 1, 1, -1, -1]], np.int32)
    positions = np.array([list(range(8)), [0, 1, 2, 3, 0, 1, 0, 0]], np.int32)
    packed = {"tokens": rng.integers(0, 40, (2, 8), np.int32), "positions": positions, "segments": segments}
    return {name: jnp.asarray(value) for name, value in packed.items()} | {"keep": jnp.asarray(segments >= 0)}


def test_the_loss_is_that_by_hand_and_falls() -> None:
    """In float64: the model as it was, and the changed one with the reconstruction in it."""
    lm, sae, packed = lm_of("gpt2"), sae_at(), rows()
    trainer = Trainer(lm, sae, dataclasses.replace(HOW, steps=60), Sinks())
    state, step = trainer.start(), trainer.step()
    state["matrices"] = {
        module: (a, jax.random.normal(jax.random.key(i), b.shape) * 0.1)
        for i, (module, (a, b)) in enumerate(sorted(state["matrices"].items()))
    }
    adapted = trainer.adapted(trainer.adapter(state))
    given = [packed[name] for name in ("tokens", "positions", "segments")]
    clean, seen = lm.run(*given, capture=POINT)
    x_RSD = np.asarray(seen[POINT[0]])
    y_RSD = np.asarray(sae.decode(sae.encode(x_RSD.reshape(-1, 16)))).reshape(x_RSD.shape)
    instead = {POINT[0]: lambda x: jnp.where(packed["keep"][:, :, None], y_RSD, x)}
    other, _ = adapted.run(*given, edits=instead)

    def log_p(logits: Any) -> np.ndarray:
        z = np.asarray(logits, np.float64)
        return z - np.log(np.exp(z).sum(-1, keepdims=True))

    p, q, total, count = log_p(clean), log_p(other), 0.0, 0
    ids = np.asarray(packed["segments"])
    for r in range(2):
        for s in range(7):
            if ids[r, s] == ids[r, s + 1] >= 0:
                total, count = total + (np.exp(p[r, s]) * (p[r, s] - q[r, s])).sum(), count + 1
    state, first = step(state, packed)
    assert float(first) == pytest.approx(total / count, rel=1e-4)
    for _ in range(59):
        state, last = step(state, packed)
    assert float(last) < 0.5 * float(first)


def test_a_dictionary_that_learns_too_has_the_gradient_of_both_losses() -> None:
    """One step of plain descent in place of Adam's; what selects stays."""
    lm, packed, (point,) = lm_of("gpt2"), rows(), POINT
    sae = dictionary("autoencoder", POINT, POINT, preset="jumprelu")
    how = dataclasses.replace(HOW, dictionary_lr=2e-3)
    trainers = [PlainDescent(lm, sae, one, Sinks()) for one in (HOW, how)]
    (alone, value), (both, other) = (trainer.step()(trainer.start(), packed) for trainer in trainers)
    assert float(value) == pytest.approx(float(other), rel=1e-5)
    for module, pair in alone["matrices"].items():  # the changes learn what they learn by themselves
        for a, b in zip(pair, both["matrices"][module], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)
    learned = both["dictionary"]
    assert learned.keys() == {"W_enc", "b_enc", "W_dec", "b_dec"} and alone["dictionary"] == {}
    own, coder = {"threshold_0": sae.params["threshold"]}, dataclasses.replace(sae.coder, lista=Lista(1, own=True))
    looks = dataclasses.replace(sae, coder=coder, params=dict(sae.params) | own)
    assert PlainDescent(lm, looks, how, Sinks()).start()["dictionary"].keys() == learned.keys()

    given = [packed[name] for name in ("tokens", "positions", "segments")]
    keep, clean = np.asarray(packed["keep"]), lm.run(*given, capture=POINT)
    x_RSD = np.asarray(clean[1][point], np.float64)

    def parts(params: Any) -> tuple[float, float]:
        """(R, L), by other functions than the training's."""
        y_RSD = np.asarray(sae.coder.reconstruct(params, jnp.asarray(x_RSD.reshape(-1, 16), jnp.float32)), np.float64)
        y_RSD = y_RSD.reshape(x_RSD.shape)
        error = np.square(x_RSD - y_RSD)[keep].sum() / np.square(x_RSD[keep] - x_RSD[keep].mean(0)).sum()
        logits, _ = lm.run(*given, edits={point: lambda x: jnp.where(keep[:, :, None], y_RSD, x)})
        p, q = (np.asarray(jax.nn.log_softmax(one), np.float64) for one in (clean[0], logits))
        ids = np.asarray(packed["segments"])
        counted = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
        return float(error), float((np.exp(p) * (p - q)).sum(-1)[:, :-1][counted].mean())

    params = dict(sae.params)
    share = parts(params)[1] / parts(params)[0]
    for name in ("W_dec", "b_dec", "W_enc"):
        got = (np.asarray(params[name]) - np.asarray(learned[name])) / how.dictionary_lr
        way = np.random.default_rng(1).normal(size=got.shape)
        way = 1e-3 * way / np.linalg.norm(way)
        up, down = (parts(params | {name: np.float32(params[name] + s * way)}) for s in (1, -1))
        along = [(a - b) / 2 for a, b in zip(up, down, strict=True)]
        assert float((got * way).sum()) == pytest.approx(along[1] + share * along[0], rel=0.02, abs=1e-6), name


def test_rows_of_padding_change_nothing() -> None:
    empty = rows() | {"segments": jnp.full((2, 8), -1), "keep": jnp.zeros((2, 8), bool)}
    trainer = PlainDescent(lm_of("gpt2"), sae_at(), dataclasses.replace(HOW, dictionary_lr=2e-3), Sinks())
    state, value = trainer.step()(trainer.start(), empty)
    assert float(value) == 0
    for name, array in state["dictionary"].items():
        np.testing.assert_array_equal(array, sae_at().params[name])


class PlainDescent(Trainer):
    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.sgd(self.how.lr)


def test_only_blocks_behind_the_dictionary_change() -> None:
    lm = lm_of("qwen3")
    for point, first in (("blocks.1.resid_post", 2), ("blocks.1.resid_pre", 1), ("blocks.0.mlp_out", 1)):
        sae = sae_at((point,))
        modules = Trainer(lm, sae, HOW, Sinks()).adaptable.shapes
        assert {int(name.split(".")[2]) for name in modules} == set(range(first, LAYERS))


def test_what_cannot_be_adapted_to_is_refused() -> None:
    lm = lm_of("gpt2")
    with pytest.raises(ConfigError, match="Adapt to a dictionary that writes one"):
        Trainer(lm, mlp_dictionaries("clt")[0], HOW, Sinks())
    with pytest.raises(ConfigError, match="does not say its family"):
        Trainer(nameless("gpt2"), sae_at(), HOW, Sinks()).start()
    last = f"blocks.{LAYERS - 1}.resid_post"
    with pytest.raises(ConfigError, match=f"No block from {LAYERS} on"):
        Trainer(lm, sae_at((last,)), HOW, Sinks()).start()


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saejax.through.text._BLOCK", 4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    e = tiny_experiment(tmp_path_factory.mktemp("adapt"))
    run_capture(Workspace(e))
    assert run_train(Workspace(e)) == 0
    run_evaluate(Workspace(e))
    return e


def test_it_goes_on_to_the_same_bits(trained: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapt, "_SAVE_EVERY", 2)
    monkeypatch.setattr(adapt, "_before_and_after", lambda *_: {"ce_sae": 0.0})
    run_adapt(Workspace(trained), HOW, tmp_path / "whole")

    def stopped(state: Any, path: Path, of: str) -> None:
        save(state, path, of)
        if int(state["step"]) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(adapt, "save", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_adapt(Workspace(trained), HOW, tmp_path / "two")
    assert not (tmp_path / "two" / WEIGHTS).exists()
    monkeypatch.setattr(adapt, "save", save)
    run_adapt(Workspace(trained), HOW, tmp_path / "two")
    whole, two = ((tmp_path / name / WEIGHTS).read_bytes() for name in ("whole", "two"))
    assert whole == two
    assert sorted(path.name for path in (tmp_path / "two").glob("[!.]*")) == [
        "adapter.json",
        "adapter_config.json",
        WEIGHTS,
    ]


def test_the_command_says_what_it_brings_and_is_done_once(trained: Experiment, capsys: Any) -> None:
    found = run_adapt(Workspace(trained), HOW)
    folder = trained.run.path / "adapter"
    metrics = json.loads(trained.run.evaluation.read_text())["metrics"]
    assert {name: found[name] for name in ("ce_clean", "ce_sae", "kl")} == {
        name: pytest.approx(metrics[name], rel=1e-6) for name in ("ce_clean", "ce_sae", "kl")
    }
    # The other door to the changed model.
    lm = saejax.load_lm("demo", backend="jax", adapter=folder)
    sae = saejax.load(trained.run.path)
    work = Workspace(trained)
    theirs = adapt.evaluate(sae.at(lm), lm, work.packer, trained.eval, trained.capture.sinks).metrics
    assert found["ce_sae_adapted"] == pytest.approx(theirs["ce_sae"], rel=1e-6)
    excess = found["ce_sae"] - found["ce_clean"]
    assert found["closed"] == pytest.approx((found["ce_sae"] - found["ce_sae_adapted"]) / excess)
    before = (folder / WEIGHTS).stat().st_mtime_ns
    assert run_adapt(Workspace(trained), HOW) == found and "already done" in capsys.readouterr().out
    assert (folder / WEIGHTS).stat().st_mtime_ns == before
    with pytest.raises(DataError, match=r"settings\.rank: 2 -> 3.*--redo"):
        run_adapt(Workspace(trained), dataclasses.replace(HOW, rank=3))
    assert Adapter.read(folder).scale == 2.0
    # The run was trained on the model without it.
    other = dataclasses.replace(trained, lm=dataclasses.replace(trained.lm, adapter=str(folder)))
    with pytest.raises(DataError, match=r"lm\.adapter: '' -> "):
        run_evaluate(Workspace(other), redo=True)
    with pytest.raises(DataError, match="adapter_sha256"):
        run_train(Workspace(dataclasses.replace(other, name="other", store="tiny")))
    with pytest.raises(ConfigError, match=r"lm\.adapter is set"):
        run_adapt(Workspace(other), HOW)


def test_the_dictionary_may_learn_too(trained: Experiment, tmp_path: Path) -> None:
    """It lies beside the changes, goes on with them, and the figures are those of both."""
    how = dataclasses.replace(HOW, dictionary_lr=1e-3)
    found = run_adapt(Workspace(trained), how, tmp_path)
    sae, lm = saejax.load(tmp_path / "dictionary"), saejax.load_lm("demo", backend="jax", adapter=tmp_path)
    assert sae.fingerprint() == found["dictionary_sha256"] != saejax.load(trained.run.path).fingerprint()
    work = Workspace(trained)
    theirs = adapt.evaluate(sae.at(lm), lm, work.packer, trained.eval, trained.capture.sinks).metrics
    assert found["ce_sae_adapted"] == pytest.approx(theirs["ce_sae"], rel=1e-5)
    assert found["fve_adapted"] == pytest.approx(theirs["fve"], rel=1e-5)
    saejax.load(trained.run.path).save(tmp_path / "dictionary")
    with pytest.raises(DataError, match=r"is not what adapter\.json is about"):
        run_adapt(Workspace(trained), how, tmp_path)
    run_adapt(Workspace(trained), HOW, tmp_path, redo=True)
    assert not (tmp_path / "dictionary").exists()


def test_a_damaged_state_is_named_and_one_of_something_else_is_not_taken(tmp_path: Path) -> None:
    trainer = Trainer(lm_of("gpt2"), sae_at(), HOW, Sinks())
    state, path = trainer.start(), tmp_path / "state.safetensors"
    save(state, path, "this")
    again = restore(trainer.start(), path, "this")
    assert again is not None
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert restore(trainer.start(), path, "that") is None
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match="delete it, and the same command begins anew"):
        restore(trainer.start(), path, "this")


def test_an_adapter_that_was_changed_is_not_taken_for_what_was_made(
    trained: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapt, "_before_and_after", lambda *_: {"ce_sae": 0.0})
    found = run_adapt(Workspace(trained), HOW, tmp_path)
    adapter = Adapter.read(tmp_path)
    dataclasses.replace(adapter, scale=1.0).write(tmp_path, "demo")
    with pytest.raises(DataError, match=r"is not what adapter\.json is about"):
        run_adapt(Workspace(trained), HOW, tmp_path)
    assert run_adapt(Workspace(trained), HOW, tmp_path, redo=True) == found
    assert Adapter.read(tmp_path).sha256 == adapter.sha256


def test_the_command_s_defaults_are_those_of_the_training() -> None:
    theirs = {field.name: field.default for field in dataclasses.fields(Adaptation) if field.name != "seed"}
    mine = {field.name: field.default for field in dataclasses.fields(Adapt)}
    assert theirs.pop("kind") == mine["loss"] and ",".join(theirs.pop("projections")) == mine["projections"]
    assert theirs == {name: mine[name] for name in theirs}


def test_the_command_refuses_what_is_no_projection(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--projections has 'X'; there are Q, K, V, O, in, gate, out"):
        run_command("adapt", config="quickstart", projections="Q,X")
