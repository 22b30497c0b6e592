"""manifest.json: what a store is (its header) and, once complete, what it holds."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from saejax.core.errors import ConfigError, DataError
from saejax.store.files import StoreFiles, canonical_json, seal, unseal
from saejax.store.layout import ArrayKind, StoreLayout, arrays_of, check_hook_points
from saejax.store.order import RowOrder
from saejax.store.statistics import Statistics

MANIFEST = "manifest.json"
FORMAT = {"name": "saejax-store", "version": 1}
MAX_PARTS = 65_536


@dataclass(frozen=True)
class Header:
    """Everything that must agree for two captures to be the same store.

    Attributes:
        identity: JSON dict naming model, revision, tokenizer, text source, context length...
        hook_points: name -> width d.
        requested_tokens: rows asked for; the text may run out earlier.
        layout, seed: how rows are grouped and permuted within a shard.
        parts: shard j belongs to part j mod parts; each part has text of its own, which may run out on its own.
    """

    identity: dict[str, Any]
    hook_points: dict[str, int]
    requested_tokens: int
    layout: StoreLayout
    seed: int
    parts: int = 1

    @property
    def arrays(self) -> tuple[ArrayKind, ...]:
        return arrays_of(self.hook_points, self.layout.dtype)

    def shards_of(self, part: int) -> range:
        """The shards of a part, as many as there are if its text does not run out."""
        return range(part, self.layout.shards(self.requested_tokens), self.parts)

    def rows_of(self, part: int) -> int:
        """Rows of a part if its text does not run out: full shards, but for the store's last."""
        shards, full = self.shards_of(part), self.layout.shard_rows
        # The store's last shard may not be full, and it is the last one of its part.
        return (len(shards) - 1) * full + min(full, self.requested_tokens - shards[-1] * full) if shards else 0

    def to_json(self) -> dict[str, Any]:
        """The header as a JSON dict."""
        return {
            "format": FORMAT,
            "identity": self.identity,
            "hook_points": self.hook_points,
            "requested_tokens": self.requested_tokens,
            "layout": {
                "shard_rows": self.layout.shard_rows,
                "chunk_rows": self.layout.chunk_rows,
                # What is left at its default is left out, here and below.
                **({} if self.layout.dtype == StoreLayout.dtype else {"dtype": self.layout.dtype}),
            },
            "seed": self.seed,
            **({} if self.parts == 1 else {"parts": self.parts}),
        }

    @property
    def fingerprint(self) -> str:
        """sha256 of the header; commits carry it so that they cannot end up in another store."""
        return hashlib.sha256(canonical_json(self.to_json())).hexdigest()


@dataclass(frozen=True)
class Manifest:
    """A store's manifest.

    Attributes:
        complete: False while capturing; the rest is then empty.
        n_tokens: rows in the store.
        shards: for each shard its rows and the sha256 of each array's row bytes; (0, {}) for one that a part did not
            reach because its text ran out.
        statistics: hook point -> moments.
        counters: totals of what the capture counted.
    """

    header: Header
    complete: bool = False
    n_tokens: int = 0
    shards: tuple[tuple[int, dict[str, str]], ...] = ()
    statistics: dict[str, Statistics] | None = None
    counters: dict[str, int] | None = None

    @property
    def fingerprint(self) -> str:
        """sha256 of what the store is and of what its shards hold: equal for stores of the same rows in one order."""
        shards = [[rows, hashes] for rows, hashes in self.shards]
        return hashlib.sha256(canonical_json({"header": self.header.fingerprint, "shards": shards})).hexdigest()

    @property
    def array_rows(self) -> int:
        """Rows of every zarr array: up to the last row that there is, with what is missing before it."""
        return self.header.layout.shard_rows * (len(self.shards) - 1) + self.shards[-1][0] if self.shards else 0

    @property
    def row_order(self) -> RowOrder:
        return RowOrder(self.header.layout.shard_rows, [rows for rows, _ in self.shards])

    @property
    def committed(self) -> dict[int, tuple[int, dict[str, str]]]:
        """{shard: its rows and hashes} of all that have a commit: those with rows, and the first of a part without."""
        there = {shard: entry for shard, entry in enumerate(self.shards) if entry[0]}
        firsts = range(min(self.header.parts, self.header.layout.shards(self.header.requested_tokens)))
        return dict(sorted((dict.fromkeys(firsts, (0, {})) | there).items()))

    def to_bytes(self) -> bytes:
        """The sealed file; nothing in it depends on time or machine."""
        value = {**self.header.to_json(), "status": "complete" if self.complete else "capturing"}
        if self.complete:
            value["n_tokens"] = self.n_tokens
            value["shards"] = [{"rows": rows, "sha256": hashes} for rows, hashes in self.shards]
            value["statistics"] = {name: s.to_json() for name, s in (self.statistics or {}).items()}
            value["counters"] = self.counters or {}
        return seal(value)


def read_manifest(files: StoreFiles) -> Manifest | None:
    """The manifest, or None when there is none.

    Raises:
        DataError: damaged, of another format or version, or contradictory.
    """
    raw = files.read(MANIFEST)
    if raw is None:
        return None
    name = files.name(MANIFEST)
    remedy = f"Delete {name} and run the command that made the store again: the commits hold all that is in it."
    value = unseal(raw, name, remedy)
    if value.get("format") != FORMAT:
        raise DataError(f"{name} has format {value.get('format')!r}; this version of saejax reads {FORMAT}.")
    try:
        return _parse(value)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, DataError, ConfigError) as error:
        raise DataError(f"{name} contradicts itself ({type(error).__name__}: {error}). {remedy}") from None


def _parse(value: dict[str, Any]) -> Manifest:
    layout = StoreLayout(**value["layout"])
    check_hook_points(value["hook_points"], layout)
    header = Header(
        dict(value["identity"]),
        dict(value["hook_points"]),
        int(value["requested_tokens"]),
        layout,
        value["seed"],
        check_parts(value.get("parts", 1)),
    )
    if value["status"] != "complete":
        return Manifest(header)
    shards = tuple((int(row["rows"]), dict(row["sha256"])) for row in value["shards"])
    counts = [rows for rows, _ in shards]
    # Behind a shard that is not full there is nothing more of its part.
    full = all(
        rows == layout.shard_rows or later == 0 for rows, later in zip(counts, counts[header.parts :], strict=False)
    )
    sane = min(counts) >= 0 and max(counts) <= layout.shard_rows and counts[-1] >= 1
    if sum(counts) != value["n_tokens"] or not full or not sane:
        raise ValueError("the rows of its shards do not add up to n_tokens")
    statistics = {
        hook: Statistics.from_json(value["statistics"][hook], width) for hook, width in header.hook_points.items()
    }
    return Manifest(header, True, value["n_tokens"], shards, statistics, dict(value["counters"]))


def check_parts(parts: Any) -> int:
    """`parts`, if it is an integer from 1 to 65,536.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(parts, bool) or not isinstance(parts, int) or not 1 <= parts <= MAX_PARTS:
        raise ConfigError(f"parts is {parts!r}; give an integer from 1 to {MAX_PARTS:,}.")
    return parts


def plain_json(value: dict[str, Any], what: str) -> dict[str, Any]:
    """`value` as JSON gives it back (tuples become lists).

    Raises:
        ConfigError: it is no JSON dict.
    """
    try:
        result = json.loads(canonical_json(value))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} must be a JSON dict with string keys: {error}") from None
    if not isinstance(result, dict):
        raise ConfigError(f"{what} must be a JSON dict, got {type(value).__name__}.")
    return result


def flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict) and item:
            flat.update(flatten(item, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def header_differences(
    stored: dict[str, Any],
    wanted: dict[str, Any],
    keys: set[str] | None = None,
    names: tuple[str, str] = ("the store has", "this run wants"),
) -> list[str]:
    """One line for each differing leaf: "key: the store has X, this run wants Y"."""
    left, right = flatten(stored), flatten(wanted)
    lines = []
    for key in sorted(set(left) | set(right) if keys is None else keys):
        if key not in left or key not in right or left[key] != right[key]:
            has, wants = (repr(flat[key])[:200] if key in flat else "nothing" for flat in (left, right))
            lines.append(f"{key}: {names[0]} {has}, {names[1]} {wants}")
    return lines
