"""Records, answers, encoder and loss of a latent prefix, each against a few lines of its own."""

import dataclasses
import itertools
import json
import math
import re
import string
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny.prefixes import small_prefix, write_squad

from saejax.app.prefix import PrefixTraining, prefix_scores
from saejax.core.errors import ConfigError, DataError
from saejax.lm import LanguageModel, decoder
from saejax.parallel import ParallelConfig, make_mesh
from saejax.prefix import PrefixConfig, Record
from saejax.prefix.answers import exact_match, f1, first_line, words_of
from saejax.prefix.encoder import Encoder
from saejax.prefix.evaluation import WAYS, Answered, evaluate_prefix
from saejax.prefix.recall import recall_records
from saejax.prefix.records import read_records
from saejax.prefix.samples import SampleBatches, training_arrays
from saejax.prefix.trained import TrainedPrefix
from saejax.prefix.training import embedding_rms, prefix_program
from saejax.text import TextConfig
from saejax.training import put_on

# --- records and answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "right", "match", "score"),
    [
        ("The cat.", ["cat"], 1, 1),
        ("a black cat", ["the cat"], 0, 2 / 3),
        ("dog", ["cat", "dog!"], 1, 1),
        ("", ["cat"], 0, 0),
        ("the", ["a"], 1, 1),
        ("cat cat", ["cat"], 0, 2 / 3),
    ],
)
def test_exact_match_and_f1(said: str, right: list[str], match: float, score: float) -> None:
    assert exact_match(said, right) == match and f1(said, right) == pytest.approx(score)


def of_squad(text: str) -> str:
    """normalize_answer of SQuAD's evaluate-v2.0.py, line by line."""

    def remove_articles(text: str) -> str:
        return re.sub(re.compile(r"\b(a|an|the)\b", re.UNICODE), " ", text)

    def remove_punc(text: str) -> str:
        exclude = set(string.punctuation)
        return "".join(ch for ch in text if ch not in exclude)

    return " ".join(remove_articles(remove_punc(text.lower())).split())


def test_words_are_those_of_squads_own_script() -> None:
    """Every text of three pieces, with dashes, quotes and letters that ASCII lacks, and articles beside them."""
    words = ["the", "a", "An", "cat", "theory", "\u00e9", "\u4e2d"]
    marks = ["\u2013", "\u2014 ", "\u201c", "\u2019s", "\u2026", "-", "'", ".", " "]
    for three in itertools.product(words + marks, repeat=3):
        text = "".join(three)
        assert words_of(text) == of_squad(text).split(), text
    assert exact_match("the\u2013end", ["\u2013end"]) == 1 and f1("1990\u20131995", ["1990-1995"]) == 0


def test_questions_of_one_context_are_drawn_together() -> None:
    """Twelve contexts with five questions each, all answered alike: the interval is that of twelve records."""
    right_C = np.arange(12) % 3 == 0

    def answered(each: int) -> Any:
        em = np.repeat(right_C.astype(float), each)
        return {way: Answered([""] * len(em), dict.fromkeys(("em", "f1", "nll"), em), 0.0, 1.0) for way in WAYS}

    alone = prefix_scores(answered(1), [str(i) for i in range(12)])
    many = prefix_scores(answered(5), [str(i) for i in range(12) for _ in range(5)])
    assert (many["records"], many["contexts"], alone["contexts"]) == (60, 12, 12)
    for metric, own in alone["ways"]["prefix"]["intervals"].items():
        assert many["ways"]["prefix"]["intervals"][metric] == pytest.approx(own)
    apart = prefix_scores(answered(5), [str(i) for i in range(60)])["ways"]["prefix"]["intervals"]["em"]
    low, high = many["ways"]["prefix"]["intervals"]["em"]
    assert high - low > 1.8 * (apart[1] - apart[0])


def test_an_answer_ends_with_its_line() -> None:
    assert first_line(" 41\nr[") == "41" and first_line("\n\n 7") == "7" and first_line("") == ""


def test_rows_become_records_and_no_context_is_in_both_splits(tmp_path: Path) -> None:
    path = write_squad(tmp_path / "rows.jsonl", 300)
    text, config = TextConfig(source="files", paths=(str(path),)), PrefixConfig(samples=100, heldout=15)
    train, heldout = read_records(text, config, 0)
    assert (len(train), len(heldout)) == (100, 15)
    assert not {r.context for r in train} & {r.context for r in heldout}
    assert train[0].answers[1].endswith(" wide")
    assert read_records(text, config, 0) == (train, heldout), "the same every time"
    others = read_records(text, config, 1)[0]
    assert others != train, "another seed draws others"
    numbers = [int(r.context.split()[2]) for r in train]
    assert max(numbers) > 200, "drawn from all rows, not the first ones"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"context": "a", "question": "b"}, "no column 'answers' for prefix.answers; the row has context, question"),
        ({"context": "a", "question": 3, "answers": "c"}, "prefix.question holds int, not text"),
        ({"context": "a", "question": "b", "answers": {"text": []}}, "holds no answer"),
        ({"context": "a", "question": "b", "answers": [""]}, "holds no answer"),
    ],
)
def test_a_bad_row_is_named(row: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"rows.jsonl, row 1") as error:
        read_records(TextConfig(source="files", paths=(str(path),)), PrefixConfig(), 0)
    assert why in str(error.value)


def test_text_without_columns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"text.source to files"):
        read_records(TextConfig(), PrefixConfig(), 0)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"\.txt has no columns"):
        read_records(TextConfig(source="files", paths=(str(tmp_path / "a.txt"),)), PrefixConfig(), 0)


def test_the_embedded_task_asks_for_what_its_context_says() -> None:
    records = recall_records("train", 200)
    assert all(json.loads(r.context[4:])[r.question] == int(r.answers[0]) for r in records)
    assert records[:50] == recall_records("train", 50) and records[:50] != recall_records("heldout", 50)
    assert len(Counter(r.question for r in records)) == 6


@pytest.mark.parametrize(
    "wrong",
    [
        *({"reads": "{answer}"}, {"prompt": "{context}"}, {"answer": "none"}, {"answer": "{answer} {"}),
        *({"d_latent": 10}, {"d_encoder": 9}, {"distill": -1.0}, {"source": "squad"}),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"prefix.{next(iter(wrong))} "):
        PrefixConfig(**{"n_head": 4} | wrong)


# --- batches ---------------------------------------------------------------------------------------------------


def test_every_epoch_has_each_record_once_in_an_order_of_its_own() -> None:
    batches = SampleBatches({"ids": np.arange(10)[:, None]}, 4, seed=3)
    seen = np.concatenate([batches.whole_batch_at(i)["ids"][:, 0] for i in range(5)])
    first, second = seen[:10], seen[10:]
    assert sorted(first) == sorted(second) == list(range(10)) and list(first) != list(second)
    asked = batches.iterate(3)
    np.testing.assert_array_equal(next(asked)["ids"][:, 0], seen[12:16])
    with pytest.raises(ConfigError, match="there are 10 records"):
        SampleBatches({"ids": np.zeros((10, 1))}, 11, seed=0)


# --- the encoder -----------------------------------------------------------------------------------------------


def test_the_encoder_is_its_equation() -> None:
    """In float64, a row and a head at a time."""
    config = PrefixConfig(length=6, d_encoder=8, n_layer=1, n_pool=2, n_head=2, latents=3, d_latent=4)
    encoder = Encoder(config, 9, (("m", 5, 0.7), ("n", 7, 2.0)))
    params = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape), encoder.init(jax.random.key(0))
    )
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    ids_BL = np.array([[3, 1, 9, 2, 0, 0], [5, 5, 1, 7, 8, 2]])

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    def gelu(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def block(b: Any, q: np.ndarray, x: np.ndarray) -> np.ndarray:
        y, s = unit(q) * b["norm"], unit(x) * b["norm_source"]
        z = []
        for h in range(2):
            width = q.shape[-1] // 2
            at = slice(h * width, (h + 1) * width)
            scores = (y @ b["W_Q"][:, at]) @ (s @ b["W_K"][:, at]).T / math.sqrt(width)
            share = np.exp(scores - scores.max(-1, keepdims=True))
            z.append(share / share.sum(-1, keepdims=True) @ (s @ b["W_V"][:, at]))
        q = q + np.concatenate(z, -1) @ b["W_O"]
        return q + gelu(unit(q) * b["norm_mlp"] @ b["W_in"] + b["b_in"]) @ b["W_out"] + b["b_out"]

    found = jax.jit(encoder.prefixes)(params, ids_BL)
    for row, ids in enumerate(ids_BL):
        there = ids[ids > 0]
        x = p["W_E"][there] + p["W_pos"][: len(there)]
        x = block(p["encode"]["0"], x, x)
        z = p["W_queries"]
        for i in range(2):
            z = block(p["pool"][str(i)], z, x)
        for name, _, rms in encoder.models:
            a = p["adapters"][name]
            wanted = a["gain"] * rms * unit(z @ a["W"] + a["b"])
            np.testing.assert_allclose(found[name][row], wanted, rtol=2e-5, atol=2e-5)


def test_a_fresh_prefix_has_the_size_of_embeddings(job: PrefixTraining) -> None:
    encoder = job.learner().encoder
    made = encoder.prefixes(encoder.init(jax.random.key(0)), jnp.asarray([[5, 6, 7]]))
    for name, lm in job.models.items():
        embeddings = np.asarray(lm.params["W_E"], np.float64)
        assert float(jnp.sqrt((made[name] ** 2).mean())) == pytest.approx(math.sqrt((embeddings**2).mean()), rel=1e-3)


# --- the loss --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> PrefixTraining:
    return PrefixTraining(small_prefix(tmp_path_factory.mktemp("runs")))


_run = jax.jit(decoder.run, static_argnames="config")


def logits_of(lm: LanguageModel, ids: Any, prefix_BPM: Any = None) -> jax.Array:
    """[S, V] of one row; compiled, which for rows of many lengths is a tenth of the work."""
    return _run(lm.config, lm.params, jnp.asarray([ids]), prefix_BPM=prefix_BPM)[0][0]


def test_the_loss_is_that_of_each_record_by_itself(job: PrefixTraining) -> None:
    """Without filling: a record at a time, the weighted mean over the answers' tokens."""
    config = dataclasses.replace(job.e.prefix, first_token_weight=3.0, distill=0.5)
    learner = dataclasses.replace(job.learner(), distill=0.5)
    params = learner.init(jax.random.key(2))
    records = [
        Record('r = {"width": 41}\n', "width", ("41",)),
        Record('r = {"depth": 7, "limit": 123456}\n', "limit", ("123456",)),
    ]
    arrays = training_arrays(records, config, job.models)
    loss, metrics = jax.jit(learner.loss)(params, {n: lm.params for n, lm in job.models.items()}, arrays)
    prefixes, total = jax.jit(learner.encoder.prefixes)(params, arrays["ids"]), 0.0
    for name, lm in job.models.items():
        sums = dict.fromkeys(("nll", "kl", "weights"), 0.0)
        plain, count = 0.0, 0
        for i, record in enumerate(records):
            prompt, answer = (lm.tokenizer.encode(record.fill(t)) for t in (config.prompt, config.answer))
            bos = jnp.asarray([[lm.tokenizer.bos_id]])
            before = jnp.concatenate([lm.params["W_E"][bos], prefixes[name][i : i + 1]], axis=1)
            logits = logits_of(lm, prompt + answer, before)
            log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)[before.shape[1] + len(prompt) - 1 :]
            context = lm.tokenizer.encode(record.context)
            text = np.asarray(
                jax.nn.log_softmax(logits_of(lm, [*bos[0].tolist(), *context, *prompt, *answer])), np.float64
            )
            text = text[1 + len(context) + len(prompt) - 1 :]
            for a, token in enumerate(answer):
                w = 3.0 if a == 0 else 1.0
                sums["nll"] -= w * log_p[a, token]
                sums["kl"] += w * (np.exp(text[a]) * (text[a] - log_p[a])).sum()
                sums["weights"] += w
                plain, count = plain - log_p[a, token], count + 1
        total += sums["nll"] / sums["weights"] + 0.5 * sums["kl"] / sums["weights"]
        assert float(metrics[f"nll_{name}"]) == pytest.approx(plain / count, rel=1e-4)
    assert float(loss) == pytest.approx(total, rel=1e-4)


def test_the_gradient_is_of_encoder_and_adapters_alone(job: PrefixTraining) -> None:
    """What is differentiated is a difference of the loss, in every part; nothing else has a gradient or a moment."""
    learner, arrays = job.learner(), training_arrays(job.records[0][:8], job.e.prefix, job.models)
    models = {name: lm.params for name, lm in job.models.items()}

    @jax.jit
    def loss(params: Any) -> jax.Array:
        return learner.loss(params, models, arrays)[0]

    params = learner.init(jax.random.key(0))
    gradient = jax.jit(jax.grad(loss))(params)
    for number, (path, slope) in enumerate(jax.tree_util.tree_leaves_with_path(gradient)):
        direction = jax.random.normal(jax.random.key(number), slope.shape)
        direction /= jnp.linalg.norm(direction) * (100 if slope.ndim else 10)
        along = slope / jnp.linalg.norm(slope) / (100 if slope.ndim else 10)
        assert float(jnp.linalg.norm(slope)) > 0, f"{path} is not trained"
        for step in (along, direction):

            def at(sign: float, path: Any = path, step: jax.Array = step) -> float:
                moved = jax.tree_util.tree_map_with_path(lambda p, x: x + sign * step if p == path else x, params)
                return float(loss(moved))

            assert (at(1) - at(-1)) / 2 == pytest.approx(float((slope * step).sum()), rel=0.05, abs=3e-6), path
    program = _program(job, arrays, make_mesh(ParallelConfig((1, 1))))
    trained = {x.shape for x in jax.tree.leaves(params)} | {()}
    assert {x.shape for x in jax.tree.leaves((program.abstract.params, program.abstract.opt_state))} == trained
    assert not {x.shape for x in jax.tree.leaves(models) if x.ndim > 1} & trained, "else their shapes tell nothing"


def _program(job: PrefixTraining, arrays: Any, mesh: Any, rows: int = 8, **given: Any) -> Any:
    models = {name: lm.placed(mesh) for name, lm in job.models.items()}
    shapes = {name: ((rows, *a.shape[1:]), a.dtype) for name, a in arrays.items()}
    return prefix_program(job.learner(), job.e.train, models, mesh, seed=0, shapes=shapes, **given)


@pytest.mark.ci
def test_devices_and_meshes_give_the_same_numbers(job: PrefixTraining) -> None:
    """Four steps of plain gradient descent on 1, 2 and 4 devices, the models whole or spread over "latent"."""
    arrays = training_arrays(job.records[0], job.e.prefix, job.models)
    batches = SampleBatches(arrays, 8, 0)
    sgd = optax.with_extra_args_support(optax.sgd(0.1))
    found = {}
    for shape in ((1, 1), (2, 1), (4, 1), (2, 2)):
        mesh = make_mesh(ParallelConfig(shape))
        program = _program(job, arrays, mesh, optimizer=sgd).compiled(batches.dtype)
        put = put_on(mesh, 8, list(arrays))
        state, losses = program.start(), []
        for i in range(4):
            state, metrics = program.step(state, put(batches.whole_batch_at(i))[0], program.hyper)
            losses.append(float(metrics["loss"]))
        found[shape] = losses, jax.device_get(state.params)
    assert found[1, 1][0][-1] < found[1, 1][0][0]
    for losses, params in found.values():
        np.testing.assert_allclose(losses, found[1, 1][0], rtol=2e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), params, found[1, 1][1])


# --- the evaluation --------------------------------------------------------------------------------------------


def test_the_nll_of_a_short_row_does_not_depend_on_a_long_answer_elsewhere(job: PrefixTraining) -> None:
    """An answer that fills more columns than the rows of another batch have."""
    learner, config = job.learner(), dataclasses.replace(job.e.prefix, eval_rows=1, answer_tokens=1, timed=1)
    params = learner.encoder.init(jax.random.key(0))
    trained = TrainedPrefix(learner.encoder, params, config, job.models["recall"].tokenizer, 0)
    short, long = Record("r\n", "width", ("41",)), Record("r\n", "width", ("41 " * 30,))
    models = {"recall": job.models["recall"]}
    alone, both = (
        evaluate_prefix(trained, models, records, seed=0, shown=False)["recall"] for records in ([short], [short, long])
    )
    for way, one in alone.items():
        assert one.columns["nll"][0] == pytest.approx(both[way].columns["nll"][0], rel=1e-4), way


@pytest.mark.soak
def test_replayed_embeddings_are_the_text_and_each_way_gives_what_it_says(job: PrefixTraining) -> None:
    encoder = job.learner().encoder
    config = dataclasses.replace(job.e.prefix, eval_rows=4)
    trained = TrainedPrefix(encoder, encoder.init(jax.random.key(0)), config, job.models["recall"].tokenizer, 0)
    records = recall_records("heldout", 6)
    found = evaluate_prefix(trained, job.models, records, seed=0, shown=False)
    for name, lm in job.models.items():
        ways = found[name]
        assert ways["replay"].said == ways["text"].said
        np.testing.assert_allclose(ways["replay"].columns["nll"], ways["text"].columns["nll"], rtol=1e-4, atol=1e-5)
        length = np.mean([len(lm.tokenizer.encode(r.context)) for r in records])
        saved = {"text": 0, "replay": 0, "none": length}
        assert {way: ways[way].saved for way in saved} == pytest.approx(saved)
        assert all(ways[way].saved == pytest.approx(length - 4) for way in ("truncated", "random", "prefix"))
        for way, given in (("none", ""), ("text", records[0].context)):
            prompt = lm.tokenizer.encode(records[0].fill(config.prompt))
            answer = lm.tokenizer.encode(records[0].fill(config.answer))
            row = [lm.tokenizer.bos_id, *lm.tokenizer.encode(given), *prompt]
            log_p = jax.nn.log_softmax(logits_of(lm, row + answer))[len(row) - 1 : -1]
            nll = -np.mean([log_p[i, token] for i, token in enumerate(answer)])
            assert ways[way].columns["nll"][0] == pytest.approx(nll, rel=1e-4, abs=1e-5)
    assert np.mean(found["recall"]["text"].columns["em"]) == 1, "it knows its task"
    assert embedding_rms(job.models["recall"]) > 0
