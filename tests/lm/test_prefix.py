"""Embeddings before the tokens: transformers' inputs_embeds in every family, gradients, and what is refused."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny.covering import rest_in
from tiny.decoders import CONFIG, random_params, saved
from tiny.families import MODELS, random_model

from saejax.core.errors import DataError
from saejax.lm import checkpoint, decoder, load_lm
from saejax.lm.generation import Sampling, generate

PROMPTS = [[95, 3, 14, 15], [7], [31, 41, 59]]
LENGTHS = [5, 9, 0]


@pytest.fixture(scope="module")
def gpt2() -> tuple[Any, Any]:
    return checkpoint.architecture(CONFIG, "").read_config(CONFIG), jax.tree.map(jnp.asarray, random_params(CONFIG))


def _continued(config: Any, params: Any, prompts: Any, prefixes: Any) -> np.ndarray:
    return np.stack(list(generate(config, params, prompts, Sampling(tokens=6), prefixes=prefixes)), axis=1)


# One with grouped heads; the others in .ci/run. In transformers gemma3 with images continues no embeddings, and
# gemma3_text is its text model.
@pytest.mark.parametrize("name", rest_in("ci", [name for name in MODELS if name != "gemma3"], ("qwen3",)))
def test_a_prefix_is_what_inputs_embeds_is_in_transformers(name: str, tmp_path: Path) -> None:
    """Logits of whole rows; greedy tokens, with prefixes of three lengths in one batch, one of them empty."""
    torch = pytest.importorskip("torch", reason="parity needs PyTorch, an extra: pip install 'saejax[torch]'")
    model = random_model(name)
    lm = load_lm(str(saved(model, tmp_path)))
    embedding, width = model.get_input_embeddings(), lm.config.d_model
    random = np.random.default_rng(0)
    tokens = random.integers(0, 90, (2, 8)).astype(np.int32)
    prefix = random.normal(size=(2, 5, width)).astype(np.float32)
    with torch.inference_mode():
        rows = torch.cat([torch.tensor(prefix), embedding(torch.tensor(tokens))], dim=1)
        want = model(inputs_embeds=rows).logits.numpy()
    got, _ = lm.run(tokens, prefix_BPM=prefix)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)

    prefixes = [random.normal(size=(n, width)).astype(np.float32) for n in LENGTHS]
    for row, prompt, prefix in zip(_continued(lm.config, lm.params, PROMPTS, prefixes), PROMPTS, prefixes, strict=True):
        settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode():
            whole = torch.cat([torch.tensor(prefix), embedding(torch.tensor(prompt))])[None]
            want = model.generate(inputs_embeds=whole, attention_mask=torch.ones(whole.shape[:2]), **settings)
        np.testing.assert_array_equal(row, want[0].numpy())


def test_the_embeddings_of_tokens_are_those_tokens(gpt2: tuple[Any, Any]) -> None:
    config, params = gpt2
    tokens = np.random.default_rng(1).integers(0, 90, (2, 12)).astype(np.int32)
    prefix = decoder.embed(config, params, tokens[:, :5])
    want, seen = decoder.run(config, params, tokens, capture=["blocks.1.resid_post"])
    got, points = decoder.run(config, params, tokens[:, 5:], capture=["blocks.1.resid_post"], prefix_BPM=prefix)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(points["blocks.1.resid_post"], seen["blocks.1.resid_post"], rtol=1e-5, atol=1e-5)
    cut = [np.split(np.asarray(row, np.int32), [n]) for row, n in zip(PROMPTS, (2, 0, 1), strict=True)]
    split, rest = [np.asarray(decoder.embed(config, params, first)) for first, _ in cut], [last for _, last in cut]
    np.testing.assert_array_equal(_continued(config, params, rest, split), _continued(config, params, PROMPTS, None))


def test_the_gradient_of_a_prefix_is_that_of_a_difference(gpt2: tuple[Any, Any]) -> None:
    config, params = gpt2
    random = np.random.default_rng(2)
    prefix, step = (jnp.asarray(random.normal(size=(1, 3, config.d_model)), jnp.float32) for _ in range(2))

    @jax.jit
    def loss(prefix: jax.Array) -> jax.Array:
        logits, _ = decoder.run(config, params, jnp.asarray([[5, 6]]), prefix_BPM=prefix)
        return -jax.nn.log_softmax(logits[:, -1])[0, 7]

    slope = float((loss(prefix + 1e-2 * step) - loss(prefix - 1e-2 * step)) / 2e-2)
    assert abs(slope) > 1e-2
    assert float((jax.grad(loss)(prefix) * step).sum()) == pytest.approx(slope, rel=2e-2)


@pytest.mark.parametrize("shape", [(2, 3, 32), (1, 3, 31), (3, 32)])
def test_a_prefix_of_another_shape_is_refused(gpt2: tuple[Any, Any], shape: tuple[int, ...]) -> None:
    config, params = gpt2
    with pytest.raises(DataError, match=r"must be \[1, P, 32\]"):
        decoder.run(config, params, np.asarray([[1, 2]]), prefix_BPM=jnp.zeros(shape))


def test_prefixes_that_cannot_be_continued_are_refused(gpt2: tuple[Any, Any]) -> None:
    config, params = gpt2
    with pytest.raises(DataError, match=r"each of the 1 prompts needs one of \[P, 32\]"):
        _continued(config, params, [[1]], [np.zeros((2, 32)), np.zeros((2, 32))])
    with pytest.raises(DataError, match=r"\[2, 31\]"):
        _continued(config, params, [[1]], [np.zeros((2, 31))])
    with pytest.raises(DataError, match="the model reads 48"):
        _continued(config, params, [[1]], [np.zeros((48, 32))])
    with pytest.raises(DataError, match="the model reads 48"):
        decoder.run(config, params, np.asarray([[1, 2]]), prefix_BPM=jnp.zeros((1, 47, 32)))
    with pytest.raises(DataError, match="no tokens"):
        _continued(config, params, [[]], [np.zeros((2, 32))])
