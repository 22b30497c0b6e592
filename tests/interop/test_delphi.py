"""delphi's latent cache against latents by hand. benchmarks/peers/check_delphi.py runs delphi's own loader on it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tiny.exports import WIDTH, Reported, reported

from saejax.core.errors import ConfigError, DataError
from saejax.interop.delphi import write_delphi

NAMES = {"autoencoder": ["blocks.0.resid_post"], "clt": ["blocks.0.mlp_in", "blocks.1.mlp_in"]}


def entries(r: Reported) -> dict[str, np.ndarray]:
    return {name: getattr(r.scan, name) for name in ("row", "position", "latent", "value")}


def write(r: Reported, folder: Path, topology: str = "autoencoder", **how: Any) -> dict[str, int]:
    tokens = r.scan.tokens[(r.scan.segments >= 0).any(1)]
    return write_delphi(folder, tokens, entries(r) | how.pop("entries", {}), NAMES[topology], WIDTH, "m", "text", **how)


def dense(folder: Path, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """([R, S, F], tokens) of one hook point as delphi's TensorBuffer reads it."""
    f, tokens = np.zeros((*shape, WIDTH)), np.zeros(0)
    for path in folder.glob("*.safetensors"):
        first, last = map(int, path.stem.split("_"))
        arrays = safetensors.numpy.load_file(path)
        locations, activations, tokens = (arrays[name] for name in ("locations", "activations", "tokens"))
        assert locations.dtype == np.uint16 and activations.dtype == np.float16 and tokens.dtype == np.int64
        assert locations.shape == (len(activations), 3)
        row, position, latent = locations.astype(np.int64).T
        assert (latent <= last - first).all()
        # delphi counts the windows of a latent by runs, so its rows and positions must rise.
        flat = (row * shape[1] + position) * WIDTH + latent
        assert (np.diff(flat) > 0).all()
        f[row, position, first + latent] = activations
    return f, tokens


@pytest.mark.parametrize("topology", ["autoencoder", "clt"])
def test_every_latent_that_is_not_0_is_there(topology: str, tmp_path: Path) -> None:
    r = reported(topology)
    written = write(r, tmp_path, topology, splits=3)
    rows = int((r.scan.segments >= 0).any(1).sum())
    assert rows < len(r.tokens)  # the scan ends with rows of padding
    for group, name in enumerate(NAMES[topology]):
        folder = tmp_path / "latents" / name
        assert {path.stem for path in folder.glob("*.safetensors")} == {"0_12", "13_25", "26_39"}
        f, tokens = dense(folder, (rows, r.tokens.shape[1]))
        wanted = r.f[:rows, :, group * WIDTH : (group + 1) * WIDTH]
        np.testing.assert_allclose(f, wanted, rtol=1e-3, atol=1e-4)
        assert ((f != 0) == (np.abs(wanted) > 1e-5)).all() and written[name] == (f != 0).sum() > 100
        np.testing.assert_array_equal(tokens, r.tokens[:rows])
        config = json.loads((folder / "config.json").read_text())
        assert config["model_name"] == "m" and config["dataset_repo"] == "text"
        assert (config["cache_ctx_len"], config["n_tokens"], config["n_splits"]) == (tokens.shape[1], tokens.size, 3)
    assert [path.name for path in sorted((tmp_path / "latents").iterdir())] == NAMES[topology]


def test_the_report_s_passages_are_in_the_cache(tmp_path: Path) -> None:
    r = reported()
    write(r, tmp_path)
    rows = int((r.scan.segments >= 0).any(1).sum())
    f, tokens = dense(tmp_path / "latents" / NAMES["autoencoder"][0], (rows, r.tokens.shape[1]))
    cached = Reported(r.sae, r.content, r.scan, tokens, f, r.n_tokens)
    checked = 0
    for feature in r.content["features"]:
        for example in feature["examples"] + [e for part in feature["quantiles"] for e in part["examples"]]:
            strings = [r.content["vocab"][token] for token in example["tokens"]]
            assert cached.holds(feature["id"], strings, example["activations"], atol=0.02)
            checked += 1
    assert checked > 50


def test_what_half_precision_cannot_hold_is_refused_and_what_delphi_drops_is_dropped(tmp_path: Path) -> None:
    r, value = reported(), reported().scan.value.copy()
    value[0] = 7e4
    with pytest.raises(DataError, match=r"7e\+04.*65,504"):
        write(r, tmp_path / "large", entries={"value": value})
    value[0] = 9e-6
    assert write(r, tmp_path / "small", entries={"value": value}) == {NAMES["autoencoder"][0]: len(value) - 1}


def test_files_for_no_latent_are_refused_and_files_without_activations_written(tmp_path: Path) -> None:
    r = reported()
    with pytest.raises(ConfigError, match="splits is 41"):
        write(r, tmp_path, splits=41)
    write(r, tmp_path, splits=40)
    dead = safetensors.numpy.load_file(tmp_path / "latents" / NAMES["autoencoder"][0] / "39_39.safetensors")
    assert dead["locations"].shape == (0, 3) and dead["tokens"].size


def test_rows_beyond_16_bits_take_32(tmp_path: Path) -> None:
    one = {name: np.array([3]) for name in ("row", "position", "latent")} | {"value": np.ones(1, np.float32)}
    write_delphi(tmp_path, np.zeros((70_000, 4), np.int32), one | {"row": np.array([69_999])}, ["h"], 8, "m", "t", 1)
    locations = safetensors.numpy.load_file(tmp_path / "latents" / "h" / "0_7.safetensors")["locations"]
    assert locations.dtype == np.uint32 and locations.tolist() == [[69_999, 3, 3]]


def test_explanations_are_named_as_delphi_names_latents(tmp_path: Path) -> None:
    said = {3: 'the word "é"', WIDTH + 5: "numbers"}
    write(reported("clt"), tmp_path, "clt", explanations=said)
    found = {path.name: json.loads(path.read_text()) for path in (tmp_path / "explanations").iterdir()}
    assert found == {"blocks.0.mlp_in_latent3.txt": said[3], "blocks.1.mlp_in_latent5.txt": said[WIDTH + 5]}
    write(reported(), tmp_path / "none", explanations={})
    assert [path.name for path in (tmp_path / "none").iterdir()] == ["latents"]
