"""features.sqlite: the features of a report in one SQLite file, which the page, the server, exports and studies read.

    about     key, JSON: what stands beside the features (model, hook_point, ...), and "made_from", "content" (sha256)
    vocab     number, token: UTF-8, where half of a surrogate pair may stand
    features  one row a feature: what lists show and sort by, the tokens it fires on and promotes, in lower case
    pages     one row a feature: its JSON and all its texts in lower case, deflated
    trigrams  FTS5, without positions: which features' texts can hold a word

A search narrows by trigrams and compares the texts that are left, so that it finds every part of a text and no more.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import sqlite3
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from saejax.core.errors import ConfigError, DataError
from saejax.core.files import finite, opened, parsed, stamp, writing
from saejax.reports.explanations import explanations_of
from saejax.runs import Run
from saejax.runs.shape import Maybe, fault, histogram

SORTS = {"id": "id", "density": "density", "max": "abs(strongest)", "token": "sorted_token"}
_REDO = "saejax report --config=... --redo"
_VERSION = 1
_SCHEMA = (
    "CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE vocab (number INTEGER PRIMARY KEY, token BLOB NOT NULL)",
    "CREATE TABLE features (id INTEGER PRIMARY KEY, density REAL NOT NULL, strongest REAL NOT NULL, token TEXT, "
    "sorted_token TEXT NOT NULL, fires TEXT NOT NULL, promotes TEXT NOT NULL)",
    "CREATE TABLE pages (id INTEGER PRIMARY KEY, feature BLOB NOT NULL, texts BLOB NOT NULL)",
    "CREATE VIRTUAL TABLE trigrams USING fts5(texts, content='', detail=none, columnsize=0, "
    "tokenize='trigram case_sensitive 1')",
)
_CONTENT = (
    "SELECT number, token FROM vocab ORDER BY number",
    "SELECT f.*, feature, texts FROM features f JOIN pages USING (id) ORDER BY id",
)
_BETWEEN = "\x1f"  # stands between two texts of a feature, and in no search
_LARGEST_VALUE = 64 << 20  # bytes of one value
_MOST_TRIGRAMS = 32
_QUERY_SECONDS = 30.0
_LOGITS = Maybe([[object]])
_EXAMPLE = {"tokens": [int], "activations": [float], "peak": int}
_FEATURE = {
    "id": int,
    "density": float,
    "max": float,
    "min": Maybe(float, null=False),
    "histogram": Maybe(histogram("edges")),
    "top_logits": _LOGITS,
    "bottom_logits": _LOGITS,
    "examples": Maybe([_EXAMPLE]),
    "quantiles": Maybe([{"low": float, "high": float, "fraction": float, "examples": [_EXAMPLE]}]),
}
_FAULTS = (sqlite3.Error, zlib.error, OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError)


@dataclasses.dataclass(frozen=True)
class Search:
    """Text in a scope (any, fires, promotes; others hold none of the table's), a density within [low, high], live."""

    text: str = ""
    scope: str = "any"
    low: float | None = None
    high: float | None = None
    live: bool = False

    @property
    def word(self) -> str:
        """The text in lower case, with the signs that the page shows for white space as what they stand for."""
        text = self.text.lower().replace("\u00b7", " ").replace("\u21b5", "\n")
        return text if text.strip() or "\n" in text else ""

    @property
    def number(self) -> int | None:
        """The feature that the text names, as 7 or #7."""
        digits = self.text.strip().removeprefix("#")
        return int(digits) if digits.isdecimal() and len(digits) < 19 and str(int(digits)) == digits else None


def write_features(path: Path, content: dict[str, Any], made_from: dict[str, Any]) -> None:
    """Write what `collect_features` gives; the file is there as a whole, or not at all. Equal content, equal bytes.

    Args:
        made_from: digests and settings that decide the content, for `FeatureTable.made_from`.

    Raises:
        ConfigError: this Python's SQLite has no FTS5.
        DataError: the file cannot be written.
    """
    _require_fts5()
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            temporary.unlink(missing_ok=True)
            with contextlib.closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
                _fill(connection, content, made_from)
            with temporary.open("rb") as handle:
                os.fsync(handle.fileno())
            temporary.replace(path)
        except sqlite3.OperationalError as error:  # a full disk, above all
            raise DataError(f"{path} cannot be written: {error}. Free some space and run it again.") from None
        finally:
            temporary.unlink(missing_ok=True)


def read_features(folder: Path) -> dict[str, Any]:
    """All of features.sqlite as `collect_features` gives it, checked, with the folder's explanations.

    Raises:
        DataError: there is none, or one of the two files is damaged.
    """
    path = Run(folder).features
    if not path.is_file():
        raise DataError(f"{folder} has no {Run.features}. Make it: {_REDO.removesuffix(' --redo')}")
    with FeatureTable(path, seconds=math.inf) as table:
        content = table.content()
    of = {key: content[key] for key in ("step", "sha256") if content.get(key) is not None}
    texts = explanations_of(folder, of)
    for feature in content["features"]:
        if feature["id"] in texts:
            feature["explanations"] = texts[feature["id"]]
    return content


class FeatureTable:
    """A features.sqlite that is open to be read; whatever the file holds, nothing of it is run. Closes with `with`.

    Attributes:
        version: another one for another state of the file.
        head: hook_point, model, d_sae, n_tokens, step, sha256, as far as the file says them.
        made_from: as `write_features` was told.
        count, dead: features, and those that never fired.

    Args:
        seconds: after which a query is given up.

    Raises:
        DataError: it is missing, damaged or no such file; names it.
    """

    def __init__(self, path: Path, seconds: float = _QUERY_SECONDS):
        self.path = path
        with self._reading():
            with opened(path) as handle:  # no pipe, which SQLite would wait on
                head, size = handle.read(100), os.fstat(handle.fileno()).st_size
                if head[:16] != b"SQLite format 3\0":
                    raise ValueError("it is no SQLite file")
                # SQLite itself does not miss the last pages until one of them is asked for.
                if int.from_bytes(head[16:18]) * int.from_bytes(head[28:32]) != size:
                    raise ValueError(f"it has {size:,} bytes, which is not what it should have")
                self.version = (str(path), stamp(path))
            address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
            self._connection = sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False)
        try:
            with self._reading():
                self._check(seconds)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "FeatureTable":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def has(self, feature: int) -> bool:
        """True for a feature of the table."""
        return abs(feature) < 1 << 63 and bool(self._rows("SELECT 1 FROM features WHERE id = ?", feature))

    def feature(self, feature: int) -> tuple[list[str], dict[str, Any]]:
        """(vocab, the feature, with its token ids numbered in this vocab).

        Raises:
            DataError: it is not what a page can show, or not there; names the file.
        """
        with self._reading():
            ((raw,),) = self._rows("SELECT feature FROM pages WHERE id = ?", feature)
            row = parsed(_inflated(raw))
            ((last,),) = self._rows("SELECT max(number) FROM vocab")
            _check_feature(row, 0 if last is None else last + 1)
            numbers: dict[int, int] = {}

            def number(token: Any) -> Any:
                return token if isinstance(token, str) else numbers.setdefault(token, len(numbers))

            for example in (
                *(row.get("examples") or []),
                *(e for q in row.get("quantiles") or [] for e in q["examples"]),
            ):
                example["tokens"] = [number(token) for token in example["tokens"]]
            for key in ("top_logits", "bottom_logits"):
                row[key] = [[number(token), value] for token, value in row.get(key) or []]
            query = "SELECT number, token FROM vocab WHERE number IN (SELECT value FROM json_each(?))"
            strings = dict(self._rows(query, json.dumps(list(numbers))))
            return [_token_text(strings[token]) for token in numbers], row

    def rows(self, features: Sequence[int]) -> dict[int, dict[str, Any]]:
        """{feature: {id, density, max: of largest size, token: promoted most}} of those that the table has."""
        query = "SELECT id, density, strongest, token FROM features WHERE id IN (SELECT value FROM json_each(?))"
        shown = {}
        with self._reading():
            for feature, density, strongest, token in self._rows(query, json.dumps(list(features))):
                if type(density) is not float or type(strongest) is not float or not isinstance(token, str | None):
                    raise ValueError(f"the row of feature {feature}")
                shown[feature] = {"id": feature, "density": density, "max": strongest, "token": token}
        return shown

    def matching(self, search: Search, also: Sequence[int] = (), sort: str = "id", down: bool = False) -> list[int]:
        """The features of a search in the order of one of SORTS; equal ones by their number, rising.

        Args:
            also: features that have the text elsewhere, in what was said of them since.

        Raises:
            ConfigError: a search for text, and this Python's SQLite has no FTS5.
        """
        conditions, values = ["1"], list[Any]()
        for condition, value in (("density >= ?", search.low), ("density <= ?", search.high)):
            if value is not None:
                conditions.append(condition)
                values.append(value)
        if search.live:
            conditions.append("density > 0")
        with self._reading():
            if word := search.word:
                conditions.append("id IN (SELECT value FROM json_each(?))")
                named = [] if search.number is None else [search.number]
                values.append(json.dumps([*also, *named, *self._containing(word, search.scope)]))
            order = f"{SORTS[sort]} {'DESC' if down else 'ASC'}, id"
            query = f"SELECT id FROM features WHERE {' AND '.join(conditions)} ORDER BY {order}"
            return [feature for (feature,) in self._connection.execute(query, values)]

    def content(self) -> dict[str, Any]:
        """All of it, as `write_features` was given it, but in the order of ids."""
        with self._reading():
            if self._about["content"] != _digest(self._connection):
                raise ValueError("it is not what was written")
            vocab = [_token_text(token) for _, token in self._rows(_CONTENT[0])]
            pages = self._connection.execute("SELECT feature FROM pages ORDER BY id")
            features = [parsed(_inflated(page)) for (page,) in pages]
            for feature in features:
                _check_feature(feature, len(vocab))
        return {**self.head, "features": features, "vocab": vocab}

    def _check(self, seconds: float) -> None:
        """Set bounds, refuse a file with anything but our tables, and read what it says of itself."""
        connection, until = self._connection, time.monotonic() + seconds
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LARGEST_VALUE)
        connection.set_progress_handler(lambda: int(time.monotonic() > until), 1000)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        ((version,),) = self._rows("PRAGMA user_version")
        if version != _VERSION:
            raise ValueError(f"it is of version {version}, and this saejax reads {_VERSION}")
        tables = self._rows("SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'trigrams\\_%' ESCAPE '\\'")
        created = [(kind, sql) for kind, name, sql in tables if not name.startswith("sqlite_autoindex_")]
        if sorted(created) != sorted(("table", sql) for sql in _SCHEMA):
            raise ValueError("its tables are not those of a report")
        about = self._rows("SELECT key, value FROM about LIMIT 100")
        self._about = {key: parsed(bytes(value, "utf-8")) for key, value in about}
        self.head, self.made_from = self._about["head"], self._about["made_from"]
        if not isinstance(self.head, dict) or not isinstance(self.made_from, dict):
            raise ValueError("it does not say what it is of")
        self.count, self.dead = (int(self._about[key]) for key in ("count", "dead"))

    def _containing(self, word: str, scope: str) -> list[int]:
        """The features in whose texts of a scope the word is."""
        if _BETWEEN in word or "\0" in word:
            return []
        if scope in ("fires", "promotes"):
            query = f"SELECT id FROM features WHERE instr({scope}, ?)"
            return [feature for (feature,) in self._connection.execute(query, (word,))]
        if scope != "any":
            return []
        _require_fts5()
        parts = list(dict.fromkeys(word[i : i + 3] for i in range(len(word) - 2)))[:_MOST_TRIGRAMS]
        narrowed = "WHERE id IN (SELECT rowid FROM trigrams WHERE trigrams MATCH ?)" if parts else ""
        values = (" AND ".join('"{}"'.format(part.replace('"', '""')) for part in parts),) if parts else ()
        written = word.encode(errors="replace")
        texts = self._connection.execute(f"SELECT id, texts FROM pages {narrowed}", values)
        return [feature for feature, raw in texts if written in _inflated(raw)]

    def _rows(self, query: str, *values: Any) -> list[Any]:
        return self._connection.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Names the file, and the way out, in whatever goes wrong with it."""
        try:
            yield
        except _FAULTS as error:
            raise DataError(f"{self.path} is damaged: {error}; make it again with `{_REDO}`") from None


def _check_feature(feature: Any, n_vocab: int) -> None:
    """Raises ValueError, saying why, for a feature that the page could not show: of another shape, with a passage whose
    numbers do not fit each other, or with a token outside a table of `n_vocab`."""
    number = feature.get("id") if isinstance(feature, dict) else None
    if wrong := fault(feature, _FEATURE, f"feature {number}"):
        raise ValueError(wrong)
    pairs = [pair for key in ("top_logits", "bottom_logits") for pair in feature.get(key) or []]
    for pair in pairs:
        if len(pair) != 2 or type(pair[0]) not in (int, str) or type(pair[1]) not in (int, float):
            raise ValueError(f"feature {number} promotes {str(pair)[:40]}, which is not [token, value]")
    examples = [*(feature.get("examples") or []), *(e for q in feature.get("quantiles") or [] for e in q["examples"])]
    for example in examples:
        if len(example["tokens"]) != len(example["activations"]):
            raise ValueError(f"an example of feature {number} does not have as many activations as tokens")
        if not 0 <= example["peak"] < len(example["tokens"]):
            peak, count = example["peak"], len(example["tokens"])
            raise ValueError(f"an example of feature {number} has the peak {peak} of {count} tokens")
    numbers = [token for token, _ in pairs if not isinstance(token, str)]
    for token in [*numbers, *(token for example in examples for token in example["tokens"])]:
        if not 0 <= token < n_vocab:
            raise ValueError(f"feature {number} uses the token {token}, outside the table of {n_vocab}")


def _fill(connection: sqlite3.Connection, content: dict[str, Any], made_from: dict[str, Any]) -> None:
    connection.execute("PRAGMA journal_mode = OFF")  # the file takes its name once it is whole
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute(f"PRAGMA user_version = {_VERSION}")
    connection.execute("BEGIN")
    for statement in _SCHEMA:
        connection.execute(statement)
    encoded = [token.encode("utf-8", "surrogatepass") for token in content["vocab"]]
    connection.executemany("INSERT INTO vocab VALUES (?, ?)", enumerate(encoded))
    vocab = [_without_halves(token) for token in content["vocab"]]
    for feature in content["features"]:
        columns, texts = _searched(feature, vocab)
        raw = json.dumps(finite(feature), separators=(",", ":")).encode()
        connection.execute("INSERT INTO features VALUES (?, ?, ?, ?, ?, ?, ?)", (feature["id"], *columns))
        page = (feature["id"], zlib.compress(raw, 6), zlib.compress(texts.encode(), 6))
        connection.execute("INSERT INTO pages VALUES (?, ?, ?)", page)
        connection.execute("INSERT INTO trigrams (rowid, texts) VALUES (?, ?)", (feature["id"], texts))
    head = {key: value for key, value in content.items() if key not in ("features", "vocab")}
    ((count, dead),) = connection.execute("SELECT count(*), total(NOT density > 0) FROM features")
    about = {"head": head, "made_from": made_from, "count": count, "dead": int(dead), "content": _digest(connection)}
    for key, value in about.items():
        connection.execute("INSERT INTO about VALUES (?, ?)", (key, json.dumps(finite(value))))
    connection.execute("COMMIT")


def _searched(feature: dict[str, Any], vocab: Sequence[str]) -> tuple[tuple[Any, ...], str]:
    """(density, value of largest size, token, its place in the order, fires, promotes), all texts."""

    def string(token: int | str) -> str:
        return _without_halves(token) if isinstance(token, str) else vocab[token]

    examples = feature.get("examples") or []
    promoted, suppressed = (
        [string(token) for token, _ in feature.get(k) or []] for k in ("top_logits", "bottom_logits")
    )
    fires = {vocab[t]: None for e in examples for t, a in zip(e["tokens"], e["activations"], strict=True) if a}
    passages = ["".join(vocab[token] for token in e["tokens"]) for e in examples]
    low, high = feature.get("min", 0.0), feature["max"]
    return (
        float(feature["density"]),
        float(low if -low > high else high),
        promoted[0] if promoted else None,
        promoted[0].strip().lower() if promoted else "\uffff",
        _lower(fires),
        _lower(promoted),
    ), _lower([*passages, *promoted, *suppressed])


def _lower(texts: Sequence[str] | dict[str, None]) -> str:
    return _BETWEEN.join(texts).lower().replace("\0", _BETWEEN)  # SQLite's tokenizer ends at a NUL


def _without_halves(text: str) -> str:
    return text.encode(errors="replace").decode()  # JSON can hold half of a surrogate pair


def _token_text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _inflated(raw: bytes) -> bytes:
    """Raises ValueError for what is torn, or larger than any value of ours."""
    inflater = zlib.decompressobj()
    data = inflater.decompress(raw, _LARGEST_VALUE)
    if not inflater.eof:
        raise ValueError("a value is torn, or too large")
    return data


def _digest(connection: sqlite3.Connection) -> str:
    """sha256 of all that a reader is shown."""
    digest = hashlib.sha256()
    for query in _CONTENT:
        for row in connection.execute(query):
            digest.update(repr(row).encode())
    return digest.hexdigest()


def _require_fts5() -> None:
    """Raises ConfigError, with the remedy, where this Python's SQLite cannot search text."""
    try:
        with contextlib.closing(sqlite3.connect(":memory:")) as connection:
            connection.execute("CREATE VIRTUAL TABLE probe USING fts5(text, tokenize='trigram')")
    except sqlite3.OperationalError as error:
        raise ConfigError(
            f"The SQLite {sqlite3.sqlite_version} of this Python cannot search text ({error}): reports need FTS5 with "
            "trigrams (3.34 or newer). Use a Python that has it, as those of python.org, conda, uv and Debian do."
        ) from None
