"""The kinds of sources: the standard library, files, files of prompts, and datasets of the hub."""

import functools
import hashlib
import itertools
import os
import string
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from saejax.core.errors import ConfigError, DataError
from saejax.core.extras import installing
from saejax.core.hub import check_hub, unreachable
from saejax.text.chat import ChatTemplate
from saejax.text.config import SourceConfig, TextConfig
from saejax.text.documents import Source, hash_fraction
from saejax.text.mixture import mixed
from saejax.text.paths import files_of, kind_of, shown
from saejax.text.rows import column_names, read_rows, readable
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
        with readable(path), path.open("rb") as handle:
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


def _file_texts(path: Path, config: SourceConfig, text_of: TextOf) -> Iterator[tuple[str, str]]:
    whole = kind_of(path) == ".txt" and config.source != "prompts"
    for number, row in enumerate(read_rows(path, not whole), 1):
        if isinstance(row, dict):
            text = text_of(row, f"{shown(path)}, row {number}")
        elif config.template or config.chat:
            text = text_of({"text": row}, f"{shown(path)}, row {number}")
        else:
            text = row  # whatever column the other files are read from
        yield path.name if whole else f"{path.name}:{number}", text


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
        raise DataError(f"{where}: no column {column!r} for {setting}; the row has {column_names(row)}.")
    return row[column]


def _text_in(row: dict[str, Any], column: str, setting: str, where: str) -> str:
    value = _column(row, column, setting, where)
    if not isinstance(value, str):
        raise DataError(f"{where}: column {column!r} holds {type(value).__name__}, not text.")
    return value


def _filled(template: str, row: dict[str, Any], where: str) -> str:
    try:
        return _Filling(where).vformat(template, (), row)
    except (KeyError, IndexError, AttributeError) as error:
        raise DataError(f"{where}: no column {error} for text.template; the row has {column_names(row)}.") from None
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
        raise DataError(f"text.source='hub' needs the datasets package: {installing('data')}") from None
    if not Path(config.dataset).exists():
        check_hub("dataset", config.dataset, config.revision, _HUB_REMEDY)
    try:
        if Path(config.dataset, "state.json").is_file():  # what Dataset.save_to_disk writes
            return datasets.load_from_disk(config.dataset).to_iterable_dataset()
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
        DataError: it cannot be read, or has no columns, as a .txt and a .json of texts; the message names it.
    """
    if config.source == "hub":
        yield from ((name, row) for _, name, row in _hub_rows(config, _hub_stream(config), 0))
        return
    for path in files_of(config.paths):
        for number, row in enumerate(read_rows(path, by_line=True), 1):
            if isinstance(row, str):
                raise DataError(f"{shown(path)} has no columns, which are wanted here; give .jsonl, .csv or .parquet.")
            yield f"{shown(path)}, row {number}", row
