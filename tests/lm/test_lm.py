"""The JAX decoder, its edits and gradients, its files and their damage, the n-gram baselines, pre-training.

Parity with PyTorch stands in test_lm_torch.py; the embedded model in test_demo_lm.py.
"""

import dataclasses
import functools
import json
import math
import shutil
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from tiny import products
from tiny.decoders import (
    BOS,
    CONFIG,
    POINTS,
    POSITIONS,
    VOCAB,
    in_order,
    random_params,
    rows_of,
    run_rows,
    write_tokenizer,
)

from benchmarks.demo_lm.ngram import ngram_losses
from benchmarks.demo_lm.pretrain import PretrainConfig, evaluate, pretrain
from saejax.core.errors import ConfigError, DataError
from saejax.lm import HOOK_NAMES, LanguageModel, LMConfig, checkpoint, decoder, load_lm
from saejax.lm.conventions import DecoderConfig, Rope
from saejax.lm.product import product

# Not compiled, a new shape costs seconds: whatever runs so has this one.
ROW = rows_of([[30, 18]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-lm")
    checkpoint.write(folder, CONFIG, random_params(CONFIG))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def lm(folder: Path) -> LanguageModel:
    return load_lm(str(folder))


@pytest.fixture
def damaged(folder: Path, tmp_path: Path) -> Path:
    """A copy of the model folder that a test may spoil."""
    return Path(shutil.copytree(folder, tmp_path / "model"))


def change_config(folder: Path, **changes: Any) -> None:
    config_json = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config_json | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


# --- running --------------------------------------------------------------------------------------


def test_a_token_in_a_packed_row_has_the_activations_of_its_document_alone(lm: LanguageModel) -> None:
    pieces = [11, 1, 20, 9]
    packed = rows_of([pieces, *([n] for n in pieces), []])
    starts = np.cumsum([0, *pieces])
    for i, n in enumerate(pieces):
        packed["tokens"][1 + i, :n] = packed["tokens"][0, starts[i] : starts[i] + n]
    for name, value in run_rows(lm, packed).items():
        for i, n in enumerate(pieces):
            alone, inside = value[1 + i, :n], value[0, starts[i] : starts[i] + n]
            np.testing.assert_allclose(inside, alone, atol=2e-5, rtol=2e-5, err_msg=f"{name}, piece {i}")


def test_padding_does_not_matter_and_stays_finite(lm: LanguageModel) -> None:
    rows = rows_of([[10, 20], [48], [5], [1], []])
    padding = rows["segments"] < 0
    other = rows | {"tokens": np.where(padding, (rows["tokens"] + 40) % VOCAB, rows["tokens"])}
    first, second = run_rows(lm, rows), run_rows(lm, other)
    for name in first:
        np.testing.assert_array_equal(first[name][~padding], second[name][~padding], err_msg=name)
        assert np.isfinite(first[name]).all()
    assert (first["logits"][padding] != second["logits"][padding]).any()


def test_without_positions_and_segments_a_row_is_one_document(lm: LanguageModel) -> None:
    rows = rows_of([[48]])
    wanted = lm.run(*in_order(rows))[0]
    np.testing.assert_array_equal(lm.run(rows["tokens"])[0], wanted)
    np.testing.assert_array_equal(lm.run(*(x.tolist() for x in in_order(rows)))[0], wanted)


def test_hook_points_have_the_width_they_announce(lm: LanguageModel) -> None:
    _, activations = jax.eval_shape(lambda t: lm.run(t, capture=list(lm.hook_points())), ROW["tokens"])
    assert {name: value.shape for name, value in activations.items()} == {
        name: (1, POSITIONS, width) for name, width in lm.hook_points().items()
    }
    assert list(lm.hook_points()) == POINTS
    assert lm.hook_points()["blocks.2.mlp_act"] == 128


def test_no_logit_depends_on_a_later_token_or_another_document(lm: LanguageModel) -> None:
    rows = rows_of([[7, 12, 5]])
    rows = {k: v[:, :26] for k, v in rows.items()}  # two padding tokens
    segments = rows["segments"][0]
    weights = np.random.default_rng(1).normal(size=(1, 1, VOCAB)).astype(np.float32)

    @jax.jit
    @jax.jacrev
    def jacobian(delta: jax.Array) -> jax.Array:
        logits, _ = lm.run(*in_order(rows), edits={"blocks.0.resid_pre": lambda x: x + delta})
        return (logits * weights).sum(axis=(0, 2))

    size = np.abs(np.asarray(jacobian(jnp.zeros((1, 26, 32)))[:, 0])).max(-1)  # [logit position, input position]
    allowed = (segments[:, None] == segments[None]) & np.tri(26, dtype=bool)
    assert (size[~allowed] == 0).all()
    assert (size[allowed] > 0).all()


def test_too_many_positions_are_refused(lm: LanguageModel) -> None:
    with pytest.raises(DataError, match="49 tokens; the model reads 48"):
        lm.run(np.zeros((1, POSITIONS + 1), np.int32))
    with pytest.raises(DataError, match="49 tokens; the model reads 48"):
        lm.activations("w3 " * POSITIONS, "blocks.0.resid_pre")


WRONG_IDS = {
    "beyond the vocabulary": (
        [[0, 1, VOCAB]],
        None,
        rf"tokens\[0, 2\] is {VOCAB}; the model has tokens 0 to {VOCAB - 1}",
    ),
    "negative": ([[0, 1], [2, -1]], None, r"tokens\[1, 1\] is -1"),
    "more than 32 bits": (np.array([[2**32 + 1]]), None, r"tokens\[0, 0\] is 4294967297"),
    "floats": ([[0.0, 1.0]], None, r"tokens are float64 \[1, 2\]; they must be rows of integers"),
    "one row without a batch": ([0, 1], None, r"tokens are int64 \[2\]"),
    "a position beyond the context": ([[0, 1]], [[0, POSITIONS]], rf"positions\[0, 1\] is {POSITIONS}; .* 0 to 47"),
    "a position before the first": ([[0, 1]], [[-1, 0]], r"positions\[0, 0\] is -1"),
}


@pytest.mark.parametrize("case", WRONG_IDS)
def test_ids_and_positions_that_are_not_there_are_refused(lm: LanguageModel, case: str) -> None:
    tokens, positions, message = WRONG_IDS[case]
    with pytest.raises(DataError, match=message):
        lm.run(tokens, positions)
    if isinstance(tokens, list) and "floats" not in case and "batch" not in case:
        with pytest.raises(DataError, match=message):
            lm.apply(lm.params, jnp.asarray(tokens), None if positions is None else jnp.asarray(positions), None)


def test_what_is_traced_is_refused_by_type_alone(lm: LanguageModel) -> None:
    with pytest.raises(DataError, match=r"tokens are float32 \[1, 3\]"):
        jax.eval_shape(lambda t: lm.run(t)[0], jax.ShapeDtypeStruct((1, 3), jnp.float32))
    assert jax.eval_shape(lambda t: lm.run(t)[0], jax.ShapeDtypeStruct((1, 3), jnp.int32)).shape == (1, 3, VOCAB)


def test_rotary_positions_have_no_end(lm: LanguageModel) -> None:
    """They count differences alone: attention is the same wherever a row begins."""
    turned = dataclasses.replace(lm.config, rope=Rope(100.0, 4))
    params = decoder.init_params(turned, jax.random.key(0))
    tokens, at = np.arange(6)[None], np.arange(6)[None]
    here, there = (decoder.run(turned, params, tokens, at + start)[0] for start in (0, 10 * POSITIONS))
    np.testing.assert_allclose(here, there, atol=1e-4)
    with pytest.raises(DataError, match="49 tokens; the model reads 48"):
        decoder.run(turned, params, np.zeros((1, POSITIONS + 1), np.int32))


def test_a_text_is_text_and_hook_points_are_a_list(lm: LanguageModel) -> None:
    wrong: Any = [1, 2]
    with pytest.raises(ConfigError, match=r"activations: text is \[1, 2\] \(list\); it must be str"):
        lm.activations(wrong, "blocks.0.resid_pre")
    with pytest.raises(ConfigError, match=r"capture is 'blocks\.0\.resid_pre'; it must be a list of str"):
        lm.run([[1, 2]], capture="blocks.0.resid_pre")


def test_activations_of_a_text_have_the_bos_in_front(lm: LanguageModel) -> None:
    words = list(range(POSITIONS - 1))
    found = lm.activations(" ".join(f"w{i}" for i in words), "blocks.1.hook_resid_post")
    ids = np.array([[BOS, *words]], np.int32)
    wanted = lm.run(ids, capture=["blocks.1.resid_post"])[1]["blocks.1.resid_post"][0]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, wanted)


def test_bfloat16_runs_in_bfloat16_even_under_a_float32_edit(folder: Path, lm: LanguageModel) -> None:
    low = load_lm(str(folder), dtype="bfloat16")
    tokens = ROW["tokens"]
    edits = {"blocks.0.resid_post": lambda x: x.astype(jnp.float32)}
    logits, activations = jax.jit(lambda t: low.run(t, capture=POINTS, edits=edits))(tokens)
    assert {x.dtype for x in (logits, *activations.values())} == {jnp.dtype(jnp.bfloat16)}
    wanted = np.asarray(lm.run(tokens)[0])
    error = np.asarray(logits, np.float32) - wanted
    assert np.square(error).mean() < 0.01 * np.square(wanted).mean()


# --- edits ----------------------------------------------------------------------------------------


def test_float32_is_float32_in_every_product(lm: LanguageModel) -> None:
    for dtype, precision in (("float32", jax.lax.Precision.HIGHEST), ("bfloat16", None)):
        params = jax.tree.map(lambda v, dtype=dtype: jax.ShapeDtypeStruct(v.shape, dtype), lm.params)
        run = functools.partial(decoder.run, lm.config)
        assert set(products(jax.make_jaxpr(run)(params, *in_order(ROW)))) == {(dtype, precision)}


@pytest.fixture(scope="module")
def unedited(lm: LanguageModel) -> dict[str, np.ndarray]:
    return run_edited(lm, {})


def run_edited(lm: LanguageModel, edits: dict[str, decoder.Edit]) -> dict[str, np.ndarray]:
    logits, activations = lm.run(*in_order(ROW), capture=POINTS, edits=edits)
    return {**{k: np.asarray(v) for k, v in activations.items()}, "logits": np.asarray(logits)}


def test_the_identity_everywhere_changes_nothing(lm: LanguageModel, unedited: dict[str, np.ndarray]) -> None:
    seen: list[str] = []

    def identity(name: str, value: jax.Array) -> jax.Array:
        seen.append(name)
        return value

    edited = run_edited(lm, {name: functools.partial(identity, name) for name in POINTS})
    assert sorted(seen) == sorted(POINTS)
    for name, value in unedited.items():
        np.testing.assert_array_equal(edited[name], value, err_msg=name)


@pytest.mark.parametrize("name", HOOK_NAMES)
def test_an_edit_is_seen_by_all_that_follows_and_nothing_before(
    lm: LanguageModel, unedited: dict[str, np.ndarray], name: str
) -> None:
    # HOOK_NAMES is in the order of computation, and each later point depends on each earlier one.
    point = f"blocks.1.{name}"
    new = np.random.default_rng(2).normal(size=unedited[point].shape).astype(np.float32)
    edited = run_edited(lm, {point: lambda _: jnp.asarray(new)})
    np.testing.assert_array_equal(edited[point], new)
    at = POINTS.index(point)
    for before in POINTS[:at]:
        np.testing.assert_array_equal(edited[before], unedited[before], err_msg=before)
    for after in [*POINTS[at + 1 :], "logits"]:
        assert np.abs(edited[after] - unedited[after]).max() > 1e-3, after


def test_the_residual_stream_adds_up(unedited: dict[str, np.ndarray]) -> None:
    for i in range(3):
        here = {name: unedited[f"blocks.{i}.{name}"] for name in HOOK_NAMES}
        np.testing.assert_allclose(here["resid_pre"] + here["attn_out"], here["resid_mid"], atol=1e-5)
        np.testing.assert_allclose(here["resid_mid"] + here["mlp_out"], here["resid_post"], atol=1e-5)
        if i < 2:
            np.testing.assert_array_equal(unedited[f"blocks.{i + 1}.resid_pre"], here["resid_post"])


def test_edits_that_cannot_be_meant_are_refused(lm: LanguageModel) -> None:
    tokens = ROW["tokens"]
    with pytest.raises(ConfigError, match=r"blocks\.0\.mlp_out made \(32,\) of \(1, 48, 32\)"):
        lm.run(tokens, edits={"blocks.0.mlp_out": lambda x: x[0, 0]})
    twice = dict.fromkeys(("blocks.0.mlp_out", "blocks.0.hook_mlp_out"), jnp.zeros_like)
    with pytest.raises(ConfigError, match="Two edits at one hook point"):
        lm.run(tokens, edits=twice)
    with pytest.raises(ConfigError, match=r"no hook point 'blocks\.0\.mlpout'"):
        lm.run(tokens, edits={"blocks.0.mlpout": jnp.zeros_like})


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("blocks.1.resid_pots", "blocks.1.resid_post"),
        ("blocks.3.mlp_out", "blocks.[012].mlp_out"),
        ("block.1.attn_out", "blocks.1.attn_out"),
        ("blocks.1.ln2.hook_normalized", None),
        ("", None),
    ],
)
def test_an_unknown_hook_point_is_refused_with_those_there_are(lm: LanguageModel, name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"no hook point '{name}'") as caught:
        lm.run([[1, 2]], capture=[name])
    caught.match(r"blocks\.0 to blocks\.2, each with " + ", ".join(HOOK_NAMES))
    if near:
        caught.match(f"Did you mean '{near}'")


def test_transformer_lens_names_are_taken(lm: LanguageModel) -> None:
    theirs = {name: f"hook_{name}" for name in HOOK_NAMES if name not in ("attn_z", "mlp_in", "mlp_act")}
    for ours, name in (theirs | {"mlp_act": "mlp.hook_post", "attn_z": "attn.hook_z"}).items():
        assert lm.hook_point(f"blocks.2.{name}") == f"blocks.2.{ours}"
    _, captured = jax.eval_shape(lambda t: lm.run(t, capture=["blocks.2.mlp.hook_post"]), ROW["tokens"])
    assert list(captured) == ["blocks.2.mlp_act"]


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_come_back_bit_for_bit(tmp_path: Path, tied: bool) -> None:
    config_json = CONFIG | {"tie_word_embeddings": tied, "n_inner": 40}
    params = random_params(config_json)
    checkpoint.write(tmp_path, config_json, params)
    config, read = checkpoint.read_params(tmp_path)
    assert (config.tied_embeddings, config.d_mlp, "W_U" in read) == (tied, 40, not tied)
    jax.tree.map(np.testing.assert_array_equal, params, read)


def test_a_bfloat16_file_is_read_as_it_is(damaged: Path, folder: Path) -> None:
    change_tensors(damaged, lambda t: t.update({k: v.astype(ml_dtypes.bfloat16) for k, v in t.items()}))
    wanted = jax.tree.map(lambda x: np.asarray(x, ml_dtypes.bfloat16), checkpoint.read_params(folder)[1])
    read = checkpoint.read_params(damaged)[1]
    assert {x.dtype for x in jax.tree.leaves(read)} == {jnp.dtype(jnp.float32)}
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.float32(a), b), wanted, read)


def test_names_without_the_transformer_prefix_are_read(damaged: Path, lm: LanguageModel) -> None:
    """OpenAI's own GPT-2 files have none."""

    def strip(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    change_tensors(damaged, strip)
    jax.tree.map(np.testing.assert_array_equal, checkpoint.read_params(damaged)[1], lm.params)


def test_the_identity_knows_weights_tokenizer_and_type_but_not_the_place(
    damaged: Path, folder: Path, tmp_path: Path, lm: LanguageModel
) -> None:
    elsewhere = Path(shutil.copytree(folder, tmp_path / "elsewhere" / folder.name))
    assert load_lm(str(elsewhere)).identity == lm.identity == json.loads(json.dumps(lm.identity))
    assert load_lm(str(elsewhere), dtype="bfloat16").identity != lm.identity
    raw = bytearray((damaged / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (damaged / "model.safetensors").write_bytes(raw)
    (damaged / "tokenizer.json").write_text((damaged / "tokenizer.json").read_text() + "\n")
    other = load_lm(str(damaged)).identity
    assert other["weights_sha256"] != lm.identity["weights_sha256"]
    assert other["tokenizer_sha256"] != lm.identity["tokenizer_sha256"]


def _write(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content)


def _config(**changes: Any) -> Callable[[Path], Any]:
    return lambda folder: change_config(folder, **changes)


def _tensor(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], Any]:
    name = f"transformer.{name}"
    return lambda f: change_tensors(f, lambda t: t.update({name: np.ascontiguousarray(change(t[name]))}))


def _index(weight_map: Any) -> Callable[[Path], Any]:
    return _indexed(json.dumps({"weight_map": weight_map}).encode())


def _indexed(content: bytes) -> Callable[[Path], Any]:
    """The index in place of the single file, which would count more, and the tensors in `part.safetensors`."""

    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        _write("model.safetensors.index.json", content)(folder)

    return spoil


def _shard_without_it(folder: Path) -> None:
    change_tensors(folder, lambda t: t.pop("transformer.wte.weight"))
    _index({"transformer.wte.weight": "part.safetensors"})(folder)


def _truncate(keep: int) -> Callable[[Path], Any]:
    return lambda f: _write("model.safetensors", (f / "model.safetensors").read_bytes()[:keep])(f)


def _outside(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
    _index({"transformer.wte.weight": "../outside.safetensors"})(folder)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "config not JSON": (_write("config.json", b'{"model_type": '), "config.json is not a usable"),
    "config not UTF-8": (_write("config.json", b'{"a": "\xff"}'), "config.json is not a usable"),
    "config a list": (_write("config.json", b"[1, 2]"), "config.json is not a usable"),
    "config too deep": (_write("config.json", b"[" * 200_000), "config.json is not a usable"),
    "no n_layer": (_write("config.json", b'{"model_type": "gpt2", "n_embd": 8, "n_head": 1}'), "n_layer"),
    "model_type": (_config(model_type="mamba"), r"config.json: .* model_type 'mamba'; it knows gpt2"),
    "activation": (_config(activation_function="swiglu"), "activation 'swiglu' .* gelu_new"),
    "unscaled attention": (_config(scale_attn_weights=False), "scale_attn_weights=False"),
    "heads": (_config(n_head=5), "n_embd=32 is not a multiple of n_head=5"),
    "no heads": (_config(n_head=0), "n_head is 0"),
    "epsilon": (_config(layer_norm_epsilon="tiny"), "epsilon is 'tiny'"),
    "negative layers": (_config(n_layer=-1), "n_layer is -1"),
    "text for a number": (_config(n_layer="3"), "n_layer is '3'"),
    "too large a width": (_config(n_embd=2**40), "n_embd is 1099511627776"),
    "a large width": (_config(n_embd=2**20, n_inner=128), "does not have the shape"),
    "a large MLP": (_config(n_inner=2**20), r"W_in.* is \(32, 128\), config.json says \(32, 1048576\)"),
    "more layers": (_config(n_layer=2**12), "'h.3.attn.c_attn.weight' is missing"),
    "a million layers": (_config(n_layer=2**20), r"n_layer is 1048576; it must be a positive integer up to 2\^12"),
    "more positions": (_config(n_positions=64), r"W_pos.* is \(48, 32\), config.json says \(64, 32\)"),
    "bos of another model": (_config(bos_token_id=50256), "bos_token_id is 50256"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "No model.safetensors in .*convert"),
    "weights cut": (_truncate(20_000), "model.safetensors is not a readable safetensors"),
    "weights cut in the header": (_truncate(100), "model.safetensors is not a readable safetensors"),
    "weights empty": (_truncate(0), "model.safetensors is not a readable safetensors"),
    "pickled weights": (_write("model.safetensors", b"\x80\x04K\x01."), "is not a readable safetensors"),
    "a tensor gone": (
        lambda f: change_tensors(f, lambda t: t.pop("transformer.h.1.ln_2.bias")),
        "'h.1.ln_2.bias' is missing",
    ),
    "a matrix turned": (_tensor("h.1.mlp.c_fc.weight", np.transpose), r"W_in.* is \(128, 32\), .* \(32, 128\)"),
    "attention turned": (_tensor("h.1.attn.c_attn.weight", np.transpose), "does not have the shape"),
    "attention flat": (_tensor("h.1.attn.c_attn.weight", np.ravel), "does not have the shape"),
    "a row less": (_tensor("wte.weight", lambda x: x[:-1]), r"W_E.* is \(96, 32\), .* \(97, 32\)"),
    "index not JSON": (_indexed(b"{"), "index.json is not a usable index"),
    "index without a map": (_indexed(b"{}"), "index.json is not a usable index"),
    "index of numbers": (_index({"transformer.wte.weight": 3}), "index.json names the file '3'"),
    "shard missing": (_index({"transformer.wte.weight": "model-00002.safetensors"}), "model-00002.safetensors"),
    "shard outside": (_outside, r"names the file '\.\./outside\.safetensors', which is not in the folder"),
    "shard without it": (_shard_without_it, "'wte.weight' is missing"),
    "weights elsewhere": (_config(transformers_weights="x.safetensors"), "transformers_weights names 'x.safetensors'"),
    "a layer more": (
        lambda f: change_tensors(f, lambda t: t.update({"transformer.h.3.ln_1.bias": t["transformer.h.2.ln_1.bias"]})),
        r"gives the tensor 'transformer\.h\.3\.ln_1\.bias' no place",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "No tokenizer.json in .*save_pretrained"),
    "tokenizer broken": (_write("tokenizer.json", b"{}"), "tokenizer.json is not a readable tokenizer"),
    "tokenizer not UTF-8": (_write("tokenizer.json", b"\xff"), "tokenizer.json is not a readable tokenizer"),
    "bos outside the model": (
        lambda f: (write_tokenizer(f, 97), change_config(f, bos_token_id=98)),
        "bos token has the id 98, and the model has only 97 tokens",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused_by_name_and_without_allocating(damaged: Path, damage: str) -> None:
    spoil, message = DAMAGE[damage]
    spoil(damaged)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=message):
            load_lm(str(damaged), backend="jax")
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


def test_what_is_neither_folder_nor_hub_id_is_refused(tmp_path: Path) -> None:
    for name in (str(tmp_path / "missing"), "gpt2", "../up", ""):
        with pytest.raises(DataError, match="No model"):
            load_lm(name)
    with pytest.raises(ConfigError, match=r"'float64'.* There are: float32, bfloat16"):
        load_lm(str(tmp_path), dtype="float64")
    with pytest.raises(ConfigError, match="float16"):
        LMConfig(dtype="float16")


def test_a_hub_id_without_a_network_fails_naming_the_repository() -> None:
    # conftest.py says HF_HUB_OFFLINE.
    with pytest.raises(
        DataError, match=r"'openai-community/gpt2' cannot be had .* not cached\. .*local folder in lm\.model"
    ):
        load_lm("openai-community/gpt2")


# --- baselines and pre-training -------------------------------------------------------------------


def plain_ngram_losses(train: list[list[int]], test: list[list[int]], vocab_size: int, order: int) -> list[float]:
    """Witten-Bell from its definition, with dictionaries; None stands before the first word of a segment."""

    def predictions(segments: list[list[int]]) -> list[tuple[tuple[int | None, ...], int]]:
        padded: list[list[Any]] = [[None] * order + s for s in segments]
        return [(tuple(s[i - order + 1 : i]), s[i]) for s in padded for i in range(order + 1, len(s))]

    followers: dict[tuple[int | None, ...], Counter[int]] = defaultdict(Counter)
    for history, word in predictions(train):
        for n in range(order):
            followers[history[len(history) - n :]][word] += 1

    def probability(history: tuple[int | None, ...], word: int) -> float:
        shorter = probability(history[1:], word) if history else 1 / vocab_size
        if history not in followers:
            return shorter
        seen = followers[history]
        return (seen[word] + len(seen) * shorter) / (seen.total() + len(seen))

    scored = predictions(test)
    return [
        -math.fsum(math.log(probability(h[len(h) - n :], w)) for h, w in scored) / len(scored) for n in range(order)
    ]


def test_ngram_losses_are_witten_bell() -> None:
    rng = np.random.default_rng(5)

    def corpus(rows: int, vocab_size: int) -> tuple[dict[str, np.ndarray], list[list[int]]]:
        lengths = [[int(n) for n in rng.integers(1, 15, 3)] for _ in range(rows)]
        packed = rows_of(lengths)
        packed["tokens"] = (rng.zipf(1.5, packed["tokens"].shape) % vocab_size).astype(np.int32)
        segments = [
            row[part == i].tolist()
            for row, part in zip(packed["tokens"], packed["segments"], strict=True)
            for i in range(3)
        ]
        return packed, segments

    # Two words of the test are never seen in training.
    (train, train_segments), (test, test_segments) = corpus(40, 13), corpus(15, 15)
    assert {13, 14} <= {word for segment in test_segments for word in segment[1:]}
    for order in (1, 2, 3):
        wanted = plain_ngram_losses(train_segments, test_segments, 15, order)
        np.testing.assert_allclose(ngram_losses(train, test, 15, order), wanted, atol=1e-9, rtol=0)


def test_pretraining_learns_a_repetition() -> None:
    config = DecoderConfig(1, 16, 2, 8, 32, 11, 48, "gelu_new", 1e-5, True)
    tokens = (np.arange(48)[None] + np.arange(8)[:, None]).astype(np.int32) % 11
    rows = rows_of([[48]] * 8) | {"tokens": tokens}
    steps: list[int] = []
    losses: list[float] = []

    def on_step(step: int, loss: float, _: Any) -> None:
        steps.append(step)
        losses.append(loss)

    params = pretrain(config, PretrainConfig(steps=120, batch=4, lr=1e-2), rows, on_step)
    assert steps == [50, 100, 120]
    assert losses[0] > losses[1] > losses[2]
    assert evaluate(config, params, rows, batch=8) < 0.5 < math.log(11)


def test_a_product_in_bfloat16_is_summed_in_float32_and_rounded_once() -> None:
    shapes = ((7, 600), (600, 5))
    a, b = (np.random.default_rng(i).normal(size=shape).astype(jnp.bfloat16) for i, shape in enumerate(shapes))
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    result = product(jnp.asarray(a), jnp.asarray(b))
    assert result.dtype == jnp.bfloat16
    # Half a unit in the last of 8 bits, and what 600 float32 sums round.
    np.testing.assert_allclose(np.asarray(result).astype(np.float64), wide_a @ wide_b, rtol=2**-8, atol=1e-4)
    grad = jax.grad(lambda x: product(x, jnp.asarray(b)).sum())(jnp.asarray(a))
    assert grad.dtype == jnp.bfloat16
    wanted = np.tile(wide_b.sum(1), (7, 1))
    np.testing.assert_allclose(np.asarray(grad).astype(np.float64), wanted, rtol=2**-7, atol=1e-2)
