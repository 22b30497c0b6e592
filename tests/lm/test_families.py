"""Every family of `saejax/lm/families.py` against transformers in PyTorch: logits and every hook point.

Each model is tiny and random, no parameter zero or one; a row is longer than its sliding window. What needs no PyTorch
stands in test_conventions.py.
"""

import contextlib
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
from tiny.decoders import rows_of, saved
from tiny.families import LAYERS, LLAMA3, MODELS, random_model

from saejax.core.errors import ConfigError, DataError
from saejax.lm import HOOK_NAMES, LanguageModel, load_lm
from saejax.lm.families import ARCHITECTURES

torch = pytest.importorskip("torch", reason="parity needs PyTorch, an extra: pip install 'saejax[torch]'")
transformers = pytest.importorskip("transformers")

TOLERANCE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
POSITIONS = 24
POINTS = [f"blocks.{i}.{name}" for i in range(LAYERS) for name in (*HOOK_NAMES, "attn_pattern")]
# One row of one document, one of packed documents (the longer ones exceed every window) and padding.
ROWS = rows_of([[24], [9, 1, 11]], seed=3)
ROWS = {name: value[:, :POSITIONS] for name, value in ROWS.items()}
PIECES = ((0, 0, 24), (1, 0, 9), (1, 9, 10), (1, 10, 21))


def run_ours(lm: LanguageModel) -> dict[str, np.ndarray]:
    points = [name for name in POINTS if name in {*lm.hook_points(), *lm.inner_points()}]
    run = jax.jit(lambda t, p, s: lm.run(t, p, s, capture=points))
    logits, activations = run(ROWS["tokens"], ROWS["positions"], ROWS["segments"])
    return {name: np.asarray(value) for name, value in {**activations, "logits": logits}.items()}


def part(model: Any, layer: Any, *names: str) -> Any:
    """The first of the named modules that the layer has."""
    for name in names:
        with contextlib.suppress(AttributeError):
            return functools.reduce(getattr, name.split("."), layer)
    raise AssertionError(f"{type(model).__name__} has none of {names}")


@contextlib.contextmanager
def hooks(model: Any, seen: dict[str, np.ndarray]) -> Iterator[None]:
    """Writes to `seen` what stands at our hook points, taken from PyTorch's own modules."""

    def put(name: str, value: Any) -> None:
        seen[name] = value.detach().numpy().copy()

    def input_of(name: str, module: Any) -> Any:
        return module.register_forward_pre_hook(lambda _, args: put(name, args[0]))

    def output_of(name: str, module: Any, at: int = 0) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            put(name, output[at] if isinstance(output, tuple) else output)

        return module.register_forward_hook(hook)

    with contextlib.ExitStack() as stack:
        for i, layer in enumerate(model.get_decoder().layers):
            attn = part(model, layer, "self_attn", "attention")
            post = hasattr(layer, "post_feedforward_layernorm")
            handles = [
                layer.register_forward_pre_hook(
                    lambda _, args, kwargs, i=i: put(
                        f"blocks.{i}.resid_pre", args[0] if args else kwargs["hidden_states"]
                    ),
                    with_kwargs=True,
                ),
                output_of(f"blocks.{i}.resid_post", layer),
                output_of(f"blocks.{i}.attn_pattern", attn, 1),
                input_of(f"blocks.{i}.attn_z", part(model, attn, "o_proj", "dense")),
                output_of(f"blocks.{i}.attn_out", layer.post_attention_layernorm if post else attn),
                input_of(f"blocks.{i}.mlp_in", layer.mlp),
                output_of(f"blocks.{i}.mlp_out", layer.post_feedforward_layernorm if post else layer.mlp),
            ]
            if not is_mixed(layer):
                last = part(model, layer, "mlp.down_proj", "mlp.dense_4h_to_h", "mlp.fc2")
                handles.append(input_of(f"blocks.{i}.mlp_act", last))
            for handle in handles:
                stack.callback(handle.remove)
        yield


def is_mixed(layer: Any) -> bool:
    return hasattr(layer.mlp, "experts")


def run_torch(model: Any, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Logits and every hook point of one document; resid_mid by its definition, as no module ends there."""
    seen: dict[str, np.ndarray] = {}
    with hooks(model, seen), torch.inference_mode():
        logits = model(torch.tensor(tokens, dtype=torch.long), use_cache=False).logits
    for i in range(LAYERS):
        seen[f"blocks.{i}.resid_mid"] = seen[f"blocks.{i}.resid_pre"] + seen[f"blocks.{i}.attn_out"]
    return seen | {"logits": logits.numpy()}


def assert_same(model: Any, ours: dict[str, np.ndarray]) -> None:
    """Each document of `ROWS` has in its row the values that PyTorch gives it alone."""
    for row, start, stop in PIECES:
        theirs = run_torch(model, ROWS["tokens"][row : row + 1, start:stop])
        without = {f"blocks.{i}.mlp_act" for i, layer in enumerate(model.get_decoder().layers) if is_mixed(layer)}
        assert set(theirs) == set(ours) == {*POINTS, "logits"} - without
        assert start + 1 == stop or np.std(theirs["logits"]) > 0.2, "the comparison is of something"
        for name, wanted in theirs.items():
            at = np.s_[row : row + 1, start:stop]
            at = np.s_[row : row + 1, :, start:stop, start:stop] if name.endswith("attn_pattern") else at
            np.testing.assert_allclose(ours[name][at], wanted, **TOLERANCE, err_msg=f"{name}, {row}:{start}")


def test_the_table_of_the_docs_is_what_is_tested_and_what_the_decoder_knows() -> None:
    text = (Path(__file__).parents[2] / "docs" / "language-models.md").read_text()
    rows = re.findall(r"^\| [^|`]*\((`[^)]*)\) \|", text, re.M)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    tested = {name.partition(",")[0] for name in MODELS} | {"gpt2"}  # GPT-2 is in test_lm_torch.py
    assert listed - {"model_type"} == tested == set(ARCHITECTURES)


@pytest.mark.parametrize("name", MODELS)
def test_every_hook_point_of_a_family_is_that_of_pytorch(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    lm = load_lm(str(saved(model, tmp_path)))
    ours = run_ours(lm)
    assert_same(model, ours)
    assert {point: ours[point].shape[-1] for point in lm.hook_points()} == lm.hook_points()
    assert np.isfinite(ours["logits"]).all(), "padding too"


@pytest.mark.parametrize(("outer", "head"), [("model.", ""), ("", "language_model.lm_head.weight")])
def test_gemma3_with_images_is_read_by_both_names_of_its_text(outer: str, head: str, tmp_path: Path) -> None:
    """In transformers the text model lies within `model`; files have that name or an older one, as what it writes."""
    folder = saved(random_model("gemma3"), tmp_path)
    older = safetensors.numpy.load_file(folder / "model.safetensors")
    given = {outer + (name.replace("language_model.model", "language_model") if outer else name): value
             for name, value in older.items()}  # fmt: skip
    if head:
        given[head] = 2 * older["language_model.model.embed_tokens.weight"]
    safetensors.numpy.save_file(given, folder / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.Gemma3ForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()
    assert_same(theirs, run_ours(load_lm(str(folder))))


def test_shards_and_half_precision_are_read_as_pytorch_reads_them(tmp_path: Path) -> None:
    model = random_model("gemma2")
    whole = load_lm(str(saved(model, tmp_path / "whole")))
    sharded = saved(model, tmp_path / "sharded", max_shard_size="8KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    jax.tree.map(np.testing.assert_array_equal, load_lm(str(sharded)).params, whole.params)
    for dtype in (torch.bfloat16, torch.float16):
        low = transformers.AutoModelForCausalLM.from_pretrained(sharded, dtype=dtype)
        folder = saved(low, tmp_path / str(dtype), max_shard_size="8KB")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        assert_same(model.eval(), run_ours(load_lm(str(folder))))


@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe"])
def test_experts_in_one_stack_are_those_in_separate_tensors(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    apart, stacked = (
        load_lm(str(saved(model, tmp_path / str(kind), save_original_format=kind))) for kind in (True, False)
    )
    jax.tree.map(np.testing.assert_array_equal, stacked.params, apart.params)
    with pytest.raises(ConfigError, match=r"no hook point 'blocks\.1\.mlp\.hook_post'\. An MLP of experts has"):
        stacked.hook_point("blocks.1.mlp.hook_post")
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert apart.config.n_parameters == n_parameters > apart.config.outer + LAYERS * apart.config.block


# What a hub's older config.json says in other words, and the same in PyTorch's present ones.
OLD_WORDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.34, "rotary_emb_base": 300.0}, ("rope_parameters", "attention_bias")),
    "llama": ("llama, llama3 rope", {"rope_theta": 500.0, "rope_scaling": LLAMA3}, ("rope_parameters", "head_dim")),
    "phi": ("phi", {"rope_theta": 200.0, "partial_rotary_factor": 0.67}, ("rope_parameters",)),
    "gemma": ("gemma", {"hidden_act": "gelu", "rope_theta": 10000.0}, ("rope_parameters", "tie_word_embeddings")),
    "gemma2": ("gemma2", {"rope_theta": 10000.0}, ("rope_parameters", "layer_types", "tie_word_embeddings")),
    "gemma3_text": (
        "gemma3_text",
        {
            "rope_theta": 500.0,
            "rope_local_base_freq": 20.0,
            "rope_scaling": {"rope_type": "linear", "factor": 3.0},
            "sliding_window_pattern": 2,
        },
        ("rope_parameters", "layer_types", "tie_word_embeddings"),
    ),
    "qwen2": ("qwen2", {"rope_theta": 10000.0}, ("rope_parameters", "layer_types")),
    "smollm3": (
        "smollm3",
        {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 3.0}, "no_rope_layer_interval": 2},
        ("rope_parameters", "layer_types", "no_rope_layers", "tie_word_embeddings"),
    ),
}


@pytest.mark.parametrize("family", OLD_WORDS)
def test_an_older_configuration_means_the_same(family: str, tmp_path: Path) -> None:
    name, said, absent = OLD_WORDS[family]
    folder = saved(random_model(name), tmp_path)
    now = load_lm(str(folder)).config
    config_json = json.loads((folder / "config.json").read_text())
    for key in absent:
        config_json.pop(key)
    (folder / "config.json").write_text(json.dumps(config_json | said))
    assert load_lm(str(folder)).config == now


def test_a_tensor_that_the_configuration_does_not_speak_of_is_refused(tmp_path: Path) -> None:
    folder = saved(random_model("llama, linear rope, biases, tied"), tmp_path)
    config_json = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config_json | {"mlp_bias": False}))
    with pytest.raises(DataError, match=r"'model\.layers\.0\.mlp\.down_proj\.bias' no place"):
        load_lm(str(folder))
