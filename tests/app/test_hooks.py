"""`launch.hooks`: the hook points of a model with their shapes, by its config.json alone where JAX runs it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny import ROOT
from tiny.commands import run_command
from tiny.decoders import CONFIG, random_params, write_tokenizer

from saejax.app import hook_list
from saejax.app.experiment import default_config, experiment
from saejax.app.hook_list import each, folded, header, hook_table, of_experiment, shape_text
from saejax.core.config import to_config_dict
from saejax.core.errors import ConfigError, DataError
from saejax.lm import HookPoint, LanguageModel, checkpoint, list_hook_points, load_lm
from saejax.lm.families import ARCHITECTURES

DEMO = Path(checkpoint.__file__).parent / "demo"
GEMMA2 = {
    "model_type": "gemma2", "vocab_size": 97, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64,
    "sliding_window": 6, "query_pre_attn_scalar": 17, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0,
}  # fmt: skip


def folder_of(folder: Path, config_json: dict[str, Any]) -> Path:
    """A model folder with config.json and nothing else."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json))
    return folder


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.hooks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def lines_of(text: str) -> dict[str, list[str]]:
    """{first word: the other words} of every line."""
    return {words[0]: words[1:] for words in map(str.split, text.splitlines()) if words}


# --- the list as data -----------------------------------------------------------------------------


def test_the_list_is_what_the_decoder_computes() -> None:
    lm, listed = load_lm("demo"), list_hook_points("demo")
    assert isinstance(lm, LanguageModel)
    names = [point.name for point in listed.points]
    length = 5
    run = jax.jit(lambda tokens: lm.run(tokens, capture=names))
    values = jax.eval_shape(run, np.zeros((1, length), np.int32))[1]
    for point in listed.points:
        shape = tuple(length if size == "S" else size for size in point.shape)
        stored = (int(np.prod(shape)),) if point.stored else shape
        found = values[point.name].shape[1:]
        # Of a pattern [H, S, S] a token has its row in each head.
        assert found[-1:] == stored[-1:] and (len(shape) == 1 or point.stored or found == (shape[0], length, length))
    assert {p.name: int(np.prod(p.shape)) for p in listed.points if p.stored} == lm.hook_points()
    assert {p.name for p in listed.points if not p.stored} == set(lm.inner_points())
    assert listed.shape.n_parameters == sum(leaf.size for leaf in jax.tree.leaves(lm.params))


def test_every_alias_is_taken_for_its_point() -> None:
    lm, listed = load_lm("demo"), list_hook_points("demo")
    aliases = {p.alias: p.name for p in listed.points if p.alias}
    assert len(aliases) == 10 * 6 + 1, "all but mlp_in, and the final norm"
    captured = jax.eval_shape(lambda: lm.run([[1, 2]], capture=list(aliases))[1])
    assert set(captured) == set(aliases.values())
    assert listed.hook_point("blocks.2.hook_resid_post") == "blocks.2.resid_post"


def test_points_come_in_the_order_of_computation() -> None:
    names = [p.name for p in list_hook_points("demo").points if p.stored]
    assert names == list(load_lm("demo").hook_points())


def test_config_json_alone_is_read(tmp_path: Path) -> None:
    shutil.copy(DEMO / "config.json", tmp_path)
    alone, whole = list_hook_points(str(tmp_path)), list_hook_points("demo")
    assert alone.points == whole.points and alone.shape.n_parameters == whole.shape.n_parameters
    assert (alone.number_types, whole.number_types) == ((), ("F32",))
    assert any("not here" in line for line in header(alone))


def test_headers_that_are_there_are_compared_with_the_config(tmp_path: Path) -> None:
    config_json = CONFIG | {"n_inner": 40}
    checkpoint.write(tmp_path, config_json, random_params(config_json))
    assert list_hook_points(str(tmp_path)).number_types == ("F32",)
    folder_of(tmp_path, CONFIG | {"n_inner": 44})
    with pytest.raises(DataError, match=r"mlp\.W_in is \(\d+, 40\), config\.json says \(\d+, 44\)"):
        list_hook_points(str(tmp_path))
    # Half of a download is no reason to refuse the list.
    (tmp_path / "model.safetensors").rename(tmp_path / "half.safetensors")
    assert list_hook_points(str(tmp_path)).shape.d_mlp == 44


def test_a_block_has_the_points_of_its_kind(tmp_path: Path) -> None:
    soft = list_hook_points(str(folder_of(tmp_path / "gemma2", GEMMA2)))
    in_block = [p.name.removeprefix("blocks.0.") for p in soft.points if p.name.startswith("blocks.0.")]
    assert in_block == [
        *("resid_pre", "ln1_scale", "attn_pattern", "attn_z", "ln1_post_scale", "attn_out", "resid_mid"),
        *("ln2_scale", "mlp_in", "mlp_act", "ln2_post_scale", "mlp_out", "resid_post"),
    ]
    shapes = {p.name: p.shape for p in soft.points}
    assert shapes["blocks.2.attn_z"] == (4, 10) and soft.hook_points()["blocks.2.attn_z"] == 40 != soft.shape.d_model
    assert shapes["blocks.1.attn_pattern"] == (4, "S") and shapes["blocks.1.mlp_act"] == (20,)
    assert (soft.shape.n_head, soft.shape.kv_heads, soft.shape.d_head, soft.shape.context_length) == (4, 2, 10, 64)
    phi = {k: v for k, v in GEMMA2.items() if k in ("vocab_size", "max_position_embeddings")} | {
        "model_type": "phi", "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
        "num_attention_heads": 3,
    }  # fmt: skip
    names = [p.name for p in list_hook_points(str(folder_of(tmp_path / "phi", phi))).points]
    assert "blocks.1.ln1_scale" in names and not any("ln2" in name or "post_scale" in name for name in names)


def test_of_a_hub_id_config_json_alone_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[dict[str, Any]] = []

    def download(**wanted: Any) -> str:
        asked.append(wanted)
        if wanted.get("local_files_only"):
            raise FileNotFoundError("not cached")
        return str(folder_of(tmp_path, GEMMA2) / "config.json")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda **_: pytest.fail("the weights"))
    listed = list_hook_points("google/gemma-2-9b", "abc")
    assert listed.shape.n_layer == 3 and listed.model == "google/gemma-2-9b"
    assert [(w["filename"], w["revision"]) for w in asked] == [("config.json", "abc")] * 2


# --- the table ------------------------------------------------------------------------------------


def test_repeated_blocks_are_one_line_that_capture_takes() -> None:
    listed = list_hook_points("demo")
    lines = folded(listed.points)
    assert len(lines) == 11 + 1
    assert lines[0].point.name == "blocks.{0..5}.resid_pre"
    assert lines[0].point.alias == "blocks.{0..5}.hook_resid_pre"
    stored = [line.point.name for line in lines if line.point.stored]
    expanded = hook_list.expand_hook_points(stored, listed)
    assert sorted(expanded) == sorted(listed.hook_points())
    assert [line.point for line in each(listed.points)] == list(listed.points)


def test_blocks_that_differ_or_are_missing_stand_apart() -> None:
    def point(block: int, width: int) -> HookPoint:
        return HookPoint(f"net.{block}.inner.0.out", (width,), module=f"deep.layers.{block}.0.out")

    points = [point(0, 8), point(1, 8), point(2, 16), point(3, 8), point(5, 8), point(6, 8)]
    lines = folded(points, frozenset(["net.1.inner.0.out", "net.2.inner.0.out"]))
    assert [(line.point.name, line.point.module, line.point.shape, line.captured) for line in lines] == [
        ("net.{0..1}.inner.0.out", "deep.layers.{0..1}.0.out", (8,), "1"),
        ("net.3.inner.0.out", "deep.layers.3.0.out", (8,), ""),
        ("net.{5..6}.inner.0.out", "deep.layers.{5..6}.0.out", (8,), ""),
        ("net.2.inner.0.out", "deep.layers.2.0.out", (16,), "yes"),
    ]


def test_shapes_say_what_is_stored() -> None:
    assert shape_text(HookPoint("a", (768,))) == "768"
    assert shape_text(HookPoint("a", (12, 64))) == "12 x 64 = 768"
    assert shape_text(HookPoint("a", (12, "S"), stored=False)) == "12 x S"
    (heads, row) = hook_table(each([HookPoint("blocks.0.attn_z", (12, 64), alias="theirs")]))
    assert heads.split("  ")[0] == "hook point" and "captured" not in heads and "module" not in heads
    assert row.split() == ["blocks.0.attn_z", "12", "x", "64", "=", "768", "yes", "theirs"]


@pytest.fixture
def config() -> Any:
    c = default_config()
    c.capture.hook_points = ("blocks.{1..3}.hook_resid_post", "blocks.0.attn_z", "blocks.5.resid_post")
    return c


def test_what_an_experiment_captures_is_marked(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    e = experiment(config)
    assert run_command("hooks", config=to_config_dict(e)) == 0
    found = lines_of(capsys.readouterr().out)
    assert found["blocks.{0..5}.resid_post"][-2:] == ["1..3,", "5"] and found["blocks.{0..5}.attn_z"][-1] == "0"
    assert found["blocks.{0..5}.mlp_out"][-1] == "blocks.{0..5}.hook_mlp_out"
    run_command("hooks", config=to_config_dict(e), all=True)
    every = lines_of(capsys.readouterr().out)
    assert [i for i in range(6) if every[f"blocks.{i}.resid_post"][-1] == "yes"] == [1, 2, 3, 5]


def test_the_second_model_of_an_experiment_is_listed_too(config: Any, tmp_path: Path) -> None:
    second = folder_of(tmp_path, CONFIG)
    config.lm.second = str(second)
    config.capture.hook_points = ("blocks.{0..1}.resid_pre", "second.blocks.*.mlp_out")
    (_, ours, mine), (model, theirs, captured) = of_experiment(experiment(config))
    assert mine == {"blocks.0.resid_pre", "blocks.1.resid_pre"} and ours[0].name == "blocks.0.resid_pre"
    assert captured == {f"second.blocks.{i}.mlp_out" for i in range(model.shape.n_layer)}
    assert captured <= {point.name for point in theirs} and model.shape.d_model == CONFIG["n_embd"]


def test_a_captured_point_that_is_not_there_is_refused() -> None:
    c = default_config()
    c.capture.hook_points = ("blocks.9.resid_post",)
    with pytest.raises(ConfigError, match=r"no hook point 'blocks\.9\.resid_post'.*blocks\.0 to blocks\.5"):
        of_experiment(experiment(c))


# --- the command ----------------------------------------------------------------------------------


def test_the_command_lists_a_folder_with_nothing_but_a_config(tmp_path: Path) -> None:
    done = launch(str(folder_of(tmp_path, GEMMA2)))
    assert done.returncode == 0, done.stderr
    found = lines_of(done.stdout)
    assert " ".join(found["heads"]) == "4 of 10, 2 of keys and values" and found["architecture"][0] == "gemma2,"
    assert found["blocks.{0..2}.attn_z"] == ["4", "x", "10", "=", "40", "yes", "blocks.{0..2}.attn.hook_z"]
    assert found["blocks.{0..2}.attn_pattern"][:7] == [
        "4",
        "x",
        "S",
        "no:",
        "watch,",
        "edit",
        "blocks.{0..2}.attn.hook_pattern",
    ]
    assert found["blocks.{0..2}.mlp_in"] == ["24", "yes"], "no name in TransformerLens"


def test_the_command_lists_the_model_of_a_config() -> None:
    done = launch("--config=configs/quickstart.py:tiny", "--config.capture.hook_points='blocks.{2..4}.mlp_act',")
    assert done.returncode == 0, done.stderr
    assert lines_of(done.stdout)["blocks.{0..5}.mlp_act"] == ["512", "yes", "blocks.{0..5}.mlp.hook_post", "2..4"]
    assert done.stdout.splitlines()[-1] == "capture.hook_points of quickstart-tiny: blocks.{2..4}.mlp_act"


def rope(folder: Path) -> Path:
    return folder_of(folder, {
        "model_type": "llama", "vocab_size": 97, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    })  # fmt: skip


def test_wrong_words_are_one_line_with_what_to_do(tmp_path: Path) -> None:
    wrong = {
        ("nobodys-model",): (DataError, r"No model 'nobodys-model': it is not a folder, .* owner/name"),
        ("nobody/nothing",): (DataError, r"'nobody/nothing' cannot be had from the hub .*not cached.*Check the name"),
        (str(tmp_path),): (DataError, r"config\.json is missing"),
        (str(rope(tmp_path / "yarn")),): (
            DataError,
            r"rope type 'yarn' .* is not known; .* default, linear and llama3",
        ),
        ("demo", "more"): (ConfigError, "Name one model, not 2: demo, more"),
    }
    for words, (kind, message) in wrong.items():
        with pytest.raises(kind, match=message) as caught:
            run_command("hooks", words)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"lm\.backend is 'tf'\. There are: auto, jax, torch"):
        run_command("hooks", ["demo"], backend="tf")
    strange = folder_of(tmp_path / "strange", GEMMA2 | {"model_type": "strange"})
    with pytest.raises(DataError, match="does not know model_type 'strange'; it knows " + ", ".join(ARCHITECTURES)):
        run_command("hooks", [strange], backend="jax")


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (1, ("llama-3-8b",), "error: The model 'meta-llama/Meta-Llama-3-8B' cannot be had from the hub"),
        *(
            pytest.param(2, words, message, marks=pytest.mark.soak)
            for words, message in (
                (("demo", "--config=configs/quickstart.py"), "error: Give a model (demo) or --config, not both."),
                (
                    ("--config=configs/quickstart.py", "--backend=jax"),
                    "error: --backend goes with a model; with --config set",
                ),
                (("--config.lm.modle=demo",), "error: Unknown key config.lm.modle. Did you mean 'model'?"),
            )
        ),
        (2, ("--bakend=jax",), "error: Unknown flag --bakend. Did you mean 'backend'?"),
    ],
)
def test_the_command_fails_in_one_line(code: int, arguments: tuple[str, ...], message: str) -> None:
    """The first one is a name of configs/models.py, and there is no network here."""
    done = launch(*arguments)
    assert done.returncode == code
    assert done.stdout == "" and done.stderr.startswith(message) and done.stderr.count("\n") == 1


# --- PyTorch --------------------------------------------------------------------------------------


def saved(kind: str, settings: dict[str, Any], folder: Path) -> Path:
    torch = pytest.importorskip("torch", reason="models in PyTorch need it: pip install 'saejax[torch]'")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    family, _, head = kind.partition("For")
    config = getattr(transformers, f"{family.removesuffix('LMHeadModel')}Config")(**settings)
    model = getattr(transformers, f"{family}{'For' if head else ''}{head}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def test_a_gpt2_of_transformers_is_listed_alike_by_both(tmp_path: Path) -> None:
    settings = {k: v for k, v in CONFIG.items() if k != "model_type"}
    folder = str(saved("GPT2LMHeadModel", settings, tmp_path))
    ours, theirs = (list_hook_points(folder, backend=backend) for backend in ("auto", "torch"))
    assert (ours.backend, theirs.backend) == ("jax", "torch")
    for key in ("n_layer", "d_model", "n_head", "kv_heads", "d_mlp", "vocab_size", "context_length", "n_parameters"):
        assert getattr(ours.shape, key) == getattr(theirs.shape, key), key
    ours_in_blocks = {p.name: p for p in ours.points if p.stored and not p.name.endswith("attn_z")}
    theirs_in_blocks = {p.name: p for p in theirs.points if p.name.startswith("blocks.")}
    assert ours_in_blocks.keys() == theirs_in_blocks.keys()
    for name, point in theirs_in_blocks.items():
        assert point.shape == ours_in_blocks[name].shape and point.alias == ours_in_blocks[name].alias
        assert theirs.hook_points()[point.module] == theirs.hook_points()[name], "the module is a hook point too"


def test_an_encoder_is_listed_by_its_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {
        "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 40, "max_position_embeddings": 48, "pad_token_id": 1,
    }  # fmt: skip
    folder = str(saved("BertForMaskedLM", settings, tmp_path))
    lm, listed = load_lm(folder), list_hook_points(folder)
    assert {p.name: p.shape for p in listed.points} == {name: (width,) for name, width in lm.hook_points().items()}
    assert all(p.stored for p in listed.points)
    assert run_command("hooks", [folder]) == 0
    found = lines_of(capsys.readouterr().out)
    assert found["architecture"] == ["BertForMaskedLM,", "run", "by", "PyTorch"]
    assert found["heads"] == ["4"] and found["context"] == ["48"] and found["d_mlp"] == ["40"]
    assert found["blocks.{0..2}.mlp_out"] == [
        *("32", "yes", "blocks.{0..2}.hook_mlp_out", "bert.encoder.layer.{0..2}.output.dense.out")
    ]
    assert found["bert.encoder.layer.{0..2}.intermediate.dense.out"] == ["40", "yes"]
