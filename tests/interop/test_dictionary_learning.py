"""dictionary_learning's own files, with what it computes from them (benchmarks/peers/make_interop_fixtures.py)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import saejax
from saejax.core.errors import DataError
from saejax.core.torch_file import read_torch, write_torch
from saejax.interop.assemble import coder_kind
from saejax.trained import TrainedCoder
from tests.interop import fixtures

CASES = fixtures.cases("dictionary_learning")
BY_NAME = {case["case"]: case for case in CASES}


@pytest.mark.parametrize("case", fixtures.read(CASES), ids=fixtures.name)
def test_its_dictionaries_do_here_what_they_do_there(case: dict[str, Any]) -> None:
    sae = fixtures.load(case)
    fixtures.check(sae, case)
    assert sae.origin.model == case["model"]
    assert sae.sites.reads == sae.sites.writes == ("blocks.3.resid_post",)


@pytest.mark.parametrize("case", fixtures.refused(CASES), ids=fixtures.name)
def test_pickles_that_call_and_files_before_zip_are_refused(case: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"posix\.system|before 1\.6"):
        fixtures.load(case)


@pytest.mark.parametrize("case", fixtures.read(CASES), ids=fixtures.name)
def test_from_there_to_here_and_back(case: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit, but for a BatchTopKSAE: it becomes a JumpReluAutoEncoder, whose encoder sees x."""
    sae = fixtures.load(case)
    sae.save(tmp_path / "back", format="dictionary_learning")
    again = saejax.load(tmp_path / "back")
    assert again.sites == sae.sites
    if coder_kind(sae) == ("autoencoder", "jumprelu"):
        fixtures.check(again, case)
    else:
        assert (again.coder, coder_kind(again)) == (sae.coder, coder_kind(sae))
        assert all(np.array_equal(again.params[name], sae.params[name]) for name in sae.params)


def test_notes_say_what_the_file_leaves_open() -> None:
    notes = {name: " ".join(fixtures.load(case).origin.notes) for name, case in BY_NAME.items() if not case["refuse"]}
    assert "use_threshold=True" in notes["topk"]
    assert "not set in training" in notes["batchtopk_threshold_unset"]
    assert "length 1" in notes["standard_april"] and not notes["standard"]
    assert "groups of 11, 11, 22" in notes["matryoshka"]


def test_rows_of_another_length_keep_their_latents_in_an_autoencodernew(tmp_path: Path) -> None:
    """AutoEncoder.from_pretrained would scale them."""
    sae = fixtures.load(BY_NAME["standard"])
    params = dict(sae.params) | {"W_dec": sae.params["W_dec"] * 2}
    sae = TrainedCoder(sae.coder, params, sae.sites)
    notes = sae.save(tmp_path / "out", format="dictionary_learning")
    assert "AutoEncoderNew" in " ".join(notes)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["trainer"]["dict_class"] == "AutoEncoderNew"
    x = np.random.default_rng(0).normal(size=(16, 14)).astype(np.float32)
    np.testing.assert_allclose(saejax.load(tmp_path / "out").encode(x), sae.encode(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"trainer": "x"}, "dict_class"),
        ({"dict_class": "IdentityDict"}, "IdentityDict"),
        ({"dict_class": ["AutoEncoder"]}, "dict_class"),
        ({"dict_class": "GatedAutoEncoder"}, "gate_bias"),
        ({"k": 9}, "k is 8 in ae.pt and 9"),
        ({"k": None}, "k is None"),
        ({"k": 10**12}, "k is"),
    ],
    ids=str,
)
def test_contradictions_are_refused(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    folder = fixtures.copied(BY_NAME["topk"], tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config = change if "trainer" in change else {"trainer": config["trainer"] | change}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=match):
        saejax.load(folder)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("encoder.weight", np.zeros(5, np.float32), "matrix"),
        ("encoder.weight", np.zeros((44, 13), np.float32), "other widths"),
        ("encoder.bias", np.zeros(43, np.float32), "b_enc"),
        ("threshold", np.zeros(44, np.float32), "one number"),
        ("k", np.zeros(2, np.int32), "k is"),
        ("b_dec", np.full(14, np.inf, np.float32), "NaN or infinity"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_of_another_shape_are_refused(name: str, value: np.ndarray, match: str, tmp_path: Path) -> None:
    folder = fixtures.copied(BY_NAME["topk"], tmp_path / "copy")
    write_torch(folder / "ae.pt", read_torch(folder / "ae.pt") | {name: value})
    with pytest.raises(DataError, match=match):
        saejax.load(folder)


@pytest.mark.parametrize(
    ("trainer", "buffer", "hook"),
    [
        ({"submodule_name": "mlp_out_layer_7", "layer": 7}, None, "blocks.7.mlp_out"),
        ({"submodule_name": "encoder.layer.2.out", "layer": 2}, None, "encoder.layer.2.out"),
        ({"submodule_name": None, "layer": 5}, {"io": "out"}, "blocks.5.resid_post"),
        ({"submodule_name": None, "layer": 5}, {"io": "in"}, "blocks.5.resid_pre"),
        ({"submodule_name": None, "layer": "five"}, None, "given"),
    ],
    ids=str,
)
def test_where_it_reads(trainer: dict[str, Any], buffer: Any, hook: str, tmp_path: Path) -> None:
    folder = fixtures.copied(BY_NAME["jumprelu"], tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"trainer": config["trainer"] | trainer, "buffer": buffer}))
    sae = saejax.load(folder, hook_points=["given"])
    assert sae.sites.reads == sae.sites.writes == (hook,)


@pytest.mark.parametrize("case", ["standard", "standard_april", "gated", "topk", "jumprelu", "batchtopk"])
def test_pytorch_computes_the_same_from_what_is_written(case: str, tmp_path: Path) -> None:
    """The classes' formulas in PyTorch, from the file as torch.load(weights_only=True) gives it."""
    torch = pytest.importorskip("torch")
    sae = fixtures.load(BY_NAME[case])
    sae.save(tmp_path / "out", format="dictionary_learning")
    kind = json.loads((tmp_path / "out" / "config.json").read_text())["trainer"]["dict_class"]
    t = {name: value.double() for name, value in torch.load(tmp_path / "out" / "ae.pt", weights_only=True).items()}
    x = np.random.default_rng(1).normal(size=(32, 14)).astype(np.float32)
    a = torch.from_numpy(x).double()
    if kind == "AutoEncoder":
        assert torch.allclose(t["decoder.weight"].norm(dim=0), torch.ones(44).double())
        f = torch.relu((a - t["bias"]) @ t["encoder.weight"].T + t["encoder.bias"])
    elif kind == "GatedAutoEncoder":
        raw = (a - t["decoder_bias"]) @ t["encoder.weight"].T
        f = (raw + t["gate_bias"] > 0) * torch.relu(t["r_mag"].exp() * raw + t["mag_bias"])
    elif kind == "AutoEncoderTopK":
        pre = torch.relu((a - t["b_dec"]) @ t["encoder.weight"].T + t["encoder.bias"])
        best = pre.topk(int(t["k"]), dim=-1)
        f = torch.zeros_like(pre).scatter(-1, best.indices, best.values)
    else:
        assert kind == "JumpReluAutoEncoder"
        pre = a @ t["W_enc"] + t["b_enc"]
        f = torch.relu(pre * (pre > t["threshold"]))
    np.testing.assert_allclose(sae.encode(x), f.numpy(), rtol=0, atol=1e-5 * f.abs().max().item())
