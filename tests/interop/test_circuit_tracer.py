"""circuit-tracer's sets and cross-layer transcoders, by its own classes; and what is to be refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import saejax
from saejax.core.errors import ConfigError, DataError
from saejax.interop import FORMATS, dictionaries_below
from saejax.interop.assemble import coder_kind
from saejax.interop.table import examples
from saejax.interop.tensors import read_safetensors, read_yaml, write_safetensors
from saejax.trained import TrainedCoder
from tests.interop import fixtures
from tests.tiny.limits import at_once

CASES = fixtures.cases("circuit_tracer")
BY_NAME = {case["case"]: case for case in CASES}
SETS = [case for case in fixtures.read(CASES) if case["case"].startswith("plt")]
CLTS = [case for case in fixtures.read(CASES) if case["case"].startswith("clt")]


def _layers(case: dict[str, Any]) -> list[TrainedCoder]:
    return [saejax.load(place) for place in dictionaries_below(fixtures.path(case))]


def _same_tensors(mine: Path, theirs: Path) -> None:
    files = sorted(file.name for file in theirs.glob("*.safetensors"))
    assert files == sorted(file.name for file in mine.glob("*.safetensors"))
    for file in files:
        a, b = read_safetensors(mine / file), read_safetensors(theirs / file)
        assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in b), file


@pytest.mark.parametrize("case", SETS, ids=fixtures.name)
def test_a_set_is_a_coder_for_each_layer_there_and_back(case: dict[str, Any], tmp_path: Path) -> None:
    coders = _layers(case)
    assert len(coders) == 3
    with np.load(fixtures.ROOT / case["expected"]) as expected:
        for i, sae in enumerate(coders):
            x, latents, out = (expected[key][:, i] for key in ("x", "latents", "reconstructions"))
            np.testing.assert_allclose(sae.encode(x), latents, rtol=0, atol=1e-5 * latents.max())
            np.testing.assert_allclose(sae.decode(latents, x), out, rtol=0, atol=1e-5 * np.abs(out).max())
            assert coder_kind(sae) == (case["topology"], case["sparsity"])
            assert (sae.sites.reads, sae.sites.writes) == ((f"blocks.{i}.mlp_in",), (f"blocks.{i}.mlp_out",))
            assert sae.origin.model == case["model"]
    # In any order; it says which layers circuit-tracer would miss.
    notes = [coders[i].save(tmp_path / "set", format="circuit_tracer") for i in (2, 0, 1)]
    assert [note[0].split("missing are ")[1] for note in notes[:2]] == ["0, 1.", "1."] and notes[2] == []
    _same_tensors(tmp_path / "set", fixtures.path(case))
    written, theirs = read_yaml(tmp_path / "set" / "config.yaml"), read_yaml(fixtures.path(case) / "config.yaml")
    assert written.keys() == theirs.keys() and written["model_kind"] == theirs["model_kind"]
    assert (written["feature_input_hook"], written["feature_output_hook"]) == ("mlp.hook_in", "hook_mlp_out")
    # One layer again: it takes its own place.
    assert coders[1].save(tmp_path / "set", format="circuit_tracer") == []
    assert [place.name for place in dictionaries_below(tmp_path / "set")] == [
        f"layer_{i}.safetensors" for i in range(3)
    ]


@pytest.mark.parametrize("case", CLTS, ids=fixtures.name)
def test_a_cross_layer_transcoder_there_and_back(case: dict[str, Any], tmp_path: Path) -> None:
    sae = fixtures.load(case)
    fixtures.check(sae, case)
    assert coder_kind(sae) == (case["topology"], case["sparsity"])
    assert sae.sites.reads == tuple(f"blocks.{i}.resid_mid" for i in range(3))
    assert sae.save(tmp_path / "clt", format="circuit_tracer") == []
    _same_tensors(tmp_path / "clt", fixtures.path(case))
    ours, theirs = (read_yaml(folder / "config.yaml") for folder in (tmp_path / "clt", fixtures.path(case)))
    assert {k: v for k, v in ours.items() if k != "scan"} == {k: v for k, v in theirs.items() if k != "scan"}


def test_a_cross_layer_transcoder_needs_no_config(tmp_path: Path) -> None:
    folder = fixtures.copied(CLTS[0], tmp_path / "clt")
    (folder / "config.yaml").unlink()
    assert set(saejax.load(folder).sites.reads) == {"unknown"}
    names = [f"blocks.{i}.{hook}" for hook in ("resid_mid", "mlp_out") for i in range(3)]
    sae = saejax.load(folder, hook_points=names)
    assert [*sae.sites.reads, *sae.sites.writes] == names
    fixtures.check(sae, CLTS[0])


def test_negative_thresholds_are_refused_in_and_act_as_0_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 thresholds are below 0"):
        _layers(BY_NAME["plt_jumprelu_below_zero"])
    sae = _layers(BY_NAME["plt_jumprelu"])[0]
    params = dict(sae.params) | {"threshold": sae.params["threshold"] - 10}
    below = TrainedCoder(sae.coder, params, sae.sites)
    below.save(tmp_path, format="circuit_tracer")
    x = np.random.default_rng(0).normal(size=(8, 14)).astype(np.float32)
    np.testing.assert_array_equal(saejax.load(tmp_path / "layer_0.safetensors").encode(x), below.encode(x))


def test_one_threshold_for_all_latents(tmp_path: Path) -> None:
    folder = fixtures.copied(BY_NAME["plt_jumprelu"], tmp_path / "set")
    tensors = read_safetensors(folder / "layer_1.safetensors")
    write_safetensors(folder / "layer_1.safetensors", tensors | {"activation_function.threshold": np.float32(0.5)})
    assert (saejax.load(folder / "layer_1.safetensors").params["threshold"] == 0.5).all()


def test_what_its_files_cannot_say_is_refused(tmp_path: Path) -> None:
    form, coders = FORMATS["circuit_tracer"], {coder_kind(sae): sae for sae in examples()}
    for kind in (("transcoder", "topk"), ("clt", "gated"), ("skip_clt", "relu"), ("autoencoder", "relu")):
        assert f"no {kind[0]} with {kind[1]}" in form.refuses(coders[kind])
    wide = {coder_kind(sae): sae for sae in examples(d_out=5)}
    assert "as wide where they write" in form.refuses(wide["transcoder", "relu"])
    layers = [sae for case in ("plt_relu", "plt_relu_skip") for sae in _layers(BY_NAME[case])]
    sites = layers[0].sites

    def at(sae: TrainedCoder, reads: str, writes: str) -> TrainedCoder:
        renamed = type(sites)((reads,), (writes,), (1.0,), (1.0,))
        return TrainedCoder(sae.coder, sae.params, renamed)

    for pair in (("blocks.0.mlp_in", "blocks.1.mlp_out"), ("unknown", "nowhere"), ("blocks.0.mlp_in", "lm_head.out")):
        with pytest.raises(ConfigError, match=r"read one name in each layer.*this one reads"):
            at(layers[0], *pair).save(tmp_path / "set", format="circuit_tracer")
    layers[0].save(tmp_path / "set", format="circuit_tracer")
    with pytest.raises(DataError, match="only layers that agree"):  # a skip beside layers without
        layers[4].save(tmp_path / "set", format="circuit_tracer")
    with pytest.raises(DataError, match="only layers that agree"):  # another place in the block
        at(layers[1], "blocks.1.resid_mid", "blocks.1.mlp_out").save(tmp_path / "set", format="circuit_tracer")
    with pytest.raises(DataError, match="something other"):
        fixtures.load(CLTS[0]).save(tmp_path / "set", format="circuit_tracer")
    assert len(dictionaries_below(tmp_path / "set")) == 1


def _of(sae: TrainedCoder, model: str) -> TrainedCoder:
    return dataclasses.replace(sae, origin=dataclasses.replace(sae.origin, model=model))


def test_a_set_is_of_one_model(tmp_path: Path) -> None:
    """config.yaml names one model for all layers: that of the first would stand for layers of others."""
    one, other, *_ = _layers(BY_NAME["plt_relu"])
    _of(one, "gpt2").save(tmp_path / "set", format="circuit_tracer")
    before = {path.name: path.read_bytes() for path in (tmp_path / "set").iterdir()}
    with pytest.raises(DataError, match=r"holds transcoders of gpt2, and this one is of EleutherAI/pythia-70m"):
        _of(other, "EleutherAI/pythia-70m").save(tmp_path / "set", format="circuit_tracer")
    assert {path.name: path.read_bytes() for path in (tmp_path / "set").iterdir()} == before
    notes = _of(other, "").save(tmp_path / "set", format="circuit_tracer")
    assert any("does not say of which model it is" in note and "says gpt2 for all" in note for note in notes)
    # Alone in the folder a layer may be written over by that of another model: the set is then of that.
    _of(one, "gpt2").save(tmp_path / "alone", format="circuit_tracer")
    _of(one, "pythia").save(tmp_path / "alone", format="circuit_tracer")
    assert saejax.load(tmp_path / "alone" / "layer_0.safetensors").origin.model == "pythia"


# --- hostile files -------------------------------------------------------------------------------------------------

BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("model_kind: !!python/object/apply:os.system ['touch pwned']\n", "not readable YAML"),
        ("model_kind: !!python/name:os.system\n", "not readable YAML"),
        ("model_kind: transcoder_set\n" + BOMB, "aliases"),
        ("model_kind: transcoder_set\n" + MERGES, "aliases"),
        ("model_kind: transcoder_set\n" + "x: " + "[" * 10_000, "more than 100 brackets"),
        ("model_kind: transcoder_set\n" + "x: " + "- " * 8000, "not readable YAML|words and signs"),
        ("model_kind: transcoder_set\n" + "x:\n" * 5000, "words and signs"),
        ("model_kind: transcoder_set\n" + "x: " + "9" * 10_000, "not readable YAML"),
        ("model_kind: transcoder_set\n" + "# \n" * 20_000, "at most"),
        ("model_kind: transcoder_set\nx: \x00\n", "not readable YAML"),
        ("- model_kind\n", "no YAML mapping"),
        ("model_kind: !!timestamp x\n", "not readable YAML"),
        ("model_kind: !!bool x\n", "not readable YAML"),
        ("model_kind: !!int ''\n", "not readable YAML"),
        ("model_kind: 1" + ":59" * 300 + ".0\n", "not readable YAML"),
    ],
    ids=[
        *("call", "name", "aliases", "merges", "deep", "dashes", "lines", "digits", "long", "bytes", "list"),
        *("time", "bool", "int", "minutes"),
    ],
)
def test_hostile_yaml_is_refused_at_once(
    text: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = fixtures.copied(SETS[0], tmp_path / "set")
    (folder / "config.yaml").write_text(text)
    with at_once(), pytest.raises(DataError, match=match):
        saejax.load(folder / "layer_0.safetensors")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("listed", "match"),
    [
        (["../../../etc/passwd"], "plain file name"),
        (["/etc/passwd"], "plain file name"),
        ([{"a": 1}], "plain file name"),
        (["mine.safetensors"], "called layer_<i>"),
        (["hf://google/gemma-scope-2b-pt-transcoders/layer_0/params.npz"] * 26, "26 files of other repositories"),
        ([], "download the rest"),
        ("layer_0.safetensors", "download the rest"),
    ],
    ids=["up", "root", "mapping", "name", "hub", "none", "text"],
)
def test_a_list_of_files_leads_nowhere_else(listed: Any, match: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model_kind": "transcoder_set", "transcoders": listed}))
    with pytest.raises(DataError, match=match):
        saejax.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("W_enc", np.zeros((41, 14)), "b_enc|W_dec"),
        ("W_dec", np.zeros((39, 14)), "W_dec"),
        ("W_skip", np.zeros((14, 13)), "W_skip"),
        ("b_enc", np.full(40, np.nan), "b_enc holds NaN"),
        ("k", np.float32(8), "for k"),
        ("log_thresholds", np.zeros(40), "log_thresholds"),
        ("activation_function.threshold", np.zeros(39), "threshold"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_of_another_shape_are_refused(name: str, value: Any, match: str, tmp_path: Path) -> None:
    file = fixtures.copied(SETS[0], tmp_path / "set") / "layer_0.safetensors"
    write_safetensors(file, read_safetensors(file) | {name: value})
    with pytest.raises(DataError, match=match):
        saejax.load(file)


def test_layers_of_a_cross_layer_transcoder_must_fit(tmp_path: Path) -> None:
    folder = fixtures.copied(CLTS[1], tmp_path / "clt")
    W_dec = read_safetensors(folder / "W_dec_1.safetensors")
    write_safetensors(folder / "W_dec_1.safetensors", {"W_dec_1": np.zeros((40, 3, 14))})
    with pytest.raises(DataError, match="W_dec_1"):
        saejax.load(folder)
    write_safetensors(folder / "W_dec_1.safetensors", W_dec)
    (folder / "W_enc_1.safetensors").rename(folder / "W_enc_7.safetensors")
    with pytest.raises(DataError, match=r"W_enc_1\.safetensors does not exist"):
        saejax.load(folder)
    tensors = read_safetensors(folder / "W_enc_7.safetensors")
    write_safetensors(folder / "W_enc_1.safetensors", {k: v for k, v in tensors.items() if k != "threshold_1"})
    (folder / "W_enc_7.safetensors").unlink()
    with pytest.raises(DataError, match="threshold has other shapes in other layers"):
        saejax.load(folder)
    for i in range(1100):
        (folder / f"W_enc_{10 + i}.safetensors").touch()
    with at_once(), pytest.raises(DataError, match="at most 1,024"):
        saejax.load(folder)


def test_a_header_of_10_to_the_12_latents_is_refused_at_once(tmp_path: Path) -> None:
    file = fixtures.copied(SETS[0], tmp_path / "set") / "layer_0.safetensors"
    n = 4 * 14 * 10**12
    header = json.dumps({"W_enc": {"dtype": "F32", "shape": [10**12, 14], "data_offsets": [0, n]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with at_once(), pytest.raises(DataError, match="layer_0"):
        saejax.load(file)
