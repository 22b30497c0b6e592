"""The kinds of sources: the standard library, files, files of prompts, and datasets of the hub."""

import functools
import hashlib
import itertools
import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from saejax.core.errors import ConfigError, DataError
from saejax.core.hub import check_hub, unreachable
from saejax.text.chat import ChatTemplate
from saejax.text.config import SourceConfig, TextConfig
from saejax.text.documents import Source, hash_fraction
from saejax.text.mixture import mixed
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
        chat = tokenizer.chat_template if part.chat and tokenizer is not None else None
        sources.append(kinds[part.source](part, config.heldout_fraction, chat))
    if not config.sources:
        return sources[0]
    return mixed(sources, [part.weight for part in config.sources], config.mix_seed, config.heldout_fraction)


def _open_stdlib(config: SourceConfig, heldout_fraction: float, chat: ChatTemplate | None) -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in root.rglob("*.py")
        # is_file: a distribution may leave a dangling link.
        if not _STDLIB_LEFT_OUT & set(path.relative_to(root).parts) and path.is_file() and path.stat().st_size > 200
    ]
    # Hashed order: a capture that stops early has still seen the whole library evenly.
    names = sorted((p.relative_to(root).as_posix() for p in files), key=hash_fraction)
    if not names:
        raise DataError(f"No .py file of the standard library below {root}; use text.source='files' instead.")
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode() + b"\0" + (root / name).read_bytes())

    def rows(start: int) -> Iterator[tuple[int, str, str, str]]:
        for index in range(start, len(names)):
            name = names[index]
            text = (root / name).read_text(encoding="utf-8", errors="replace")
            yield index, name, name.split("/")[0].removesuffix(".py"), text

    return Source({"source": "stdlib", "sha256": digest.hexdigest()}, rows, heldout_fraction)


def _open_files(config: SourceConfig, heldout_fraction: float, chat: ChatTemplate | None) -> Source:
    files = list(itertools.chain.from_iterable(_expand(pattern) for pattern in config.paths))
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())

    text_of = row_writer(config, chat)

    def rows(start: int) -> Iterator[tuple[int, str, str, str]]:
        everything = itertools.chain.from_iterable(_file_texts(path, config, text_of) for path in files)
        for index, (name, text) in enumerate(everything):
            if index >= start:
                yield index, name, name, text

    identity = {
        "source": config.source,
        "files": [path.name for path in files],
        "sha256": digest.hexdigest(),
        "column": config.column,
        "template": config.template,
    }
    identity |= _chat_identity(config, chat)
    return Source(identity, rows, heldout_fraction)


def _expand(pattern: str) -> list[Path]:
    """Files behind one entry of `text.paths`: a file, a folder (its text files), or a glob pattern."""
    path = Path(pattern).expanduser()
    if path.is_file():
        found = [path]
    elif path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in _READERS and p.is_file())
    else:
        anchor = Path(path.anchor) if path.is_absolute() else Path()
        found = sorted(p for p in anchor.glob(str(path.relative_to(path.anchor))) if p.is_file())
    if not found:
        raise DataError(f"No text file at {pattern!r} (text.paths). Give a file, a folder or a glob pattern.")
    for p in found:
        if p.suffix not in _READERS:
            raise DataError(f"{p}: cannot read {p.suffix!r} files; text.paths takes {', '.join(_READERS)}.")
    return found


def _file_texts(path: Path, config: SourceConfig, text_of: TextOf) -> Iterator[tuple[str, str]]:
    by_line = config.source == "prompts" and path.suffix == ".txt"
    whole = path.suffix == ".txt" and not by_line
    for number, row in enumerate(_read_lines(path) if by_line else _READERS[path.suffix](path), 1):
        # A .txt file has one field, whatever column the other files are read from.
        plain = path.suffix == ".txt" and not config.template and not config.chat
        text = row["text"] if plain else text_of(row, f"{path}, row {number}")
        yield path.name if whole else f"{path.name}:{number}", text


def row_writer(config: SourceConfig, chat: ChatTemplate | None) -> TextOf:
    """(row, where it stands) -> its text: a column, the template filled with its columns, or a conversation.

    The writer raises DataError for a row without the columns that are asked for, and names the row.
    """
    if chat is not None:
        return functools.partial(_conversation, config, chat)
    if config.template:
        return functools.partial(_filled, config.template)
    return lambda row, where: _text(_column(row, config.column, "text.column", where), config.column, where)


def _column(row: dict[str, Any], column: str, setting: str, where: str) -> Any:
    if column not in row:
        raise DataError(f"{where}: no column {column!r} for {setting}; the row has {', '.join(map(str, row))}.")
    return row[column]


def _text(value: Any, column: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: column {column!r} holds {type(value).__name__}, not text.")
    return value


def _filled(template: str, row: dict[str, Any], where: str) -> str:
    try:
        return template.format_map(row)
    except (KeyError, IndexError, AttributeError) as error:
        raise DataError(
            f"{where}: no column {error} for text.template; the row has {', '.join(map(str, row))}."
        ) from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: text.template {template!r} cannot be filled: {error}.") from None


def _conversation(config: SourceConfig, chat: ChatTemplate, row: dict[str, Any], where: str) -> str:
    try:
        return chat.render(_messages(config, row, where))
    except DataError as error:
        raise error if str(error).startswith(where) else DataError(f"{where}: {error}") from None


def _messages(config: SourceConfig, row: dict[str, Any], where: str) -> list[dict[str, str]]:
    if config.prompt:
        said = [("user", config.prompt, "text.prompt"), ("assistant", config.response, "text.response")]
        return [
            {"role": role, "content": _text(_column(row, column, setting, where), column, where)}
            for role, column, setting in said
            if column
        ]
    messages = _column(row, config.column, "text.column", where)
    fits = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not fits or not messages:
        raise DataError(
            f"{where}: column {config.column!r} is no conversation: text.chat wants a list of "
            '{"role": ..., "content": ...} there, or name the columns of a pair by text.prompt and text.response.'
        )
    return messages


def _chat_identity(config: SourceConfig, chat: ChatTemplate | None) -> dict[str, Any]:
    """What a conversation's text comes from besides its column; nothing for other texts, whose stores stay valid."""
    return {"chat": [chat.identity, config.prompt, config.response]} if chat else {}


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as handle:
        yield from ({"text": line.removesuffix("\n")} for line in handle)


def _read_txt(path: Path) -> Iterator[dict[str, Any]]:
    yield {"text": path.read_text(encoding="utf-8", errors="replace")}


def _read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as handle:
        for number, line in enumerate(handle, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (
                ValueError,
                RecursionError,
            ) as error:  # not JSON, not UTF-8, a number without end, too deep
                raise DataError(f"{path}, line {number} is not JSON: {error}.") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number} is a {type(row).__name__}, not an object with columns.")
            yield row


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(f"Reading {path} needs pyarrow: pip install 'saejax[data]'.") from None
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from None


_READERS: dict[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def _open_hub(config: SourceConfig, heldout_fraction: float, chat: ChatTemplate | None) -> Source:
    try:
        import datasets
    except ImportError:
        raise DataError("text.source='hub' needs the datasets package: pip install 'saejax[data]'.") from None
    remedy = (
        "Check the name, the revision and the network; a downloaded copy works with text.source='files'. The same "
        "command continues where it was."
    )
    if not Path(config.dataset).exists():
        check_hub("dataset", config.dataset, config.revision, remedy)
    try:
        stream = datasets.load_dataset(
            config.dataset,
            config.subset or None,
            split=config.dataset_split,
            revision=config.revision or None,
            streaming=True,
        )
    except Exception as error:  # the library raises many kinds; all mean that the data cannot be had
        raise unreachable("dataset", config.dataset, error, remedy) from None

    text_of = row_writer(config, chat)

    def rows(start: int) -> Iterator[tuple[int, str, str, str]]:
        stored = iter(stream.skip(start))
        for index in itertools.count(start):
            name = f"{config.dataset}:{index}"
            try:
                row = next(stored)
            except StopIteration:
                return
            except Exception as error:  # the network, or a damaged file of the dataset
                raise unreachable("dataset", name, error, remedy) from None
            yield index, name, name, text_of(row, name)

    keys = ("dataset", "subset", "dataset_split", "revision", "column", "template")
    identity = {"source": "hub"} | {key: getattr(config, key) for key in keys} | _chat_identity(config, chat)
    return Source(identity, rows, heldout_fraction)
