"""What holds for every format: what it writes it reads, bit for bit or folded; what it cannot say it refuses."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

import saejax
from saejax.core.errors import ConfigError, DataError
from saejax.interop import FORMATS, dictionaries_below, format_table, load_dictionary
from saejax.interop.assemble import coder_kind, weighted
from saejax.interop.hooks import from_module, from_transformer_lens, layer_of, norm_notes, to_transformer_lens
from saejax.interop.table import examples
from saejax.interop.tensors import read_npz, read_safetensors
from saejax.trained import Format, Kind, TrainedCoder, centred
from tests.interop.test_torch_file import crowded
from tests.tiny.limits import at_once

RNG = np.random.default_rng(1)
CODERS = {coder_kind(sae): sae for sae in examples()}
# Written with another width than is read, where that may be; most formats cannot say it.
WIDER = {coder_kind(sae): sae for sae in examples(d_out=5) if sae.coder.topology.out_shape[-1] == 5}
WRITTEN = [(name, kind) for name, form in FORMATS.items() for kind, sae in CODERS.items() if not form.refuses(sae)]
WRITERS = list(dict.fromkeys(name for name, _ in WRITTEN))
NAMES = [f"{name}-{'-'.join(kind).replace(' ', '_')}" for name, kind in WRITTEN]


def activations(sae: TrainedCoder, n: int = 32) -> np.ndarray:
    return RNG.normal(size=(n, *sae.coder.topology.in_shape)).astype(np.float32)


def same(a: TrainedCoder, b: TrainedCoder, bits: bool = False) -> None:
    """Equal latents and reconstructions, to 1e-5 of the largest entry."""
    x = activations(a)
    latents = a.encode(x), b.encode(x)
    for mine, other in (latents, (a.decode(latents[0], x), b.decode(latents[1], x))):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-5 * np.abs(mine).max())
    assert (latents[0] != 0).any()
    if bits:
        assert all(np.array_equal(a.params[name], b.params[name]) for name in a.params if name != "threshold")
        if "threshold" in a.params:  # below 0 it acts as 0; some files hold its logarithm
            mine, other = (np.maximum(sae.params["threshold"], 0) for sae in (a, b))
            np.testing.assert_allclose(mine, other, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "kind"), WRITTEN, ids=NAMES)
def test_what_is_written_is_read_and_does_the_same(name: str, kind: Kind, tmp_path: Path) -> None:
    form, wider = FORMATS[name], WIDER.get(kind)
    _there_and_back(form, kind, CODERS[kind], tmp_path)
    if wider is not None and not form.refuses(wider):
        _there_and_back(form, kind, wider, tmp_path / "wider")


def _there_and_back(form: Format, kind: Kind, sae: TrainedCoder, tmp_path: Path) -> None:
    sae.save(tmp_path / "out", format=form.name)
    if not form.reads:
        return
    place = form.place_of(sae, tmp_path / "out")
    assert place in form.here(tmp_path / "out")
    back = saejax.load(place)
    assert coder_kind(back) in form.reads
    same(sae, back, bits=coder_kind(back) == kind and type(back.coder.sparsity) is type(sae.coder.sparsity))
    # And once more: the second file says what the first said.
    back.save(tmp_path / "again", format=form.name)
    again = saejax.load(form.place_of(back, tmp_path / "again"))
    assert all(np.array_equal(again.params[key], back.params[key]) for key in back.params)
    assert (again.coder, again.sites) == (back.coder, back.sites)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, id=str(k), marks=[] if k[0] == "autoencoder" else [pytest.mark.ci]) for k in CODERS]
)
def test_saejax_s_own_folders_say_every_coder(kind: Kind, tmp_path: Path) -> None:
    CODERS[kind].save(tmp_path / "out")
    same(CODERS[kind], saejax.load(tmp_path / "out"), bits=True)


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_format_cannot_say_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    refused = [sae for sae in CODERS.values() if FORMATS[name].refuses(sae)]
    for sae in refused:
        with pytest.raises(ConfigError, match="cannot be written for"):
            sae.save(tmp_path / "out", format=name)
    assert not (tmp_path / "out").exists()


def test_one_format_is_not_taken_for_another(tmp_path: Path) -> None:
    for name, kind in WRITTEN:
        folder = tmp_path / f"{name}-{kind[0]}-{kind[1]}"
        CODERS[kind].save(folder, format=name)
        takers = [other for other, form in FORMATS.items() if form.here(folder)]
        assert takers[0] == name, (name, kind, takers)


def test_the_table_says_what_is_so() -> None:
    table = {form.name: cells for form, cells in format_table()}
    assert table.keys() == FORMATS.keys()
    for name, cells in table.items():
        assert cells.keys() == CODERS.keys()
        assert any(is_read or not why for is_read, why in cells.values()), name
        assert FORMATS[name].reads <= CODERS.keys(), "a kind that no coder of saejax is"


def test_a_folder_of_several_is_answered_with_their_places(tmp_path: Path) -> None:
    sae = CODERS["autoencoder", "topk"]
    for name in ("a", "deep/b", "deep/c"):
        sae.save(tmp_path / name, format="saelens")
    sae.save(tmp_path / "own")
    assert dictionaries_below(tmp_path) == [tmp_path / name for name in ("a", "deep/b", "deep/c", "own")]
    with pytest.raises(DataError, match=r"holds 4 dictionaries.*deep/b"):
        load_dictionary(tmp_path)
    with pytest.raises(DataError, match="neither a run"):
        (tmp_path / "nothing").mkdir()
        load_dictionary(tmp_path / "nothing")


def test_a_links_circle_and_a_crowd_end_the_search(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    for i in range(300):
        (tmp_path / "a" / f"empty{i}").mkdir()
    with at_once():
        assert dictionaries_below(tmp_path) == []


def test_a_name_that_no_file_can_have_and_a_locked_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"aaa cannot be read: File name too long"):
        saejax.load("/" + "a" * 5000)
    CODERS["autoencoder", "topk"].save(tmp_path / "open", format="saelens")
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked").chmod(0)
    assert dictionaries_below(tmp_path) == [tmp_path / "open"]
    if os.geteuid():  # nothing is locked for root
        with pytest.raises(DataError, match="locked cannot be read: Permission denied"):
            saejax.load(tmp_path / "locked")


def test_headers_that_take_long_to_read_are_refused_at_once(tmp_path: Path) -> None:
    header = (
        b"{" + b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(100_000)) + b"}"
    )
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with at_once():
        for refused, path in ((read_safetensors, tmp_path / "a.safetensors"), (read_npz, crowded(tmp_path / "a.npz"))):
            with pytest.raises(DataError, match="bytes; a dictionary's"):
                refused(path)


@pytest.mark.parametrize("name", WRITERS)
def test_a_foreign_folder_is_not_overwritten(name: str, tmp_path: Path) -> None:
    sae = next(CODERS[kind] for other, kind in WRITTEN if other == name)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="something other"):
        sae.save(tmp_path, format=name)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_unknown_formats_are_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no format .saelense.*saelens"):
        CODERS["autoencoder", "topk"].save(tmp_path / "out", format="saelense")


@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage", "nan", "pipe", "huge", "missing"])
@pytest.mark.parametrize("name", WRITERS)
def test_damaged_files_are_refused_by_name(name: str, damage: str, tmp_path: Path) -> None:
    kinds = [kind for other, kind in WRITTEN if other == name]
    sae, form = CODERS[kinds[0]], FORMATS[name]
    if damage == "nan":
        bad = dict(sae.params) | {"W_dec": np.full_like(sae.params["W_dec"], np.nan)}
        sae = dataclasses.replace(sae, params=bad)
    sae.save(tmp_path / "out", format=name)
    place = form.place_of(sae, tmp_path / "out")
    if damage != "nan":
        saejax.load(place)  # it was sound; and what is made once for all reading is made now
        files = [f for f in (tmp_path / "out").rglob("*") if f.is_file()]
        _damage(max(files, key=lambda f: f.stat().st_size), damage)
    with at_once(), pytest.raises(DataError) as error:
        saejax.load(place)
    assert str(tmp_path) in str(error.value)


def _damage(path: Path, how: str) -> None:
    raw = path.read_bytes()
    if how == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "missing":
        path.unlink()
    elif how == "huge":  # 10^12 numbers, all of them holes
        os.truncate(path, 4 * 10**12)
    else:
        path.write_bytes({"truncated": raw[: len(raw) // 2], "empty": b"", "garbage": b"\xff" * len(raw)}[how])


@pytest.mark.parametrize("kind", [("autoencoder", "relu"), ("autoencoder", "gated"), ("autoencoder", "jumprelu")])
def test_the_folds_keep_what_they_say(kind: Kind) -> None:
    sae = CODERS[kind]
    x = activations(sae).astype(np.float64)
    p = {name: value.astype(np.float64) for name, value in sae.params.items()}

    def pre(params: dict[str, np.ndarray], centre: bool) -> np.ndarray:
        return (x - centre * params["b_dec"]) @ params["W_enc"] + params["b_enc"]

    plain = centred(dict(sae.params), -1)
    np.testing.assert_allclose(pre(p, True), pre(plain, False), rtol=0, atol=1e-5)
    if kind[1] == "gated":  # mag = exp(r_mag) x' W_enc + b_mag
        with_centre = np.exp(p["r_mag"]) * ((x - p["b_dec"]) @ p["W_enc"]) + p["b_mag"]
        without = np.exp(p["r_mag"]) * (x @ plain["W_enc"]) + plain["b_mag"]
        np.testing.assert_allclose(with_centre, without, rtol=0, atol=1e-5)
    factor = RNG.uniform(0.5, 2, len(p["b_enc"]))
    factor[0], p["W_dec"][0] = 0, 0  # writes nothing: never on
    sae = dataclasses.replace(sae, params={name: value.astype(np.float32) for name, value in p.items()})
    scaled = dataclasses.replace(sae, params=weighted(p, factor))
    latents = sae.encode(x)
    np.testing.assert_allclose(scaled.encode(x), latents * factor, rtol=0, atol=1e-5 * np.abs(latents).max())
    np.testing.assert_allclose(scaled.decode(scaled.encode(x)), sae.decode(latents), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("blocks.6.hook_resid_pre", "blocks.6.resid_pre"),
        ("blocks.11.mlp.hook_in", "blocks.11.mlp_in"),
        ("blocks.0.attn.hook_z", "blocks.0.attn_z"),
        ("blocks.3.hook_mlp_out", "blocks.3.mlp_out"),
        ("blocks.3.ln2.hook_normalized", "blocks.3.ln2.hook_normalized"),
        ("encoder.layer.2.output.out", "encoder.layer.2.output.out"),
    ],
)
def test_hook_points_go_both_ways(theirs: str, ours: str) -> None:
    assert from_transformer_lens(theirs) == ours
    assert to_transformer_lens(ours) == theirs


@pytest.mark.parametrize(
    ("name", "model", "told"),
    [
        ("layers.3.mlp", "", True),
        ("model.layers.3.mlp.output", "google/gemma-3-1b-pt", True),
        ("blocks.3.mlp.hook_out", "gemma-2-2b", True),
        ("model.layers.3.self_attn", "", True),
        ("blocks.3.mlp.hook_out", "gpt2", False),
        ("blocks.3.hook_mlp_out", "gemma-2-2b", False),
        ("layers.3.mlp.input", "", False),
        ("blocks.3.attn.hook_z", "", False),
        ("layers.3", "", False),
    ],
)
def test_who_stands_before_a_last_norm_is_told(name: str, model: str, told: bool) -> None:
    assert bool(norm_notes(name, model)) == told


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("model.layers.6", "blocks.6.resid_post"),
        ("layers.6", "blocks.6.resid_post"),
        ("transformer.h.2.mlp", "blocks.2.mlp_out"),
        ("transformer.h.2.mlp.input", "blocks.2.mlp_in"),
        ("model.layers.12.output", "blocks.12.resid_post"),
        ("model.layers.12.self_attn.o_proj.input", "blocks.12.attn_z"),
        ("model.layers.12.pre_feedforward_layernorm.output", "blocks.12.mlp_in"),
        ("gpt_neox.layers.3.attention", "blocks.3.attn_out"),
        ("encoder.layer.2.output", "encoder.layer.2.out"),
    ],
)
def test_module_paths_become_hook_points(path: str, ours: str) -> None:
    assert from_module(path) == ours


def test_layers_are_read_from_names() -> None:
    assert layer_of("blocks.12.resid_post") == 12
    assert layer_of("h.3.out") == 3
    assert layer_of("x") is None


def test_a_format_of_ones_own(tmp_path: Path) -> None:
    """What docs/extending.md promises: one class under `register_format`."""

    class Numbers(Format):
        name, title, files = "numbers", "Numbers", "numbers.npz"

        def here(self, path: Path) -> list[Path]:
            return [path] if (path / "numbers.npz").is_file() else []

        def refuses(self, sae: TrainedCoder) -> str:
            return "" if "W_dec" in sae.params else "it wants W_dec"

        def write(self, sae: TrainedCoder, folder: Path) -> list[str]:
            folder.mkdir()
            np.savez(folder / "numbers.npz", **dict(sae.params))
            return ["It does not say the hook point."]

    saejax.register_format(Numbers)
    try:
        assert CODERS["autoencoder", "relu"].save(tmp_path / "out", format="numbers")
        assert dictionaries_below(tmp_path) == [tmp_path / "out"]
        with pytest.raises(ConfigError, match="it wants W_dec"):
            CODERS["clt", "relu"].save(tmp_path / "clt", format="numbers")
    finally:
        del FORMATS.registered["numbers"]
