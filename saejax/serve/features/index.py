"""An index of features.json.gz on disk, by which one feature is read without the others, and all are searched.

    python -P -m saejax.serve.features.index <features.json.gz> <index>

Beside `index.json` the folder has files of bytes, each with the places at which its pieces begin (int64, one more than
pieces): `features` (their JSON, each deflated), `vocab` (token strings), `top` (the token that each promotes most), and
what each scope of a search looks through: `any`, `fires`, `promotes`, in lower case. Columns are arrays of numpy.

The file is read in pieces and never held as a whole: its vocabulary stands behind its features, so their token ids
wait in a file for it.
"""

import codecs
import gzip
import json
import os
import sys
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from saejax.core.errors import BusyError, DataError, SaejaxError
from saejax.core.files import check_depth, read_bounded, replacing, write_bytes, write_json
from saejax.core.lease import lease
from saejax.report.read import REPORT, check_feature

# Part of an index's key: another number, and indexes of earlier versions are made again.
VERSION = 1
SCOPES = ("any", "fires", "promotes")
COLUMNS = ("id", "density", "strongest", "token_rank")
_PIECE = 1 << 20  # bytes that are inflated at a time
_AHEAD = 1 << 16  # letters that should be at hand when a feature begins
_LARGEST = 64 << 20  # letters of one value: a feature, or the vocabulary
_PROGRESS = "progress"
_NO_LIMIT = 1 << 62

Tell = Callable[[int], None]


def build(source: Path, index: Path, tell: Tell = lambda done: None) -> None:
    """Make the index of a features.json.gz; it is there as a whole, or not at all.

    Args:
        tell: is given the bytes of the file that are read.

    Raises:
        DataError: the file is damaged, or the index cannot be written; names it.
    """
    with replacing(index) as folder:
        size = source.stat().st_size
        try:
            head, ids = _first_pass(source, folder, tell)
        except (
            gzip.BadGzipFile,
            EOFError,
            zlib.error,
            ValueError,
            RecursionError,
            LookupError,
            TypeError,
            OverflowError,
        ) as error:
            raise DataError(f"{source} is damaged ({error}); make it again with `{REPORT}`") from None
        _second_pass(source, folder, head, ids)
        del head["vocab"]
        write_json(folder / "index.json", head | {"version": VERSION, "features": len(ids), "bytes": size})


def main(arguments: Sequence[str]) -> int:
    """The command; 75 where another process makes the same index."""
    source, index = map(Path, arguments)
    os.nice(10)
    at = index.with_name(f".{index.name}.making")
    try:
        with lease(at):
            build(source, index, progress_writer(at))
    except BusyError:
        return 75
    except SaejaxError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def progress_writer(folder: Path) -> Tell:
    """Writes the bytes done into a file of the folder, a few times a second; `progress` reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    last = 0.0

    def tell(done: int) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > 0.2:
            last = now
            write_bytes(folder / _PROGRESS, str(done).encode())

    return tell


def progress(index: Path) -> int:
    """Bytes that whoever makes the index has read; 0 where that is not known."""
    try:
        return int(read_bounded(index.with_name(f".{index.name}.making") / _PROGRESS, 32))
    except (DataError, ValueError):
        return 0


def strongest(feature: dict[str, Any]) -> float:
    """The activation of largest size, which may be negative."""
    low, high = feature.get("min", 0.0), feature["max"]
    return low if -low > high else high


class _Pieces:
    """A file of bytes in pieces, beside it where each begins."""

    def __init__(self, folder: Path, name: str):
        self._path, self._starts, self._at = folder / name, array("q", [0]), 0
        self._handle = self._path.open("wb")

    def add(self, piece: bytes) -> None:
        self._handle.write(piece)
        self._at += len(piece)
        self._starts.append(self._at)

    def close(self) -> None:
        self._handle.close()
        np.save(self._path.with_suffix(".at.npy"), np.frombuffer(self._starts, np.int64))

    def __enter__(self) -> "_Pieces":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _first_pass(source: Path, folder: Path, tell: Tell) -> tuple[dict[str, Any], np.ndarray]:
    """(what stands beside the features, their ids [F]): their JSON and columns are written, their tokens wait."""
    columns: dict[str, array[Any]] = {"id": array("q"), "density": array("d"), "strongest": array("d")}
    with _Pieces(folder, "features") as kept, (folder / "waiting").open("w", encoding="utf-8") as waiting:

        def keep(feature: dict[str, Any], text: str) -> None:
            check_feature(source, feature, _NO_LIMIT)
            columns["id"].append(feature["id"])
            columns["density"].append(feature["density"])
            columns["strongest"].append(strongest(feature))
            kept.add(zlib.compress(text.encode(), 1))
            waiting.write(json.dumps(_tokens(feature)) + "\n")

        with source.open("rb") as handle:
            head = _read(handle, keep, tell)
    vocab = head.get("vocab")
    if not isinstance(vocab, list) or not all(isinstance(token, str) for token in vocab):
        raise ValueError("'vocab' is not a list of token strings")
    ids = np.frombuffer(columns["id"], np.int64) if columns["id"] else np.zeros(0, np.int64)
    if len(np.unique(ids)) != len(ids):
        raise ValueError("two features have the same id")
    for name, values in columns.items():
        np.save(folder / f"{name}.npy", np.asarray(values))
    return head, ids


def _tokens(feature: dict[str, Any]) -> list[Any]:
    """Token ids or strings that a search looks through: [passages, those it fires on, promoted, suppressed]."""
    examples = feature.get("examples") or []
    fires = {t: None for e in examples for t, a in zip(e["tokens"], e["activations"], strict=True) if a}
    promoted, suppressed = ([pair[0] for pair in feature.get(key) or []] for key in ("top_logits", "bottom_logits"))
    return [[e["tokens"] for e in examples], list(fires), promoted, suppressed]


def _second_pass(source: Path, folder: Path, head: dict[str, Any], ids: np.ndarray) -> None:
    """With the vocabulary: the texts that searches look through, and the order by promoted token."""
    vocab: list[str] = head["vocab"]
    waiting = folder / "waiting"

    def string(token: int | str) -> str:
        return token if isinstance(token, str) else vocab[token]

    tops: list[str] = []
    pieces = {name: _Pieces(folder, name) for name in (*SCOPES, "top", "vocab")}
    try:
        for token in vocab:
            pieces["vocab"].add(_utf8(token))
        with waiting.open(encoding="utf-8") as lines:
            for row, line in enumerate(lines):
                try:
                    passages, fires, *logits = json.loads(line)
                    shown = "\0".join("".join(vocab[t] for t in tokens) for tokens in passages)
                    promoted, suppressed = ("\0".join(map(string, tokens)) for tokens in logits)
                    texts = ("\0".join((shown, promoted, suppressed)), "\0".join(vocab[t] for t in fires), promoted)
                except IndexError:
                    raise DataError(
                        f"{source} is damaged: feature {ids[row]} uses a token outside the table of {len(vocab)}; make "
                        f"it again with `{REPORT}`"
                    ) from None
                for name, text in zip(SCOPES, texts, strict=True):
                    pieces[name].add(_utf8(text.lower()) + b"\0")
                top = string(logits[0][0]) if logits[0] else ""
                pieces["top"].add(_utf8(top) if logits[0] else b"")
                tops.append(top.strip().lower() if logits[0] else "\uffff")
    finally:
        for one in pieces.values():
            one.close()
    waiting.unlink()
    ranks = {token: rank for rank, token in enumerate(sorted(set(tops)))}
    np.save(folder / "token_rank.npy", np.asarray([ranks[token] for token in tops], np.int64))


def _utf8(text: str) -> bytes:
    return text.encode(errors="replace")  # JSON can hold half of a surrogate pair


# --- JSON in pieces -----------------------------------------------------------------------------------------------


class _Text:
    """The letters of a gzip file in order, of which only those around the next value are in memory."""

    def __init__(self, handle: BinaryIO, tell: Tell):
        self._raw, self._tell = handle, tell
        self._gzip = gzip.GzipFile(fileobj=handle)
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._scan = json.JSONDecoder().raw_decode
        self._text, self._at, self._ended = "", 0, False

    def value(self) -> tuple[Any, str]:
        """(the next value, its text)."""
        self._space()
        if len(self._text) - self._at < _AHEAD:
            self._more(_PIECE)
        while True:
            try:
                value, end = self._scan(self._text, self._at)
                # A number that ends with the letters at hand may go on.
                if self._ended or end < len(self._text):
                    text = self._text[self._at : end]
                    self._at = end
                    return value, text
            except json.JSONDecodeError:
                if self._ended or len(self._text) - self._at > _LARGEST:
                    raise
            self._more(max(_PIECE, len(self._text) - self._at))

    def sign(self) -> str:
        """The next letter that is no space."""
        self._space()
        self._at += 1
        return self._text[self._at - 1]

    def peek(self) -> str:
        self._space()
        return self._text[self._at]

    def at_end(self) -> bool:
        """Whether nothing but space follows; the file's checksum is compared by then."""
        while not self._ended and not self._text[self._at :].strip():
            self._text, self._at = "", 0
            self._more(_PIECE)
        return not self._text[self._at :].strip()

    def _space(self) -> None:
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return
            if self._ended:
                raise ValueError("it ends in the middle")
            self._more(_PIECE)

    def _more(self, letters: int) -> None:
        raw = self._gzip.read(letters)
        self._ended = not raw
        self._text = self._text[self._at :] + self._decode(raw, self._ended)
        self._at = 0
        self._tell(self._raw.tell())


def _read(handle: BinaryIO, keep: Callable[[dict[str, Any], str], None], tell: Tell) -> dict[str, Any]:
    """The object that a file holds, but for its "features": each of these is given to `keep`, with its text."""
    text = _Text(handle, tell)
    head: dict[str, Any] = {}
    seen = False
    for key in _keys(text):
        if key != "features":
            head[key] = text.value()[0]
            check_depth(head[key])
            continue
        if seen or text.peek() != "[":
            raise ValueError("'features' is not one list")
        seen = True
        for _ in _items(text, "[", "]"):
            keep(*text.value())
    if not seen:
        raise ValueError("it has no 'features'")
    if not text.at_end():
        raise ValueError("something follows its end")
    return head


def _keys(text: _Text) -> Iterator[str]:
    for _ in _items(text, "{", "}"):
        key = text.value()[0]
        if not isinstance(key, str) or text.sign() != ":":
            raise ValueError("a key is no string")
        yield key


def _items(text: _Text, first: str, last: str) -> Iterator[None]:
    """Stops before each item of a list or an object; whoever asks takes the item from `text`."""
    if text.sign() != first:
        raise ValueError(f"it does not begin with {first}")
    if text.peek() == last:
        text.sign()
        return
    while True:
        yield
        sign = text.sign()
        if sign == last:
            return
        if sign != ",":
            raise ValueError(f"{sign!r} stands where a comma should")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
