"""Llama Scope's files of 2024 and 2025 and Llamascopium's of today, by SAELens and its own code; what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import saejax
from saejax.core.errors import DataError
from saejax.core.torch_file import write_torch
from saejax.interop.assemble import UNCENTRED, coder_kind
from saejax.interop.table import examples
from saejax.interop.tensors import read_safetensors, write_safetensors
from tests.interop import fixtures
from tests.tiny.limits import at_once

CASES = fixtures.cases("llama_scope")
BY_NAME = {case["case"]: case for case in CASES}
TOPOLOGIES = {"autoencoder": UNCENTRED}
D = 14


def _expected(case: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with np.load(fixtures.ROOT / case["expected"]) as expected:
        return expected["x"], expected["latents"], expected["reconstructions"]


@pytest.mark.parametrize("case", fixtures.read(CASES), ids=fixtures.name)
def test_it_does_here_what_it_does_there(case: dict[str, Any]) -> None:
    sae = fixtures.load(case)
    x, latents, out = _expected(case)
    if case["case"] == "today_topk":  # chosen by their length times that of their rows, which become 1 here
        latents = latents * np.linalg.norm(
            read_safetensors(fixtures.path(case) / "sae_weights.safetensors")["W_D"], axis=1
        )
        assert "latents here are times" in sae.origin.notes[0]
    if case["topology"] == "crosscoder":
        np.testing.assert_allclose(latents, np.broadcast_to(latents[:, :1], latents.shape), rtol=1e-5, atol=0)
        latents = latents[:, 0]
    mine = sae.encode(x)
    assert (latents != 0).any()
    np.testing.assert_allclose(mine, latents, rtol=0, atol=1e-5 * latents.max())
    np.testing.assert_allclose(sae.decode(mine, x), out, rtol=0, atol=1e-5 * np.abs(out).max())
    assert coder_kind(sae) == (TOPOLOGIES.get(case["topology"], case["topology"]), case["sparsity"])
    ours = [[name.replace("hook_", "") for name in case[key]] for key in ("hooks_in", "hooks_out")]
    assert [list(sae.sites.reads), list(sae.sites.writes)] == ours
    assert sae.origin.model == (case["model"] if case["case"].startswith("v1") else "")


@pytest.mark.parametrize("case", [c for c in fixtures.read(CASES) if c["topology"] != "crosscoder"], ids=fixtures.name)
def test_it_goes_back_and_comes_again_bit_for_bit(case: dict[str, Any], tmp_path: Path) -> None:
    """All ages are written as today's; thresholds to the last digit that a logarithm in float32 holds."""
    sae = fixtures.load(case)
    notes = sae.save(tmp_path / "back", format="llama_scope")
    assert any("logarithms" in note for note in notes) == (case["sparsity"] == "jumprelu")
    back = saejax.load(tmp_path / "back")
    assert (back.coder, back.sites) == (sae.coder, sae.sites)
    for name, value in sae.params.items():
        np.testing.assert_allclose(back.params[name], value, rtol=5e-7 * (name == "threshold"), atol=0)
    back.save(tmp_path / "again", format="llama_scope")
    first, second = (read_safetensors(tmp_path / name / "sae_weights.safetensors") for name in ("back", "again"))
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("case", fixtures.refused(CASES), ids=fixtures.name)
def test_what_saejax_has_not_is_refused_by_name(case: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"token-wise|on at one hook point and off at another"):
        fixtures.load(case)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("centre", [False, True])
def test_2024_gates_as_the_loader_of_its_own_did(include: bool, centre: bool, tmp_path: Path) -> None:
    """A transcoder (LXTC) with rows of any length: its loader folds s_in and s_out in, then makes rows 1, then gates.

    Its latents are ours times s_out / s_in, and times n where rows were made 1.
    """
    folder = fixtures.copied(BY_NAME["v1"], tmp_path / "Llama3_1-8B-Base-L15TC-8x")
    config = json.loads((folder / "hyperparams.json").read_text())
    config |= {"hook_point_in": "blocks.15.ln2.hook_normalized", "hook_point_out": "blocks.15.hook_mlp_out"}
    config |= {"dataset_average_activation_norm": {"in": 5.3, "out": 2.9}, "sparsity_include_decoder_norm": include}
    config |= {"apply_decoder_bias_to_pre_encoder": centre}
    (folder / "hyperparams.json").write_text(json.dumps(config))
    tensors = read_safetensors(folder / "checkpoints" / "final.safetensors")
    p = {name: value.astype(np.float64) for name, value in tensors.items()}
    s_in, s_out = (np.sqrt(D) / norm for norm in (5.3, 2.9))
    W, b, W_dec, b_dec = (p[f"{side}.{what}"] for side in ("encoder", "decoder") for what in ("weight", "bias"))
    b, b_dec, W_dec = b / s_in, b_dec / s_out, W_dec * s_in / s_out
    n = np.linalg.norm(W_dec, axis=0) if include else np.ones(len(b))
    x = np.random.default_rng(3).normal(size=(64, D)) * 3
    pre = ((x - centre * b_dec) @ W.T + b) * n
    f = np.where(pre > config["jump_relu_threshold"], pre, 0)

    sae = saejax.load(folder)
    assert (f != 0).any() and (f == 0).any()
    np.testing.assert_allclose(sae.encode(x), f * s_in / n, rtol=0, atol=1e-4 * f.max())
    y = f @ (W_dec / n).T + b_dec
    np.testing.assert_allclose(sae.decode(sae.encode(x)), y, rtol=0, atol=1e-5 * np.abs(y).max())
    assert sae.sites.reads == ("blocks.15.ln2.hook_normalized",) and sae.sites.writes == ("blocks.15.mlp_out",)


def test_a_topk_of_2024_without_threshold_is_a_topk(tmp_path: Path) -> None:
    folder = fixtures.copied(BY_NAME["v1"], tmp_path / "copy")
    config = json.loads((folder / "hyperparams.json").read_text())
    for threshold, sparsity in ((0.0, "topk"), (0.3, "jumprelu")):
        changed = config | {"act_fn": "topk", "top_k": 7, "jump_relu_threshold": threshold}
        (folder / "hyperparams.json").write_text(json.dumps(changed))
        assert coder_kind(saejax.load(folder)) == (UNCENTRED, sparsity)


def test_without_decoder_bias_and_as_a_pt_file(tmp_path: Path) -> None:
    case = BY_NAME["today_relu"]
    folder = fixtures.copied(case, tmp_path / "copy")
    tensors = read_safetensors(folder / "sae_weights.safetensors")
    (folder / "sae_weights.safetensors").unlink()
    write_torch(folder / "sae_weights.pt", {"surprise": tensors["b_E"]})
    with pytest.raises(DataError, match="no dict 'sae'"):
        saejax.load(folder)
    (folder / "sae_weights.pt").unlink()
    write_safetensors(folder / "sae_weights.safetensors", {k: v for k, v in tensors.items() if k != "b_D"})
    assert not saejax.load(folder).params["b_dec"].any()


def test_a_sharded_checkpoint_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = fixtures.copied(BY_NAME["today_relu"], tmp_path / "copy")
    (folder / "sae_weights.safetensors").unlink()
    (folder / "sae_weights.dcp").mkdir()
    with pytest.raises(DataError, match="without a device mesh and save it again"):
        saejax.load(folder)


def test_a_row_that_writes_nothing_never_fires_where_norms_gate(tmp_path: Path) -> None:
    folder = fixtures.copied(BY_NAME["today_jumprelu"], tmp_path / "copy")
    tensors = read_safetensors(folder / "sae_weights.safetensors")
    tensors["W_D"][3] = 0
    write_safetensors(folder / "sae_weights.safetensors", tensors)
    x, latents, _ = _expected(BY_NAME["today_jumprelu"])
    latents[:, 3] = 0
    np.testing.assert_allclose(saejax.load(folder).encode(x), latents, rtol=0, atol=1e-5 * latents.max())


def test_only_thresholds_above_0_have_a_logarithm(tmp_path: Path) -> None:
    sae = {coder_kind(one): one for one in examples()}["transcoder", "jumprelu"]
    assert (sae.params["threshold"] < 0).any()
    sae.save(tmp_path, format="llama_scope")
    np.testing.assert_allclose(
        saejax.load(tmp_path).params["threshold"], np.maximum(sae.params["threshold"], 0), rtol=5e-7, atol=0
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"sae_type": "lorsa"}, "sae_type 'lorsa'"),
        ({"use_glu_encoder": True}, "use_glu_encoder"),
        ({"act_fn": "batchtopk"}, "act_fn 'batchtopk' selects over a batch"),
        ({"act_fn": "topk", "top_k": 10**12}, "keeps k = 1000000000000 of 42"),
        ({"act_fn": "topk", "top_k": "8"}, "top_k is '8'"),
        ({"act_fn": "jumprelu"}, "jump_relu_threshold is None, and there is no"),
        ({"act_fn": "jumprelu", "jump_relu_threshold": -1.0}, "jump_relu_threshold is -1.0"),
        ({"norm_activation": ["dataset-wise"]}, "norm_activation"),
        ({"hook_point_in": "blocks.1.hook_resid_pre"}, "a mean norm above 0"),
        ({"hook_point_in": 7}, "the hook points are"),
        ({"hook_point_in": None, "hook_point_out": None}, "the hook points are"),
        ({"d_model": 10**12}, "d_model is 1000000000000"),
        ({"d_model": "14"}, "needs d_model"),
        ({"d_model": 10**400}, "d_model"),
        ({"act_fn": "jumprelu", "jump_relu_threshold": 10**400}, "jump_relu_threshold is"),
        ({"sae_type": "clt", "hook_points_in": ["a"] * 3, "hook_points_out": ["b"] * 3}, "mean norm"),
        (
            {
                "sae_type": "clt",
                "hook_points_in": ["a"] * 3,
                "hook_points_out": ["b"] * 3,
                "norm_activation": "inference",
            },
            "not those of 3 layers",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_contradictions_are_refused_at_once(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    folder = fixtures.copied(BY_NAME["today_relu"], tmp_path / "copy")
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | change))
    with at_once(), pytest.raises(DataError, match=match):
        saejax.load(folder)


NORM = "dataset_average_activation_norm.blocks.15.hook_resid_post"


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("W_E", np.zeros((3, 14, 42)), "an encoder of"),
        ("W_D", np.zeros((41, 14)), "W_dec"),
        ("W_D", np.zeros(()), "W_dec"),
        ("b_E", np.full(42, np.nan), "b_enc holds NaN"),
        ("b_D", np.zeros(13), "b_dec"),
        ("surprise", np.zeros(3), "surprise"),
        (NORM, np.float32(np.nan), "a mean norm above 0"),
        (NORM, np.float32(0), "a mean norm above 0"),
        (NORM, np.zeros(3), "a mean norm above 0"),
        (NORM, np.float32(1e-45), "NaN or infinity|W_enc"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_of_another_shape_are_refused(name: str, value: Any, match: str, tmp_path: Path) -> None:
    folder = fixtures.copied(BY_NAME["today_relu"], tmp_path / "copy")
    file = folder / "sae_weights.safetensors"
    write_safetensors(file, read_safetensors(file) | {name: value})
    with pytest.raises(DataError, match=match):
        saejax.load(folder)


def test_layers_of_a_cross_layer_transcoder_must_fit(tmp_path: Path) -> None:
    file = fixtures.copied(BY_NAME["today_clt_jumprelu"], tmp_path / "copy") / "sae_weights.safetensors"
    whole = read_safetensors(file)
    for change, match in (
        ({"W_D.1": whole["W_D.2"]}, "not those of 3 layers"),
        ({"W_E": whole["W_E"][:2]}, "an encoder of"),
        ({"b_D.2": whole["b_D.2"][:3]}, "not those of 3 layers"),
        ({"activation_function.log_jumprelu_threshold": np.full((3, 42), np.inf)}, "NaN or infinity"),
    ):
        write_safetensors(file, whole | change)
        with pytest.raises(DataError, match=match):
            saejax.load(file.parent)


def test_a_latent_that_writes_nothing_takes_no_place_among_the_k(tmp_path: Path) -> None:
    """The k largest are chosen by pre ||W_dec||, which is 0 where the decoder row is."""
    rng = np.random.default_rng(5)
    shapes = {"W_E": (D, 20), "b_E": (20,), "W_D": (20, D), "b_D": (D,)}
    W = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    W["W_D"][:4], W["b_E"][:4] = 0, 50
    write_safetensors(tmp_path / "sae_weights.safetensors", W)
    config = {"sae_type": "sae", "act_fn": "topk", "top_k": 3, "hook_point_in": "a", "norm_activation": "none"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    x, norms = rng.normal(size=(30, D)), np.linalg.norm(W["W_D"], axis=1)
    score = np.maximum(x @ W["W_E"] + W["b_E"], 0) * norms
    kept = np.where(score >= np.sort(score)[:, [-3]], score, 0)
    sae = saejax.load(tmp_path)
    np.testing.assert_allclose(sae.encode(x), kept, rtol=0, atol=1e-5 * kept.max())
    expected = (kept[:, 4:] / norms[4:]) @ W["W_D"][4:] + W["b_D"]
    np.testing.assert_allclose(sae.decode(sae.encode(x)), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
