"""The shipped experiments: every file loads and passes the boundary; the GPT-2 one runs with a shrunk model."""

import dataclasses
import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny import ROOT, replaced

import saejax
from saejax.app.experiment import Experiment, default_config, experiment, from_json, to_run_json
from saejax.app.experiments import shipped
from saejax.app.new_experiment import file_of
from saejax.app.stages import run_capture, run_evaluate, run_report, run_train
from saejax.app.workspace import Workspace
from saejax.coders import RECIPES
from saejax.core.errors import ConfigError
from saejax.lm import checkpoint, decoder
from saejax.lm.families import ARCHITECTURES
from saejax.training import TRAINING_RECIPES, TrainConfig

FILES = sorted(p.stem for p in (ROOT / "configs").glob("*.py") if not p.name.startswith("_"))


@pytest.mark.parametrize("name", FILES)
def test_every_config_passes_the_boundary_and_says_how_it_is_run(name: str) -> None:
    module = importlib.import_module(f"configs.{name}")
    assert module.__doc__ and f"--config={name}" in module.__doc__
    presets = getattr(module, "PRESETS", ("",))
    for preset in presets:
        e = experiment(module.get_config(preset) if preset else module.get_config())
        assert e.train.steps > 0 and e.name.replace("-", "_").startswith(name)
        # The recipes are documented in their table.
        assert not preset or f"{name}:{preset}" in module.__doc__ or preset in RECIPES


def test_an_experiment_is_named_as_on_the_command_line(tmp_path: Path) -> None:
    """By its name, its preset and its file; doors take what --config takes."""
    assert experiment("quickstart:tiny") == experiment(shipped("quickstart", "tiny"))
    e = experiment("quickstart")
    assert experiment(e) is e
    (tmp_path / "mine.py").write_bytes(file_of(replaced(e, "train", lr=0.5), "Mine.", "saejax train"))
    assert experiment(str(tmp_path / "mine.py")).train.lr == 0.5
    with pytest.raises(ConfigError, match="quickstart"):
        experiment("quikstart")


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no preset 'tyni'.*Did you mean 'tiny'"):
        importlib.import_module("configs.quickstart").get_config("tyni")


def test_training_recipes_change_the_effort_and_nothing_else() -> None:
    get_config = importlib.import_module("configs.quickstart").get_config
    plain, fast, thorough = (experiment(get_config(preset)) for preset in ("", *TRAINING_RECIPES))
    assert (fast.train.tokens, plain.train.tokens, thorough.train.tokens) == (1_024_000, 4_096_000, 12_288_000)
    assert fast.train.lr == pytest.approx(3 * plain.train.lr) and thorough.train.ema_decay == 0.999
    for e in (fast, thorough):
        assert e.name != plain.name
        assert dataclasses.replace(e, name=plain.name, train=plain.train) == plain
    both = experiment(importlib.import_module("configs.coders").get_config("jumprelu+fast"))
    assert (both.name, both.coder.preset, both.train.tokens) == ("coders-jumprelu-fast", "jumprelu", 256_000)
    with pytest.raises(ConfigError, match=r"no training recipe 'fats'.*Did you mean 'fast'"):
        importlib.import_module("configs.coders").get_config("topk+fats")


def test_the_defaults_are_the_dataclasses_own() -> None:
    assert experiment(default_config()) == Experiment()


@pytest.mark.parametrize("name", ["", "a/b", "..", "."])
def test_a_name_that_is_not_one_folder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="the name of one folder"):
        Experiment(name=name)


@pytest.fixture(scope="module")
def small_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of GPT-2's 12 layers 8, of 12 heads, with random weights, 48 wide instead of 768, the demo's tokenizer."""
    return random_gpt2(tmp_path_factory.mktemp("gpt2"), 8)


def random_gpt2(folder: Path, n_layer: int, seed: int = 0) -> Path:
    config_json = {
        "model_type": "gpt2", "n_layer": n_layer, "n_head": 12, "n_embd": 48, "n_positions": 512, "vocab_size": 4096,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "bos_token_id": 0,
    }  # fmt: skip
    config = ARCHITECTURES["gpt2"].read_config(config_json)
    params = jax.jit(lambda key: decoder.init_params(config, key))(jax.random.key(seed))
    checkpoint.write(folder, config_json, params)
    shutil.copy(Path(saejax.__file__).parent / "lm" / "demo" / "tokenizer.json", folder)
    return folder


def run_shrunk(c: Any, tmp_path: Path) -> Workspace:
    """The whole way of a config on 2,000 made-up lines, 4,096 activations and 20 steps."""
    documents = [{"text": f"def f{i}():\n    return {i} * {i + 1}  # line {i}"} for i in range(2000)]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, documents)))
    c.runs_dir, c.stores_dir = str(tmp_path / "runs"), str(tmp_path / "stores")
    c.text.update(source="files", paths=(str(tmp_path / "text.jsonl"),), heldout_fraction=0.2)
    c.capture.update(tokens=4096, heldout_tokens=512, batch_rows=4, shard_rows=1024)
    c.train.update(tokens=20 * 256, batch_size=256, checkpoint_every=10, validate_every=10)
    c.eval.update(tokens=500, batch_rows=2)
    c.report.update(tokens=500, batch_rows=2)
    c.parallel.mesh = (1, 1)
    work = Workspace(experiment(c))
    run_capture(work)
    assert run_train(work) == 0
    run_evaluate(work)
    assert run_report(work).is_file()
    return work


@pytest.mark.soak
def test_gpt2_small_runs_with_a_shrunk_model(
    small_gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    c = importlib.import_module("configs.gpt2_small").get_config()
    c.lm.update(model=str(small_gpt2), revision="")
    work = run_shrunk(c, tmp_path)
    sae = saejax.load(work.experiment.run_dir)
    # What the config says and does not shrink: layer 6, expansion 8, k 32.
    assert sae.hook_point == "blocks.6.resid_pre" and sae.params["W_enc"].shape == (48, 8 * 48)
    assert sae.config.coder.k == 32 and sae.config.train.lr == 1e-4
    assert "384 latents" in capsys.readouterr().out


@pytest.mark.soak
def test_a_crosscoder_of_two_models_runs_with_shrunk_ones(tmp_path: Path) -> None:
    c = importlib.import_module("configs.model_diff").get_config()
    first, second = (random_gpt2(tmp_path / f"{n}", n, seed=n) for n in (7, 4))
    c.lm.update(model=str(first), revision="", second=str(second))
    work = run_shrunk(c, tmp_path)
    sae = saejax.load(work.experiment.run_dir)
    assert sae.sites.reads == ("blocks.6.resid_pre", "second.blocks.3.resid_pre")
    assert sae.params["W_dec"].shape == (16 * 48, 2, 48)
    x = np.stack([work.lm.activations("def f():", name) for name in sae.sites.reads], axis=1)
    assert sae.encode(x).shape == (len(x), 16 * 48) and sae.decode(sae.encode(x)).shape == x.shape


def test_a_runs_config_keeps_its_meaning_when_presets_and_keys_change(monkeypatch: pytest.MonkeyPatch) -> None:
    e = importlib.import_module("configs.coders").get_config("matryoshka")
    e.coder.dead_after_tokens = 1000
    written, coder = to_run_json(experiment(e)), experiment(e).coder.resolved()
    monkeypatch.setitem(RECIPES, "matryoshka", RECIPES["gated"])
    assert from_json(written).coder.resolved() == coder != experiment(e).coder.resolved()
    # A key that came after the run was written has its default.
    del written["train"]["ema_decay"]
    assert from_json(written).train.ema_decay == TrainConfig().ema_decay


def _experiment(preset: str) -> Experiment:
    return experiment(importlib.import_module("configs.coders").get_config(preset))


def test_when_a_latent_is_dead_follows_from_the_tokens_and_is_written_down() -> None:
    e = importlib.import_module("configs.coders").get_config("topk")
    for tokens, dead_after in ((1_024_000, 3_072), (10**12, 10_000_000), (e.train.batch_size, 3)):
        e.train.tokens = tokens
        assert to_run_json(experiment(e))["coder"]["dead_after_tokens"] == dead_after
    e.coder.dead_after_tokens = 77
    assert to_run_json(experiment(e))["coder"]["dead_after_tokens"] == 77


@pytest.mark.parametrize("url", ["s3://bucket/runs", "gs://bucket/runs", "file:///runs"])
def test_runs_in_a_bucket_are_refused_with_what_to_mount(url: str) -> None:
    with pytest.raises(ConfigError, match=r"runs_dir is .*gcsfuse.*s3fs"):
        Experiment(runs_dir=url)
    assert Experiment(stores_dir="s3://bucket/stores").store_dir("train") == "s3://bucket/stores/run/train"
