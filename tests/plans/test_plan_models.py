"""Models from config.json alone: parameters, operations and caches against what the programs themselves say."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from saejax.core.errors import ConfigError, DataError
from saejax.lm import LMConfig, decoder, generation
from saejax.lm.conventions import DecoderConfig
from saejax.plans import models
from saejax.plans.models import PUBLISHED, shape_of, shapes_of


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_models_have_their_published_parameters_without_a_network(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: str) -> Path:
        raise DataError("no hub.")

    monkeypatch.setattr(models, "config_folder", unreachable)
    models.shape_of.cache_clear()
    shape = shape_of(model)
    assert shape.n_parameters == PUBLISHED[model]["parameters"] and "copy" in shape.note
    models.shape_of.cache_clear()


def test_a_model_that_nobody_knows_is_told_what_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"config\.json alone: a folder that holds nothing else will do"):
        shape_of("nobody/nothing-at-all")
    with pytest.raises(ConfigError, match=r"lm\.model is empty"):
        shapes_of(LMConfig(model=""))


def test_operations_are_those_that_xla_counts() -> None:
    demo = shape_of("demo")
    assert isinstance(demo, DecoderConfig)
    config = shape = dataclasses.replace(demo, d_model=256, d_head=64, d_mlp=1024)
    params = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    for capture, depth in ((["blocks.2.resid_post"], 3), ([], None)):

        def run(params: object, tokens: jax.Array, capture: list[str] = capture) -> object:
            logits, found = decoder.run(config, params, tokens, None, None, capture, {})
            return found if capture else logits

        counted = jax.jit(run).lower(params, tokens).compile().cost_analysis()["flops"]
        assert 2 * shape.operations(128, depth) == pytest.approx(counted, rel=0.1)


def test_the_cache_has_the_bytes_that_generation_takes() -> None:
    demo = shape_of("demo")
    assert isinstance(demo, DecoderConfig)
    cache = jax.eval_shape(lambda: generation.start_cache(demo, jnp.zeros(1, jnp.int32), 40))
    taken = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache) if leaf.dtype == jnp.float32)
    assert demo.cache_bytes(40, 4) == taken


def test_the_depth_of_hook_points() -> None:
    demo = shape_of("demo")
    assert demo.depth(("blocks.3.resid_post",)) == 4
    assert demo.depth(("blocks.3.resid_pre",)) == 3
    assert demo.depth(("blocks.0.resid_pre", "blocks.2.mlp_out")) == 3
    assert demo.depth(("encoder.layer.2.out",)) == demo.n_layer


def test_any_model_of_transformers_has_a_shape_by_its_config_alone(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, vocab_size=100
    )
    config.architectures = ["BertForMaskedLM"]
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    shape = shape_of(str(tmp_path))
    module = transformers.BertForMaskedLM(config)
    assert shape.n_parameters == sum(one.numel() for one in module.parameters())
    assert shape.block == sum(one.numel() for one in module.bert.encoder.layer[0].parameters())
    assert (shape.n_layer, shape.d_model, shape.d_mlp, shape.n_head) == (3, 48, 96, 4)
    widths = shape.hook_points()
    assert widths["blocks.1.resid_post"] == 48 and widths["bert.encoder.layer.2.intermediate.dense.out"] == 96
    assert widths["bert.encoder.layer.0.output.out"] == widths["bert.encoder.layer.1.in"] == 48
    with pytest.raises(ConfigError, match=r"finds no hook point 'blocks.9.resid_post'"):
        shape.hook_point("blocks.9.resid_post")
    assert torch.is_tensor(module.bert.embeddings.word_embeddings.weight)


def test_a_config_that_nothing_can_build_is_refused_in_a_line(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(DataError, match="transformers cannot build the model of"):
        shape_of(str(tmp_path))
