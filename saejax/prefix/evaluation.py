"""Answers of models from a prefix, beside five other ways of giving them the context.

    text        bos, the context, the prompt
    truncated   the same with as many tokens of the context as the prefix has latents
    none        bos, the prompt
    replay      as text, but bos and context come as embeddings, as a prefix does: it must equal text
    random      random embeddings of the right size in place of the prefix
    prefix      the trained prefix

Every way goes through `lm.generation`, with keys and values kept. Figures are of held-out records; intervals come from
resampled records, and differences from the same resamples.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.core.progress import Progress
from saejax.core.rng import stream
from saejax.lm import LanguageModel, decoder, generation
from saejax.lm.conventions import DecoderConfig
from saejax.prefix.answers import exact_match, f1, first_line
from saejax.prefix.records import Record
from saejax.prefix.samples import Spoken, check_fits, spoken
from saejax.prefix.trained import TrainedPrefix
from saejax.prefix.training import embedding_rms

WAYS = ("text", "truncated", "none", "replay", "random", "prefix")
METRICS = ("em", "f1", "nll")


@dataclasses.dataclass(frozen=True)
class PromptedContexts:
    """A way of giving the context: embeddings before each prompt [P, M], and its tokens.

    Attributes:
        context: tokens or embeddings that stand for each record's context.
    """

    prefixes: list[np.ndarray]
    prompts: list[list[int]]
    context: list[int]


@dataclasses.dataclass(frozen=True)
class Answered:
    """A model's answers to the records in one way.

    Attributes:
        said: its answer to each.
        columns: {"em", "f1", "nll": [N]}; nll is the mean over the right answer's tokens, in nats.
        saved: tokens of the context that need not be read, mean.
        ms: median milliseconds from the context to the first token, one record at a time; the prefix with its encoder.
    """

    said: list[str]
    columns: dict[str, np.ndarray]
    saved: float
    ms: float


def evaluate_prefix(
    trained: TrainedPrefix,
    models: Mapping[str, LanguageModel],
    records: Sequence[Record],
    seed: int,
    shown: bool = True,
) -> dict[str, dict[str, Answered]]:
    """{model: {way: what it made of the records}}.

    Raises:
        DataError: a model's context is too short for a record.
    """
    embeddings = trained.embeddings(records)
    answered: dict[str, dict[str, Answered]] = {name: {} for name in models}
    with Progress("evaluate", len(models) * len(WAYS) * len(records), shown=shown, unit="records") as progress:
        for name, lm in models.items():
            ids = spoken(lm.tokenizer, records, trained.config)
            longest = max(
                len(c) + len(p) + len(a) for c, p, a in zip(ids.contexts, ids.prompts, ids.answers, strict=True)
            )
            check_fits(name, lm, longest + trained.config.answer_tokens + 1)
            for way in WAYS:
                contexts = prompted(way, lm, ids, embeddings[name], trained.config.latents, seed)
                encode = (lambda record, name=name: trained.embeddings([record])[name][0]) if way == "prefix" else None
                answered[name][way] = _answered(lm, contexts, ids, records, trained, encode)
                progress.advance(len(records))
    return answered


def prompted(
    way: str, lm: LanguageModel, ids: Spoken, prefix_NPM: np.ndarray, latents: int, seed: int
) -> PromptedContexts:
    """One of WAYS for all records."""
    bos, n = lm.tokenizer.bos, len(ids.prompts)
    nothing = np.zeros((0, lm.config.d_model), np.float32)
    in_text: dict[str, list[list[int]]] = {
        "text": ids.contexts,
        "truncated": [c[:latents] for c in ids.contexts],
        "none": [[]] * n,
    }
    if way in in_text:
        rows = [bos + c + p for c, p in zip(in_text[way], ids.prompts, strict=True)]
        return PromptedContexts([nothing] * n, rows, list(map(len, in_text[way])))
    if way == "replay":
        embedded = [_embedded(lm, bos + c) for c in ids.contexts]
        return PromptedContexts(embedded, ids.prompts, list(map(len, ids.contexts)))
    if way == "random":
        drawn = jax.random.normal(stream(seed, "random prefix"), prefix_NPM.shape)
        prefix_NPM = np.asarray(drawn) * embedding_rms(lm)
    before = _embedded(lm, bos)
    return PromptedContexts([np.concatenate([before, one]) for one in prefix_NPM], ids.prompts, [latents] * n)


def _embedded(lm: LanguageModel, ids: list[int]) -> np.ndarray:
    """[S, M] float32."""
    if not ids:
        return np.zeros((0, lm.config.d_model), np.float32)
    return np.asarray(decoder.embed(lm.config, lm.params, jnp.asarray([ids], jnp.int32))[0], np.float32)


def _answered(
    lm: LanguageModel,
    contexts: PromptedContexts,
    ids: Spoken,
    records: Sequence[Record],
    trained: TrainedPrefix,
    encode: Callable[[Record], np.ndarray] | None,
) -> Answered:
    config = trained.config
    stop = tuple(sorted({a[-1] for a in ids.answers if "\n" in lm.tokenizer.decode([a[-1]])}))
    sampling, rows = generation.Sampling(tokens=config.answer_tokens, stop=stop), min(config.eval_rows, len(records))
    most = max(map(len, ids.answers))
    texts: list[str] = []
    nll: list[float] = []
    for start in range(0, len(records), rows):
        index = [min(start + i, len(records) - 1) for i in range(rows)]  # the last rows are filled with the last record
        new = min(rows, len(records) - start)
        prefixes, prompts = [contexts.prefixes[i] for i in index], [contexts.prompts[i] for i in index]
        tokens = np.stack(list(generation.generate(lm.config, lm.params, prompts, sampling, prefixes=prefixes)), axis=1)
        texts += [first_line(lm.tokenizer.decode([int(t) for t in row if t >= 0])) for row in tokens[:new]]
        nll += _nll(lm, prefixes, prompts, [ids.answers[i] for i in index], most)[:new]
    right = [record.answers for record in records]
    columns = {
        "em": np.asarray([exact_match(one, r) for one, r in zip(texts, right, strict=True)]),
        "f1": np.asarray([f1(one, r) for one, r in zip(texts, right, strict=True)]),
        "nll": np.asarray(nll),
    }
    saved = float(np.mean([len(c) - n for c, n in zip(ids.contexts, contexts.context, strict=True)]))
    return Answered(texts, columns, saved, _first_token_ms(lm, contexts, records[: config.timed], encode))


def _nll(
    lm: LanguageModel, prefixes: list[np.ndarray], prompts: list[list[int]], answers: list[list[int]], most: int
) -> list[float]:
    """Mean -log p of the tokens of each row's answer, in nats; `most` is the tokens of the longest answer of all."""
    rows = [p + a for p, a in zip(prompts, answers, strict=True)]
    tokens_BS, filling_B, placed = generation.lay_out(lm.config, rows, 0, prefixes)
    cache = generation.start_cache(lm.config, jnp.asarray(filling_B), tokens_BS.shape[1], lm.params["W_E"].dtype)
    nll_BA = np.asarray(_last_nll(lm.config, most, lm.params, cache, jnp.asarray(tokens_BS), placed))
    return [float(nll_A[-len(a) :].mean()) for nll_A, a in zip(nll_BA, answers, strict=True)]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _last_nll(
    config: DecoderConfig, count: int, params: Any, cache: generation.Cache, tokens_BS: jax.Array, placed: Any
) -> jax.Array:
    """-log p(token | all before it) of the last `count` tokens of each row [B, count]. Rows end with their answers, so
    that the numbers of a whole vocabulary are kept for these alone."""
    count = min(count, tokens_BS.shape[1] - 1)
    logits_BSV, _, _ = generation.extend(config, params, cache, tokens_BS, placed=placed)
    log_p_BAV = jax.nn.log_softmax(logits_BSV[:, -count - 1 : -1].astype(jnp.float32))
    return -jnp.take_along_axis(log_p_BAV, tokens_BS[:, -count:, None], axis=-1)[..., 0]


def _first_token_ms(
    lm: LanguageModel,
    contexts: PromptedContexts,
    records: Sequence[Record],
    encode: Callable[[Record], np.ndarray] | None,
) -> float:
    """Median over records, each run once before it is timed: programs are compiled then."""
    sampling, took = generation.Sampling(tokens=1), []
    for i, record in enumerate(records):
        for _ in range(2):
            started = time.perf_counter()
            prefix = contexts.prefixes[i]
            if encode is not None:
                latents = encode(record)
                prefix = np.concatenate([prefix[: len(prefix) - len(latents)], latents])
            prefixes = [prefix] if len(prefix) else None
            next(iter(generation.generate(lm.config, lm.params, [contexts.prompts[i]], sampling, prefixes=prefixes)))
            seconds = time.perf_counter() - started
        took.append(1e3 * seconds)
    return float(np.median(took))
