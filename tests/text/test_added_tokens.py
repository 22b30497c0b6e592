"""Every way to say a token: ids, special ids and bos are those of transformers' AutoTokenizer for the same folder."""

import functools
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from saejax.core.errors import DataError
from saejax.lm import load_lm
from saejax.text import Packer, Source, Tokenizer
from saejax.text.agreement import disagreement

transformers = pytest.importorskip("transformers", reason="parity needs transformers: pip install 'saejax[torch]'")

LETTERS = "abcdefghijklmnopqrstuvwxyz"
# What every tokenizer.json here holds: special tokens and one that is none.
OWN = [
    tokenizers.AddedToken("<s>", special=True),
    tokenizers.AddedToken("</s>", special=True),
    tokenizers.AddedToken("<unk>", special=True),
    tokenizers.AddedToken("<|endoftext|>", special=True),
    tokenizers.AddedToken("<sep>", special=True),
    tokenizers.AddedToken("<plain>"),
]
NEW = ("<one>", "<two>", "<Three>", "<image>", "ab")


def token(content: str, **properties: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), False)
    return {"content": content} | plain | properties


def as_object(content: str, **properties: bool) -> dict[str, Any]:
    return {"__type": "AddedToken"} | token(content, **properties)


# tokenizer.json's own tokens, as tokenizer_config.json lists them; `=` stands for the id of a token.
SAME = {f"={t.content}": token(t.content, special=t.special, normalized=t.normalized) for t in OWN}
CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
# {way: {file: its content}}; `@` stands for the first id that tokenizer.json leaves free.
WAYS: dict[str, dict[str, Any]] = {
    "tokenizer.json alone": {},
    "added_tokens.json": {ADDED: {"<one>": "@0", "<two>": "@1"}},
    "added_tokens.json, out of order, with a gap": {ADDED: {"<two>": "@7", "<one>": "@2"}},
    "special map, strings": {MAP: {"eos_token": "<one>", "pad_token": "</s>"}},
    "special map, objects": {
        MAP: {"eos_token": token("<one>", lstrip=True), "pad_token": token("<two>", rstrip=True, normalized=True)}
    },
    "special map with one of tokenizer.json": {MAP: {"eos_token": token("</s>", lstrip=True), "pad_token": "<plain>"}},
    "special map and added_tokens.json": {MAP: {"eos_token": "<one>"}, ADDED: {"<one>": "@1", "<two>": "@0"}},
    "special map, null": {CONFIG: {"eos_token": "<one>"}, MAP: {"eos_token": None}},
    "special map against the configuration": {CONFIG: {"eos_token": "<one>"}, MAP: {"eos_token": "<two>"}},
    "special map, a list": {MAP: {"additional_special_tokens": ["<one>", "<two>"]}},
    "special map, a list, and added_tokens.json": {
        MAP: {"additional_special_tokens": ["<Three>"]}, ADDED: {"<Three>": "@0", "<one>": "@1"}
    },
    "special map, further ones": {
        MAP: {"extra_special_tokens": ["<one>", {"content": "<two>", "lstrip": True, "normalized": False}]}
    },
    "special map, named further ones": {MAP: {"extra_special_tokens": {"image_token": "<image>"}}},
    "special map, a name of its own": {MAP: {"image_token": "<image>"}},
    "decoder": {
        CONFIG: {"added_tokens_decoder": {
            "@0": token("<one>", special=True, lstrip=True), "@1": token("<two>", rstrip=True),
            "@2": token("<Three>", normalized=True),
        }}
    },
    "decoder, out of order, with a gap": {
        CONFIG: {"added_tokens_decoder": {"@5": token("<two>", special=True), "@1": token("<one>")}}
    },
    "decoder, a token within words": {CONFIG: {"added_tokens_decoder": {"@0": token("ab", single_word=True)}}},
    "decoder against tokenizer.json": {
        CONFIG: {"added_tokens_decoder": {"=<plain>": token("<plain>", special=True, lstrip=True, rstrip=True)}}
    },
    "decoder makes a special token plain": {
        CONFIG: {"added_tokens_decoder": {"=<sep>": token("<sep>", normalized=True)}}
    },
    "decoder and a special map": {
        CONFIG: {"added_tokens_decoder": {"@0": token("<one>")}}, MAP: {"eos_token": "<two>"}, ADDED: {"<Three>": "@1"}
    },
    "decoder without the one named": {
        CONFIG: {"added_tokens_decoder": {"@0": token("<one>")}, "eos_token": "<two>", "pad_token": "<plain>"}
    },
    "decoder with the one named": {
        CONFIG: {"added_tokens_decoder": {"@0": token("<one>", normalized=True)}, "eos_token": "<one>"}
    },
    "decoder of the same": {CONFIG: {"added_tokens_decoder": SAME, "eos_token": "</s>"}},
    "empty decoder": {CONFIG: {"added_tokens_decoder": {}, "eos_token": "<one>"}, MAP: {"pad_token": "<two>"}},
    "named, strings": {CONFIG: {"bos_token": "<one>", "eos_token": "<two>", "pad_token": "<Three>"}},
    "named, objects": {
        CONFIG: {"bos_token": as_object("<one>", lstrip=True), "eos_token": as_object("<two>", normalized=True)}
    },
    "named, of tokenizer.json": {CONFIG: {"bos_token": "<s>", "eos_token": "</s>"}},
    "named, plain in tokenizer.json": {CONFIG: {"eos_token": "<plain>"}},
    "named, an ordinary token": {CONFIG: {"pad_token": "ab"}},
    "named, no bos": {CONFIG: {"bos_token": None, "eos_token": "<one>"}},
    "named by the model": {
        CONFIG: {"image_token": "<image>", "add_bos_token": True, "audio_token": as_object("<one>")}
    },
    "a list": {CONFIG: {"additional_special_tokens": ["<one>", "<two>"]}},
    "a list of objects": {CONFIG: {"additional_special_tokens": [as_object("<one>", rstrip=True), "<two>"]}},
    "further ones": {CONFIG: {"extra_special_tokens": ["<one>", "</s>"]}},
    "named further ones": {CONFIG: {"extra_special_tokens": {"image_token": "<image>", "one_token": "<one>"}}},
    "both lists": {CONFIG: {"extra_special_tokens": ["<one>"], "additional_special_tokens": ["<two>"]}},
    "a list in both files": {
        CONFIG: {"additional_special_tokens": ["<one>"]}, MAP: {"additional_special_tokens": ["<two>"]}
    },
    "further ones in both files": {
        CONFIG: {"extra_special_tokens": ["<one>"]}, MAP: {"extra_special_tokens": ["<two>", "<one>"]}
    },
    "a list and added_tokens.json": {
        CONFIG: {"additional_special_tokens": ["<one>"]}, ADDED: {"<one>": "@0", "<Three>": "@1"}
    },
    "special tokens split": {CONFIG: {"split_special_tokens": True, "eos_token": "<one>"}},
}  # fmt: skip


@functools.cache
def backend(kind: str) -> tokenizers.Tokenizer:
    """Of one id a letter and "ab": bytes as GPT-2's, the marked spaces of Llama, or words under a normalizer."""
    first = {"<s>": 0, "</s>": 1, "<unk>": 2}
    if kind == "bytes":
        vocab = {letter: i for i, letter in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"])}
        made = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b")]))
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    elif kind == "spaces":
        pieces = ["\u2581", *(f"<0x{i:02X}>" for i in range(256)), *LETTERS, "ab"]
        vocab = first | {piece: i + 3 for i, piece in enumerate(pieces)}
        made = tokenizers.Tokenizer(
            models.BPE(vocab, [("a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
        )
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        made.decoder = decoders.Metaspace()
    else:
        vocab = first | {word: i + 3 for i, word in enumerate([*LETTERS, "ab"])}
        made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        made.normalizer, made.pre_tokenizer = tokenizers.normalizers.Lowercase(), pre_tokenizers.Whitespace()
    made.add_tokens(OWN)
    return made


# {kind: (model_type of config.json, class of tokenizer_config.json)}
KINDS = {
    "bytes": ("gpt2", "GPT2Tokenizer"),
    "spaces": ("llama", "LlamaTokenizer"),
    "words": ("llama", "PreTrainedTokenizerFast"),
}


def write(folder: Path, kind: str, files: dict[str, Any]) -> Path:
    own, free = backend(kind), backend(kind).get_vocab_size()

    def placed(value: Any) -> Any:
        if isinstance(value, dict):
            return {placed(key): placed(item) for key, item in value.items()}
        if isinstance(value, str) and value.startswith("@"):
            return free + int(value[1:])
        return own.token_to_id(value[1:]) if isinstance(value, str) and value.startswith("=") else value

    own.save(str(folder / "tokenizer.json"))
    model_type, name = KINDS[kind]
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for file, said in ({CONFIG: {}} | files).items():
        content = {"tokenizer_class": name} | said if file == CONFIG else said
        if kind != "words" and "added_tokens_decoder" in content:
            # The class rebuilds the tokenizer from the vocabulary and this list, which is complete in such folders.
            content = content | {"added_tokens_decoder": SAME | content["added_tokens_decoder"]}
        (folder / file).write_text(json.dumps(placed(content)))
    return folder


def probe() -> str:
    """Each token alone, within words, between spaces, and in another case."""
    said = [token.content for token in OWN] + list(NEW)
    return " ".join(f"x{t}y {t} z  {t}  {t.upper()} {t.lower()}{t}" for t in said) + " end"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_one_however_it_is_said(kind: str, way: str, tmp_path: Path) -> None:
    folder = write(tmp_path, kind, WAYS[way])
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_folder(folder)
    assert ours.encode(probe()) == theirs(probe(), add_special_tokens=False)["input_ids"]
    special = {i for i, token in theirs.added_tokens_decoder.items() if token.special} | set(theirs.all_special_ids)
    assert ours.special_ids == special
    if "bos_token" in WAYS[way].get(CONFIG, {}):
        assert ours.bos_id == theirs.bos_token_id
    unchanged = ours.sha256 == hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    assert unchanged == (way in REPEATS), "the hash of tokenizer.json alone, as older stores have it, where it is all"


# What is said in other files and in tokenizer.json just so: it decides nothing.
REPEATS = ("tokenizer.json alone", "named, of tokenizer.json", "decoder of the same", "special map, null")


def test_one_hash_means_the_same_ids(tmp_path: Path) -> None:
    known: dict[str, tuple[list[int], frozenset[int]]] = {}
    for number, files in enumerate(WAYS.values()):
        (folder := tmp_path / str(number)).mkdir()
        tokenizer = Tokenizer.from_folder(write(folder, "words", files))
        decided = (tokenizer.encode(probe()), tokenizer.special_ids)
        assert known.setdefault(tokenizer.sha256, decided) == decided
    assert len(known) > len(WAYS) // 2


DEMO = Path(load_lm.__code__.co_filename).parent / "demo"


def test_a_store_continues_where_the_files_beside_change_nothing(tmp_path: Path) -> None:
    """A store's identity has the hash: of tokenizer.json as before, until another file decides something."""
    folder = shutil.copytree(DEMO, tmp_path / "model")
    before = load_lm(str(folder)).identity
    assert before["tokenizer_sha256"] == hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    own = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    repeated = {str(said.pop("id")): said for said in own}
    (folder / CONFIG).write_text(json.dumps({"added_tokens_decoder": repeated, "chat_template": "{{ messages }}"}))
    assert load_lm(str(folder)).identity == before
    (folder / CONFIG).write_text(json.dumps({"added_tokens_decoder": repeated, "eos_token": "def"}))
    assert load_lm(str(folder)).identity["tokenizer_sha256"] != before["tokenizer_sha256"]


DAMAGE: dict[str, tuple[str, Any]] = {
    "a list": (CONFIG, []),
    "a decoder that is none": (CONFIG, {"added_tokens_decoder": 3}),
    "a decoder of numbers": (CONFIG, {"added_tokens_decoder": {"7": 3}}),
    "ids that are words": (CONFIG, {"added_tokens_decoder": {"seven": token("<one>")}}),
    "a property that is a word": (CONFIG, {"added_tokens_decoder": {"7": token("<one>") | {"lstrip": "no"}}}),
    "no content": (CONFIG, {"added_tokens_decoder": {"7": {"special": True}}}),
    "a list of numbers": (CONFIG, {"additional_special_tokens": [1]}),
    "one number": (CONFIG, {"extra_special_tokens": 1}),
    "a map of numbers": (MAP, {"additional_special_tokens": [1]}),
    "ids without a number": (ADDED, {"<one>": None}),
    "tokens in a list": (ADDED, ["<one>"]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_token_that_cannot_be_read_is_refused_with_its_file(damage: str, tmp_path: Path) -> None:
    file, content = DAMAGE[damage]
    folder = write(tmp_path, "words", {})
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(DataError, match=file):
        Tokenizer.from_folder(folder)


def test_a_token_that_the_model_does_not_have_is_refused_in_a_text_and_not_at_load(tmp_path: Path) -> None:
    """Text-only Gemma 3 has 262144 rows, and its tokenizer the token <image_soft_token> with the id 262144."""
    tokenizer = Tokenizer.from_folder(write(tmp_path, "words", {CONFIG: {"image_token": "<image>"}}))
    rows = tokenizer.largest_id
    own = tokenizer.for_rows(rows)
    assert own.encode("a ab z") == tokenizer.encode("a ab z")
    assert max(own.usable_ids) == rows - 1
    with pytest.raises(DataError, match=rf"token '<image>', whose id is {rows}; the model has only {rows} tokens"):
        own.encode_many(["a", "b <image> c"])
    assert tokenizer.encode("<image>") == tokenizer.for_rows(rows + 1).encode("<image>") == [rows]


def test_a_special_token_that_stands_beside_is_never_stored(tmp_path: Path) -> None:
    folder = write(tmp_path, "words", {CONFIG: {"eos_token": "<one>"}, MAP: {"additional_special_tokens": ["<two>"]}})
    tokenizer = Tokenizer.from_folder(folder)
    rows = ((0, "document", "0", "a b <one> c <two> d </s>") for _ in range(1))
    packer = Packer(Source({}, lambda start: rows, 1.0), tokenizer, 8, prepend_bos=False)
    (batch,) = packer.batches("heldout", 1)
    kept = batch.tokens[batch.keep].tolist()
    assert kept == [tokenizer.backend.token_to_id(word) for word in "abcd"]


# --- what is said where the two readings part -------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_readings_that_agree_say_nothing(kind: str, tmp_path: Path) -> None:
    assert disagreement(Tokenizer.from_folder(write(tmp_path, kind, {}))) == ""
    assert disagreement(Tokenizer(backend(kind), None, frozenset(), "")) == "", "made in memory: nothing to compare"


def test_a_text_with_other_ids_in_transformers_is_named(tmp_path: Path) -> None:
    """GPT2Tokenizer makes its own pre-tokenizer, by a setting that tokenizer.json does not follow."""
    tokenizer = Tokenizer.from_folder(write(tmp_path, "bytes", {CONFIG: {"add_prefix_space": True}}))
    text = "The quick brown fox, 1234567890 times!"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)(text, add_special_tokens=False)["input_ids"]
    said = disagreement(tokenizer)
    assert said.startswith(repr(text)) and f"[{', '.join(map(str, theirs[:12]))}, ...]" in said
    assert f"[{', '.join(map(str, tokenizer.encode(text)[:12]))}, ...]" in said and "which saejax follows" in said


def test_a_folder_that_transformers_cannot_read_is_said_to_be_uncompared(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, "words", {}))
    (tmp_path / CONFIG).write_text("{")
    assert "nothing compares its ids" in disagreement(tokenizer)
