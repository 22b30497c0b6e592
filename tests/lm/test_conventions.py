"""The decoder's conventions without PyTorch: hostile configurations, inner points, gradients, axes and meshes."""

import dataclasses
import functools
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from tokenizers import models

from saejax.core.errors import ConfigError, DataError
from saejax.lm import LanguageModel, checkpoint, conventions, decoder, families
from saejax.lm.conventions import DecoderConfig, Llama3Scaling, Rope
from saejax.parallel import ParallelConfig, batch_sharding, make_mesh
from saejax.text import Tokenizer

LENGTH, VOCAB = 12, 96
# Every convention at once; no family has this.
CONFIG = DecoderConfig(
    n_layer=2,
    d_model=16,
    n_head=4,
    d_head=6,
    d_mlp=20,
    vocab_size=VOCAB,
    context_length=LENGTH,
    activation="gelu_pytorch_tanh",
    norm_eps=1e-5,
    tied_embeddings=False,
    n_kv_head=2,
    norm="rms",
    post_norms=True,
    rope=Rope(100.0, 4, 3.0, Llama3Scaling(1.0, 4.0, 8)),
    windows=(4, None),
    attn_out_bias=False,
    unembed_bias=True,
    qk_norm=True,
    gated_mlp=True,
    attn_scale=0.3,
    attn_softcap=5.0,
    logit_softcap=6.0,
    embed_scale=4.0,
)
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH), np.int32)
SEGMENTS = np.array([[0] * LENGTH, [0] * 7 + [1] * 4 + [-1]], np.int32)
POSITIONS = np.array([range(LENGTH), [*range(7), *range(4), 0]], np.int32)
ROWS = (TOKENS, POSITIONS, SEGMENTS)


def random_lm(config: DecoderConfig) -> LanguageModel:
    """No parameter is zero or one."""
    rng = np.random.default_rng(1)
    params = conventions.tree_of(config, lambda _, p: jnp.asarray(rng.normal(p.mean, 0.4, p.shape), jnp.float32))
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"w": 0}, unk_token="w")), 0, frozenset(), "")
    return LanguageModel(config, params, tokenizer, {"model": "tiny"})


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return random_lm(CONFIG)


# --- configurations -------------------------------------------------------------------------------


def _rope(**values: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, **values}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"rope type 'yarn'.*default, linear and llama3.*hooks"),
    "longrope": ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'.*lm.backend=torch"),
    "dynamic": ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope type 'dynamic'.*lm.backend=torch"),
    "rope of each layer type": ({"rope_parameters": {"full_attention": {}}}, "rope type 'default' in .*full_attention"),
    "rope of other layers": (
        {"model_type": "gemma3_text", "rope_parameters": {"linear": {}}},
        "names .'linear'., which",
    ),
    "few turned layers": ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers is .1.; .* for 2 layers"),
    "turned by a word": ({"model_type": "smollm3", "no_rope_layers": ["no", 1]}, "no_rope_layers is .'no', 1"),
    "too many experts": ({"model_type": "qwen3_moe", "num_experts": 2**60}, "the number of experts is"),
    "more than there are": ({"model_type": "olmoe", "num_experts_per_tok": 65}, "num_experts_per_tok is 65"),
    "clipped": ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv=8.0 is a variant of olmoe"),
    "dense by a word": ({"model_type": "qwen3_moe", "mlp_only_layers": "01"}, "mlp_only_layers is 01"),
    "normed by a word": ({"model_type": "qwen3_moe", "norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'"),
    "yarn within": (
        {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
        "rope type 'yarn'",
    ),
    "capped Gemma 3": ({"model_type": "gemma3_text", "attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5"),
    "no text": ({"model_type": "gemma3"}, "KeyError 'text_config'"),
    "another text": (
        {"model_type": "gemma3", "text_config": {"model_type": "gemma2"}},
        "model_type='gemma2' is a variant",
    ),
    "rope a list": ({"rope_scaling": [1]}, "not a usable model configuration"),
    "linear without factor": ({"rope_scaling": {"type": "linear"}}, "KeyError 'factor'"),
    "factor zero": ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope factor is 0"),
    "factor too small": ({"rope_scaling": {"type": "linear", "factor": 5e-324}}, "rope factor is 5e-324"),
    "turns too fast": ({"rope_theta": 1e-37, "head_dim": 512}, "rope theta 1e-37 and factor 1.0 turn beyond"),
    "a cap beyond float32": ({"model_type": "gemma2", "attn_logit_softcapping": 1e308}, "attn_softcap is 1e.308"),
    "theta infinite": ({"rope_theta": float("inf")}, "rope theta is inf"),
    "theta text": ({"rope_theta": "1e4"}, "rope theta is '1e4'"),
    "high below low": (_rope(high_freq_factor=0.5), r"high_freq_factor 0\.5 must be above low_freq_factor 1\.0"),
    "no context": (_rope(high_freq_factor=4.0, original_max_position_embeddings=0), "embeddings is 0"),
    "an odd part of a head": ({"model_type": "gpt_neox", "rotary_pct": 0.25}, "1 numbers of each head are rotated"),
    "more than a head": ({"model_type": "phi", "partial_rotary_factor": 2.0}, "8 numbers .* rotated; it has 4"),
    "part of a NaN": ({"model_type": "phi", "partial_rotary_factor": float("nan")}, "partial_rotary_factor is nan"),
    "part of a Llama": ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5 is a variant of llama"),
    "activation": ({"hidden_act": "xielu"}, "activation 'xielu' is not known; .*silu"),
    "activation a list": ({"hidden_act": ["silu"]}, "not a usable model configuration"),
    "quantised": (
        {"quantization_config": {"quant_method": "awq"}},
        "quantization_config is .*awq.*Give the checkpoint",
    ),
    "heads": ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
    "width": ({"hidden_size": 18}, "hidden_size=18 is not a multiple of num_attention_heads=4"),
    "head too wide": ({"head_dim": 2**40}, f"head_dim is {2**40}"),
    "bias a word": ({"attention_bias": "no"}, "qkv_bias is 'no'; it must be true or false"),
    "tied by a word": ({"tie_word_embeddings": "false"}, "tied_embeddings is 'false'"),
    "layers without end": ({"model_type": "gemma2", "num_hidden_layers": 2**60}, f"num_hidden_layers is {2**60}"),
    "layer types": ({"model_type": "gemma2", "layer_types": ["chunked_attention"]}, "names 'chunked_attention'"),
    "too few types": ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "1 entries for 2 layers"),
    "a window of nothing": ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
    "a window of text": ({"model_type": "mistral", "sliding_window": "all"}, "sliding_window is 'all'"),
    "alternating Mistral": ({"model_type": "mistral", "layer_types": ["full_attention"] * 2}, "layer_types=.* mistral"),
    "a cap of nothing": ({"model_type": "gemma2", "attn_logit_softcapping": 0}, "attn_softcap is 0"),
    "a negative scale": ({"model_type": "gemma2", "query_pre_attn_scalar": -4}, "attn_scale is -4"),
    "bidirectional": ({"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    "normed queries": ({"model_type": "phi", "qk_layernorm": True}, "qk_layernorm=True is a variant of phi"),
    "numbers beyond floats": ({"model_type": "gemma2", "query_pre_attn_scalar": 10**400}, "not a usable .* Overflow"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_configuration_that_cannot_be_run_is_refused_without_allocating(case: str, tmp_path: Path) -> None:
    changes, message = REFUSED[case]
    config_json = LLAMA | changes
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=message):
            checkpoint.read_config(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


def _sizes(layers: int, width: int, mlp: int, heads: int, vocab: int, context: int, **rest: Any) -> dict[str, Any]:
    return rest | {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
    }


# Published models: what their config.json says beyond defaults, and their number of parameters.
PUBLISHED = {
    "pythia-70m": (_sizes(6, 512, 2048, 8, 50304, 2048, model_type="gpt_neox"), 70_426_624),
    "Llama-3.2-1B": (
        _sizes(
            16,
            2048,
            8192,
            32,
            128256,
            131072,
            model_type="llama",
            num_key_value_heads=8,
            head_dim=64,
            tie_word_embeddings=True,
        ),
        1_235_814_400,
    ),
    "Qwen2.5-0.5B": (
        _sizes(24, 896, 4864, 14, 151936, 32768, model_type="qwen2", num_key_value_heads=2, tie_word_embeddings=True),
        494_032_768,
    ),
    "Qwen3-0.6B": (
        _sizes(28, 1024, 3072, 16, 151936, 40960, model_type="qwen3", num_key_value_heads=8, tie_word_embeddings=True),
        596_049_920,
    ),
    "Mistral-7B-v0.3": (_sizes(32, 4096, 14336, 32, 32768, 32768, model_type="mistral"), 7_248_023_552),
    "gemma-2b": (_sizes(18, 2048, 16384, 8, 256000, 8192, model_type="gemma", num_key_value_heads=1), 2_506_172_416),
    "gemma-2-2b": (_sizes(26, 2304, 9216, 8, 256000, 8192, model_type="gemma2", num_key_value_heads=4), 2_614_341_888),
    "gemma-3-1b": (
        _sizes(26, 1152, 6912, 4, 262144, 32768, model_type="gemma3_text", num_key_value_heads=1),
        999_885_952,
    ),
    "gemma-3-4b": (  # all that the hub's config.json says of text
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        },
        3_880_263_168,
    ),
    "OLMo-2-7B": (_sizes(32, 4096, 11008, 32, 100352, 4096, model_type="olmo2"), 7_298_617_344),
    "SmolLM3-3B": (_sizes(36, 2048, 11008, 16, 128256, 65536, model_type="smollm3"), 3_075_098_624),
    "Qwen3-30B-A3B": (_sizes(48, 2048, 6144, 32, 151936, 40960, model_type="qwen3_moe", head_dim=128), 30_532_122_624),
    "OLMoE-1B-7B": (_sizes(16, 2048, 1024, 16, 50304, 4096, model_type="olmoe"), 6_919_161_856),
    "phi-2": (_sizes(32, 2560, 10240, 32, 51200, 2048, model_type="phi", partial_rotary_factor=0.4), 2_779_683_840),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_number_of_parameters(name: str, tmp_path: Path) -> None:
    config_json, count = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    _, config = checkpoint.read_config(tmp_path)
    assert sum(math.prod(parameter.shape) for _, parameter in conventions.leaves(config)) == count


def write_zeros(folder: Path, config_json: dict[str, Any], **instead: np.ndarray) -> None:
    """A checkpoint of zeros in the shapes that `config_json` implies, with `instead` in place of some tensors."""
    (folder / "config.json").write_text(json.dumps(config_json))
    arch = families.architecture(config_json, "")
    tensors = {}
    for path, parameter in conventions.leaves(arch.read_config(config_json)):
        stem, layout = arch.tensors[".".join(str(part) for part in path if isinstance(part, str))]
        prefix = "" if path[0] in ("W_U", "b_U") else arch.prefix
        for name, shape in checkpoint.pieces(stem, str(path[1]) if len(path) > 1 else "", layout, parameter):
            tensors[prefix + name] = np.zeros(shape, np.float32)
    assert instead.keys() - tensors.keys() <= {"model.layers.1.self_attn.q_norm.weight"}
    safetensors.numpy.save_file(tensors | instead, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("tensors", "changes", "message"),
    [
        (
            {},
            {"vocab_size": 2**20, "hidden_size": 2**20, "head_dim": 4},
            r"W_E is \(96, 16\), config.json says \(1048576, 1048576\)",
        ),
        ({}, {"num_key_value_heads": 4}, r"blocks\.0\.attn\.W_K is \(8, 16\), config.json says \(16, 16\)"),
        ({}, {"attention_bias": True}, r"'layers\.0\.self_attn\.q_proj\.bias' is missing"),
        ({"model.layers.1.self_attn.o_proj.weight": np.zeros((16, 16), np.int8)}, {}, "holds I8; .*quantised"),
        ({"model.layers.1.mlp.up_proj.weight": np.zeros((16, 20))}, {}, r"W_in is \(16, 20\), .* \(20, 16\)"),
        ({"model.layers.1.self_attn.q_norm.weight": np.zeros(4)}, {}, r"layers\.1\.self_attn\.q_norm.* no place"),
    ],
)
def test_tensors_are_compared_with_the_configuration_before_one_is_read(
    tensors: dict[str, np.ndarray],
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_zeros(tmp_path, LLAMA, **tensors)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))

    def read(*_: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(checkpoint.TensorFiles, "read", read)
    with pytest.raises(DataError, match=message):
        checkpoint.read_params(tmp_path)


@pytest.mark.parametrize("family", sorted(families.ARCHITECTURES.keys() - {"gpt2"}))
def test_every_family_has_a_place_for_all_of_its_parameters(family: str, tmp_path: Path) -> None:
    config_json = LLAMA | {"model_type": family, "rotary_pct": 1.0, "tie_word_embeddings": False, "num_experts": 9}
    text = LLAMA | {"model_type": f"{family}_text"}
    write_zeros(tmp_path, config_json | {"text_config": text})
    config, params = checkpoint.read_params(tmp_path, jnp.bfloat16)
    wanted = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, wanted)
    # A scale that is stored as w of 1 + w is one here; norms keep their precision.
    scale = params["ln_final"]["w"]
    assert scale.dtype == jnp.float32 and params["W_E"].dtype == jnp.bfloat16
    assert (scale == (1 if family.startswith("gemma") else 0)).all()


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_a_tensor_of_several_parameters_is_written_as_it_is_read(family: str, tmp_path: Path) -> None:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
    config_json = LLAMA | {"model_type": family, "rotary_pct": 1.0, "num_key_value_heads": 4} | sizes
    params = random_lm(families.architecture(config_json, "").read_config(config_json)).params
    checkpoint.write(tmp_path, config_json, params)
    jax.tree.map(np.testing.assert_array_equal, checkpoint.read_params(tmp_path)[1], params)


def test_llama3_keeps_fast_frequencies_and_divides_slow_ones() -> None:
    plain = Rope(10000.0, 128).frequencies()
    scaled = Rope(10000.0, 128, 8.0, Llama3Scaling(1.0, 4.0, 8192)).frequencies()
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_array_equal(scaled[turns > 4], plain[turns > 4])
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / 8, rtol=1e-6)
    between = (turns >= 1) & (turns <= 4)
    assert between.sum() >= 3 and (scaled[between] < plain[between]).all() and (np.diff(scaled) < 0).all()
    np.testing.assert_allclose(Rope(10000.0, 128, 8.0).frequencies(), plain / 8, rtol=1e-6)


# --- inner points ---------------------------------------------------------------------------------


def run(lm: LanguageModel, params: Any = None, **edits: decoder.Edit) -> dict[str, np.ndarray]:
    """Logits and all points; `edits` are of block 0."""
    named = {f"blocks.0.{name}": edit for name, edit in edits.items()}
    points = [*lm.hook_points(), *lm.inner_points()]
    lm = lm if params is None else dataclasses.replace(lm, params=params)
    logits, activations = jax.jit(lambda *rows: lm.run(*rows, capture=points, edits=named))(*ROWS)
    return {name: np.asarray(value) for name, value in {**activations, "logits": logits}.items()}


@pytest.fixture(scope="module")
def clean(lm: LanguageModel) -> dict[str, np.ndarray]:
    return run(lm)


def test_inner_points_are_what_the_block_computes_with(lm: LanguageModel, clean: dict[str, np.ndarray]) -> None:
    assert {name: clean[name].shape[1:] for name in lm.inner_points()} == {
        **{f"blocks.{i}.attn_pattern": (4, LENGTH, LENGTH) for i in range(2)},
        **{f"blocks.{i}.{n}_scale": (LENGTH, 1) for i in range(2) for n in ("ln1", "ln2", "ln1_post", "ln2_post")},
        "ln_final_scale": (LENGTH, 1),
    }
    for i, window in ((0, 4), (1, LENGTH)):
        pattern = clean[f"blocks.{i}.attn_pattern"]
        s, t = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None]
        seen = (t <= s) & (t > s - window) & (SEGMENTS[:, :, None] == SEGMENTS[:, None])
        np.testing.assert_array_equal(pattern > 0, np.broadcast_to(seen[:, None], pattern.shape))
        np.testing.assert_allclose(pattern.sum(-1), 1, rtol=1e-5)
    for norm, stream in (("blocks.0.ln1", "blocks.0.resid_pre"), ("blocks.1.ln2", "blocks.1.resid_mid")):
        wanted = np.sqrt(np.square(clean[stream]).mean(-1, keepdims=True) + 1e-5)
        np.testing.assert_allclose(clean[f"{norm}_scale"], wanted, rtol=1e-5)
    assert np.abs(clean["logits"]).max() < CONFIG.logit_softcap


@pytest.mark.parametrize("queries", [12, 5])
def test_attention_by_blocks_of_queries_is_attention(queries: int) -> None:
    config = dataclasses.replace(CONFIG, rope=None, qk_norm=False)
    p = random_lm(config).params["blocks"][0]["attn"]
    x_BSM = np.random.default_rng(2).normal(size=(2, LENGTH, 16)).astype(np.float32)
    mask_BST = decoder.attention_mask(LENGTH, jnp.asarray(SEGMENTS), 4)

    @functools.partial(jax.jit, static_argnums=1)
    def attention(x: jax.Array, block: int) -> jax.Array:
        attend = functools.partial(decoder._within_rows, config, mask_BST, block)
        return decoder._attention(config, p, x, None, attend, lambda _, value: value)

    q, k, v = (
        np.einsum("bsm,mhd->bhsd", x_BSM, np.float64(p[f"W_{n}"])) + np.float64(p[f"b_{n}"])[:, None] for n in "QKV"
    )
    k, v = (np.repeat(x, 2, axis=1) for x in (k, v))
    scores = np.where(mask_BST[:, None], 5 * np.tanh(0.3 * q @ k.transpose(0, 1, 3, 2) / 5), -np.inf)
    pattern = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    wanted = np.einsum("bhsd,hdm->bsm", pattern @ v, np.float64(p["W_O"]))
    np.testing.assert_allclose(attention(x_BSM, queries), wanted, atol=1e-5 * np.abs(wanted).max())
    one, other = (jax.jit(jax.grad(lambda x, b=b: jnp.sin(attention(x, b)).sum()))(x_BSM) for b in (12, queries))
    np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(one).max())


def test_a_cpu_attends_by_blocks_unless_somebody_watches() -> None:
    assert [decoder.query_block(n, False) for n in (64, 128, 512, 513, 1024, 2048)] == [128, 128, 128, 256, 256, 512]
    assert decoder.query_block(512, True) == 512


def test_an_edit_of_the_pattern_decides_what_heads_read(lm: LanguageModel, clean: dict[str, np.ndarray]) -> None:
    eye = jnp.eye(LENGTH)[None]
    own = run(lm, attn_pattern=lambda p: p.at[:, 1].set(jnp.broadcast_to(eye, p[:, 1].shape)).at[:, 2].set(0))
    block = jax.tree.map(np.asarray, lm.params["blocks"][0])
    normed = clean["blocks.0.resid_pre"] / clean["blocks.0.ln1_scale"] * block["ln1"]["w"][None, None]
    # Heads 0 and 1 share the first head of values.
    values = normed @ block["attn"]["W_V"][:, 0] + block["attn"]["b_V"][0][None, None]
    z = own["blocks.0.attn_z"].reshape(2, LENGTH, 4, 6)
    np.testing.assert_allclose(z[:, :, 1], values, atol=1e-5)
    assert (z[:, :, 2] == 0).all()
    untouched = clean["blocks.0.attn_z"].reshape(z.shape)
    np.testing.assert_allclose(z[:, :, ::3], untouched[:, :, ::3], atol=1e-6)
    assert np.abs(own["logits"] - clean["logits"]).max() > 1e-2


def test_an_edit_of_a_scale_is_a_change_of_the_norm(lm: LanguageModel, clean: dict[str, np.ndarray]) -> None:
    halved = jax.tree.map(lambda x: x, lm.params)
    halved["blocks"][0]["ln1"] = {"w": lm.params["blocks"][0]["ln1"]["w"] / 2}
    wanted, edited = run(lm, halved), run(lm, ln1_scale=lambda s: 2 * s)
    for name in clean:
        if name != "blocks.0.ln1_scale":
            np.testing.assert_allclose(edited[name], wanted[name], atol=1e-5, err_msg=name)
    assert np.abs(edited["logits"] - clean["logits"]).max() > 1e-2


def test_gradients_flow_through_edits(lm: LanguageModel) -> None:
    names = ("attn_pattern", "ln1_scale", "ln2_post_scale", "attn_z")
    weights = np.random.default_rng(2).normal(size=(*TOKENS.shape, VOCAB)).astype(np.float32)

    def edit(t: jax.Array) -> decoder.Edit:
        # Not one factor for all: the norm after attention would undo it.
        return lambda x: x * (1 + t * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape))

    @jax.jit
    @jax.value_and_grad
    def loss(t: jax.Array) -> jax.Array:
        edits = {f"blocks.0.{name}": edit(t[i]) for i, name in enumerate(names)}
        return (lm.run(*ROWS, edits=edits)[0] * weights).sum()

    slopes = loss(jnp.zeros(4))[1]
    for slope, step in zip(slopes, 5e-3 * jnp.eye(4), strict=True):
        measured = (loss(step)[0] - loss(-step)[0]) / 1e-2
        assert abs(measured) > 0.1
        np.testing.assert_allclose(slope, measured, rtol=0.02)


def test_names_of_inner_points(lm: LanguageModel) -> None:
    theirs = ["ln1.hook_scale", "attn.hook_pattern", "ln2.hook_scale"]
    names = [*(f"blocks.1.{name}" for name in theirs), "ln_final.hook_scale"]
    _, captured = jax.eval_shape(lambda: lm.run(*ROWS, capture=names))
    ours = {"blocks.1.ln1_scale", "blocks.1.attn_pattern", "blocks.1.ln2_scale", "ln_final_scale"}
    assert set(captured) == ours and ours <= set(lm.inner_points())
    assert not set(lm.inner_points()) & set(lm.hook_points())
    with pytest.raises(
        ConfigError, match=r"no hook point 'blocks\.1\.attn\.hook_pattern'\. It can be watched and edited"
    ):
        lm.hook_point("blocks.1.attn.hook_pattern")
    no_norm = random_lm(dataclasses.replace(CONFIG, pre_norms=False))
    with pytest.raises(ConfigError, match=r"no hook point 'blocks\.0\.ln1\.hook_scale'"):
        no_norm.run(*ROWS, capture=["blocks.0.ln1.hook_scale"])
    one_norm = random_lm(dataclasses.replace(CONFIG, residual="parallel_one_norm", post_norms=False))
    with pytest.raises(ConfigError, match=r"no hook point 'blocks\.0\.ln2_scale'"):
        one_norm.run(*ROWS, capture=["blocks.0.ln2_scale"])
    names = list(one_norm.inner_points())
    assert list(jax.eval_shape(lambda: one_norm.run(*ROWS, capture=names))[1]) == names


@pytest.mark.parametrize("residual", ["parallel", "parallel_one_norm"])
def test_in_a_parallel_block_the_mlp_does_not_see_attention(residual: str) -> None:
    lm = random_lm(dataclasses.replace(CONFIG, n_layer=1, windows=(), residual=residual))
    clean, edited = run(lm), run(lm, attn_out=lambda x: x + 1)
    np.testing.assert_array_equal(edited["blocks.0.mlp_out"], clean["blocks.0.mlp_out"])
    for name in ("resid_mid", "resid_post"):
        np.testing.assert_allclose(edited[f"blocks.0.{name}"], clean[f"blocks.0.{name}"] + 1, atol=1e-5)


# --- axes and meshes ------------------------------------------------------------------------------


def test_logical_axes_name_every_axis_by_its_size(lm: LanguageModel) -> None:
    sizes = {"vocab": VOCAB, "d_model": 16, "heads": 4, "kv_heads": 2, "d_head": 6, "d_mlp": 20, None: LENGTH}

    def check(leaf: Any, axes: tuple[str | None, ...]) -> None:
        assert leaf.shape == tuple(sizes[axis] for axis in axes)

    jax.tree.map(check, lm.params, conventions.logical_axes(CONFIG))
    learned = dataclasses.replace(CONFIG, rope=None, norm="layer", tied_embeddings=True)
    jax.tree.map(check, random_lm(learned).params, conventions.logical_axes(learned))


def test_a_mesh_of_eight_devices_gives_the_logits_of_one(lm: LanguageModel, clean: dict[str, np.ndarray]) -> None:
    mesh = make_mesh(ParallelConfig((2, 4)))
    params = conventions.shard_params(CONFIG, lm.params, mesh)
    attn = params["blocks"][0]["attn"]
    assert attn["W_Q"].sharding.shard_shape(attn["W_Q"].shape) == (16, 1, 6)
    assert attn["W_K"].sharding.is_fully_replicated, "2 heads over 4 devices"
    assert {x.sharding.shard_shape(x.shape) for x in (params["W_E"], params["W_U"])} == {(24, 16), (16, 24)}
    assert params["blocks"][1]["mlp"]["W_out"].sharding.shard_shape((20, 16)) == (5, 16)
    rows = [jax.device_put(x, batch_sharding(mesh)) for x in ROWS]
    point = "blocks.1.attn_z"
    logits, captured = jax.jit(lambda p, *r: lm.apply(p, *r, [point]))(params, *rows)
    np.testing.assert_allclose(logits, clean["logits"], atol=2e-5)
    np.testing.assert_allclose(captured[point], clean[point], atol=2e-5)


def test_experts_spread_over_devices_are_those_of_one() -> None:
    experts = conventions.Experts(5, 2, 8, normed=True)
    mixed = random_lm(dataclasses.replace(CONFIG, experts=experts, sparse=(True, False)))
    mesh, point = make_mesh(ParallelConfig((2, 4))), "blocks.0.mlp_out"
    params = conventions.shard_params(mixed.config, mixed.params, mesh)
    weights = params["blocks"][0]["experts"]["W_out"]
    assert weights.sharding.shard_shape(weights.shape) == (5, 2, 16)
    rows = [jax.device_put(x, batch_sharding(mesh)) for x in ROWS]
    apply = jax.jit(lambda p, *r: mixed.apply(p, *r, [point]))
    (logits, seen), (wanted, there) = apply(params, *rows), apply(mixed.params, *ROWS)
    np.testing.assert_allclose(logits, wanted, atol=2e-5)
    np.testing.assert_allclose(seen[point], there[point], atol=2e-5)
