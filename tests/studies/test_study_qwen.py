"""configs/study_qwen.py: its figures against the published config.json, and whole studies with a shrunk model."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from ml_collections import config_dict
from safetensors.numpy import save_file
from tokenizers import models, pre_tokenizers

from saejax.app import experiments
from saejax.app.experiment import experiment
from saejax.app.sweep.members import members
from saejax.app.workspace import Workspace
from saejax.capture import expand_hook_points
from saejax.core.errors import DataError
from saejax.lm import list_hook_points
from saejax.studies.behaviours import BEHAVIOURS
from saejax.studies.run import run_study

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = json.loads((ROOT / "saejax" / "plans" / "model_configs.json").read_text())["qwen2.5-3b-instruct"]["config"]
WORDS = ["<unk>", *["question", "answer", "is", "are", ".", "?", ",", "what", "how", "many"]]


def config_of() -> config_dict.ConfigDict:
    return experiments.settings(experiments.load(experiments.find("study_qwen")), "")


def shrunk(layers: int) -> dict[str, Any]:
    """The published config.json with all its conventions, 16 wide."""
    return dict(PUBLISHED) | {
        **{"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"num_hidden_layers": layers, "max_window_layers": layers, "max_position_embeddings": 64},
    }


def save_model(folder: Path, layers: int) -> Path:
    """Random weights under transformers' names, and a tokenizer of the behaviours' words without a bos token."""
    pairs = [pair for name in ("agreement", "pronoun") for pair in BEHAVIOURS[name].pairs()]
    words = [*WORDS, *(word for pair in pairs for part in vars(pair).values() for word in part.split())]
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<|im_end|>"])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": None, "eos_token": "<|im_end|>"}))
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    config = shrunk(layers) | {"vocab_size": len(vocab) + 1, "eos_token_id": len(vocab), "bos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    d, mlp, kv = config["hidden_size"], config["intermediate_size"], 8
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(vocab) + 1, d), "model.norm.weight": (d,)}
    own = {
        **{"self_attn.q_proj.weight": (d, d), "self_attn.q_proj.bias": (d,), "self_attn.o_proj.weight": (d, d)},
        **{f"self_attn.{x}_proj.weight": (kv, d) for x in "kv"},
        **{f"self_attn.{x}_proj.bias": (kv,) for x in "kv"},
        **{"mlp.gate_proj.weight": (mlp, d), "mlp.up_proj.weight": (mlp, d), "mlp.down_proj.weight": (d, mlp)},
        **{"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)},
    }
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in own.items()}
    rng = np.random.default_rng(0)
    save_file({n: rng.normal(0, 0.3, s).astype(np.float32) for n, s in shapes.items()}, folder / "model.safetensors")
    return folder


def small(folder: Path, layers: range) -> config_dict.ConfigDict:
    """The study with the model of `folder`: fewer layers and tokens, fewer and smaller groups; all else is its own."""
    c = config_of()
    rng = np.random.default_rng(0)
    rows = [{name: " ".join(rng.choice(WORDS[1:], 12)) for name in ("query", "response")} for _ in range(80)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    c.runs_dir, c.stores_dir, c.parallel.mesh = str(folder / "runs"), str(folder / "stores"), (1, 1)
    c.lm.update(model=str(folder / "model"), revision="")
    c.text.update(source="files", paths=(str(folder / "text.jsonl"),), dataset="", subset="", revision="")
    c.text.update(context_length=32, heldout_fraction=0.3)
    c.capture.hook_points = tuple(
        name.replace("10..24", f"{layers[0]}..{layers[-1]}") for name in c.capture.hook_points
    )
    c.capture.update(tokens=256, heldout_tokens=64, batch_rows=8, shard_rows=128, chunk_rows=32)
    c.sweep.reads = tuple(f"blocks.{i}.mlp_in" for i in layers)
    c.coder.update(k=8, dead_after_tokens=1000)
    c.train.update(tokens=10 * 64, batch_size=64, checkpoint_every=5, validate_every=5)
    # A random model prefers no answer, and so has no behaviour.
    c.study.update(train_pairs=2, test_pairs=2, least_accuracy=0.0, graphs=2, groups=2, group_size=2)
    c.study.update(controls=2, resamples=1, singles=3, every=6)
    c.attribution.max_features = 40
    return c


# --- the real one, without its weights ---------------------------------------------------------------------------


def test_the_figures_of_the_docstring_are_those_of_the_published_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    c = config_of()
    assert (PUBLISHED["num_hidden_layers"], PUBLISHED["hidden_size"]) == (36, 2048)
    points = list_hook_points(str(tmp_path), backend="jax").hook_points()
    captured = expand_hook_points(c.capture.hook_points, list_hook_points(str(tmp_path), backend="jax"))
    assert captured == tuple(f"blocks.{i}.{side}" for side in ("mlp_in", "mlp_out") for i in range(10, 25))
    assert {points[name] for name in captured} == {2048}
    gigabytes = c.capture.tokens * sum(points[name] for name in captured) * 2 / 1e9
    said = re.search(r"of ([\d,]+) tokens takes ([\d.]+) GB", experiments.load(experiments.find("study_qwen")).__doc__)
    assert said and (int(said[1].replace(",", "")), float(said[2])) == (c.capture.tokens, gigabytes) == (
        2_000_000,
        245.76,
    )
    assert c.capture.dtype == "bfloat16" and c.coder.expansion == 8
    e = experiment(c)
    assert e.study.behaviours == ("agreement", "pronoun")
    assert (e.study.train_pairs, e.study.test_pairs, e.study.positions) == (80, 20, 5)
    own = [
        Workspace(member.experiment, named=list_hook_points(str(tmp_path), backend="jax"))  # type: ignore[arg-type]
        for member in members(e)
    ]
    sites = [work.sites for work in own]
    assert sites == [((f"blocks.{i}.mlp_in",), (f"blocks.{i}.mlp_out",)) for i in range(10, 25)]
    assert {member.experiment.coder.resolved().topology for member in members(e)} == {"transcoder"}


def test_its_prompts_have_five_tokens_behind_the_first_and_one_place_that_differs() -> None:
    """In words: each is one token or more, and the first token is left alone, as Qwen has no bos token."""
    for name in ("agreement", "pronoun"):
        for pair in BEHAVIOURS[name].pairs():
            clean, corrupt = pair.clean.split(), pair.corrupt.split()
            assert len(clean) == len(corrupt) >= 6 and clean[0] == corrupt[0]
            assert sum(a != b for a, b in zip(clean, corrupt, strict=True)) == 1


# --- shrunk ------------------------------------------------------------------------------------------------------


def check(folder: Path, layers: int, c: config_dict.ConfigDict) -> None:
    """Tables and pages of a finished study."""
    run, own = folder / "runs" / "study-qwen", folder / "runs" / "study-qwen" / "study"
    assert len(list(run.glob("blocks.*.mlp_in/checkpoints"))) == layers
    content = json.loads((own / "summary.json").read_text())
    assert [b["name"] for b in content["behaviours"]] == ["agreement", "pronoun"] and len(
        content["dictionaries"]
    ) == layers
    for b in content["behaviours"]:
        with open(own / f"effects.{b['name']}.csv", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        patched = {int(row["number"]) for row in rows if row["kind"] == "patch"}
        assert patched == set(range(5)), "the last five tokens"
        assert len(rows) == len(b["groups"]) * (1 + c.study.controls + 5 + 1) * c.study.test_pairs
        assert any(row["value"] != row["clean"] for row in rows if row["kind"] == "ablate")
        assert all(np.isfinite(float(row["value"])) for row in rows)
        # Graphs see all layers of the sweep, in the order of the model.
        assert {f["layer"] for f in b["features"]} <= set(range(layers))
        assert (own / b["graphs"][0]["href"]).is_file()
    assert "agreement" in (own / "study.html").read_text()


@pytest.mark.soak
def test_a_study_with_a_shrunk_random_model(tmp_path: Path) -> None:
    """Two transcoders as one sweep, in the bfloat16 of the config; both behaviours to the page."""
    save_model(tmp_path / "model", 3)
    c = small(tmp_path, range(1, 3))
    refused = c.copy_and_resolve_references()
    refused.study.least_accuracy = 1.0
    with pytest.raises(
        DataError, match=r"right for agreement in \d+%, pronoun in \d+%, and study.least_accuracy is 100%"
    ):
        run_study(experiment(refused))
    assert not (tmp_path / "runs" / "study-qwen" / "study" / "graphs").exists()
    assert run_study(experiment(c)) == 0
    check(tmp_path, 2, c)


@pytest.mark.soak
def test_a_study_of_its_whole_structure(tmp_path: Path) -> None:
    """36 layers, fifteen of them with a transcoder; 80 + 20 prompts."""
    save_model(tmp_path / "model", 36)
    c = small(tmp_path, range(10, 25))
    c.study.update(train_pairs=80, test_pairs=20)
    c.sweep = config_of().sweep
    c.capture.hook_points = config_of().capture.hook_points
    assert run_study(experiment(c)) == 0
    check(tmp_path, 15, c)
