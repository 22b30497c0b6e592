"""Chat templates against transformers' apply_chat_template on the same files, and one bos in front of every text."""

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from saejax.core.errors import ConfigError, DataError
from saejax.text import ChatTemplate, Packer, Source, SourceConfig, TextConfig, Tokenizer, begins_with_bos, open_source

WORDS = [*(f"w{i}" for i in range(20)), "a"]
TOKENS = ("<bos>", "<eos>", "<unk>", "<pad>", "<image>")
SPECIAL = {name: i for i, name in enumerate(TOKENS)}

MESSAGES = [
    {"role": "system", "content": "w1 w2"},
    {"role": "user", "content": " w3 é<&> w4 "},
    {"role": "assistant", "content": "w5\n"},
]
CONVERSATIONS = [MESSAGES, MESSAGES[:2], MESSAGES[1:], [*MESSAGES[1:], *MESSAGES[1:]]]

# Each as a family of templates does it: turns, tags of what is trained on, tables of tools, dates, namespaces, macros.
TEMPLATES = {
    "turns": """{{- bos_token }}
{%- for m in messages %}
    {{- '<|' + m['role'] + '|> ' + m.content | trim + ' ' + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}""",
    "generation": """{{ bos_token }}{% set mark = 'w1' %}{% for m in messages %}
{% if m.role == 'assistant' %}
{% generation %}
{% set mark = 'w2' %}w9 {{ m.content }} {{ mark }} {{ eos_token }}
{% endgeneration %}
{% else %}
{{ m.role }} {{ m.content }}
{% endif %}
{% endfor %}
{{ mark }}{%- generation -%} {% set mark = 'w7' %} {%- endgeneration -%} {{ mark }}""",
    "json": """{% for m in messages %}{{ m | tojson }}
{{ {'b': 1, 'a': [m.content, 'é']} | tojson(sort_keys=true, separators=(',', ':')) }}
{{ {'b': 1, 'a': m} | tojson(indent=2) }}{{ ['é'] | tojson(ensure_ascii=true) }}
{{ ['é', {'z': 1, 'y': 2}] | tojson(true, 1) }}
{% endfor %}""",
    "date": """{{ bos_token }}{{ strftime_now('%d %B %Y') }} {{ messages[0].content }}{% if messages | length > 2 %}
{{ strftime_now("%Y-%m-%d") }}{% endif %}""",
    "a date or none": """{% if not day is defined %}
{% if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}
{% else %}{% set day = '26 Jul 2024' %}{% endif %}{% endif %}{{ day }} {{ messages[-1].content }}""",
    "namespace, macro, loop control": """
{%- macro turn(m) -%}[{{ m.role | upper }}]{{ m.content | trim }}{%- endmacro -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{% set ns.last = loop.index0 %}
{{ turn(m) }}
{%- if loop.index > 3 %}{% break %}{% endif %}{% endfor %} {{ ns.last }} {{ pad_token }} {{ unk_token }}
{{ image_token }}
{%- if tools is not none or documents %} w7{% endif %}""",
    "bos as it is written": """<bos>{% for m in messages %} {{ m.content }} <eos>{% endfor %}""",
}  # fmt: skip
TODAY = datetime.datetime(2026, 3, 9, 15, 30)


def token(text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": text, **flags}


GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast"}  # transformers then takes tokenizer.json as it is
NAMED = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
OBJECTS = {name: token(text) for name, text in NAMED.items()}
LISTED = {"added_tokens_decoder": {str(i): token(t) | {"special": True} for t, i in SPECIAL.items()}}
# Ways to say which tokens there are: (tokenizer_config.json, special_tokens_map.json).
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the configuration": (NAMED | {"image_token": "<image>"}, {}),
    "objects": ({name: value | {"__type": "AddedToken"} for name, value in OBJECTS.items()}, {}),
    "the map": ({}, NAMED),
    "objects in the map": ({"eos_token": "<pad>"}, OBJECTS),
    "a map that is not read": (LISTED | NAMED | {"eos_token": "<pad>"}, NAMED),
    "null in the map": (NAMED, {"eos_token": None}),
    "null in the configuration": (NAMED | {"pad_token": None}, {"pad_token": "<pad>"}),
    "further ones": (NAMED | {"extra_special_tokens": {"image_token": "<image>"}}, {}),
}


def write_folder(folder: Path, template: str, way: str = "the map", scheme: str = "") -> Path:
    """A tokenizer of words; with a scheme of Metaspace, of words behind ▁."""
    words = [f"▁{w}" for w in WORDS] + WORDS if scheme else WORDS
    backend = tokenizers.Tokenizer(models.WordLevel(dict(SPECIAL) | {w: 5 + i for i, w in enumerate(words)}, "<unk>"))
    backend.pre_tokenizer = (
        pre_tokenizers.Metaspace(prepend_scheme=scheme) if scheme else pre_tokenizers.WhitespaceSplit()
    )
    backend.add_special_tokens(list(TOKENS))
    backend.save(str(folder / "tokenizer.json"))
    settings, words_of = WAYS[way]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template} | GENERIC))
    if words_of:
        (folder / "special_tokens_map.json").write_text(json.dumps(words_of))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "bos_token_id": SPECIAL["<bos>"]}))
    return folder


class _Today(datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return TODAY


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """(folder) -> transformers' tokenizer, on a day of ours."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", _Today)
    return lambda folder: transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def rendered(theirs: Any, messages: list[dict[str, str]], **settings: Any) -> Any:
    answer_next = messages[-1]["role"] != "assistant"
    return theirs.apply_chat_template(messages, add_generation_prompt=answer_next, **settings)


def our_template(folder: Path) -> ChatTemplate:
    chat = Tokenizer.from_folder(folder).chat_template
    return chat.on("2026-03-09T15:30") if "strftime_now" in chat.template else chat


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_gives_what_transformers_gives(name: str, theirs: Any, tmp_path: Path) -> None:
    other = theirs(write_folder(tmp_path, TEMPLATES[name]))
    for messages in CONVERSATIONS:
        wanted = rendered(other, messages, tokenize=False)
        # A bos token in front is the packer's.
        assert our_template(tmp_path).render(messages).removeprefix("<bos>") == wanted.removeprefix("<bos>")


@pytest.mark.parametrize("way", WAYS)
def test_a_token_has_its_name_however_it_is_said(way: str, theirs: Any, tmp_path: Path) -> None:
    template = "w1{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}{{ image_token }}{{ mask_token }}"
    other = theirs(write_folder(tmp_path, template, way))
    wanted = rendered(other, MESSAGES, tokenize=False)
    assert our_template(tmp_path).render(MESSAGES) == wanted
    assert "<bos>" in wanted


def packed(folder: Path, chat: ChatTemplate, **settings: Any) -> list[list[int]]:
    """The rows of a capture, a conversation each."""
    texts = [chat.render(messages) for messages in CONVERSATIONS]
    source = Source({}, lambda start: iter([(i, str(i), str(i), t) for i, t in enumerate(texts)][start:]), 1e-9)
    packer = Packer(source, Tokenizer.from_folder(folder), 64, pack=False, **settings)
    return [
        row[part >= 0].tolist()
        for b in packer.batches("train", 1)
        for row, part in zip(b.tokens, b.segments, strict=True)
    ]


@pytest.mark.parametrize("scheme", ["", "first", "always"])
@pytest.mark.parametrize("name", ["turns", "generation", "bos as it is written"])
def test_the_tokens_of_a_conversation_are_those_of_transformers(
    name: str, scheme: str, theirs: Any, tmp_path: Path
) -> None:
    """Also where a word behind the bos token is another one than a word at the start."""
    other = theirs(write_folder(tmp_path, TEMPLATES[name].replace("<|", "w8 ").replace("|>", ""), scheme=scheme))
    chat = our_template(tmp_path)
    wanted = [rendered(other, messages, tokenize=True, return_dict=False) for messages in CONVERSATIONS]
    assert packed(tmp_path, chat) == wanted
    assert chat.keeps_bos == (scheme == "first" and "bos_token" in chat.template)


# ------------------------------------------------------------------------------------------------------------- dates


def test_a_template_that_wants_a_date_is_given_one_or_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, TEMPLATES["date"]))
    (tmp_path / "x.jsonl").write_text('{"q": "w2"}\n')
    settings: dict[str, Any] = {"source": "files", "paths": (str(tmp_path / "x.jsonl"),), "chat": True, "prompt": "q"}

    def texts(date: str) -> tuple[list[str], dict[str, Any]]:
        source = open_source(TextConfig(**settings, chat_date=date), tokenizer)
        return [text for *_, text in source.rows(0)], source.identity

    with pytest.raises(DataError, match=r"row 1: The chat template of .* \(strftime_now\).*text\.chat_date=2026-01-31"):
        texts("")
    first, second = texts("2026-01-31"), texts("2025-12-01")
    assert (first[0], second[0]) == (["31 January 2026 w2"], ["01 December 2025 w2"])
    assert first[1] != second[1]
    for date, message in (("soon", "text.chat_date is 'soon'; give a date"), ("2026-02-30", "give a date")):
        with pytest.raises(ConfigError, match=message):
            SourceConfig(**settings, chat_date=date)
    with pytest.raises(ConfigError, match=r"text\.chat_date is read with text\.chat=True alone"):
        SourceConfig(chat_date="2026-01-31")
    other = Tokenizer.from_folder(write_folder(tmp_path, TEMPLATES["turns"]))
    with pytest.raises(ConfigError, match=r"chat_date is 2026-01-31, and the chat template of .* asks for no date"):
        open_source(TextConfig(**settings, chat_date="2026-01-31"), other)


def test_a_template_that_can_do_without_a_date_has_the_text_of_every_day(tmp_path: Path) -> None:
    chat = Tokenizer.from_folder(write_folder(tmp_path, TEMPLATES["a date or none"])).chat_template
    assert chat.render(MESSAGES).startswith("26 Jul 2024")
    assert chat.on("2026-03-09").render(MESSAGES).lstrip().startswith("09 Mar 2026")
    assert chat.on("2026-03-09").identity != chat.identity == dataclasses.replace(chat).identity


def identity_before(template: str, tokens: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps([template, tokens], sort_keys=True).encode()).hexdigest()


def test_a_template_s_identity_is_that_of_before_where_its_text_is(tmp_path: Path) -> None:
    """Names that it does not use, in a file that was not read before, change nothing; options of tojson do."""
    write_folder(tmp_path, TEMPLATES["turns"], "the configuration")
    before = identity_before(TEMPLATES["turns"], NAMED)
    assert Tokenizer.from_folder(tmp_path).chat_template.identity == before
    (tmp_path / "special_tokens_map.json").write_text('{"cls_token": "<cls>", "pad_token": "<pad>"}')
    assert Tokenizer.from_folder(tmp_path).chat_template.identity == before
    plain, options = "{{ 1 | tojson }}", "{{ 1 | tojson(sort_keys=true) }}"
    assert [ChatTemplate(t, {}, "").identity == identity_before(t, {}) for t in (plain, options)] == [True, False]


# --------------------------------------------------------------------------------------------------------------- bos


def source_of(texts: list[str]) -> Source:
    def rows(start: int) -> Iterator[tuple[int, str, str, str]]:
        for index in range(start, len(texts)):
            yield index, str(index), str(index), texts[index]

    return Source({}, rows, 1e-9)


def test_a_text_that_begins_with_the_bos_gets_no_second_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, TEMPLATES["turns"]))
    bare = [" ".join(WORDS[i : i + 5]) for i in range(9)]
    marked = [f"<bos> {text}" if i % 2 else text for i, text in enumerate(bare)]
    packers = [Packer(source_of(texts), tokenizer, 12) for texts in (bare, marked)]
    one, two = (list(packer.batches("train", 2)) for packer in packers)
    for name in ("tokens", "positions", "segments", "documents", "to_end", "keep"):
        for a, b in zip(one, two, strict=True):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    # Entered again in the middle of a marked document.
    for batch in two:
        np.testing.assert_array_equal(next(packers[1].batches("train", 2, batch.cursor)).tokens, batch.tokens)
    # Without a bos of saejax's, a text is what it is.
    (row,) = Packer(source_of(["<bos> w1 w2"]), tokenizer, 12, prepend_bos=False).batches("train", 1)
    assert row.tokens[0, :3].tolist() == [SPECIAL["<bos>"], *tokenizer.encode("w1 w2")]
    assert tokenizer.encode_behind_bos(["<bos>", "", "<bos> <bos> w1", "w1 <bos>"]) == [
        [],
        [],
        tokenizer.encode("<bos> w1"),
        tokenizer.encode("w1 <bos>"),
    ]


def test_a_template_that_writes_the_bos_makes_another_store_than_before(tmp_path: Path) -> None:
    """Earlier versions put a second one in front of it."""
    files: dict[str, Any] = {"source": "files", "paths": ("x.jsonl",)}
    chat = files | {"chat": True, "prompt": "q"}
    for template, settings, begins in (
        ("turns", chat, False),  # it names the bos, which was always taken away
        ("bos as it is written", chat, True),
        ("date", chat, False),
        ("turns", files | {"template": "<bos> {q}"}, True),
        ("turns", files | {"template": "{q} <bos>"}, False),
        ("turns", files | {"template": "<bos> {q}", "prepend_bos": False}, False),
        ("turns", {"sources": (SourceConfig(**files), SourceConfig(**files, template="<bos>{q}"))}, True),
    ):
        tokenizer = Tokenizer.from_folder(write_folder(tmp_path, TEMPLATES[template]))
        assert begins_with_bos(TextConfig(**settings), tokenizer) == begins, (template, settings)
