"""Low-rank adapters: the files of PEFT, the model with their changes, and what is refused."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from tiny.attributed import FAMILIES
from tiny.decoders import random_params, write_tokenizer

import saejax
from saejax.core.errors import ConfigError, DataError
from saejax.lm import LanguageModel, LMConfig, checkpoint
from saejax.lm.adapter import CONFIG, PROJECTIONS, WEIGHTS, Adaptable, Adapter
from saejax.lm.pair import load_models

FEW = ("gpt2", "gpt_neox", "qwen3", "gemma2")
TOKENS = np.random.default_rng(3).integers(0, 41, (2, 7))


def model(folder: Path, family: str) -> LanguageModel:
    folder.mkdir(exist_ok=True)
    config_json = {"model_type": family} | FAMILIES[family]
    checkpoint.write(folder, config_json, random_params(config_json))
    write_tokenizer(folder, 39)
    return saejax.load_lm(folder, backend="jax")


def adapter_for(lm: LanguageModel, first: int = 1, projections: tuple[str, ...] = tuple(PROJECTIONS)) -> Adapter:
    adaptable = Adaptable.of(lm.config, lm.family, projections, first, 3)
    rng = np.random.default_rng(0)
    a, b = (
        {module: rng.normal(0, 0.3, sides[i]).astype(np.float32) for module, sides in adaptable.shapes.items()}
        for i in (0, 1)
    )
    return Adapter(2.0, {module: (a[module], b[module]) for module in a}, adaptable.transposed)


@pytest.mark.parametrize(
    "family", [f if f in FEW else pytest.param(f, marks=pytest.mark.soak) for f in FAMILIES if f != "qwen3_moe"]
)
def test_a_loaded_adapter_is_in_the_matrices(tmp_path: Path, family: str) -> None:
    """Of each tensor of the checkpoint by hand in float64; and the same by the door of the training."""
    lm = model(tmp_path, family)
    adapter = adapter_for(lm)
    adapter.write(tmp_path / "adapter", "base")
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert len(adapter.matrices) >= 8
    for module, (a, b) in adapter.matrices.items():
        change = 2.0 * b.astype(np.float64) @ a.astype(np.float64)
        name = f"{module}.weight" if f"{module}.weight" in tensors else f"{module.partition('.')[2]}.weight"
        tensors[name] = (tensors[name] + (change.T if family == "gpt2" else change)).astype(np.float32)
    other = tmp_path / "by hand"
    other.mkdir()
    for path in tmp_path.glob("*.json"):
        (other / path.name).write_bytes(path.read_bytes())
    safetensors.numpy.save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    want = np.asarray(saejax.load_lm(other, backend="jax").run(TOKENS)[0])
    loaded = saejax.load_lm(tmp_path, backend="jax", adapter=tmp_path / "adapter")
    np.testing.assert_allclose(np.asarray(loaded.run(TOKENS)[0]), want, rtol=1e-5, atol=1e-5)
    adaptable = Adaptable.of(lm.config, lm.family, tuple(PROJECTIONS), 1, 3)
    applied = adaptable.applied(lm.params, adapter.matrices, 2.0)
    again = LanguageModel(lm.config, applied, lm.tokenizer, lm.identity)
    np.testing.assert_allclose(np.asarray(again.run(TOKENS)[0]), want, rtol=1e-5, atol=1e-5)
    assert np.abs(want - np.asarray(lm.run(TOKENS)[0])).max() > 0.05
    assert loaded.identity == lm.identity | {"adapter_sha256": adapter.sha256}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    adapter = adapter_for(model(tmp_path, "qwen3"), first=2, projections=("Q", "out"))
    adapter.write(tmp_path / "a", "base")
    again = Adapter.read(tmp_path / "a")
    assert again.sha256 == adapter.sha256 and again.scale == 2.0 and not again.transposed
    assert sorted(again.matrices) == ["model.layers.2.mlp.down_proj", "model.layers.2.self_attn.q_proj"]
    names = set(safetensors.numpy.load_file(tmp_path / "a" / WEIGHTS))
    assert "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight" in names and len(names) == 4
    config = json.loads((tmp_path / "a" / CONFIG).read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 6.0)


def test_an_adapter_in_bfloat16_is_read_as_its_numbers(tmp_path: Path) -> None:
    """PEFT saves in the type of the model that it trained."""
    adapter = adapter_for(model(tmp_path, "qwen3"), first=2, projections=("Q",))
    adapter.write(tmp_path / "a", "base")
    tensors = safetensors.numpy.load_file(tmp_path / "a" / WEIGHTS)
    rounded = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    (tmp_path / "a" / WEIGHTS).write_bytes(safetensors.numpy.save(rounded))
    for module, sides in Adapter.read(tmp_path / "a").matrices.items():
        for mine, theirs in zip(sides, adapter.matrices[module], strict=True):
            assert mine.dtype == np.float32
            np.testing.assert_array_equal(mine, theirs.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_a_changed_unembedding_is_tied_no_more(tmp_path: Path) -> None:
    """The files hold an embedding and an equal unembedding; PEFT changes the second alone."""
    config_json = {"model_type": "gpt2"} | FAMILIES["gpt2"]
    params = random_params(config_json)
    checkpoint.write(tmp_path, config_json, params | {"W_U": params["W_E"].T})
    write_tokenizer(tmp_path, 39)
    rng = np.random.default_rng(0)
    sides = rng.normal(0, 0.3, (3, 16)).astype(np.float32), rng.normal(0, 0.3, (41, 3)).astype(np.float32)
    Adapter(2.0, {"lm_head": sides}).write(tmp_path / "a", "base")
    plain = saejax.load_lm(tmp_path, backend="jax")
    changed = saejax.load_lm(tmp_path, backend="jax", adapter=tmp_path / "a")
    assert plain.config.tied_embeddings and not changed.config.tied_embeddings
    np.testing.assert_array_equal(changed.params["W_E"], plain.params["W_E"])
    want = params["W_E"].T + 2.0 * (sides[1] @ sides[0]).T
    np.testing.assert_allclose(changed.params["W_U"], want, rtol=1e-5, atol=1e-6)


def test_what_is_no_place_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="load_lm: adapter takes the folder of a LoRA adapter"):
        saejax.load_lm("demo", backend="jax", adapter=3)  # type: ignore[call-overload]  # on purpose


def test_a_new_adapter_changes_nothing(tmp_path: Path) -> None:
    lm = model(tmp_path, "gpt2")
    adaptable = Adaptable.of(lm.config, lm.family, ("Q", "O", "in"), 0, 4)
    matrices = adaptable.fresh(0)
    same = LanguageModel(lm.config, adaptable.applied(lm.params, matrices, 2.0), lm.tokenizer, lm.identity)
    np.testing.assert_array_equal(np.asarray(same.run(TOKENS)[0]), np.asarray(lm.run(TOKENS)[0]))
    assert all(np.abs(np.asarray(a)).max() > 0 for a, _ in matrices.values())


def _config(folder: Path, **change: Any) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda a: _config(a, use_dora=True), DataError, "use_dora is True, and saejax reads plain LoRA alone"),
        (lambda a: _config(a, modules_to_save=["lm_head"]), DataError, "modules_to_save"),
        (lambda a: _config(a, peft_type="IA3"), DataError, "peft_type is IA3"),
        (lambda a: _config(a, r=7), DataError, "not both sides of rank 7"),
        (lambda a: _config(a, r=0), DataError, "is no adapter, or it is damaged"),
        (lambda a: (a / CONFIG).write_text("{"), DataError, "is no adapter, or it is damaged"),
        (lambda a: (a / WEIGHTS).write_bytes(b"x" * 20), DataError, "is no adapter, or it is damaged"),
        (lambda a: (a / WEIGHTS).unlink(), DataError, "adapter_model.safetensors is missing"),
    ],
)
def test_an_adapter_that_is_none_is_refused(tmp_path: Path, damage: Any, error: type, message: str) -> None:
    adapter_for(model(tmp_path, "gpt2")).write(tmp_path / "a", "base")
    damage(tmp_path / "a")
    with pytest.raises(error, match=message):
        saejax.load_lm(tmp_path, backend="jax", adapter=tmp_path / "a")


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    adapter_for(model(tmp_path / "one", "qwen3")).write(tmp_path / "a", "base")
    model(tmp_path / "two", "gpt2")
    with pytest.raises(ConfigError, match="is an adapter of another model"):
        saejax.load_lm(tmp_path / "two", backend="jax", adapter=tmp_path / "a")
    wide = {"model_type": "qwen3"} | FAMILIES["qwen3"] | {"intermediate_size": 24}
    checkpoint.write(tmp_path / "three", wide, random_params(wide))
    write_tokenizer(tmp_path / "three", 39)
    with pytest.raises(ConfigError, match=r"is \[\d+, \d+\] there, and"):
        saejax.load_lm(tmp_path / "three", backend="jax", adapter=tmp_path / "a")


def test_of_two_models_the_first_has_the_adapter(tmp_path: Path) -> None:
    lm = model(tmp_path, "gpt2")
    adapter_for(lm).write(tmp_path / "a", "base")
    pair = load_models(LMConfig(str(tmp_path), second=str(tmp_path), adapter=str(tmp_path / "a")))
    point = "blocks.2.resid_post"
    _, seen = pair.apply(
        pair.params, TOKENS, np.tile(np.arange(7), (2, 1)), np.zeros((2, 7), int), [point, f"second.{point}"]
    )
    second = np.asarray(lm.run(TOKENS, capture=[point])[1][point])
    np.testing.assert_allclose(np.asarray(seen[f"second.{point}"]), second, rtol=1e-5, atol=1e-5)
    assert np.abs(np.asarray(seen[point]) - second).max() > 0.05
