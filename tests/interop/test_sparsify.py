"""sparsify's folders, by its own SparseCoder; and what is to be refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import saejax
from saejax.core.errors import ConfigError, DataError
from saejax.interop import FORMATS, dictionaries_below
from saejax.interop.assemble import coder_kind
from saejax.interop.hooks import to_module
from saejax.interop.table import examples
from saejax.interop.tensors import read_safetensors, write_safetensors
from tests.interop import fixtures
from tests.tiny.limits import at_once

CASES = fixtures.cases("sparsify")
BY_NAME = {case["case"]: case for case in CASES}
SITES = {"layers.3": ("blocks.3.resid_post",) * 2, "layers.3.mlp": ("blocks.3.mlp_in", "blocks.3.mlp_out")}


@pytest.mark.parametrize("case", fixtures.read(CASES), ids=fixtures.name)
def test_from_there_to_here_and_back(case: dict[str, Any], tmp_path: Path) -> None:
    sae, there = fixtures.load(case), fixtures.path(case)
    fixtures.check(sae, case)
    assert coder_kind(sae) == (case["topology"], case["sparsity"])
    assert (*sae.sites.reads, *sae.sites.writes) == SITES[there.name]
    assert any("a norm follows" in note for note in sae.origin.notes) == there.name.endswith("mlp")
    assert sae.save(tmp_path, format="sparsify") == []
    mine, theirs = (read_safetensors(folder / "sae.safetensors") for folder in (tmp_path / there.name, there))
    assert mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in theirs)
    config, said = (json.loads((folder / "cfg.json").read_text()) for folder in (tmp_path / there.name, there))
    assert config.keys() == said.keys()
    assert all(config[key] == said[key] for key in ("activation", "k", "transcode", "skip_connection", "d_in"))


@pytest.mark.parametrize("case", fixtures.refused(CASES), ids=fixtures.name)
def test_what_saejax_has_not_is_refused_by_name(case: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="groupmax"):
        fixtures.load(case)


def test_a_run_is_a_folder_of_hook_points(tmp_path: Path) -> None:
    names = ["layers.2", "layers.10", "layers.10.mlp"]
    for name in names:
        case = BY_NAME["transcoder" if name.endswith("mlp") else "topk"]
        fixtures.copied(case, tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    assert FORMATS["sparsify"].here(tmp_path) == dictionaries_below(tmp_path) == [tmp_path / name for name in names]
    with pytest.raises(DataError, match=r"holds 3 dictionaries.*layers\.2"):
        saejax.load(tmp_path)
    assert saejax.load(tmp_path / "layers.10").sites.reads == ("blocks.10.resid_post",)
    # Layers are added one by one; the folder of one is not the folder of a run.
    sae = fixtures.load(BY_NAME["skip_transcoder"])
    assert not sae.save(tmp_path, format="sparsify") and len(dictionaries_below(tmp_path)) == 4
    with pytest.raises(DataError, match="something other"):
        sae.save(tmp_path / "layers.2", format="sparsify")


def test_modules_of_two_models_do_not_share_a_folder(tmp_path: Path) -> None:
    sae = fixtures.load(BY_NAME["skip_transcoder"])
    sae.save(tmp_path, format="sparsify")
    other = dataclasses.replace(sae, origin=dataclasses.replace(sae.origin, model="openai-community/gpt2"))
    with pytest.raises(DataError, match=r"would hold h\.\d+\.mlp and layers\.\d+\.mlp"):
        other.save(tmp_path, format="sparsify")
    assert len(dictionaries_below(tmp_path)) == 1


def test_seeds_lie_below_their_hook_point_and_other_names_say_nothing(tmp_path: Path) -> None:
    for seed in (0, 1):
        fixtures.copied(BY_NAME["topk"], tmp_path / "h.4" / f"seed{seed}")
    assert dictionaries_below(tmp_path) == [tmp_path / "h.4" / "seed0", tmp_path / "h.4" / "seed1"]
    assert saejax.load(tmp_path / "h.4" / "seed1").hook_point == "blocks.4.resid_post"
    folder = fixtures.copied(BY_NAME["topk"], tmp_path / "downloaded")
    assert saejax.load(folder).hook_point == "unknown"
    assert saejax.load(folder, hook_points=["blocks.1.mlp_out"]).sites.writes == ("blocks.1.mlp_out",)


def test_a_skip_beside_an_autoencoder_and_signed_latents(tmp_path: Path) -> None:
    """Its class computes both; a skip sees x, the encoder x - b_dec. Signed ones are of its first versions."""
    case = BY_NAME["topk"]
    folder = fixtures.copied(case, tmp_path / "layers.3")
    config, tensors = json.loads((folder / "cfg.json").read_text()), read_safetensors(folder / "sae.safetensors")
    rng, p = np.random.default_rng(0), {name: value.astype(np.float64) for name, value in tensors.items()}
    x, W_skip = rng.normal(size=(9, 14)), rng.normal(size=(14, 14))
    pre = (x - p["b_dec"]) @ p["encoder.weight"].T + p["encoder.bias"]

    write_safetensors(folder / "sae.safetensors", tensors | {"W_skip": W_skip})
    (folder / "cfg.json").write_text(json.dumps(config | {"skip_connection": True}))
    f = np.where(pre >= np.sort(pre)[:, -8, None], np.maximum(pre, 0), 0)
    skip = saejax.load(folder)
    np.testing.assert_allclose(skip.encode(x), f, rtol=0, atol=1e-5)
    np.testing.assert_allclose(skip.decode(f, x), f @ p["W_dec"] + p["b_dec"] + x @ W_skip.T, rtol=0, atol=1e-4)
    skip.save(tmp_path / "back", format="sparsify")
    assert not json.loads((tmp_path / "back" / "layers.3" / "cfg.json").read_text())["transcode"]
    np.testing.assert_allclose(saejax.load(tmp_path / "back" / "layers.3").encode(x), f, rtol=0, atol=1e-5)

    write_safetensors(folder / "sae.safetensors", tensors)
    (folder / "cfg.json").write_text(json.dumps(config | {"signed": True}))
    f = np.where(np.abs(pre) >= np.sort(np.abs(pre))[:, -8, None], pre, 0)
    assert (f < 0).any()
    np.testing.assert_allclose(saejax.load(folder).encode(x), f, rtol=0, atol=1e-5)


def test_hook_points_become_modules_or_are_refused() -> None:
    assert to_module("blocks.6.mlp_in", "blocks.6.mlp_out") == "layers.6.mlp"
    assert to_module("blocks.6.resid_pre", "blocks.6.resid_post", "h") == "h.6"
    assert to_module("blocks.6.attn_out", "blocks.6.attn_out") == "layers.6.self_attn"
    assert to_module("encoder.block.2.in", "encoder.block.2.out") == "encoder.block.2"
    assert to_module("embed_tokens.out", "embed_tokens.out") == "embed_tokens"
    for pair in (("blocks.5.mlp_in", "blocks.6.mlp_out"), ("blocks.6.resid_mid",) * 2, ("unknown", "unknown")):
        assert to_module(*pair) is None


def test_a_hook_point_that_no_module_has_names_the_folder(tmp_path: Path) -> None:
    sae = {coder_kind(one): one for one in examples()}["autoencoder", "topk"]
    assert "which is no module" in sae.save(tmp_path, format="sparsify")[0]
    assert saejax.load(tmp_path / "blocks.0.mlp_in").sites == sae.sites
    wider = {coder_kind(one): one for one in examples(d_out=5)}["transcoder", "topk"]
    with pytest.raises(ConfigError, match="as wide where they write"):
        wider.save(tmp_path, format="sparsify")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_latents": 10**12}, "has an encoder of"),
        ({"num_latents": -1}, "num_latents is -1"),
        ({"num_latents": 0, "expansion_factor": 10**12}, "has an encoder of"),
        ({"d_in": 13}, "has an encoder of"),
        ({"d_in": None}, "d_in is None"),
        ({"k": 0}, "k is 0"),
        ({"k": 10**6}, "keeps k = 1000000 of 44"),
        ({"activation": ["topk"]}, "activation is"),
        ({"skip_connection": True}, "do not agree about a skip"),
    ],
    ids=str,
)
def test_contradictions_are_refused_at_once(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    folder = fixtures.copied(BY_NAME["topk"], tmp_path / "layers.3")
    (folder / "cfg.json").write_text(json.dumps(json.loads((folder / "cfg.json").read_text()) | change))
    with at_once(), pytest.raises(DataError, match=match):
        saejax.load(folder)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("W_dec", np.zeros((44, 15)), "other widths"),
        ("W_dec", np.zeros(44), "no matrix"),
        ("encoder.weight", np.zeros(5), "has an encoder of"),
        ("encoder.bias", np.full(44, np.nan), "b_enc holds NaN"),
        ("b_dec", np.zeros((14, 1)), "b_dec"),
        ("surprise", np.zeros(3), "surprise"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_of_another_shape_are_refused(name: str, value: np.ndarray, match: str, tmp_path: Path) -> None:
    folder = fixtures.copied(BY_NAME["topk"], tmp_path / "layers.3")
    write_safetensors(folder / "sae.safetensors", read_safetensors(folder / "sae.safetensors") | {name: value})
    with pytest.raises(DataError, match=match):
        saejax.load(folder)
