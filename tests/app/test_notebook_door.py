"""What a person in a notebook sees and types: completion, one-line reprs, history, pictures, features of a text."""

import dataclasses
import functools
import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tiny import ROOT

import saejax
from saejax.app.array_training import keys_of_train
from saejax.app.features import Features
from saejax.commands._reference import COMMAND, TYPED_KEYS, typed_keys
from saejax.core.errors import ConfigError, DataError
from saejax.core.metrics import columns
from saejax.core.progress import Progress

HOOK = "blocks.1.resid_post"
TEXTS = ["def area(width, height):\n    return width * height\n" * 6, "import json\n\nprint(json.dumps({}))\n" * 4]


@functools.cache
def trained() -> saejax.TrainedCoder:
    rows = np.random.default_rng(0).normal(size=(512, 128)).astype(np.float32)
    settings: Any = {"k": 4, "d_sae": 32, "batch_size": 64, "tokens": 1280, "validate_every": 10, "log_every": 5}
    return saejax.train(rows, "topk", heldout=rows[:64], hook_point=HOOK, progress=False, **settings)


@functools.cache
def found() -> Features:
    return saejax.features(trained(), saejax.load_lm("demo"), TEXTS, examples=3)


def test_the_package_lists_its_doors_alone() -> None:
    assert dir(saejax) == sorted([*saejax.__all__, "__version__"])
    assert all(getattr(saejax, name) is not None for name in dir(saejax))


def test_the_typed_keys_are_fresh() -> None:
    assert (ROOT / TYPED_KEYS).read_text(encoding="utf-8") == typed_keys(), f"{TYPED_KEYS} is stale: {COMMAND}"


def test_the_signature_and_the_help_know_every_key() -> None:
    signature = inspect.signature(saejax.train)
    keys = [key for key, *_ in keys_of_train()]
    assert set(keys) < set(signature.parameters) and {"d_sae", "k", "lr", "batch_size"} < set(keys)
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    text = inspect.getdoc(saejax.train) or ""
    assert all(re.search(rf"^\* {key} \(", text, re.M) for key in keys)
    assert "docs/" not in text


def test_history_and_its_picture() -> None:
    sae = trained()
    assert sae.history["step"].tolist() == [0, 1, 5, 10, 15, 20]
    assert np.isfinite(sae.history["val/fve"]).tolist() == [True, False, False, True, False, True]
    assert np.isfinite(sae.history["train/loss"]).tolist() == [False, True, True, True, True, True]
    figure: Any = sae.plot()
    assert [axes.get_title() for axes in figure.axes] == ["loss", "FVE", "L0", "dead latents"]
    assert figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(DataError, match="no history to plot"):
        dataclasses.replace(sae, metrics=tuple).plot()
    assert columns([]) == {}


def test_a_run_has_the_history_of_its_file(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).normal(size=(256, 8)).astype(np.float32)
    sae = saejax.train(rows, "topk", k=2, d_sae=16, batch_size=64, tokens=640, run=tmp_path / "r", progress=False)
    with (tmp_path / "r" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "train/own": 3.0}\n')
    history = saejax.load(tmp_path / "r").history
    assert history["step"].tolist() == [1, 10] and history["train/own"][-1] == 3.0
    sae.save(tmp_path / "s")
    assert saejax.load(tmp_path / "s").history == {}


def test_what_people_type() -> None:
    sae, x = trained(), np.random.default_rng(2).normal(size=(3, 5, 128)).astype(np.float32)
    assert sae.W_enc.shape == (128, 32) and sae.W_dec.shape == (32, 128) and (sae.d_in, sae.d_sae) == (128, 32)
    assert sae.b_enc is sae.params["b_enc"] and sae.b_dec is sae.params["b_dec"]
    np.testing.assert_array_equal(sae(x), sae.decode(sae.encode(x)))
    assert {"W_enc", "encode", "history"} < set(dir(sae))
    for name, where in {
        "cfg": "sae.config",
        "forward": r"sae\(x\)",
        "threshold": "no attribute",
        "push_to_hub": "saejax.p",
    }.items():
        with pytest.raises(AttributeError, match=where):
            getattr(sae, name)


def test_what_a_notebook_shows() -> None:
    page = trained()._repr_html_()
    assert "d_sae=32" in page and HOOK in page and "<table" in page
    settings = saejax.default_config()._repr_html_()
    assert settings.count("<details>") >= 8 and "batch_size = 4096" in settings


def test_the_passages_of_a_text() -> None:
    found_here, sae, lm = found(), trained(), saejax.load_lm("demo")
    assert len(found_here) == 32 and repr(found_here).startswith("Features(32 latents")
    ids = lm.tokenizer.encode(TEXTS[1])
    latents = sae.encode(np.asarray(lm.activations(TEXTS[1], HOOK))[1:])
    assert len(latents) == len(ids) <= 255, "one row"
    alone = saejax.features(sae, lm, TEXTS[1])
    assert alone.n_tokens == len(ids)
    np.testing.assert_allclose(alone.density, (latents != 0).mean(0), atol=1e-9)
    best = int(latents.max(0).argmax())
    feature = alone[best]
    assert feature.largest == pytest.approx(latents[:, best].max(), rel=1e-3)
    (passage,) = feature.passages
    assert passage.activations[passage.peak] == pytest.approx(feature.largest, rel=1e-4)
    assert passage.text().removeprefix("<|endoftext|>") in TEXTS[1]


def test_features_are_shown() -> None:
    (strongest,) = found().strongest(1, most_density=1.0)
    assert strongest.largest == max(one.largest for one in found())
    assert repr(strongest).count("\n") >= 1 and "<<" in repr(strongest)
    page = strongest._repr_html_()
    assert "rgba(230, 159, 0, 1.00)" in page and "\n" not in page
    assert found()._repr_html_().count("<b>feature") == len(found().strongest())
    assert [one.latent for one in found()[3:5]] == [3, 4]
    assert found().plot().axes[0].get_title().endswith("of 32 never fire")


def test_the_figures_of_a_text() -> None:
    """L0 and FVE by hand, over all tokens but the bos in front of each row."""
    sae, lm = trained(), saejax.load_lm("demo")
    done = saejax.evaluate(sae, lm, TEXTS)
    x = np.concatenate([np.asarray(lm.activations(text, HOOK))[1:] for text in TEXTS])
    latents = sae.encode(x)
    error = np.square(x - sae.decode(latents)).sum(dtype=np.float64)
    assert done.tokens == len(x)
    assert done.metrics["l0"] == pytest.approx((latents != 0).sum(1).mean(), rel=1e-4)
    assert done.metrics["fve"] == pytest.approx(1 - error / np.square(x - x.mean(0)).sum(dtype=np.float64), abs=1e-3)
    assert repr(done).startswith(f"Evaluated({len(x)} tokens: l0 ") and "loss_recovered" in repr(done)
    page = done._repr_html_()
    assert page.count("<tr>") == 1 + len(done.metrics) and done.intervals["fve"] is None, "two documents"


@pytest.mark.ci
def test_sinks_of_the_training_are_left_out_of_every_figure() -> None:
    """A dictionary that was trained without the first five tokens is not looked at on them."""
    lm, sae = saejax.load_lm("demo"), trained()
    five = dataclasses.replace(sae, settings={"capture": {"drop_first": 5, "max_norm_ratio": 0.0}})
    (all_figures, figures), (all_found, found_there) = (
        [door(one, lm, TEXTS) for one in (sae, five)] for door in (saejax.evaluate, saejax.features)
    )
    assert figures.tokens == found_there.n_tokens == all_figures.tokens - 8, "bos, and four tokens of each text"
    assert all_found.n_tokens == all_figures.tokens and "l0_with_sinks" in figures.metrics
    odd = dataclasses.replace(sae, settings={"capture": "none"})
    assert saejax.features(odd, lm, TEXTS).n_tokens == all_found.n_tokens


def test_what_is_given_in_place_of_a_dictionary_or_a_model_is_named() -> None:
    lm: Any = saejax.load_lm("demo")
    with pytest.raises(ConfigError, match="a dictionary and then its model; the first is a LanguageModel"):
        saejax.features(lm, trained(), "x")
    with pytest.raises(ConfigError, match=r"a model of saejax\.load_lm"):
        saejax.features(trained(), cast(Any, "demo"), "x")
    with pytest.raises(ConfigError, match="release is 3"):
        saejax.from_pretrained(cast(Any, 3))


@pytest.mark.parametrize(
    ("text", "message"), [([], "there is none"), ("  \n", "there is none"), ([b"x"], "list of texts")]
)
def test_text_is_needed(text: Any, message: str) -> None:
    for door in (saejax.features, saejax.evaluate):
        with pytest.raises(DataError, match=f"{door.__name__} .*{message}"):
            door(trained(), saejax.load_lm("demo"), text)


TABLE = """
known-res:
  repo_id: ann/known
  saes:
  - {id: blocks.0.hook_resid_post, path: layer_0/x}
  - {id: blocks.1.hook_resid_post}
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The places that `from_pretrained` loads, beside an installed table."""
    (tmp_path / "sae_lens").mkdir()
    (tmp_path / "sae_lens" / "__init__.py").write_text("raise ImportError('it was run')")
    (tmp_path / "sae_lens" / "pretrained_saes.yaml").write_text(TABLE)
    monkeypatch.syspath_prepend(tmp_path)
    asked: list[str] = []
    monkeypatch.setattr("saejax.app.pretrained.load", asked.append)
    return asked


def test_published_dictionaries_by_their_names(places: list[str]) -> None:
    saejax.from_pretrained("known-res", "blocks.0.hook_resid_post")
    saejax.from_pretrained("known-res", "blocks.1.hook_resid_post", revision="v/1")
    saejax.from_pretrained("ann/other", "layer_1/k")
    saejax.from_pretrained("ann/other")
    assert places == [
        "hf://ann/known/layer_0/x", "hf://ann/known@v%2F1/blocks.1.hook_resid_post", "hf://ann/other/layer_1/k",
        "hf://ann/other",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("release", "sae_id", "message"),
    [
        ("known-re", "x", "no release 'known-re'. Did you mean 'known-res'"),
        ("known-res", "blocks.0.hook_resid_pos", "Did you mean 'blocks.0.hook_resid_post'"),
        ("known-res", "", "There are: blocks.0.hook_resid_post, blocks.1"),
    ],
)
def test_unknown_names_are_refused(places: list[str], release: str, sae_id: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        saejax.from_pretrained(release, sae_id)


def test_releases_need_their_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'gpt2-small' is no repository.*pip install --no-deps sae-lens"):
        saejax.from_pretrained("gpt2-small", "x")


def test_a_kernel_shows_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its stderr is no terminal, and yet nobody wants lines there."""
    shell = types.SimpleNamespace(kernel=True)
    ipython: Any = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with Progress("train", 10) as progress:
        progress.advance(10)
    assert "100%" in capsys.readouterr().err
    del shell.kernel
    with Progress("train", 10) as progress:
        progress.advance(10)
    assert "10/10 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_whole_batches_that_end_beyond_the_total_become_the_total(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    with Progress("evaluate", 10, done=2) as progress:
        progress.advance(6)
        progress.advance(6)
    last = capsys.readouterr().err.split("\r")[-1]
    assert "14.0/14.0" in last if terminal else "14/14 tokens" in last
