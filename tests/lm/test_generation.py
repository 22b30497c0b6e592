"""Generation: transformers' own greedy tokens, the model without a cache as the reference, and draws within top_p."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny.decoders import CONFIG, VOCAB, random_params, saved
from tiny.families import MODELS, random_model

from saejax.core.errors import ConfigError, DataError
from saejax.lm import checkpoint, decoder, load_lm
from saejax.lm.generation import Sampling, _kept_without_edits, choose, extend, generate, start_cache

PROMPTS = [[95, 3, 14, 15, 9, 26, 53, 5, 8], [7], [31, 41, 59]]
FAMILIES = ["gpt2", *(name for name in MODELS if "," not in name), "llama, llama3 rope"]


@pytest.fixture(scope="module")
def gpt2() -> tuple[Any, Any]:
    return checkpoint.architecture(CONFIG, "").read_config(CONFIG), jax.tree.map(jnp.asarray, random_params(CONFIG))


def _all(config: Any, params: Any, prompts: Any, sampling: Sampling, *edits: Any) -> np.ndarray:
    return np.stack(list(generate(config, params, prompts, sampling, *edits)), axis=1)


def _gpt2_of_transformers() -> Any:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = {k: v for k, v in CONFIG.items() if k != "model_type"}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings, eos_token_id=0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Rows of three lengths in one batch, longer than every sliding window; each alone in transformers."""
    torch = pytest.importorskip("torch", reason="parity needs PyTorch, an extra: pip install 'saejax[torch]'")
    model = _gpt2_of_transformers() if name == "gpt2" else random_model(name)
    with torch.no_grad():  # else a token's own embedding or the biases decide, and one token follows for ever
        model.get_input_embeddings().weight *= 0.1
        for parameter, value in model.named_parameters():
            if parameter.endswith("bias"):
                value.zero_()
    lm = load_lm(str(saved(model, tmp_path)))
    got = _all(lm.config, lm.params, PROMPTS, Sampling(tokens=12))
    assert len(set(got.ravel().tolist())) > 3, "the same token for ever tests little"
    for row, prompt in zip(got, PROMPTS, strict=True):
        settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode():
            want = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **settings)
        np.testing.assert_array_equal(row, want[0, len(prompt) :].numpy())


def test_a_piece_at_a_time_is_the_whole_row(gpt2: tuple[Any, Any]) -> None:
    """Logits and activations of `extend` are those of `run`, however the row is divided, filling in front."""
    config, params = gpt2
    extended = jax.jit(functools.partial(extend, config, capture=["blocks.1.resid_post"]))
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 12)).astype(np.int32)
    point = "blocks.1.resid_post"
    want, seen = jax.jit(functools.partial(decoder.run, config, capture=[point]))(params, tokens)
    filled = jnp.asarray(np.concatenate([np.zeros((2, 3), np.int32), tokens], axis=1))
    cache, logits, points = start_cache(config, jnp.full(2, 3), 20), [], []
    for start, stop in ((0, 7), (7, 8), (8, 15)):
        step, captured, cache = extended(params, cache, filled[:, start:stop])
        logits.append(step)
        points.append(captured[point])
    assert int(cache.length) == 15
    np.testing.assert_allclose(np.concatenate(logits, axis=1)[:, 3:], want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.concatenate(points, axis=1)[:, 3:], seen[point], rtol=1e-4, atol=1e-4)


def test_edits_act_in_every_step(gpt2: tuple[Any, Any]) -> None:
    """With a constant added everywhere, the tokens are those that the edited model without a cache takes one by one;
    with one that knows places, filling and the prompt can be left alone."""
    config, params = gpt2
    push = jnp.asarray(np.random.default_rng(1).normal(size=config.d_model), jnp.float32)[None, None] * 3
    edits = {"blocks.1.resid_post": lambda x: x + push}

    def later(place: jax.Array, push: jax.Array) -> Any:
        return {"blocks.1.resid_post": lambda x: x + jnp.where(place[..., None] >= 3, push, 0)}

    @jax.jit
    def run(params: Any, tokens: jax.Array, first: jax.Array) -> Any:
        here = jnp.arange(14)[None] - first + 3
        return decoder.run(config, params, tokens, edits=later(here, push))

    def by_hand(first: int) -> list[list[int]]:
        """Whole rows, filled up behind, where nothing attends to it."""
        rows = [list(prompt) for prompt in PROMPTS]
        for _ in range(5):
            logits = np.asarray(run(params, np.stack([np.pad(row, (0, 14 - len(row))) for row in rows]), first)[0])
            for i, row in enumerate(rows):
                row.append(int(logits[i, len(row) - 1].argmax()))
        return [row[-5:] for row in rows]

    plain, steered = (_all(config, params, PROMPTS, Sampling(tokens=5), e) for e in (None, edits))
    at_places = _all(config, params, PROMPTS, Sampling(tokens=5), later, push)
    assert (plain != steered).any() and (steered != at_places).any()
    assert steered.tolist() == by_hand(0)
    assert at_places.tolist() == by_hand(3)


def test_rows_end_at_their_stop(gpt2: tuple[Any, Any]) -> None:
    """What follows a row's stop is -1; when every row has ended, nothing more is computed."""
    config, params = gpt2
    free = _all(config, params, PROMPTS, Sampling(tokens=8))
    stop = (int(free[0, 2]), int(free[1, 0]), int(free[2, 4]))
    got = _all(config, params, PROMPTS, Sampling(tokens=8, stop=stop))
    ends = [next(i for i, token in enumerate(row) if token in stop) for row in free]
    assert got.shape[1] == max(ends) + 1
    for row, want, end in zip(got, free, ends, strict=True):
        np.testing.assert_array_equal(row[: end + 1], want[: end + 1])
        assert (row[end + 1 :] == -1).all()


def test_prompts_of_about_one_length_share_programs(gpt2: tuple[Any, Any]) -> None:
    """However long, the tokens are the same."""
    step, want = _kept_without_edits(gpt2[0], Sampling(tokens=1)), _all(*gpt2, PROMPTS, Sampling(tokens=6))
    before = step._cache_size()  # type: ignore[attr-defined]
    for n in (1, 4):
        longer = [prompt + tokens[:n].tolist() for prompt, tokens in zip(PROMPTS, want, strict=True)]
        np.testing.assert_array_equal(_all(*gpt2, longer, Sampling(tokens=6 - n)), want[:, n:])
    assert step._cache_size() == before  # type: ignore[attr-defined]


def test_draws_follow_the_probabilities_within_top_p() -> None:
    """20,000 draws: shares by softmax(logits / temperature) over the smallest set that reaches top_p, nothing else."""
    logits, temperature, top_p = np.array([2.0, 1.5, 0.0, 1.4, -3.0]), 0.7, 0.8
    p = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    order = np.argsort(-p)
    kept = order[: int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1]
    want = np.where(np.isin(np.arange(5), kept), p, 0) / p[kept].sum()
    assert 1 < len(kept) < 5
    n = 20_000
    sampling = Sampling(temperature=temperature, top_p=top_p)
    drawn = choose(jnp.tile(jnp.asarray(logits, jnp.float32), (n, 1)), sampling, jax.random.key(0))
    shares = np.bincount(drawn, minlength=5) / n
    np.testing.assert_allclose(shares, want, atol=4 * 0.5 / n**0.5)
    assert (shares[want == 0] == 0).all()
    whole = choose(jnp.tile(jnp.asarray(logits, jnp.float32), (n, 1)), Sampling(temperature=1.0), jax.random.key(1))
    softmax = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(np.bincount(whole, minlength=5) / n, softmax, atol=4 * 0.5 / n**0.5)


def test_the_same_seed_draws_the_same_tokens(gpt2: tuple[Any, Any]) -> None:
    first, again, other = (_all(*gpt2, PROMPTS, Sampling(tokens=6, temperature=2.0, seed=s)) for s in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize(
    ("prompts", "tokens", "match"),
    [
        ([], 4, "nothing to continue"),
        ([[1], []], 4, "nothing to continue"),
        ([[1, VOCAB]], 4, "97"),
        ([[1] * 40], 9, "40 tokens of prompt and 9 more are 49; the model reads 48"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(
    gpt2: tuple[Any, Any], prompts: Any, tokens: int, match: str
) -> None:
    with pytest.raises(DataError, match=match):
        next(generate(*gpt2, prompts, Sampling(tokens=tokens)))


@pytest.mark.parametrize("bad", [{"tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": float("nan")}])
def test_numbers_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Sampling(**bad)
