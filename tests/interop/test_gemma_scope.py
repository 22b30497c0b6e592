"""Gemma Scope's files and folders, with what SAELens and circuit-tracer compute from them.

(benchmarks/peers/make_interop_fixtures.py; no peer reads a crosscoder of version 2: there it is the published formula.)
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import saejax
from saejax.core.errors import DataError
from saejax.interop import FORMATS
from saejax.interop.assemble import UNCENTRED, coder_kind
from saejax.interop.hooks import from_module, from_transformer_lens
from saejax.interop.table import examples
from saejax.interop.tensors import read_safetensors, write_safetensors
from saejax.trained import TrainedCoder
from tests.interop import fixtures

CASES = fixtures.cases("gemma_scope")
BY_NAME = {case["case"]: case for case in CASES}


def _ours(name: str) -> str:
    return from_transformer_lens(name) if name.startswith(("blocks.", "hook_")) else from_module(name)


@pytest.mark.parametrize("case", CASES, ids=fixtures.name)
def test_its_dictionaries_do_here_what_they_do_there(case: dict[str, Any]) -> None:
    sae = fixtures.load(case)
    with np.load(fixtures.ROOT / case["expected"]) as expected:
        x, latents, reconstructions = (expected[key] for key in ("x", "latents", "reconstructions"))
    mine = sae.encode(x)
    if coder_kind(sae)[0] == "crosscoder":  # one group of all layers' latents
        latents = latents.reshape(len(x), -1)
    assert (latents != 0).any()
    np.testing.assert_allclose(mine, latents, rtol=0, atol=1e-5 * latents.max())
    np.testing.assert_allclose(sae.decode(mine, x), reconstructions, rtol=0, atol=1e-5 * np.abs(reconstructions).max())
    assert sae.origin.model.removeprefix("google/") == case["model"].removeprefix("google/")
    assert sae.sites.reads == tuple(map(_ours, case["hooks_in"]))
    assert sae.sites.writes == tuple(map(_ours, case["hooks_out"] or case["hooks_in"]))


def _loaded_elsewhere(sae: TrainedCoder, folder: Path) -> None:
    again = saejax.load(folder)
    assert (again.coder, again.sites, again.origin.model) == (sae.coder, sae.sites, sae.origin.model)
    for name, value in sae.params.items():
        np.testing.assert_array_equal(again.params[name], value, err_msg=name)


@pytest.mark.parametrize("case", [case for name, case in BY_NAME.items() if name.startswith("v1")], ids=fixtures.name)
def test_version_1_goes_back_bit_for_bit_into_a_folder_of_its_name(case: dict[str, Any], tmp_path: Path) -> None:
    sae = fixtures.load(case)
    folder = tmp_path.joinpath(*fixtures.path(case).relative_to(fixtures.ROOT).parts[2:])
    if case["case"] == "v1_transcoder":
        assert "gemma_scope_2" in FORMATS["gemma_scope"].refuses(sae)
        return
    assert sae.save(folder, format="gemma_scope") == []
    if case["case"] == "v1_embedding":  # scaled there and back
        x = np.random.default_rng(0).normal(size=(8, sae.coder.topology.d_in)).astype(np.float32)
        np.testing.assert_allclose(saejax.load(folder).encode(x), sae.encode(x), rtol=0, atol=1e-5)
    else:
        _loaded_elsewhere(sae, folder)
    with np.load(folder / "params.npz") as mine, np.load(fixtures.path(case) / "params.npz") as theirs:
        assert sorted(mine.files) == sorted(theirs.files)
        assert all(np.allclose(mine[name], theirs[name], rtol=1e-6, atol=0) for name in theirs.files)
    assert "layer_20" in sae.save(tmp_path / "elsewhere", format="gemma_scope")[0]
    assert saejax.load(tmp_path / "elsewhere").sites.reads == ("unknown",)
    placed = saejax.load(tmp_path / "elsewhere", hook_points=["blocks.1.resid_post"])
    assert coder_kind(placed) == (UNCENTRED, "jumprelu")


SINGLE = [name for name in BY_NAME if name.startswith("v2") and "clt" not in name and "crosscoder" not in name]


@pytest.mark.parametrize("name", SINGLE)
def test_version_2_goes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    sae, there = fixtures.load(BY_NAME[name]), fixtures.path(BY_NAME[name])
    assert sae.save(tmp_path / "back", format="gemma_scope_2") == []
    _loaded_elsewhere(sae, tmp_path / "back")
    mine, theirs = (read_safetensors(folder / "params.safetensors") for folder in (tmp_path / "back", there))
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[key], theirs[key]) for key in theirs)
    if (there / "config.json").exists():
        written, read = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "back", there))
        assert written.keys() == read.keys()
        same = ("architecture", "hf_hook_point_in", "hf_hook_point_out", "affine_connection", "type")
        assert {key: written[key] for key in same} == {key: read[key] for key in same}


def test_a_causal_crosscoder_reads_a_layer_and_writes_those_from_it_on(tmp_path: Path) -> None:
    folder = fixtures.copied(
        BY_NAME["v2_crosscoder"], tmp_path / "crosscoder" / "layer_7_13_17_22_width_262k_l0_medium"
    )
    layers = [read_safetensors(folder / f"params_layer_{i}.safetensors") for i in range(4)]
    for i, arrays in enumerate(layers):
        arrays["w_dec"][:, :i] = 0
        write_safetensors(folder / f"params_layer_{i}.safetensors", arrays)
    sae = saejax.load(folder)
    assert coder_kind(sae) == ("causal_crosscoder", "jumprelu") and sae.sites.reads == sae.sites.writes
    assert sae.sites.reads == tuple(f"blocks.{layer}.resid_post" for layer in (7, 13, 17, 22))
    x = np.random.default_rng(0).normal(size=(6, 4, sae.coder.topology.d_in))
    f = [np.maximum(x[:, i] @ a["w_enc"].astype(float) + a["b_enc"], 0) for i, a in enumerate(layers)]
    f = [np.where(f_i > a["threshold"], f_i, 0) for f_i, a in zip(f, layers, strict=True)]
    y = sum(np.einsum("bf,fmd->bmd", f_i, a["w_dec"]) for f_i, a in zip(f, layers, strict=True))
    y = y + np.stack([a["b_dec"] for a in layers])
    latents = sae.encode(x.astype(np.float32))
    np.testing.assert_allclose(latents, np.stack(f, 1), rtol=0, atol=1e-5 * np.abs(latents).max())
    np.testing.assert_allclose(sae.decode(latents), y, rtol=0, atol=1e-5 * np.abs(y).max())

    assert sae.save(tmp_path / "back", format="gemma_scope_2") == []
    _loaded_elsewhere(sae, tmp_path / "back")
    for i, arrays in enumerate(layers):
        mine = read_safetensors(tmp_path / "back" / f"params_layer_{i}.safetensors")
        assert mine.keys() == arrays.keys() and all(np.array_equal(mine[key], arrays[key]) for key in arrays)


@pytest.mark.parametrize("name", [name for name in BY_NAME if name.startswith("v2_clt")])
def test_dictionaries_of_several_layers_go_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    sae, there = fixtures.load(BY_NAME[name]), fixtures.path(BY_NAME[name])
    assert sae.save(tmp_path / "back", format="gemma_scope_2") == []
    _loaded_elsewhere(sae, tmp_path / "back")
    for file in there.glob("params_layer_*.safetensors"):
        mine, theirs = read_safetensors(tmp_path / "back" / file.name), read_safetensors(file)
        assert mine.keys() == theirs.keys() and all(np.array_equal(mine[key], theirs[key]) for key in theirs)
    mixed = dataclasses.replace(sae.sites, reads=("blocks.0.resid_post", *sae.sites.reads[1:]))
    assert "one module" in FORMATS["gemma_scope_2"].refuses(dataclasses.replace(sae, sites=mixed))


@pytest.mark.parametrize(
    ("given", "hooks"),
    [
        ({"hf_hook_point_in": "model.layers.{all}.pre_feedforward_layernorm.output"}, "blocks.{}.mlp_in"),
        ({"hf_hook_point_in": "model.layers.{3,5,9}.output"}, None),
        ({"hf_hook_point_in": "model.layers.{3,5}.output"}, "weights of 3 layers"),
        ({"hf_hook_point_in": 7}, "blocks.{}.mlp_in"),
        ({"architecture": "topk"}, "'topk'"),
    ],
    ids=str,
)
def test_where_several_layers_stand(given: dict[str, Any], hooks: str | None, tmp_path: Path) -> None:
    folder = fixtures.copied(BY_NAME["v2_clt"], tmp_path / "clt" / "width_262k_l0_medium")
    (folder / "config.json").write_text(json.dumps(given))
    if hooks is None:
        assert saejax.load(folder).sites.reads == tuple(f"blocks.{i}.resid_post" for i in (3, 5, 9))
    elif hooks.startswith("blocks"):
        sae = saejax.load(folder)
        assert sae.sites.reads == tuple(hooks.format(i) for i in range(3))
        assert sae.sites.writes == tuple(f"blocks.{i}.mlp_out" for i in range(3))
    else:
        with pytest.raises(DataError, match=hooks):
            saejax.load(folder)


def test_the_affine_skip_of_a_transcoder_is_x_times_the_matrix() -> None:
    sae, case = fixtures.load(BY_NAME["v2_transcoder_affine"]), BY_NAME["v2_transcoder_affine"]
    skip = read_safetensors(fixtures.path(case) / "params.safetensors")["affine_skip_connection"]
    assert not np.allclose(skip, skip.T)
    x = np.random.default_rng(0).normal(size=(4, len(skip))).astype(np.float32)
    zero = np.zeros((4, sae.n_latents), np.float32)
    np.testing.assert_allclose(sae.decode(zero, x) - sae.params["b_dec"], x @ skip, rtol=0, atol=1e-5)


def test_what_no_coder_says_is_refused_by_name(tmp_path: Path) -> None:
    clt = fixtures.copied(BY_NAME["v2_clt"], tmp_path / "clt" / "below")
    (clt / "params_layer_2.safetensors").unlink()
    with pytest.raises(DataError, match="2 files"):
        saejax.load(clt)
    shutil.copy(fixtures.path(BY_NAME["v2_clt"]) / "params_layer_1.safetensors", clt / "params_layer_2.safetensors")
    arrays = read_safetensors(clt / "params_layer_1.safetensors")
    arrays["w_dec"][:, 0] = 1
    write_safetensors(clt / "params_layer_1.safetensors", arrays)
    with pytest.raises(DataError, match="below their own"):
        saejax.load(clt)
    write_safetensors(clt / "params_layer_1.safetensors", arrays | {"b_enc": arrays["b_enc"][:-1]})
    with pytest.raises(DataError, match="b_enc, the first layer"):
        saejax.load(clt)

    v1 = fixtures.copied(BY_NAME["v1_res"], tmp_path / "v1")
    with np.load(v1 / "params.npz") as data:
        arrays = dict(data)
    for change, match in (
        ({"scaling_factor": np.full(40, 2.0)}, "scaling_factor"),
        ({"threshold": np.zeros(3)}, "threshold"),
        ({"b_dec": np.array(["a"])}, "real numbers"),
        ({"W_dec": np.array([None])}, "readable"),
    ):
        np.savez(v1 / "params.npz", **arrays | change)
        with pytest.raises(DataError, match=match):
            saejax.load(v1)
    np.savez(v1 / "params.npz", **{name: value for name, value in arrays.items() if name != "threshold"})
    with pytest.raises(DataError, match="no threshold"):
        saejax.load(v1)


def test_what_attention_adds_stands_behind_gemma_3_s_norm(tmp_path: Path) -> None:
    sae = next(sae for sae in examples() if coder_kind(sae) == (UNCENTRED, "jumprelu"))
    sites = dataclasses.replace(sae.sites, reads=("blocks.7.attn_out",), writes=("blocks.7.attn_out",))
    dataclasses.replace(sae, sites=sites).save(tmp_path / "out", format="gemma_scope_2")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hf_hook_point_in"] == "model.layers.7.post_attention_layernorm.output"
    assert saejax.load(tmp_path / "out").sites == sites
