"""Documents from every source, and their packing into rows that can be entered again anywhere."""

import csv
import dataclasses
import errno
import gzip
import io
import json
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import zstandard
from tokenizers import models, pre_tokenizers

from saejax.core.errors import ConfigError, DataError
from saejax.lm import load_lm
from saejax.text import (
    Document,
    PackedRows,
    Packer,
    Source,
    SourceConfig,
    TextConfig,
    Tokenizer,
    compressed,
    open_source,
)
from saejax.text.paths import ENDINGS
from saejax.text.sources import rows_of

N_WORDS, BOS, MASK = 50, 50, 51


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of one id a word; id 0 is an ordinary word, <bos> and <mask> are special."""
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(N_WORDS)}, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<bos>", "<mask>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"bos_token_id": BOS}))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def source_of(texts: list[str]) -> Source:
    """A source in memory; a document's group is its number."""

    def rows(start: int) -> Iterator[tuple[int, str, str, str]]:
        for index in range(start, len(texts)):
            yield index, f"d{index}", f"d{index}", texts[index]

    return Source({"source": "memory"}, rows, 0.3)


def random_texts(rng: np.random.Generator, documents: int, longest: int) -> list[str]:
    """Documents of 0 to `longest` words, among them w0 and <mask>."""
    words = [f"w{i}" for i in range(N_WORDS)] + ["<mask>"]
    lengths = rng.integers(0, longest + 1, documents)
    return [" ".join(rng.choice(words, n, p=[0.25, *[0.01] * (N_WORDS - 1), 0.26])) for n in lengths]


CASES = [
    (seed, documents, longest, context, rows, bos)
    for seed, (documents, longest, context, rows) in enumerate(
        [
            (60, 40, 16, 3),
            (40, 200, 32, 2),
            (80, 5, 24, 4),
            (25, 30, 2, 5),
            (30, 30, 7, 2),
            (3, 400, 64, 50),
            (0, 0, 8, 1),
        ]
    )
    for bos in (True, False)
]
PACKING = pytest.mark.parametrize(("seed", "documents", "longest", "context", "rows", "bos"), CASES)


# --- packing --------------------------------------------------------------------------------------


@PACKING
def test_every_token_of_every_document_is_there_once_in_order_and_apart(
    tokenizer: Tokenizer, seed: int, documents: int, longest: int, context: int, rows: int, bos: bool
) -> None:
    texts = random_texts(np.random.default_rng(seed), documents, longest)
    packer = Packer(source_of(texts), tokenizer, context, prepend_bos=bos)
    for split in ("train", "heldout"):
        found: dict[int, list[int]] = {}
        for batch in packer.batches(split, rows):
            check_shapes(batch, rows, context)
            for row in range(rows):
                for document, ids, keep in pieces(batch, row, context):
                    if bos:
                        assert ids[0] == BOS and not keep[0]
                    body = slice(1 if bos else 0, None)
                    assert keep[body] == [i != MASK for i in ids[body]]
                    assert len(ids[body]) > 0
                    found.setdefault(document, []).extend(ids[body])
        wanted = {d.index: tokenizer.encode(d.text) for d in packer.source.documents(split)}
        assert found == wanted
        assert list(found) == sorted(found)


def check_shapes(batch: PackedRows, rows: int, context: int) -> None:
    for field in ("tokens", "positions", "segments", "documents"):
        array = getattr(batch, field)
        assert (array.shape, array.dtype) == ((rows, context), np.int32)
    assert batch.keep.shape == (rows, context)
    assert batch.keep.dtype == np.bool_
    padding = batch.segments < 0
    assert (batch.documents[padding] == -1).all()
    assert not batch.keep[padding].any()


def pieces(batch: PackedRows, row: int, context: int) -> Iterator[tuple[int, list[int], list[bool]]]:
    """(document, ids, keep) of each piece of a row, having checked what must hold within it."""
    segments = batch.segments[row]
    count = int(segments.max()) + 1
    filled = int((segments >= 0).sum())
    assert (segments[:filled] >= 0).all(), "padding stands at the end"
    assert (np.diff(segments[:filled]) >= 0).all()
    for piece in range(count):
        at = np.flatnonzero(segments == piece)
        assert batch.positions[row, at].tolist() == list(range(len(at)))
        assert len(set(batch.documents[row, at])) == 1
        # No piece begins where there is room for almost no context.
        assert at[0] == 0 or context - at[0] >= 8
        yield int(batch.documents[row, at[0]]), batch.tokens[row, at].tolist(), batch.keep[row, at].tolist()


@PACKING
def test_every_cursor_leads_to_exactly_the_batches_that_remain(
    tokenizer: Tokenizer, seed: int, documents: int, longest: int, context: int, rows: int, bos: bool
) -> None:
    texts = random_texts(np.random.default_rng(seed), documents, longest)
    packer = Packer(source_of(texts), tokenizer, context, prepend_bos=bos)
    everything = list(packer.batches("train", rows))
    for number, batch in enumerate(everything):
        cursor = json.loads(json.dumps(batch.cursor))
        remainder = list(packer.batches("train", rows, start=cursor))
        assert cursor == batch.cursor, "the cursor it was given is not written to"
        assert len(remainder) == len(everything) - number
        for again, before in zip(remainder, everything[number:], strict=True):
            assert_same(again, before)


def test_where_the_tokenizer_is_called_does_not_matter(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    packer = Packer(source_of(random_texts(np.random.default_rng(9), 50, 40)), tokenizer, 16)
    wanted = list(packer.batches("train", 4))
    monkeypatch.setattr("saejax.text.packing._TOKENIZE_CHARS", 100)
    for again, before in zip(packer.batches("train", 4), wanted, strict=True):
        assert_same(again, before)


def assert_same(a: PackedRows, b: PackedRows) -> None:
    for field in dataclasses.fields(PackedRows):
        np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name), err_msg=field.name)


def test_without_padding_the_last_batch_has_the_rows_that_are_left(tokenizer: Tokenizer) -> None:
    packer = Packer(source_of(random_texts(np.random.default_rng(3), 30, 40)), tokenizer, 16)
    padded, bare = (list(packer.batches("train", 7, pad_last=pad)) for pad in (True, False))
    left = len(bare[-1].tokens)
    assert 0 < left < 7 == len(padded[-1].tokens)
    np.testing.assert_array_equal(padded[-1].tokens[:left], bare[-1].tokens)
    assert (padded[-1].segments[left:] == -1).all()


def test_id_0_is_a_word_like_any_other_where_there_is_no_bos(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null}')
    packer = Packer(source_of(["w0 w0 w3"] * 20), Tokenizer.from_folder(tmp_path), 8)
    batch = next(packer.batches("train", 1))
    assert batch.tokens[0, :3].tolist() == [0, 0, 3]
    np.testing.assert_array_equal(batch.keep, batch.segments >= 0)


def test_a_bos_that_is_also_a_word_is_left_out_only_where_it_was_put(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text('{"bos_token_id": 3}')
    packer = Packer(source_of(["w3 w0"] * 20), Tokenizer.from_folder(tmp_path), 8)
    batch = next(packer.batches("train", 1))
    assert batch.tokens[0, :3].tolist() == [3, 3, 0]
    assert batch.keep[0, :3].tolist() == [False, True, True]


def test_a_row_must_hold_two_tokens(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="context_length is 1"):
        Packer(source_of(["w0"]), tokenizer, 1)


# --- tokenizer ------------------------------------------------------------------------------------


def test_the_tokenizer_adds_nothing_pads_nothing_and_cuts_nothing(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[CLS]": 2}, unk_token="b"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["[CLS]"])
    backend.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 2)])
    backend.enable_padding(length=9)
    backend.enable_truncation(3)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode_many(["a b a b a", "", "a [CLS]"]) == [[0, 1, 0, 1, 0], [], [0, 2]]
    # What it would put in front of a text by itself is bos where no file names another.
    assert (tokenizer.bos_id, tokenizer.special_ids, tokenizer.largest_id) == (2, frozenset({2}), 2)


def sentencepiece(kind: str) -> tokenizers.Tokenizer:
    """As Llama 2 (its decoder takes one space from the front), Mistral's Metaspace, or BERT's word pieces."""
    if kind == "wordpiece":
        vocab = {"[UNK]": 0, "a": 1, "b": 2, "##b": 3}
        backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), tokenizers.decoders.WordPiece()
        return backend
    pieces = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", "a", "b", "\u2581a", "\u2581ab"]
    merges = [("\u2581", "a"), ("\u2581a", "b")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    if kind == "metaspace":
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    else:
        prepend, replace = tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")
        backend.normalizer = tokenizers.normalizers.Sequence([prepend, replace])
        d = tokenizers.decoders
        steps = [d.Replace("\u2581", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)]
        backend.decoder = d.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>"])
    return backend


@pytest.mark.parametrize("kind", ["llama", "metaspace", "wordpiece"])
def test_a_token_keeps_the_space_in_front_of_it(kind: str) -> None:
    tokenizer = Tokenizer(sentencepiece(kind), None, frozenset(), "0")
    ids = tokenizer.encode("a ab a b" if kind == "wordpiece" else "a ab a<s>")
    wanted = [" a", " a", "b", " a", " b"] if kind == "wordpiece" else [" a", " ab", " a", "<s>"]
    assert tokenizer.token_strings(ids) == wanted
    assert tokenizer.decode_inside(ids) == "".join(wanted)
    if kind == "llama":
        assert tokenizer.token_strings(tokenizer.encode("\u00e9")) == [" ", "\ufffd", "\ufffd"]
        assert tokenizer.decode_inside(tokenizer.encode("\u00e9")) == " \u00e9"
        assert tokenizer.pieces(tokenizer.encode("\u00e9")) == [" ", "\u00e9", ""]


@pytest.mark.parametrize("text", ["caf\u00e9", "\u65e5\u672c\u8a9e a", " \U0001f642!", "e\u0301", ""])
def test_pieces_add_up_to_the_text(text: str) -> None:
    """Letters of several tokens read as in the text; U+FFFD stands only where one is not whole."""
    tokenizer = load_lm("demo").tokenizer
    ids = tokenizer.encode(text)
    pieces = tokenizer.pieces(ids)
    assert len(pieces) == len(ids) and "".join(pieces) == text
    torn = tokenizer.encode("\u65e5")[:-1] + tokenizer.encode("a")
    assert tokenizer.pieces(torn)[-1] == "a" and "\ufffd" in tokenizer.pieces(torn)[0]


def test_a_lone_surrogate_is_read_as_text(tokenizer: Tokenizer) -> None:
    """JSON can hold one, UTF-8 cannot, and the tokenizer refuses the whole batch for it."""
    assert tokenizer.encode_many(["w2 \ud83d w3", "w4"]) == [[2, 1, 3], [4]]


@pytest.mark.parametrize(("settings", "bos"), [({"bos_token": None}, None), ({"bos_token": "<bos>"}, BOS), ({}, BOS)])
def test_a_tokenizer_that_has_no_bos_gets_none_from_config_json(
    folder: Path, tmp_path: Path, settings: dict[str, Any], bos: int | None
) -> None:
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(folder / name, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer.from_folder(tmp_path).bos_id == bos


SAID_ELSEWHERE = {
    "tokenizer_config.json": {"bos_token": "<bos>"},
    "special_tokens_map.json": {"bos_token": {"content": "<bos>", "lstrip": False}},
    "generation_config.json": {"bos_token_id": [BOS, 3]},
    "config.json": {"bos_token_id": None, "text_config": {"bos_token_id": BOS}},
}


@pytest.mark.parametrize("name", SAID_ELSEWHERE)
def test_bos_is_found_in_each_file_that_can_name_it(folder: Path, tmp_path: Path, name: str) -> None:
    shutil.copy(folder / "tokenizer.json", tmp_path)
    (tmp_path / name).write_text(json.dumps(SAID_ELSEWHERE[name]))
    packer = Packer(source_of(["w0 w3"] * 20), Tokenizer.from_folder(tmp_path), 8)
    assert next(packer.batches("train", 1)).tokens[0, :3].tolist() == [BOS, 0, 3]


def test_bos_is_refused_where_no_file_names_it(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "tokenizer.json", tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"which token is bos\. Name it by bos_token.*text\.prepend_bos=False"):
        Packer(source_of(["w0"]), tokenizer, 8)
    batch = next(Packer(source_of(["w0 w3"] * 20), tokenizer, 8, prepend_bos=False).batches("train", 1))
    assert batch.tokens[0, :2].tolist() == [0, 3]
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<start>"}')
    named = Tokenizer.from_folder(tmp_path)
    assert named.bos_id == MASK + 1, "a token that is only named is one more"
    with pytest.raises(DataError, match=r"bos token has the id 52, and the model has only 52 tokens"):
        named.for_rows(MASK + 1)


@pytest.mark.parametrize("bos", [52, -1, "0", True])
def test_a_bos_that_the_tokenizer_does_not_have_is_refused(folder: Path, tmp_path: Path, bos: Any) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": bos}))
    with pytest.raises(DataError, match=f"config.json: bos_token_id is {bos!r}"):
        Tokenizer.from_folder(tmp_path)


# --- sources --------------------------------------------------------------------------------------


def names(source: Source, split: str, start: int = 0) -> list[str]:
    return [d.name for d in source.documents(split, start)]


@pytest.fixture(scope="module")
def stdlib() -> Source:
    return open_source(TextConfig())


def test_the_standard_library_is_split_by_module(stdlib: Source) -> None:
    train, heldout = names(stdlib, "train"), names(stdlib, "heldout")
    modules = [{name.split("/")[0].removesuffix(".py") for name in split} for split in (train, heldout)]
    assert not modules[0] & modules[1]
    assert {"asyncio", "json", "argparse"} <= modules[0] | modules[1]
    assert not {"test", "site-packages", "encodings"} & (modules[0] | modules[1])
    assert len(train) + len(heldout) > 300
    assert 0.02 < len(modules[1]) / (len(modules[0]) + len(modules[1])) < 0.2
    assert train != sorted(train), "a hashed order, not the alphabet's"


def test_the_standard_library_is_the_same_every_time(stdlib: Source) -> None:
    again = open_source(TextConfig())
    assert again.identity == stdlib.identity
    assert list(again.documents("heldout")) == list(stdlib.documents("heldout"))


def entered_anywhere(source: Source) -> None:
    for split in ("train", "heldout"):
        everything = list(source.documents(split))
        for start in (0, 1, 7, 10_000):
            assert list(source.documents(split, start)) == [d for d in everything if d.index >= start]


def test_a_source_can_be_entered_at_any_document() -> None:
    entered_anywhere(source_of([f"text {i}" for i in range(40)]))


PACKED: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.compress}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    if ".parquet" in path.suffixes:
        pq.write_table(pa.Table.from_pylist(rows), path)
        return str(path)
    if {".csv", ".tsv"} & set(path.suffixes):
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, list(rows[0]), delimiter="\t" if ".tsv" in path.suffixes else ",")
        writer.writeheader()
        writer.writerows(rows)
        raw = table.getvalue().encode()
    elif ".json" in path.suffixes:
        raw = json.dumps(rows, indent=1).encode()
    else:
        raw = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(PACKED.get(path.suffix, bytes)(raw))
    return str(path)


def files(*paths: str, **settings: Any) -> Source:
    return open_source(TextConfig(source="files", paths=paths, heldout_fraction=0.3, **settings))


def both(source: Source) -> list[Document]:
    """The documents of both splits, in the source's order."""
    split = [*source.documents("train"), *source.documents("heldout")]
    assert len({d.index for d in split}) == len(split), "the splits are disjoint"
    return sorted(split, key=lambda d: d.index)


@pytest.mark.parametrize("suffix", [name for name in ENDINGS if not name.startswith(".txt")])
def test_rows_come_from_a_column_or_a_template(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saejax.text.rows._JSON_PIECE", 7)
    rows = [{"body": f'body é,\r\n"{i}" [', "title": f"title {i}", "n": i} for i in range(25)]
    path = write_rows(tmp_path / f"rows{suffix}", rows)
    column = files(path, column="body")
    assert [d.text for d in both(column)] == [row["body"] for row in rows]
    assert len(names(column, "heldout")) in range(2, 14)
    entered_anywhere(column)
    template = files(path, template="{title}: {body} {n}")
    assert both(template)[3].text == f"title 3: {rows[3]['body']} 3"
    assert template.identity != column.identity


@pytest.mark.parametrize("packed", PACKED)
def test_what_is_compressed_is_read_as_what_it_is(tmp_path: Path, packed: str) -> None:
    text = "\ufeffnaïve\r\n" + "".join(f"line {i}\n" for i in range(2000))
    plain, small = tmp_path / "a.txt", tmp_path / f"b.TXT{packed}"
    plain.write_bytes(text.encode())
    halves = (text[:7000].encode(), text[7000:].encode())  # files that are joined are one
    small.write_bytes(b"".join(map(PACKED[packed], halves)))
    assert both(files(str(small)))[0].text == both(files(str(plain)))[0].text == text[1:].replace("\r\n", "\n")
    by_line = [open_source(TextConfig(source="prompts", paths=(str(path),))) for path in (plain, small)]
    assert [d.text for d in both(by_line[0])] == [d.text for d in both(by_line[1])]
    assert both(by_line[1])[2000].name == f"b.TXT{packed}:2001"


def test_a_list_of_texts_has_no_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    texts = [f"text {i}" for i in range(30)]
    path.write_text(json.dumps(texts))
    assert [d.text for d in both(files(str(path), column="body"))] == texts
    assert both(files(str(path), template="<{text}>"))[3].text == "<text 3>"
    with pytest.raises(DataError, match=r"x\.json has no columns.*give \.jsonl, \.csv or"):
        list(rows_of(SourceConfig(source="files", paths=(str(path),))))
    path.write_text(" [ ] \n")
    assert both(files(str(path))) == []


@pytest.mark.parametrize("name", ["x.txt.gz", "x.jsonl.gz", "x.json.gz", "x.csv.gz", "y.csv.gz", "x.jsonl.zst"])
def test_a_bomb_is_refused_before_it_is_in_memory(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(path: Path, unpacked: Any = compressed._unpacked) -> Iterator[bytes]:
        for piece in unpacked(path):
            sizes.append(len(piece))
            yield piece

    monkeypatch.setattr(compressed, "_unpacked", counted)
    for module in ("compressed", "rows"):
        monkeypatch.setattr(f"saejax.text.{module}.LONGEST", 100_000)
    monkeypatch.setattr("saejax.text.rows._JSON_PIECE", 1 << 14)
    line = "a" * (4 << 20)
    texts = {"x.txt.gz": "a\n" * (1 << 20), "x.json.gz": f'["{line}', "y.csv.gz": 'text\n"' + "a\n" * (1 << 20)}
    (tmp_path / name).write_bytes(PACKED[Path(name).suffix](texts.get(name, line).encode()))
    longer = r"(one document|the row|line).* is unpacked longer than 100,000 bytes\. Split|record 1 is not JSON"
    with pytest.raises(DataError, match=rf"{name}, ({longer})"):
        both(files(str(tmp_path / name)))
    assert name.endswith(".zst") or sum(sizes) < 3 << 20


@pytest.mark.parametrize("packed", PACKED)
def test_a_damaged_or_cut_file_is_named(tmp_path: Path, packed: str) -> None:
    path = tmp_path / f"x.jsonl{packed}"
    rng = np.random.default_rng(0)
    rows = [{"text": rng.bytes(30).hex()} for _ in range(200)]
    whole = Path(write_rows(path, rows)).read_bytes()
    middle = len(whole) // 2
    bad = (b"", whole[:-9], whole[:middle], whole + b"tail", b"\0" * 99, b"no" + whole[2:])
    for raw in bad:
        path.write_bytes(raw)
        with pytest.raises(DataError, match=rf"x\.jsonl\{packed} is damaged or cut \(.*Restore it, or leave it out"):
            both(files(str(path)))


def test_without_zstandard_its_files_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "x.jsonl.zst", [{"text": "a"}])
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(DataError, match=r"x\.jsonl\.zst needs zstandard: pip install 'datasets>="):
        both(files(path))


def test_a_long_field_of_csv_is_read(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.csv", [{"text": "a" * 200_000, "n": 1}, {"text": "b", "n": 2}])
    assert [len(d.text) for d in both(files(path))] == [200_000, 1]


def test_blank_lines_and_blank_texts_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "  "}\n{"text": "b\\u2028c"}\n')
    assert [d.text for d in both(files(str(path)))] == ["a", "b\u2028c"]


def test_files_folders_and_globs(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/notes.md"):
        (tmp_path / name).write_text(f"text of {name}")
    write_rows(tmp_path / "d.jsonl", [{"text": "row"}])

    def texts(*paths: str) -> list[str]:
        return [d.text for d in both(files(*paths))]

    assert texts(str(tmp_path / "b.txt"), str(tmp_path / "a.txt")) == ["text of b.txt", "text of a.txt"]
    with pytest.warns(UserWarning, match=r"1 file is not read \(1 \.md\): it takes \.txt.*, \.parquet\.$"):
        assert texts(str(tmp_path)) == ["text of a.txt", "text of b.txt", "row", "text of sub/c.txt"]
    assert texts(str(tmp_path / "*.txt")) == ["text of a.txt", "text of b.txt"]
    assert texts(str(tmp_path / "**" / "*.txt")) == ["text of a.txt", "text of b.txt", "text of sub/c.txt"]
    assert both(files(str(tmp_path / "a.txt"), column="body"))[0].text == "text of a.txt"


def test_an_ending_is_one_in_any_case(tmp_path: Path) -> None:
    (tmp_path / "a.TXT").write_text("text")
    Path(write_rows(tmp_path / "b.jsonl", [{"text": "row"}])).rename(tmp_path / "b.JSONL")
    Path(write_rows(tmp_path / "c.parquet", [{"text": "table"}])).rename(tmp_path / "c.Parquet")
    assert [d.text for d in both(files(str(tmp_path)))] == ["text", "row", "table"]
    (tmp_path / "a.TXT").write_text("one\ntwo")
    prompts = open_source(TextConfig(source="prompts", paths=(str(tmp_path / "a.TXT"),)))
    assert [d.text for d in both(prompts)] == ["one", "two"]


def test_what_a_folder_holds_besides_is_told_with_its_remedy(tmp_path: Path) -> None:
    for name in ("a.txt", "b.bz2", "c.xls", "d.xls", "e.gz", "LICENSE", ".git/config", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    with pytest.warns(UserWarning) as caught:
        assert [d.text for d in both(files(str(tmp_path)))] == ["text"]
    (said,) = {str(warning.message) for warning in caught}
    assert "5 files are not read (2 .xls, 1 without an ending, 1 .bz2, 1 .gz): it takes .txt, .jsonl, .json, " in said
    assert "\n" not in said and len(said) < 500
    assert "as .jsonl.gz" in said and "unpack what is compressed" in said and "write tables as" in said
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"No text file at .* 5 files are not read \(2 \.xls.* unpack"):
        files(str(tmp_path))
    (tmp_path / "x.parquet.zst").touch()
    with pytest.raises(DataError, match=r"x\.parquet\.zst: cannot read '\.zst' files; .* Or name what is compressed"):
        files(str(tmp_path / "*.zst"))


def test_the_identity_of_files_is_their_content_not_their_place(tmp_path: Path) -> None:
    paths = [tmp_path / place / "a.txt" for place in ("here", "there", "elsewhere")]
    for path, text in zip(paths, ("one", "one", "two"), strict=True):
        path.parent.mkdir()
        path.write_text(text)
    identities = [files(str(path)).identity for path in paths]
    assert identities[0] == identities[1] != identities[2]
    assert json.loads(json.dumps(identities[0])) == identities[0]


def test_equal_texts_are_in_one_split_wherever_they_stand(tmp_path: Path) -> None:
    for n in range(40):
        (tmp_path / f"site{n}").mkdir()
        (tmp_path / f"site{n}" / "page.txt").write_text(f"text {n % 20}")
    write_rows(tmp_path / "rows.jsonl", [{"text": f"text {n}"} for n in (*range(20), *range(20))])
    source = files(str(tmp_path), str(tmp_path / "rows.jsonl"))
    train, heldout = ({d.text for d in source.documents(split)} for split in ("train", "heldout"))
    assert train | heldout == {f"text {n}" for n in range(20)} and not train & heldout and len(heldout) > 1
    assert len(both(source)) == 80, "nothing is left out"
    assert source.identity["split_by"] == "content"


def test_the_standard_library_holds_no_text_in_both_splits(stdlib: Source) -> None:
    train, heldout = ({d.text for d in stdlib.documents(split)} for split in ("train", "heldout"))
    assert not train & heldout


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(f"text of {name}")
    (tmp_path / "d.txt").symlink_to("c.txt")
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    (tmp_path / "around").symlink_to(".")
    every = ("b.txt", "*.txt", ".", "./b.txt", "around/a.txt")
    source = files(*(str(tmp_path / path) for path in every))
    assert [d.text for d in both(source)] == ["text of b", "text of a", "text of c"]
    assert source.identity == files(*(str(tmp_path / f"{name}.txt") for name in "bac")).identity
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    twice = tuple(str(tmp_path / path) for path in ("rows.jsonl", "*.jsonl", "around/rows.jsonl"))
    assert [row["a"] for _, row in rows_of(SourceConfig(source="files", paths=twice))] == [1, 2]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert [d.text for d in both(files(str(tmp_path / "a.txt")))] == ["one\ntwo\n"]
    prompts = open_source(TextConfig(source="prompts", paths=(str(tmp_path / "a.txt"),)))
    assert [d.text for d in both(prompts)] == ["one", "two"]


def test_a_lone_surrogate_in_a_row_has_a_split(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a \\ud83d"}\n{"text": "b"}\n')
    assert [d.text for d in both(files(str(tmp_path / "x.jsonl")))] == ["a \ud83d", "b"]


def _rows(name: str, rows: list[dict[str, Any]]) -> Callable[[Path], Any]:
    return lambda folder: write_rows(folder / name, rows)


def _bytes(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content)


def _lines(content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / "x.jsonl").write_bytes(content)


NO_COLUMN = r"x\.jsonl, row 1: no column 'txt' for text\.column; the row has body, id"
NO_FIELD = r"row 1: no column 'title' for text\.template; the row has text"
TEXT_ROW = _rows("x.jsonl", [{"text": "a"}])
NULLS = _rows("x.jsonl", [{"q": "a", "a": "b"}, {"q": "a", "a": None, "meta": {"by": None}}])
PROMPTS = {"source": "prompts"}
# {case: (what is in the folder, the path that is read, settings, the message)}
BAD_FILES: dict[str, tuple[Callable[[Path], Any], str, dict[str, Any], str]] = {
    "missing": (TEXT_ROW, "gone.txt", {}, r"No text file at '.*gone\.txt' \(text\.paths\)"),
    "empty glob": (TEXT_ROW, "*.txt", {}, r"No text file at '.*\*\.txt'"),
    "suffix": (lambda f: (f / "x.xls").write_text("a"), "x.xls", {}, r"x\.xls: cannot read '\.xls'.*\.txt"),
    "bad line": (_lines(b'{"text": "a"}\n{"text": \n'), "x.jsonl", {}, r"x\.jsonl, line 2 is not JSON"),
    "not UTF-8": (_lines(b'{"text": "a"}\n\n{"text": "\xff"}\n'), "x.jsonl", {}, "line 3 is not JSON"),
    "too deep": (_lines(b"[" * 200_000), "x.jsonl", {}, r"x\.jsonl, line 1 is not JSON"),
    "no object": (_lines(b'{"text": "a"}\n["b"]\n'), "x.jsonl", {}, r"x\.jsonl, line 2 is a list"),
    "column": (_rows("x.jsonl", [{"body": "a", "id": 1}]), "x.jsonl", {"column": "txt"}, NO_COLUMN),
    "later column": (_rows("x.jsonl", [{"text": "a"}, {"b": "a"}]), "x.jsonl", {}, "row 2: no column 'text'"),
    "parquet column": (_rows("x.parquet", [{"b": "a"}]), "x.parquet", {}, r"x\.parquet, row 1: no column 'text'"),
    "not text": (_rows("x.jsonl", [{"text": 5}]), "x.jsonl", {}, "row 1: column 'text' holds int, not text"),
    "null": (_rows("x.parquet", [{"text": "a"}, {"text": None}]), "x.parquet", {}, "row 2.*holds NoneType"),
    "template": (TEXT_ROW, "x.jsonl", {"template": "{title}"}, NO_FIELD),
    "template syntax": (TEXT_ROW, "x.jsonl", {"template": "{text"}, r"template '\{text' cannot be filled"),
    "template with a null": (NULLS, "x.jsonl", {"template": "{q}: {a}"}, r"x\.jsonl, row 2: 'a' is null, and text\.te"),
    "template, deep null": (
        _rows("x.jsonl", [{"m": {"a": None}}]),
        "x.jsonl",
        {"template": "{m[a]}"},
        r"'m\[a\]' is n",
    ),
    "template by number": (
        TEXT_ROW,
        "x.jsonl",
        {"template": "{}"},
        r"template '\{\}' cannot be filled.*name the column",
    ),
    "Latin-1": (_bytes("x.txt", "naïve".encode("latin-1")), "x.txt", {}, r"x\.txt is not UTF-8.*byte 2 is 0xef.*iconv"),
    "a late byte": (_bytes("x.txt", b"a" * 70_000 + b"\xff"), "x.txt", PROMPTS, "byte 70,000 is 0xff"),
    "UTF-16": (_bytes("x.txt", "\ufeffa".encode("utf-16-le")), "x.txt", {}, "byte 0 is 0xff"),
    "NUL": (_bytes("x.txt", b"ab\n\0c\xff"), "x.txt", {}, "byte 3 is 0x00"),
    "NUL in prompts": (_bytes("x.txt", b"ab\n\0c"), "x.txt", PROMPTS, "byte 3 is 0x00"),
    "NUL behind letters of two bytes": (_bytes("x.txt", "ääää\n\0".encode()), "x.txt", {}, "byte 9 is 0x00"),
    "** within a name": (TEXT_ROW, "**b**", {}, r"text\.paths"),
    "5,000 characters": (TEXT_ROW, "x" * 5000, {}, r"text\.paths.*5,0\d\d characters"),
    "NUL in a path": (TEXT_ROW, "a\0b*", {}, r"text\.paths"),
    "name of no UTF-8": (
        _bytes("x\udcff.txt", b"a"),
        "*.txt",
        {},
        r"x\\udcff\.txt'?: the name of this file is not UTF-8",
    ),
    "line break in a name": (_bytes("x\ny.xls", b"a"), "*.xls", {}, r"x\\ny\.xls'?: cannot read"),
    "NUL in what is compressed": (
        _bytes("x.txt.gz", gzip.compress(b"ab\n\0c")),
        "x.txt.gz",
        {},
        r"x\.txt\.gz is not UTF-8.*byte 3",
    ),
    "JSON that is no list": (_bytes("x.json", b'{"data": []}'), "x.json", {}, r"x\.json holds no list; name.*\.jsonl"),
    "JSON of numbers": (_bytes("x.json", b'["a", 12]'), "x.json", {}, r"x\.json, record 2 is a int, not an object"),
    "JSON that is cut": (_bytes("x.json", b'["a", "b'), "x.json", {}, r"x\.json, record 2 is not JSON, or .* cut: U"),
    "JSON without its end": (_bytes("x.json", b'["a", "b"'), "x.json", {}, r"record 3 is not JSON, or the file is cut"),
    "JSON with a comma too many": (_bytes("x.json", b'["a",]'), "x.json", {}, r"record 2 is not JSON.*Expecting value"),
    "JSON without a comma": (_bytes("x.json", b'["a" "b"]'), "x.json", {}, r"record 2 is not JSON.*Expecting ','"),
    "JSON behind its list": (_bytes("x.json", b'["a"]\n["b"]'), "x.json", {}, r"goes on behind its list of 1 records"),
    "JSON too deep": (_bytes("x.json", b"[" * 200_000), "x.json", {}, r"x\.json, record 1 is not JSON"),
    "JSON of no UTF-8": (_bytes("x.json", b'["a", "\xff"]'), "x.json", {}, "x.json is not UTF-8.*byte 7 is 0xff"),
    "CSV column": (_bytes("x.csv", b"a,b\n1,2\n"), "x.csv", {}, r"x\.csv, row 1: no column 'text'.*the row has a, b"),
    "CSV field": (_bytes("x.csv", b"text,b\n1,2\n\n1\n"), "x.csv", {}, r"x\.csv, line 4 ends a row of 1 fields; .* 2"),
    "CSV quote": (_bytes("x.csv", b'text\n"a"b\n'), "x.csv", {}, r"x\.csv, line 2 is not CSV: "),
    "CSV that is cut": (_bytes("x.csv", b'text\n"a\nb'), "x.csv", {}, r"x\.csv, line 3 is not CSV: unexpected end"),
    "CSV of two columns": (_bytes("x.csv", b"text,text\n1,2\n"), "x.csv", {}, r"x\.csv names a column twice: text"),
    "CSV of Latin-1": (_bytes("x.csv", "text\nï".encode("latin-1")), "x.csv", {}, "x.csv is not UTF-8.*byte 5 is 0xef"),
    "no parquet": (lambda f: (f / "x.parquet").write_bytes(b"PAR1"), "x.parquet", {}, "is not a readable parquet"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_named_with_line_and_column(tmp_path: Path, case: str) -> None:
    make, path, settings, message = BAD_FILES[case]
    make(tmp_path)
    with pytest.raises((DataError, ConfigError), match=message) as caught:
        both(open_source(TextConfig(**({"source": "files", "paths": (str(tmp_path / path),)} | settings))))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_the_home_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"text\.paths holds '~nosuchuser/x', which is no path.*Give a file"):
        files("~nosuchuser/x")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "x.jsonl", [{"text": "a"}])
    source = files(path)
    monkeypatch.setattr(Path, "open", _refused)
    with pytest.raises(DataError, match=r"x\.jsonl cannot be read: Permission denied\. Mend it, or leave"):
        files(path)
    with pytest.raises(DataError, match=r"x\.jsonl cannot be read: Permission denied\. Mend it, or leave"):
        both(source)


def _refused(*_: Any, **__: Any) -> Any:
    raise PermissionError(errno.EACCES, "Permission denied")


HUB = {"source": "hub", "dataset": "o/d"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "web"}, "text.source is 'web'. There are: stdlib, files, prompts, hub"),
        ({"source": "files"}, "text.paths is empty"),
        ({"source": "hub"}, "text.dataset is empty"),
        ({"source": "prompts"}, "text.source is 'prompts' but text.paths is empty"),
        ({"source": "files", "paths": ("a.txt", "")}, "text.paths holds an empty path"),
        ({"weight": 0.0}, "text.weight is 0.0; it must be positive"),
        ({"weight": float("nan")}, "text.weight is nan"),
        ({"chat": True}, "text.chat needs rows with columns"),
        ({**HUB, "chat": True, "template": "{a}"}, "text.chat and text.template both write"),
        ({**HUB, "prompt": "q"}, "read with text.chat=True alone"),
        ({**HUB, "chat": True, "response": "a"}, "text.response is 'a' without text.prompt"),
        ({"sources": (SourceConfig(),), "column": "body"}, "text.sources is set, so text.column is never read"),
        ({"mix_seed": -1}, "text.mix_seed is -1"),
        ({"heldout_fraction": 0.0}, "text.heldout_fraction is 0.0"),
        ({"heldout_fraction": 1.0}, "text.heldout_fraction is 1.0"),
        ({"context_length": 1}, "text.context_length is 1"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextConfig(**settings)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="no split 'test'; choose one of train, heldout"):
        next(source_of(["a"]).documents("test"))


# --- hub ------------------------------------------------------------------------------------------


class Stream:
    """As much of a streamed `datasets` dataset as the source may rely on."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def skip(self, n: int) -> "Stream":
        return Stream(self.rows[n:])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for `datasets`, with one dataset `o/d`; the list is of the calls."""
    calls: list[Any] = []

    def load_dataset(*args: Any, **settings: Any) -> Stream:
        calls.append((args, settings))
        if args[0] != "o/d":
            raise ConnectionError("no route to the hub")
        return Stream([{"text": f"text {i}", "n": i} for i in range(40)])

    def load_from_disk(path: str) -> Any:
        calls.append(path)
        return types.SimpleNamespace(to_iterable_dataset=lambda: Stream([{"text": f"text {i}"} for i in range(40)]))

    there = types.SimpleNamespace(load_dataset=load_dataset, load_from_disk=load_from_disk)
    monkeypatch.setitem(sys.modules, "datasets", there)
    return calls


def test_a_hub_dataset_is_streamed_at_its_revision(hub: list[Any]) -> None:
    config = TextConfig(source="hub", dataset="o/d", subset="en", revision="abc", heldout_fraction=0.3)
    source = open_source(config)
    assert hub == [(("o/d", "en"), {"split": "train", "revision": "abc", "streaming": True})]
    assert [d.text for d in both(source)] == [f"text {i}" for i in range(40)]
    entered_anywhere(source)
    assert source.identity["revision"] == "abc"
    other = open_source(dataclasses.replace(config, template="{n}"))
    assert both(other)[11].text == "11"
    assert other.identity["split_by"] == "content"


def test_a_dataset_that_was_saved_to_a_folder_is_read(hub: list[Any], tmp_path: Path) -> None:
    (tmp_path / "state.json").touch()
    source = open_source(TextConfig(source="hub", dataset=str(tmp_path), heldout_fraction=0.3))
    assert [d.text for d in both(source)] == [f"text {i}" for i in range(40)] and hub == [str(tmp_path)]
    entered_anywhere(source)


def test_hub_errors_name_the_dataset(hub: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"'o/missing' cannot be had from the hub .ConnectionError: no route.*network"):
        open_source(TextConfig(source="hub", dataset="o/missing"))
    with pytest.raises(DataError, match=r"o/d:0: no column 'body' for text\.column; the row has text, n"):
        both(open_source(TextConfig(source="hub", dataset="o/d", column="body")))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the datasets package: pip install 'datasets>="):
        open_source(TextConfig(source="hub", dataset="o/d"))
