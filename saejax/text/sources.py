"""The kinds of sources: the standard library, files, files of prompts, and datasets of the hub."""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import string
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from saejax.core.errors import ConfigError, DataError
from saejax.core.hub import check_hub, unreachable
from saejax.text.chat import ChatTemplate
from saejax.text.config import SourceConfig, TextConfig
from saejax.text.documents import Source, hash_fraction
from saejax.text.mixture import mixed
from saejax.text.paths import ending, files_of, short, shown
from saejax.text.tokenizer import Tokenizer

# Parts of the standard library that some distributions leave out, that are tables rather than text,
# or that belong to tests.
_STDLIB_LEFT_OUT = {
    *("test", "tests", "idle_test"),
    *("lib2to3", "encodings", "_pyrepl", "__phello__"),
    *("site-packages", "dist-packages", "__pycache__"),
}

# (row, where it stands) -> its text
TextOf = Callable[[dict[str, Any], str], str]


def open_source(config: TextConfig, tokenizer: Tokenizer | None = None) -> Source:
    """The source, or the mixture of sources, that a configuration names.

    Args:
        tokenizer: of the model, for its chat template; only text.chat asks for it.

    Raises:
        ConfigError: chat without a tokenizer, or a mixture with a weight that is too small.
        DataError: a file or dataset that cannot be read, or a tokenizer without a chat template; the message names it.
    """
    if any(part.chat for part in config.parts) and tokenizer is None:
        raise ConfigError("text.chat is set, and no tokenizer is given whose chat template could write the text.")
    kinds = {"stdlib": _open_stdlib, "files": _open_files, "prompts": _open_files, "hub": _open_hub}
    sources = []
    for part in config.parts:
        chat = tokenizer.chat_template.on(part.chat_date) if part.chat and tokenizer is not None else None
        sources.append(kinds[part.source](part, config, chat))
    if not config.sources:
        return sources[0]
    return mixed(sources, [part.weight for part in config.sources], config.mix_seed, config.heldout_fraction)


def _open_stdlib(config: SourceConfig, whole: TextConfig, chat: ChatTemplate | None) -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    names, digest = _stdlib_below(root)

    def rows(start: int) -> Iterator[tuple[int, str, str, str]]:
        for index in range(start, len(names)):
            name = names[index]
            text = (root / name).read_text(encoding="utf-8", errors="replace")
            yield index, name, name.split("/")[0].removesuffix(".py"), text

    return Source({"source": "stdlib", "sha256": digest}, rows, whole.heldout_fraction)


@functools.cache  # it does not change while a process runs
def _stdlib_below(root: Path) -> tuple[list[str], str]:
    """(names of its files, relative to `root`, the sha256 of names and contents)."""
    files: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _STDLIB_LEFT_OUT]  # installed packages are many
        files += (Path(folder, name) for name in names if name.endswith(".py") and name not in _STDLIB_LEFT_OUT)
    # is_file: a distribution may leave a dangling link.
    sized = (path for path in files if path.is_file() and path.stat().st_size > 200)
    # Hashed order: a capture that stops early has still seen the whole library evenly.
    chosen = sorted((path.relative_to(root).as_posix() for path in sized), key=hash_fraction)
    if not chosen:
        raise DataError(f"No .py file of the standard library below {root}; use text.source='files' instead.")
    digest = hashlib.sha256()
    for name in chosen:
        digest.update(name.encode() + b"\0" + (root / name).read_bytes())
    return chosen, digest.hexdigest()


def _open_files(config: SourceConfig, whole: TextConfig, chat: ChatTemplate | None) -> Source:
    files = files_of(config.paths)
    digest = hashlib.sha256()
    for path in files:
        with _readable(path), path.open("rb") as handle:
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            digest.update(hashlib.file_digest(handle, "sha256").digest())

    text_of = row_writer(config, chat)

    def rows(start: int) -> Iterator[tuple[int, str, str, str]]:
        everything = itertools.chain.from_iterable(_file_texts(path, config, text_of) for path in files)
        for index, (name, text) in enumerate(everything):
            if index >= start:
                yield index, name, text, text

    identity = {"source": config.source, "files": [path.name for path in files], "sha256": digest.hexdigest()}
    return Source(identity | _identity_of_rows(config, chat), rows, whole.heldout_fraction)


def _identity_of_rows(config: SourceConfig, chat: ChatTemplate | None) -> dict[str, Any]:
    """The part of an identity that says how rows become texts; the text of a document decides its split."""
    conversation = {"chat": [chat.identity, config.prompt, config.response]} if chat else {}
    return {"column": config.column, "template": config.template, "split_by": "content"} | conversation


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{shown(path)} cannot be read: {error.strerror or error}. Mend it, or leave it out of text.paths."
        ) from None


def _file_texts(path: Path, config: SourceConfig, text_of: TextOf) -> Iterator[tuple[str, str]]:
    is_txt, by_line = ending(path) == ".txt", config.source == "prompts"
    for number, row in enumerate(_read(path, by_line), 1):
        # A .txt file has one field, whatever column the other files are read from.
        plain = is_txt and not config.template and not config.chat
        text = row["text"] if plain else text_of(row, f"{shown(path)}, row {number}")
        yield path.name if is_txt and not by_line else f"{path.name}:{number}", text


def row_writer(config: SourceConfig, chat: ChatTemplate | None) -> TextOf:
    """(row, where it stands) -> its text: a column, the template filled with its columns, or a conversation.

    The writer raises DataError for a row without the columns that are asked for, and names the row.
    """
    if chat is not None:
        return functools.partial(_conversation, config, chat)
    if config.template:
        return functools.partial(_filled, config.template)
    return lambda row, where: _text_in(row, config.column, "text.column", where)


def _column(row: dict[str, Any], column: str, setting: str, where: str) -> Any:
    if column not in row:
        raise DataError(f"{where}: no column {column!r} for {setting}; the row has {_columns(row)}.")
    return row[column]


def _text_in(row: dict[str, Any], column: str, setting: str, where: str) -> str:
    value = _column(row, column, setting, where)
    if not isinstance(value, str):
        raise DataError(f"{where}: column {column!r} holds {type(value).__name__}, not text.")
    return value


def _columns(row: dict[str, Any]) -> str:
    return short(", ".join(name if name.isprintable() else repr(name) for name in map(str, row)))


def _filled(template: str, row: dict[str, Any], where: str) -> str:
    try:
        return _Filling(where).vformat(template, (), row)
    except (KeyError, IndexError, AttributeError) as error:
        raise DataError(f"{where}: no column {error} for text.template; the row has {_columns(row)}.") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{where}: text.template {template!r} cannot be filled: {error}.") from None


class _Filling(string.Formatter):
    """`str.format_map`, but for nulls: "None" is no text."""

    def __init__(self, where: str) -> None:
        self._where = where

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if isinstance(key, int):
            raise ValueError("a field is a number; name the column")
        return super().get_value(key, args, kwargs)

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value, first = super().get_field(field_name, args, kwargs)
        if value is None:
            raise DataError(
                f"{self._where}: {field_name!r} is null, and text.template asks for it. Give it a value, or leave the "
                "row out."
            )
        return value, first


def _conversation(config: SourceConfig, chat: ChatTemplate, row: dict[str, Any], where: str) -> str:
    if config.prompt:
        columns = [("user", config.prompt, "text.prompt"), ("assistant", config.response, "text.response")]
        messages = [
            {"role": role, "content": _text_in(row, column, setting, where)}
            for role, column, setting in columns
            if column
        ]
    else:
        messages = _column(row, config.column, "text.column", where)
        fits = isinstance(messages, list) and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        )
        if not fits or not messages:
            raise DataError(
                f"{where}: column {config.column!r} is no conversation: text.chat wants a list of "
                '{"role": ..., "content": ...} there, or name the columns of a pair by text.prompt and text.response.'
            )
    try:
        return chat.render(messages)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def _read(path: Path, by_line: bool = False) -> Iterator[dict[str, Any]]:
    """The rows of a file. A .txt has one, {"text": all of it}; `by_line` one for each line.

    Raises:
        DataError: it cannot be read, or is not what its ending says; the message names it.
    """
    with _readable(path):
        if ending(path) == ".jsonl":
            yield from _read_jsonl(path)
        elif ending(path) == ".parquet":
            yield from _read_parquet(path)
        elif by_line:
            yield from ({"text": line.removesuffix("\n")} for line in _text_lines(path))
        else:
            yield {"text": "".join(_text_lines(path))}


def _text_lines(path: Path) -> Iterator[str]:
    """The lines of a file of UTF-8, each with its end, without a byte order mark in front.

    Raises:
        DataError: a byte that is no UTF-8, or a NUL, which text has none of; names the byte.
    """
    try:
        with path.open(encoding="utf-8-sig") as handle:
            for line in handle:
                if "\0" in line:
                    raise _not_text(path)
                yield line
    except UnicodeDecodeError:
        raise _not_text(path) from None


def _not_text(path: Path) -> DataError:
    raw = path.read_bytes()
    try:
        raw.decode()
        at = raw.find(b"\0")
    except UnicodeDecodeError as error:
        at = raw.find(b"\0", 0, error.start) if b"\0" in raw[: error.start] else error.start
    return DataError(
        f"{shown(path)} is not UTF-8 text: byte {at:,} is 0x{raw[at]:02x}. Convert it, as by iconv -t UTF-8 -f <its "
        "encoding>, or leave it out of text.paths."
    )


def _read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as handle:
        for number, line in enumerate(handle, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number without end, too deep
                raise DataError(f"{shown(path)}, line {number} is not JSON: {error}.") from None
            if not isinstance(row, dict):
                kind = type(row).__name__
                raise DataError(f"{shown(path)}, line {number} is a {kind}, not an object with columns.")
            yield row


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"Reading {shown(path)} needs pyarrow: pip install 'saejax[data]'.") from None
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (ArrowException, OSError, ValueError, OverflowError) as error:
        why = " ".join(str(error).split())
        raise DataError(f"{shown(path)} is not a readable parquet file: {why}") from None


def _open_hub(config: SourceConfig, whole: TextConfig, chat: ChatTemplate | None) -> Source:
    stream = _hub_stream(config)
    text_of = row_writer(config, chat)

    def rows(start: int) -> Iterator[tuple[int, str, str, str]]:
        for index, name, row in _hub_rows(config, stream, start):
            text = text_of(row, name)
            yield index, name, text, text

    keys = ("source", "dataset", "subset", "dataset_split", "revision")
    identity = {key: getattr(config, key) for key in keys}
    return Source(identity | _identity_of_rows(config, chat), rows, whole.heldout_fraction)


_HUB_REMEDY = (
    "Check the name, the revision and the network; a downloaded copy works with text.source='files'. The same "
    "command continues where it was."
)


def _hub_stream(config: SourceConfig) -> Any:
    """The dataset, opened for streaming."""
    try:
        import datasets
    except ImportError:
        raise DataError("text.source='hub' needs the datasets package: pip install 'saejax[data]'.") from None
    if not Path(config.dataset).exists():
        check_hub("dataset", config.dataset, config.revision, _HUB_REMEDY)
    try:
        return datasets.load_dataset(
            config.dataset,
            config.subset or None,
            split=config.dataset_split,
            revision=config.revision or None,
            streaming=True,
        )
    except Exception as error:  # the library raises many kinds; all mean that the data cannot be had
        raise unreachable("dataset", config.dataset, error, _HUB_REMEDY) from None


def _hub_rows(config: SourceConfig, stream: Any, start: int) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(index, where it stands, row) of a dataset, from `start` on."""
    stored = iter(stream.skip(start))
    for index in itertools.count(start):
        name = f"{config.dataset}:{index}"
        try:
            row = next(stored)
        except StopIteration:
            return
        except Exception as error:  # the network, or a damaged file of the dataset
            raise unreachable("dataset", name, error, _HUB_REMEDY) from None
        yield index, name, row


def rows_of(config: SourceConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, its columns) of each row of files or of a dataset of the hub, in order.

    Raises:
        DataError: it cannot be read, or a .txt, which has no columns; the message names it.
    """
    if config.source == "hub":
        yield from ((name, row) for _, name, row in _hub_rows(config, _hub_stream(config), 0))
        return
    for path in files_of(config.paths):
        if ending(path) == ".txt":
            raise DataError(f"{shown(path)}: a .txt has no columns, which are wanted here; give .jsonl or .parquet.")
        for number, row in enumerate(_read(path), 1):
            yield f"{shown(path)}, row {number}", row
