"""Mixtures of sources, conversations and prompts: which document comes when, and what its text is."""

import importlib
import itertools
import json
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from ml_collections import config_dict
from tokenizers import models, pre_tokenizers

from saejax.core.config import from_config_dict, to_config_dict, to_json
from saejax.core.errors import ConfigError, DataError
from saejax.text import ChatTemplate, Packer, Source, SourceConfig, TextConfig, Tokenizer, open_source
from saejax.text.mixture import mixed, quotas

BOS = 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of one id a word, with <bos>, and a chat template that writes it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(BOS)}, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<bos>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"bos_token_id": BOS}))
    write_template(folder, TEMPLATE)
    return folder


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "[{{ m.role }}] {{ m['content'] | trim }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_template(folder: Path, template: Any) -> None:
    settings = {"chat_template": template, "bos_token": {"content": "<bos>"}, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def memory(name: str, documents: int) -> Source:
    """A source in memory; a document's text is its own name."""

    def rows(start: int) -> Iterator[tuple[int, str, str, str]]:
        for index in range(start, documents):
            yield index, f"{name}{index}", f"{name}{index}", f"{name}{index}"

    return Source({"source": name}, rows, 0.3)


# --- mixtures -------------------------------------------------------------------------------------


def test_each_source_comes_in_its_own_order_and_as_often_as_its_weight_says() -> None:
    source = mixed([memory("a", 30_000), memory("b", 30_000), memory("c", 30_000)], (1.0, 2.0, 0.5), 3, 0.3)
    rows = [row for row, _ in zip(source.rows(0), range(2 * 4096), strict=False)]
    assert [index for index, *_ in rows] == list(range(2 * 4096))
    for name, weight in (("a", 1.0), ("b", 2.0), ("c", 0.5)):
        own = [text for *_, text in rows if text[0] == name]
        assert own == [f"{name}{i}" for i in range(len(own))]
        assert len(own) == pytest.approx(2 * 4096 * weight / 3.5, abs=2)
    # Evenly all along, and not one source after another.
    assert 200 < sum(text[0] == "b" for *_, text in rows[:512]) < 380
    assert sum(x[3][0] != y[3][0] for x, y in itertools.pairwise(rows)) > 3000


def test_a_mixture_is_entered_at_any_index_and_its_order_is_the_seed_s() -> None:
    sources = [memory("a", 9000), memory("b", 700)]
    source = mixed(sources, (3.0, 1.0), 3, 0.3)
    everything = list(source.rows(0))
    assert Counter(text[0] for *_, text in everything) == {"a": 9000, "b": 700}, "each document once"
    for start in (1, 700, 4095, 4096, 4097, 9000, 11_000, 10**6):
        assert list(source.rows(start)) == [row for row in everything if row[0] >= start]
    assert [row[3] for row in mixed(sources, (3.0, 1.0), 4, 0.3).rows(0)][:50] != [row[3] for row in everything[:50]]
    assert mixed(sources, (3.0, 1.0), 4, 0.3).identity != source.identity
    assert mixed(sources, (3.0, 2.0), 3, 0.3).identity != source.identity
    assert mixed(sources, (6.0, 2.0), 3, 0.3).identity == source.identity, "weights are relative"


def test_a_document_keeps_the_split_of_its_own_source() -> None:
    own = memory("a", 300)
    heldout = {d.text for d in own.documents("heldout")}
    both = mixed([own, memory("b", 300)], (1.0, 1.0), 0, 0.3)
    assert {d.text for d in both.documents("heldout") if d.text[0] == "a"} == heldout


def test_the_places_of_a_period_are_all_taken_and_a_weight_may_be_too_small() -> None:
    for weights in ((1.0,), (1.0, 1.0, 1.0), (0.1, 0.7, 0.2), (1e-3, 1.0, 3.14)):
        found = quotas(weights)
        assert found.sum() == 4096
        np.testing.assert_allclose(found / 4096, np.array(weights) / sum(weights), atol=1 / 4096)
    with pytest.raises(ConfigError, match=r"text.sources\[1\].weight is 1e-06, less than one document in 4096"):
        quotas((1.0, 1e-6))


def test_packed_rows_of_a_mixture_are_entered_again_at_every_cursor(folder: Path) -> None:
    def words(name: str, documents: int) -> Source:
        def rows(start: int) -> Iterator[tuple[int, str, str, str]]:
            for index in range(start, documents):
                yield index, f"{name}{index}", f"{name}{index}", f"{name} " * (index % 7 + 1)

        return Source({}, rows, 0.3)

    packer = Packer(mixed([words("w2", 60), words("w3", 25)], (2.0, 1.0), 1, 0.3), Tokenizer.from_folder(folder), 16)
    everything = list(packer.batches("train", 3))
    assert len(everything) > 3
    for number, batch in enumerate(everything):
        for again, before in zip(packer.batches("train", 3, start=batch.cursor), everything[number:], strict=True):
            np.testing.assert_array_equal(again.tokens, before.tokens)
            np.testing.assert_array_equal(again.documents, before.documents)


def test_a_mixture_is_described_by_dicts_in_a_config_file(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"q": "{name}{i}"}}\n' for i in range(40)))
    config = to_config_dict(TextConfig())
    entries = ({"source": "files", "paths": (str(tmp_path / f"{n}.jsonl"),), "column": "q"} for n in "ab")
    config.sources = tuple(entry | {"weight": weight} for entry, weight in zip(entries, (1.0, 3.0), strict=True))
    text = from_config_dict(TextConfig, config_dict.ConfigDict({"text": config}).text.to_dict())
    assert [part.weight for part in text.parts] == [1.0, 3.0]
    # As config.json holds it, and as a config file may start from it.
    assert from_config_dict(TextConfig, json.loads(json.dumps(to_json(text)))) == text
    assert from_config_dict(TextConfig, to_config_dict(text).to_dict()) == text
    source = open_source(text)
    documents = [*source.documents("train"), *source.documents("heldout")]
    assert {d.text for d in documents} == {f"{n}{i}" for n in "ab" for i in range(40)}
    with pytest.raises(ConfigError, match=r"Unknown key config.sources\[0\].wieght. Did you mean 'weight'"):
        from_config_dict(TextConfig, {"sources": [{"wieght": 1.0}]})


# --- conversations --------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": " w2 "}, {"role": "assistant", "content": "w3"}]


def test_a_conversation_is_written_by_the_tokenizer_s_template(folder: Path) -> None:
    chat = Tokenizer.from_folder(folder).chat_template
    # Without the bos: the packer puts it in front of every row.
    assert chat.render(MESSAGES) == "[user] w2\n[assistant] w3\n"
    assert chat.render(MESSAGES[:1]) == "[user] w2\n[assistant]"
    with pytest.raises(DataError, match=r"template of .*tokenizer_config.json does not take these messages: no tools"):
        chat.render([{"role": "tool", "content": "w2"}])


def test_the_template_gives_what_transformers_gives(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<bos>", eos_token="</s>"
    )
    template = (
        "{%- for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] | trim }}{% if loop.last %}"
        "{{ eos_token }}{% endif %}\n{%- endfor %}{{ [1, 'é<'] | tojson }}{% if tools is not none %}T{% endif %}\n"
    )
    wanted = theirs.apply_chat_template(MESSAGES, chat_template=template, tokenize=False)
    assert ChatTemplate(template, {"bos_token": "<bos>", "eos_token": "</s>"}, "here").render(MESSAGES) == wanted


def test_conversations_are_read_from_messages_or_from_a_pair_of_columns(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    rows = [{"q": f"w{i}", "a": "w3", "talk": [{"role": "user", "content": f"w{i}"}, MESSAGES[1]]} for i in range(20)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def source(**settings: Any) -> Source:
        return open_source(TextConfig("files", (str(tmp_path / "x.jsonl"),), chat=True, **settings), tokenizer)

    def texts(source: Source) -> list[str]:
        return [text for *_, text in source.rows(0)]

    pair, talk, bare = source(prompt="q", response="a"), source(column="talk"), source(prompt="q")
    assert texts(pair) == texts(talk) == [f"[user] w{i}\n[assistant] w3\n" for i in range(20)]
    assert texts(bare)[4] == "[user] w4\n[assistant]"
    assert len({json.dumps(s.identity) for s in (pair, talk, bare)}) == 3
    with pytest.raises(DataError, match=r"x\.jsonl, row 1: no column 'answer' for text\.response; the row has q, a"):
        texts(source(prompt="q", response="answer"))
    with pytest.raises(DataError, match=r"x\.jsonl, row 1: column 'q' is no conversation: text\.chat wants a list"):
        texts(source(column="q"))
    with pytest.raises(ConfigError, match=r"text\.chat is set, and no tokenizer is given"):
        open_source(TextConfig("files", (str(tmp_path / "x.jsonl"),), chat=True))


def test_the_template_is_part_of_what_the_text_is(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "x.jsonl").write_text('{"q": "w2"}\n')
    text = TextConfig("files", (str(tmp_path / "x.jsonl"),), chat=True, prompt="q")
    identities = []
    several = [{"name": "tools", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    for template in (TEMPLATE, TEMPLATE.replace("[{{", "<{{"), several):
        write_template(tmp_path, template)
        identities.append(open_source(text, Tokenizer.from_folder(tmp_path)).identity)
    assert identities[0] == identities[2] != identities[1]
    (tmp_path / "chat_template.jinja").write_text("from the file: {{ messages[0].content }}")
    own = open_source(text, Tokenizer.from_folder(tmp_path))
    assert [row[3] for row in own.rows(0)] == ["from the file: w2"]


def test_a_template_can_reach_nothing() -> None:
    """Each of these gives a text, or changes the messages, outside the sandbox."""
    for attack in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
    ):
        with pytest.raises(DataError, match=r"does not take these messages: .*unsafe"):
            ChatTemplate(attack, {}, "here").render(MESSAGES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"There is no chat template in .*text.template in place of text.chat"),
        ('{"chat_template": null}', r"There is no chat template in"),
        ("{", r"tokenizer_config.json is not a readable tokenizer configuration"),
        ('{"chat_template": "{% for %}"}', r"chat template of .*tokenizer_config.json cannot be read"),
    ],
)
def test_a_missing_or_broken_template_is_named(folder: Path, tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(DataError, match=message):
        ChatTemplate.from_folder(tmp_path, {}).render(MESSAGES)


def test_without_jinja_the_remedy_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(DataError, match=r"text\.chat needs the jinja2 package: pip install 'jinja2>="):
        ChatTemplate.from_folder(folder, {}).render(MESSAGES)


# --- prompts --------------------------------------------------------------------------------------


def test_every_line_is_a_prompt_and_begins_a_row_of_its_own(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("w2 w3\n\nw4\u2028w5 w6\n" + "w7 " * 20 + "\n" + "w8\n" * 30)
    text = TextConfig("prompts", (str(tmp_path / "p.txt"),), heldout_fraction=0.01, context_length=8)
    source = open_source(text)
    documents = list(source.documents("train"))
    assert [d.text for d in documents[:2]] == ["w2 w3", "w4\u2028w5 w6"], "a blank line is no prompt"
    assert documents[1].name == "p.txt:3"
    tokenizer = Tokenizer.from_folder(folder)
    packer = Packer.of(source, tokenizer, text)
    everything = list(packer.batches("train", 4))
    seen: list[int] = []
    for number, batch in enumerate(everything):
        for row in batch.documents:
            assert len(set(row[row >= 0])) <= 1
            seen += sorted({int(d) for d in row[row >= 0]})
        again = list(packer.batches("train", 4, start=batch.cursor))
        assert len(again) == len(everything) - number
        np.testing.assert_array_equal(again[0].tokens, batch.tokens)
    # The third prompt is longer than a row: it goes on in two more, alone.
    assert seen == [d.index for d in documents for _ in range(3 if d.text.startswith("w7") else 1)]
    packed = next(Packer.of(source, tokenizer, TextConfig(**(vars(text) | {"pack": True}))).batches("train", 4))
    assert len(set(packed.documents[-1])) == 1 or len(set(packed.documents[0])) > 1


def test_prompts_come_from_columns_too_and_are_packed_when_asked(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"p": "w2"}\n{"p": "w3"}\n')
    text = TextConfig("prompts", (str(tmp_path / "p.jsonl"),), template="ask: {p}")
    assert [row[3] for row in open_source(text).rows(0)] == ["ask: w2", "ask: w3"]
    assert not text.packed
    assert TextConfig(**(vars(text) | {"pack": True})).packed
    assert TextConfig().packed and not TextConfig(pack=False).packed
    prompts = SourceConfig("prompts", ("p.txt",))
    assert not TextConfig(sources=(prompts, prompts)).packed and TextConfig(sources=(prompts, SourceConfig())).packed


# --- the mixture that is shipped ------------------------------------------------------------------

# A row of each data set of configs/reasoning_mix.py, with the columns it is published with.
PUBLISHED: dict[str, dict[str, Any]] = {
    "openai/gsm8k": {"question": "q", "answer": "a"},
    "kaist-ai/CoT-Collection": {"source": "q", "target": "t", "rationale": "a", "task": "x", "type": "CoT"},
    "AI-MO/NuminaMath-CoT": {"source": "x", "problem": "q", "solution": "a", "messages": []},
    "meta-math/MetaMathQA": {"type": "x", "query": "q", "original_question": "o", "response": "a"},
}


def test_the_reasoning_mixture_fills_its_templates_by_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self, row: dict[str, Any], start: int = 0) -> None:
            self.row, self.start = row, start

        def skip(self, n: int) -> "Stream":
            return Stream(self.row, self.start + n)

        def __iter__(self) -> Iterator[dict[str, Any]]:
            for i in range(self.start, 500):
                yield {k: f"{v}{i}" if isinstance(v, str) else v for k, v in self.row.items()}

    fake = types.SimpleNamespace(load_dataset=lambda name, *_, **__: Stream(PUBLISHED[name]))
    monkeypatch.setitem(sys.modules, "datasets", fake)
    text = from_config_dict(TextConfig, importlib.import_module("configs.reasoning_mix").get_config().text.to_dict())
    assert {part.dataset for part in text.parts} == set(PUBLISHED)
    rows = list(itertools.islice(open_source(text).rows(0), 300))
    count = Counter(name.partition(":")[0] for _, name, *_ in rows)
    total = sum(part.weight for part in text.parts)
    for part in text.parts:
        assert count[part.dataset] == pytest.approx(300 * part.weight / total, abs=35)
    assert all("q" in text and "a" in text and "{" not in text for *_, text in rows)
    assert list(open_source(text).rows(123))[:50] == rows[123:173]
