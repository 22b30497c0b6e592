"""A model in PyTorch has the head that transformers' own tables give it, whatever its class is called.

Without it there is no loss recovered, no KL and no promoted token: decoders of images and text (Gemma 3 4b and larger)
are called ForConditionalGeneration, as models of encoder and decoder are.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny.attributed import dictionary
from tiny.by_hand import documents, source
from tiny.decoders import CONFIG, VOCAB, in_order, random_params, rows_of, write_tokenizer
from tiny.families import random_model

from saejax.coders import CoderConfig, build
from saejax.coders.sites import Sites
from saejax.core.errors import DataError
from saejax.evals import EvalConfig, evaluate
from saejax.lm import checkpoint, load_lm
from saejax.text import Packer
from saejax.trained import TrainedCoder

torch = pytest.importorskip("torch", reason="models in PyTorch need it: pip install 'saejax[torch]'")
transformers = pytest.importorskip("transformers")

from saejax.lm.torch_hooks import TorchModel  # noqa: E402 - after the skips
from saejax.lm.torch_hooks.load import kind_of  # noqa: E402

WIDTH, POSITIONS = 16, 48
TEXT = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 20, "max_position_embeddings": POSITIONS,
}  # fmt: skip
# As wide as the text model: a norm of images must not be taken for the last one of text.
IMAGES = {"hidden_size": WIDTH, "intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
IMAGES |= {"image_size": 8, "patch_size": 4}
# {family: (settings, the last norm of text)}
DECODERS: dict[str, tuple[dict[str, Any], str]] = {
    "Gemma3": (
        {
            "text_config": TEXT | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
            "vision_config": IMAGES,
            "mm_tokens_per_image": 1,
        },
        "model.language_model.norm",
    ),
    "Mistral3": (
        {
            "text_config": TEXT | {"model_type": "mistral", "tie_word_embeddings": False},
            "vision_config": IMAGES | {"model_type": "pixtral", "head_dim": 8},
        },
        "model.language_model.norm",
    ),
}


def model_of(family: str) -> Any:
    """Random, no parameter zero or one."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**DECODERS[family][0], image_token_index=VOCAB - 3)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model


@pytest.mark.ci
@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_of_images_and_text_predicts_the_next_token(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    lm = load_lm(str(tmp_path), backend="torch")
    assert isinstance(lm, TorchModel) and lm.causal and lm.measures_loss(["blocks.1.resid_post"])
    rows = rows_of([[POSITIONS]], seed=2)
    rows["tokens"] %= VOCAB - 4
    with torch.inference_mode():
        tokens = torch.tensor(rows["tokens"]).long()
        wanted = model(input_ids=tokens, use_cache=False).logits.numpy()
    assert np.std(wanted) > 0.2
    np.testing.assert_allclose(lm.apply({}, *in_order(rows))[0], wanted, atol=1e-4, rtol=1e-3)

    scale_D, W_U_DV = lm.readout() or (None, None)
    np.testing.assert_array_equal(W_U_DV, model.lm_head.weight.detach().numpy().T)
    norm = model.get_submodule(DECODERS[family][1])
    unit = torch.ones(WIDTH)
    unit[1::2] = -1
    np.testing.assert_allclose(scale_D, (norm(unit) * unit).detach().numpy(), atol=1e-4)

    coder = build(CoderConfig(preset="topk", d_sae=40, k=4, encoder_centre=False), WIDTH, 10)
    rng = np.random.default_rng(5)
    shapes = {"W_enc": (WIDTH, 40), "b_enc": (40,), "W_dec": (40, WIDTH), "b_dec": (WIDTH,)}
    params = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    sae = TrainedCoder(coder, params, Sites(("blocks.1.resid_post",), ("blocks.1.resid_post",), (1.0,), (1.0,)))
    packer = Packer(source(documents(4)), lm.tokenizer, POSITIONS, prepend_bos=False)
    metrics = evaluate(sae, lm, packer, EvalConfig(tokens=60, batch_rows=2)).metrics
    assert {"ce_clean", "ce_zero", "loss_recovered", "kl"} <= set(metrics)
    assert abs(metrics["ce_zero"] - metrics["ce_clean"]) > 1e-3 and metrics["kl"] > 1e-3


@pytest.mark.parametrize("family", ["gpt_neox", "qwen3"])
def test_a_cross_layer_transcoder_costs_the_same_in_both(family: str, tmp_path: Path) -> None:
    """Also where its layers read one after the other, and where attention and MLP stand side by side (gpt_neox)."""
    random_model(family).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    reads, writes = (tuple(f"blocks.{i}.{name}" for i in range(2)) for name in ("mlp_in", "mlp_out"))
    sae = dictionary("clt", reads, writes, width=24)
    found = []
    for backend in ("jax", "torch"):
        lm = load_lm(str(tmp_path), backend=backend)
        own = [name for name in lm.hook_points() if name in (*reads, *writes)]
        assert own == [reads[0], writes[0], reads[1], writes[1]]
        packer = Packer(source(documents(6)), lm.tokenizer, POSITIONS)
        found.append(evaluate(sae, lm, packer, EvalConfig(tokens=100, batch_rows=2)).metrics)
    assert found[1] == pytest.approx(found[0], rel=2e-3, abs=1e-5)
    assert abs(found[0]["kl_in_turn"] - found[0]["kl"]) > 1e-3


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_tokenizer_with_one_more_id_than_the_model_has_rows_is_loaded(backend: str, tmp_path: Path) -> None:
    """As that of text-only Gemma 3: the id is refused in a text, and the probe of a model in PyTorch draws none."""
    config_json = CONFIG | {"bos_token_id": VOCAB - 1}
    checkpoint.write(tmp_path, config_json, random_params(config_json))
    write_tokenizer(tmp_path, VOCAB - 1)
    lm = load_lm(str(tmp_path), backend=backend)
    assert (lm.tokenizer.largest_id, lm.config.vocab_size, lm.tokenizer.bos_id) == (VOCAB, VOCAB, VOCAB - 1)
    assert np.isfinite(lm.activations("w1 w95", "blocks.1.resid_post")).all()
    with pytest.raises(DataError, match=rf"the token '<mask>', whose id is {VOCAB}; the model has only {VOCAB} tokens"):
        lm.activations("w1 <mask>", "blocks.1.resid_post")


# (configuration, architectures of config.json, the class of transformers that reads it)
KINDS = [
    ("Gemma3", ["Gemma3ForConditionalGeneration"], "AutoModelForCausalLM"),
    ("Gemma3", ["Gemma3Model"], "AutoModel"),
    ("Mistral3", ["Mistral3ForConditionalGeneration"], "AutoModelForImageTextToText"),
    ("Llava", ["LlavaForConditionalGeneration"], "AutoModelForImageTextToText"),
    ("Llama4", ["Llama4ForConditionalGeneration"], "AutoModelForImageTextToText"),
    ("Llama", ["LlamaForCausalLM"], "AutoModelForCausalLM"),
    ("Llama", ["LlamaForSequenceClassification"], "AutoModel"),
    ("Llama", ["LLaMAForCausalLM"], "AutoModelForCausalLM"),
    ("Llama", ["SomebodysModel"], "AutoModel"),
    ("GPT2", None, "AutoModelForCausalLM"),
    ("GPT2", ["GPT2LMHeadModel"], "AutoModelForCausalLM"),
    ("GPT2", ["GPT2Model"], "AutoModel"),
    ("Bert", ["BertForMaskedLM"], "AutoModelForMaskedLM"),
    ("Bert", ["BertLMHeadModel"], "AutoModelForCausalLM"),
    ("Bert", ["BertForSequenceClassification"], "AutoModel"),
    ("Bert", ["SomebodysBertForMaskedLM"], "AutoModelForMaskedLM"),
    ("Bert", ["BertModel"], "AutoModel"),
    ("T5", ["T5ForConditionalGeneration"], "AutoModel"),
    ("T5", None, "AutoModel"),
    ("Bart", ["BartForConditionalGeneration"], "AutoModel"),
]


@pytest.mark.parametrize(("family", "named", "kind"), KINDS, ids=[f"{family} {named}" for family, named, _ in KINDS])
def test_the_tables_of_transformers_say_what_has_a_head(family: str, named: list[str] | None, kind: str) -> None:
    config = getattr(transformers, f"{family}Config")(architectures=named)
    assert kind_of(transformers, config) is getattr(transformers, kind)
