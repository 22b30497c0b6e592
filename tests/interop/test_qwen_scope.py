"""Qwen-Scope's layers, by SAELens' converter; and what is to be refused."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import saejax
from saejax.core.errors import ConfigError, DataError
from saejax.core.torch_file import read_torch, write_torch
from saejax.interop import dictionaries_below
from saejax.interop.assemble import UNCENTRED, coder_kind
from tests.interop import fixtures
from tests.tiny.limits import at_once

(CASE,) = fixtures.cases("qwen_scope")
REPOSITORY = fixtures.path(CASE).parent


def test_it_does_here_what_it_does_there() -> None:
    sae = fixtures.load(CASE)
    fixtures.check(sae, CASE)
    assert coder_kind(sae) == (UNCENTRED, "topk") and sae.coder.sparsity.kept == 8
    assert sae.hook_point == "blocks.7.resid_post" and sae.origin.model == "Qwen/Qwen3-1.7B-Base"
    with pytest.raises(ConfigError, match="does not write"):
        sae.save("nowhere", format="qwen_scope")


@pytest.mark.parametrize(
    "name", ["SAE-Res-Qwen3.5-35B-A3B-Base-W128K-L0_100", "models--Qwen--SAE-Res-Qwen3-8B-W32K-L0_4"]
)
def test_a_repository_is_a_folder_of_layers_and_its_name_says_k(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name / ("snapshots/abc" if "--" in name else "")
    folder.mkdir(parents=True)
    layers = [folder / f"layer{i}.sae.pt" for i in (2, 10)]
    for layer in layers:
        shutil.copy(fixtures.path(CASE), layer)
    assert dictionaries_below(folder) == layers
    with pytest.raises(DataError, match="holds 2 dictionaries"):
        saejax.load(folder)
    if name.endswith("100"):
        with pytest.raises(DataError, match="keeps k = 100 of 44"):
            saejax.load(layers[1])
    else:
        sae = saejax.load(layers[1])
        assert (sae.origin.model, sae.coder.sparsity.kept) == ("Qwen/Qwen3-8B", 4)
        assert sae.hook_point == "blocks.10.resid_post"


def test_without_the_name_it_says_what_is_missing(tmp_path: Path) -> None:
    shutil.copy(fixtures.path(CASE), tmp_path / "layer7.sae.pt")
    with pytest.raises(DataError, match="in the repository's name alone"):
        saejax.load(tmp_path / "layer7.sae.pt")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"W_dec": np.zeros((44, 14), np.float32)}, "W_dec"),
        ({"W_enc": np.zeros((44, 13), np.float32)}, "other widths"),
        ({"W_enc": np.zeros(3, np.float32)}, "no matrix"),
        ({"b_enc": np.full(44, np.inf, np.float32)}, "NaN or infinity"),
        ({"k": np.zeros((), np.float32)}, "for k"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_tensors_are_refused_at_once(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    file = tmp_path / REPOSITORY.name / "layer7.sae.pt"
    file.parent.mkdir()
    write_torch(file, read_torch(fixtures.path(CASE)) | change)
    with at_once(), pytest.raises(DataError, match=match):
        saejax.load(file)


@pytest.mark.parametrize("damage", ["truncated", "a pickle that calls", "empty"])
def test_damaged_files_are_refused_and_nothing_is_called(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, raw = tmp_path / REPOSITORY.name / "layer7.sae.pt", fixtures.path(CASE).read_bytes()
    file.parent.mkdir()
    calls = fixtures.ROOT / "dictionary_learning" / "pickle_that_calls" / "trainer_0" / "ae.pt"
    damaged = {"truncated": raw[: len(raw) // 2], "a pickle that calls": calls.read_bytes(), "empty": b""}
    file.write_bytes(damaged[damage])
    with pytest.raises(DataError, match=r"layer7\.sae\.pt"):
        saejax.load(file)
    assert [path.name for path in tmp_path.iterdir()] == [REPOSITORY.name]
