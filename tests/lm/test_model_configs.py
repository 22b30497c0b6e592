"""`configs/models.py`: each published model by its config.json at full size, and its experiment with a shrunk one.

saejax/plans/model_configs.json holds what the models' own config.json say of shapes and conventions, written by hand,
and the number of parameters of the published weights.
"""

import dataclasses
import importlib
import json
import math
import random
import shutil
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from ml_collections import config_flags
from tiny import ROOT
from tiny.covering import rest_in

import saejax
from configs.models import MODELS, get_config
from saejax.app.experiment import experiment
from saejax.app.hook_list import header, of_experiment
from saejax.app.stages import run_capture
from saejax.app.workspace import Workspace
from saejax.core.errors import ConfigError, SaejaxError
from saejax.lm import checkpoint, decoder, list_hook_points
from saejax.lm.families import ARCHITECTURES
from saejax.store import StoreReader

PUBLISHED = json.loads((ROOT / "saejax" / "plans" / "model_configs.json").read_text())
DEMO = Path(saejax.__file__).parent / "lm" / "demo"
# Of each model what its papers and cards say: layers, width, heads, heads of keys and values, width of a head, of the
# MLP, and what the first tokens meet: rotated numbers of a head (0: learned positions), base, activation, residual.
FACTS: dict[str, tuple[int, int, int, int, int, int, int, float, str, str]] = {
    "gpt2": (12, 768, 12, 12, 64, 3072, 0, 0, "gelu_new", "sequential"),
    "gpt2-medium": (24, 1024, 16, 16, 64, 4096, 0, 0, "gelu_new", "sequential"),
    "pythia-1.4b": (24, 2048, 16, 16, 128, 8192, 32, 1e4, "gelu", "parallel"),
    "gemma-2b": (18, 2048, 8, 1, 256, 16384, 256, 1e4, "gelu_pytorch_tanh", "sequential"),
    "llama-3-8b": (32, 4096, 32, 8, 128, 14336, 128, 5e5, "silu", "sequential"),
    "phi-2": (32, 2560, 32, 32, 80, 10240, 32, 1e4, "gelu_new", "parallel_one_norm"),
    "qwen2.5-3b-instruct": (36, 2048, 16, 2, 128, 11008, 128, 1e6, "silu", "sequential"),
}


def published(name: str, folder: Path) -> str:
    """A folder that holds the model's config.json and nothing else."""
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]["config"]))
    return str(folder)


# --- at full size ---------------------------------------------------------------------------------


def test_every_shipped_model_is_tested_and_no_other() -> None:
    assert list(MODELS) == list(FACTS)
    assert {row.model for row in MODELS.values()} <= {one["model"] for one in PUBLISHED.values()}


@pytest.mark.parametrize("name", MODELS)
def test_the_published_config_has_the_published_shapes(name: str, tmp_path: Path) -> None:
    model = published(name, tmp_path)
    _, config = checkpoint.read_config(tmp_path)
    rope = config.rope
    found = (config.n_layer, config.d_model, config.n_head, config.kv_heads, config.d_head, config.d_mlp)
    turned = (rope.width, rope.theta) if rope else (0, 0)
    assert (*found, *turned, config.activation, config.residual) == FACTS[name]
    # Twice, by the table of parameters and by what the decoder's own initialisation would make; nothing is allocated.
    listed = list_hook_points(model)
    shapes = jax.eval_shape(lambda key: decoder.init_params(config, key), jax.random.key(0))
    counted = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert listed.shape.n_parameters == counted == PUBLISHED[name]["parameters"]
    assert f"  parameters    {counted:,}" in header(listed)


def test_what_else_the_families_differ_in(tmp_path: Path) -> None:
    configs = {}
    for name in MODELS:
        published(name, tmp_path)
        configs[name] = checkpoint.read_config(tmp_path)[1]
    assert {n for n, c in configs.items() if c.tied_embeddings} == {
        *("gpt2", "gpt2-medium", "gemma-2b", "qwen2.5-3b-instruct")
    }
    assert {n for n, c in configs.items() if c.norm == "rms"} == {"gemma-2b", "llama-3-8b", "qwen2.5-3b-instruct"}
    assert {n for n, c in configs.items() if c.gated_mlp} == {"gemma-2b", "llama-3-8b", "qwen2.5-3b-instruct"}
    assert {n for n, c in configs.items() if c.qkv_bias and not c.attn_out_bias} == {"qwen2.5-3b-instruct"}
    assert {n for n, c in configs.items() if c.unembed_bias} == {"phi-2"}
    assert {n for n, c in configs.items() if set(c.windows) - {None}} == set(), "none slides"
    assert configs["gemma-2b"].embed_scale == 2048**0.5 and configs["llama-3-8b"].norm_eps == 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_what_is_captured_is_there_and_takes_what_the_docstring_says(name: str, tmp_path: Path) -> None:
    c = get_config(name)
    assert c.lm.model == MODELS[name].model
    c.lm.model = published(name, tmp_path)
    e = experiment(c)
    ((model, _, captured),) = of_experiment(e)
    n_layer, d_model = FACTS[name][:2]
    middle = {f"blocks.{n_layer // 2}.resid_pre"}
    layers = {f"blocks.{i}.resid_post" for i in range(10, 25)}
    assert captured == (layers if name.startswith("qwen") else middle)
    assert {model.hook_points()[point] for point in captured} == {d_model}
    assert not e.hook_point or e.hook_point in captured
    assert e.text.context_length <= model.shape.context_length
    gigabytes = e.capture.tokens * len(captured) * d_model * 2 / 1e9
    doc = importlib.import_module("configs.models").__doc__ or ""
    (line,) = [line.split() for line in doc.splitlines() if line.split()[:1] == [f"models:{name}"]]
    assert line[1:5] == [
        *e.capture.hook_points,
        f"{d_model:,}",
        f"{gigabytes:.2f}",
        "GB" if len(captured) < 2 else "GB,",
    ]
    assert e.train.steps == e.train.tokens // 4096 > 2000


# --- damaged by chance ----------------------------------------------------------------------------

# What the readers ask for and the published files leave out.
RARE = (
    *("rope_scaling", "rope_parameters", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("n_inner", "head_dim", "num_key_value_heads", "hidden_activation", "quantization_config", "attention_bias"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "partial_rotary_factor"),
    *("rope_local_base_freq", "sliding_window_pattern", "no_rope_layers", "no_rope_layer_interval"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step"),
    *("original_max_position_embeddings", "scale_attn_weights", "use_bidirectional_attention", "text_config"),
)
SMALL: tuple[Any, ...] = (None, True, False, 0, 1, -1, 3, 0.5, -0.5, "", "gelu", "64", [], [1], {}, {"a": 1})
LARGE: tuple[Any, ...] = (2**20, 2**20 + 1, 2**63, 10**400, 1e308, 5e-324, math.inf, -math.inf, math.nan, "x" * 10_000)
ROPES: tuple[Any, ...] = tuple(
    {"rope_type": kind, "factor": value, "rope_theta": other, "low_freq_factor": other, "high_freq_factor": value}
    for kind in ("default", "linear", "llama3", None, [])
    for value in (8.0, 0, 1e308, 5e-324, "2", 10**400)
    for other in (1.0, -1, math.nan, None, 10**400)
)
ROPES += tuple({kind: rope} for kind in ("full_attention", "sliding_attention") for rope in ROPES[::7])
VALUES = (*SMALL, *LARGE, *ROPES, ["full_attention"] * 24, [["full_attention"]], ["sliding_attention"] * 2**12)


def is_finite(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(is_finite, value))
    if dataclasses.is_dataclass(value):
        return all(is_finite(getattr(value, field.name)) for field in dataclasses.fields(value))
    return not isinstance(value, float) or math.isfinite(np.float32(value))


def read_damaged(rng: random.Random, folder: Path) -> str | None:
    """One or two keys of a published config.json changed or taken away; why it was refused, or None."""
    config_json = dict(PUBLISHED[rng.choice(list(PUBLISHED))]["config"])
    if rng.random() < 0.4:
        config_json["model_type"] = rng.choice(list(ARCHITECTURES))
    for key in rng.sample([*config_json, *RARE], rng.choice((1, 1, 2))):
        if rng.random() < 0.15:
            config_json.pop(key, None)
        else:
            config_json[key] = rng.choice(VALUES)
    (folder / "config.json").write_text(json.dumps(config_json))
    started = time.thread_time()
    try:
        listed = list_hook_points(str(folder), backend="jax")
        config = checkpoint.read_config(folder)[1]
    except SaejaxError as error:
        return str(error)
    finally:
        assert time.thread_time() - started < 1, config_json
    assert is_finite(config) and listed.shape.n_parameters > 0 and listed.points, config_json
    for rope in {config.rope, *config.ropes} - {None}:
        angles = rope.frequencies() * np.float32(config.context_length)
        assert np.isfinite(angles).all(), config_json
    return None


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.soak)])
def test_a_config_with_a_damaged_key_is_described_or_refused_in_a_line(count: int, tmp_path: Path) -> None:
    rng, refusals = random.Random(0), []
    tracemalloc.start()
    try:
        for _ in range(count):
            refusals.append(read_damaged(rng, tmp_path))
        assert tracemalloc.get_traced_memory()[1] < 200e6
    finally:
        tracemalloc.stop()
    messages = [message for message in refusals if message is not None]
    assert count / 10 < len(messages) < count * 9 / 10
    assert all(message and "\n" not in message and len(message) < 1200 for message in messages)


# --- shrunk, from text to a store -----------------------------------------------------------------


def shrunk(name: str) -> dict[str, Any]:
    """The model's config.json with all its conventions, 40 wide, 4 heads, the demo's vocabulary.

    Of its layers those up to the last one that is captured.
    """
    layers = 25 if name.startswith("qwen") else FACTS[name][0] // 2 + 1
    config_json = dict(PUBLISHED[name]["config"]) | {"vocab_size": 4096, "bos_token_id": 0, "eos_token_id": 0}
    if config_json["model_type"] == "gpt2":
        return config_json | {"n_embd": 40, "n_layer": layers, "n_head": 4, "n_positions": 128, "n_ctx": 128}
    heads, shared = config_json["num_attention_heads"], config_json.get("num_key_value_heads")
    config_json |= {"hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 4, "pad_token_id": None}
    config_json |= {"max_position_embeddings": 128, "num_hidden_layers": layers}
    if shared is not None:
        config_json["num_key_value_heads"] = 4 if shared == heads else 2 if shared > 1 else 1
    return config_json | ({"head_dim": 16} if "head_dim" in config_json else {})


def saved(name: str, folder: Path) -> Path:
    """A random model of transformers in the shape of `shrunk`, with the demo's tokenizer and a chat template."""
    torch = pytest.importorskip("torch", reason="random models are made by PyTorch: pip install 'saejax[torch]'")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config_json = shrunk(name)
    config = transformers.AutoConfig.for_model(**config_json)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    # What the hub has, not what this version of transformers writes.
    (folder / "config.json").write_text(json.dumps(config_json))
    shutil.copy(DEMO / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    )
    return folder


# One in whole documents and one in conversations; the others in the soak.


@pytest.mark.parametrize("name", rest_in("ci", MODELS, ["qwen2.5-3b-instruct"]))
def test_the_experiment_captures_with_a_shrunk_model(name: str, tmp_path: Path) -> None:
    c = get_config(name)
    rows = [{"text": f"def f{i}(): return {i}", "query": f"what is {i}?", "response": f"it is {i}."} for i in range(80)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    c.runs_dir, c.stores_dir = str(tmp_path / "runs"), str(tmp_path / "stores")
    c.lm.update(model=str(saved(name, tmp_path)), revision="")
    c.text.update(source="files", paths=(str(tmp_path / "text.jsonl"),), dataset="", subset="", revision="")
    c.text.update(context_length=32, heldout_fraction=0.3)
    c.capture.update(tokens=96, heldout_tokens=32, batch_rows=2, shard_rows=64, chunk_rows=16)
    c.parallel.mesh = (1, 1)
    work = Workspace(experiment(c))
    run_capture(work)
    reader = StoreReader.open(work.experiment.store_dir("train"))
    model = list_hook_points(str(tmp_path))
    captured = of_experiment(work.experiment)[0][2]
    assert dict(reader.hook_points) == {point: model.hook_points()[point] for point in captured}
    assert set(reader.hook_points.values()) == {40} and reader.n_tokens == 96
    values = reader.rows(0, 96)
    assert all(np.isfinite(values[point].astype(np.float32)).all() for point in captured)
    assert len({values[point].tobytes() for point in captured}) == len(captured), "each layer is another"
    # The experiment's own dtype is the parameters', and the coder is of the width captured.
    assert {leaf.dtype for leaf in jax.tree.leaves(work.lm.params["blocks"][0]["mlp"])} == {jnp.dtype(c.lm.dtype)}
    (site,) = work.sites[0]
    assert work.build().topology.d_sae == 8 * 40 and site in captured
    conversation = next(iter(work.source.documents("train"))).text
    assert conversation.startswith("<user>what is" if c.text.chat else "def f")


# --- the command line -----------------------------------------------------------------------------


# ml_collections loads a config file in a way that Python 3.12 has no longer.
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
def test_the_flag_takes_every_name_and_overrides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file("config", None, "", lock_config=True, flag_values=values)
    overrides = ["--config.capture.tokens=1000", "--config.lm.revision=abc"]
    # ml_collections looks for overrides there, not in what it is given.
    monkeypatch.setattr(sys, "argv", ["launch", f"--config={ROOT}/configs/models.py:{name}", *overrides])
    values(sys.argv)
    e = experiment(holder.value)
    assert (e.name, e.capture.tokens, e.lm.revision) == (f"models-{name}", 1000, "abc")
    assert e.capture.batch_rows == MODELS[name].batch_rows and e.coder.expansion == 8


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"no model 'gpt3'\. There are: " + ", ".join(MODELS)):
        get_config("gpt3")


@pytest.mark.ci
def test_a_launch_script_takes_them(tmp_path: Path) -> None:
    def launch(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", f"launch.{script}", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    name = "qwen2.5-3b-instruct"
    model = f"--config.lm.model={published(name, tmp_path)}"
    done = launch("hooks", f"--config=configs/models.py:{name}", model)
    assert done.returncode == 0, done.stderr
    (line,) = [
        words for words in map(str.split, done.stdout.splitlines()) if words[:1] == ["blocks.{0..35}.resid_post"]
    ]
    assert line[1:] == ["2048", "yes", "blocks.{0..35}.hook_resid_post", "10..24"]
    unknown = launch("capture", "--config=configs/models.py:gpt3")
    assert unknown.returncode == 2 and unknown.stderr == (
        f"error: configs/models.py has no model 'gpt3'. There are: {', '.join(MODELS)}.\n"
    )
    shown = launch("capture", "--config=configs/models.py:phi-2", "--help")
    assert "--config.a.b=value overrides" in " ".join((shown.stdout + shown.stderr).split())


@pytest.mark.parametrize("kind", ["gpt2", "qwen2.5-3b-instruct"])
def test_a_model_of_a_million_layers_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    config = dict(PUBLISHED[kind]["config"])
    config |= {key: 2**20 for key in ("n_layer", "num_hidden_layers") if key in config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    started = time.thread_time()
    with pytest.raises(SaejaxError, match=r"(n_layer|num_hidden_layers) is 1048576; .* up to 2\^12"):
        list_hook_points(str(tmp_path), backend="jax")
    assert time.thread_time() - started < 1
