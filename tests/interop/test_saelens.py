"""SAELens' own files, with what SAELens computes from them (benchmarks/peers/make_interop_fixtures.py)."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import saejax
from saejax.core.errors import DataError
from saejax.interop.assemble import coder_kind
from tests.interop import fixtures

CASES = fixtures.cases("saelens")
TRANSCODERS = [case for case in fixtures.read(CASES) if "transcoder" in case["topology"]]


@pytest.mark.parametrize("case", fixtures.read(CASES), ids=fixtures.name)
def test_its_dictionaries_do_here_what_they_do_there(case: dict[str, Any]) -> None:
    sae = fixtures.load(case)
    fixtures.check(sae, case)
    assert sae.origin.model == case["model"]


@pytest.mark.parametrize("case", fixtures.refused(CASES), ids=fixtures.name)
def test_what_saejax_has_not_is_refused_by_name(case: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"cfg\.json|sae_weights"):
        fixtures.load(case)


@pytest.mark.parametrize("case", fixtures.read(CASES), ids=fixtures.name)
def test_from_there_to_here_and_back_is_bit_equal(case: dict[str, Any], tmp_path: Path) -> None:
    sae = fixtures.load(case)
    sae.save(tmp_path / "back", format="saelens")
    again = saejax.load(tmp_path / "back")
    assert all(np.array_equal(again.params[name], sae.params[name]) for name in sae.params)
    assert (again.coder, again.sites, coder_kind(again)) == (sae.coder, sae.sites, coder_kind(sae))


def test_hook_points_and_notes(tmp_path: Path) -> None:
    by_name = {case["case"]: case for case in CASES}
    transcoder = fixtures.load(by_name["transcoder"])
    assert transcoder.sites.reads != transcoder.sites.writes
    assert "16 bits" in " ".join(fixtures.load(by_name["bf16"]).origin.notes)
    bare = fixtures.copied(by_name["topk"], tmp_path / "bare")
    cfg = json.loads((bare / "cfg.json").read_text())
    cfg["metadata"].pop("hook_name")
    (bare / "cfg.json").write_text(json.dumps(cfg))
    assert saejax.load(bare).sites.reads == ("unknown",)
    assert saejax.load(bare, hook_points=["blocks.1.resid_pre"]).sites.writes == ("blocks.1.resid_pre",)


@pytest.mark.parametrize(
    "change",
    [
        {"k": 0},
        {"k": "4"},
        {"k": 10**12},
        {"architecture": None},
        {"architecture": ["topk"]},
        {"metadata": "none"},
        {"metadata": {"hook_head_index": 3, "sae_lens_version": "6.0.0"}},
        {"normalize_activations": "constant_norm_rescale"},
        {"normalize_activations": 7},
    ],
    ids=str,
)
def test_contradictions_in_cfg_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    topk = next(case for case in CASES if case["case"] == "topk")
    folder = fixtures.copied(topk, tmp_path / "copy")
    cfg = json.loads((folder / "cfg.json").read_text()) | change
    (folder / "cfg.json").write_text(json.dumps(cfg))
    with pytest.raises(DataError, match=str(tmp_path)):
        saejax.load(folder)


@pytest.mark.parametrize("case", TRANSCODERS, ids=fixtures.name)
@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"apply_b_dec_to_input": True}, "apply_b_dec_to_input is true, which SAELens refuses of transcoders"),
        ({"metadata": {"hook_head_index_out": 3, "sae_lens_version": "6.0.0"}}, "hook_head_index_out=3"),
    ],
)
def test_what_saelens_refuses_of_transcoders_is_refused(
    case: dict[str, Any], change: dict[str, Any], match: str, tmp_path: Path
) -> None:
    folder = fixtures.copied(case, tmp_path / "copy")
    cfg = json.loads((folder / "cfg.json").read_text()) | change
    (folder / "cfg.json").write_text(json.dumps(cfg))
    with pytest.raises(DataError, match=match):
        saejax.load(folder)


def test_weights_of_another_coder_are_refused(tmp_path: Path) -> None:
    by_name = {case["case"]: case for case in CASES}
    folder = fixtures.copied(by_name["gated"], tmp_path / "copy")
    shutil.copy(fixtures.path(by_name["topk"]) / "sae_weights.safetensors", folder)
    with pytest.raises(DataError, match=r"r_mag|b_mag"):
        saejax.load(folder)
