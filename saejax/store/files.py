"""The small files of a store (JSON) and its key-value root, alike for local paths, gs://, s3:// and memory://.

Every JSON file is sealed: canonical text with the sha256 of the rest inside, so that a flipped bit or a
cut tail is noticed before a single value is believed.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorstore as ts

from saejax.core.errors import ConfigError, DataError
from saejax.core.places import as_place
from saejax.store.remote import cause_of, context_of, plain, spec_of

# One parent for every context made here: it owns what must be shared in a process (memory:// stores).
_PROCESS_CONTEXT = ts.Context({})

JSON_LIMIT_BYTES = 1 << 30
_CACHE_BYTES = 100_000_000  # of an open store: keeps the indexes of its shards
_LOCK_SUFFIX = ".__lock"


def canonical_json(value: dict[str, Any]) -> bytes:
    """The one text of a JSON dict: sorted keys, no NaN, a newline at the end."""
    return (json.dumps(value, sort_keys=True, allow_nan=False) + "\n").encode()


def seal(value: dict[str, Any]) -> bytes:
    """Canonical text of `value` with "seal" added: the sha256 of the canonical text without it."""
    digest = hashlib.sha256(canonical_json(value)).hexdigest()
    return canonical_json({**value, "seal": digest})


def unseal(raw: bytes, name: str, remedy: str) -> dict[str, Any]:
    """Inverse of `seal`.

    Raises:
        DataError: not JSON, not canonical, or the hash does not fit; the message ends with `remedy`.
    """
    try:
        value = json.loads(raw)
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        digest = value.pop("seal", None)
        if seal(value) != raw:
            raise ValueError(f"its content does not fit its seal {str(digest)[:80]!r}")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is damaged ({error}). {remedy}") from None
    return value


class StoreFiles:
    """The root of a store as a key-value store: whole small files, written atomically and durably.

    Args:
        path: a local folder or a URL that tensorstore knows (gs://, s3://, memory://, file://).

    Attributes:
        url: the path as messages show it, without a trailing slash.
        local: the folder, or None for a URL.
        kv: tensorstore's handle of the root.
        context: tensorstore's, for the arrays of this store.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        text = as_place(path, "A store", "a folder or a URL")
        if not text:
            raise ConfigError("The path of a store is empty; name a folder ('.' is the current one).")
        self.local = None if "://" in text else Path(os.path.abspath(text))
        self.url = text.rstrip("/") if self.local is None else str(self.local)
        settings: dict[str, Any] = {"cache_pool": {"total_bytes_limit": _CACHE_BYTES}}
        self.context = ts.Context(settings | ({} if self.local else context_of(self.url)), _PROCESS_CONTEXT)
        spec: Any = spec_of(self.url) if self.local is None else {"driver": "file", "path": f"{self.local}/"}
        with self.trying(f"Cannot open the store {self.url}"):
            self.kv: Any = ts.KvStore.open(spec, context=self.context).result()

    @contextlib.contextmanager
    def trying(self, failure: str) -> Iterator[None]:
        """Raise what fails in the block as DataError: `failure`, the cause, and for a URL its remedy."""
        try:
            yield
        except Exception as error:  # tensorstore has no base class for its errors
            raise DataError(f"{failure}: {self.trouble(error)}") from error

    def trouble(self, error: Exception) -> str:
        """The cause of a failure, and for a URL its remedy too."""
        if self.local is not None:
            return str(error)
        cause = cause_of(error)
        return f"{cause[0]}. {cause[1]}" if cause else plain(str(error))

    def name(self, key: str) -> str:
        return f"{self.url}/{key}"

    def kvstore(self, folder: str) -> dict[str, Any]:
        spec: dict[str, Any] = (self.kv / f"{folder}/").spec().to_json()
        return spec

    def read(self, key: str, limit: int = JSON_LIMIT_BYTES) -> bytes | None:
        """The file's bytes, or None when there is none.

        Raises:
            DataError: it cannot be read, or is longer than `limit` bytes (checked before it is read: a
                failed allocation inside tensorstore would end the process).
        """
        with self.trying(f"Cannot read {self.name(key)}"):
            try:
                probe = self.kv.read(key, byte_range=slice(limit, limit + 1)).result()
            except (ValueError, IndexError) as error:
                if self.local is None and cause_of(error):
                    raise
                # Shorter than the limit, as it should be; other troubles repeat here.
                result = self.kv.read(key).result()
                return None if result.state == "missing" else bytes(result.value)
        if probe.state == "missing":
            return None
        raise DataError(f"{self.name(key)} is longer than {limit} bytes: not a file that a store writes.")

    def write(self, key: str, value: bytes) -> None:
        """Replace the file atomically; returns when it is durable.

        Raises:
            DataError: disk full, no permission; with the path and the free bytes.
        """
        try:
            self.kv.write(key, value).result()
        except Exception as error:
            raise DataError(f"{self.name(key)} could not be written: {self.write_trouble(error)}") from error

    def delete(self, keys: Sequence[str]) -> None:
        """Delete files; those that do not exist are no error."""
        with self.trying(f"Cannot delete files in {self.url}"):
            for future in [self.kv.write(key, None) for key in keys]:
                future.result()

    def list(self, folder: str) -> list[str]:
        """Names under `folder`, relative to it, sorted."""
        with self.trying(f"Cannot list {self.name(folder)}"):
            keys = (self.kv / f"{folder}/").list().result()
        return sorted(key.decode(errors="replace") for key in keys)

    def clear_stale_locks(self, mine: Callable[[str], bool]) -> None:
        """Remove the `.__lock` files that a killed tensorstore write leaves, where the caller holds the lease of what
        was written: `mine(key)`."""
        if self.local is not None:
            for leftover in self.local.rglob(f"*{_LOCK_SUFFIX}"):
                if mine(leftover.relative_to(self.local).as_posix().removesuffix(_LOCK_SUFFIX)):
                    leftover.unlink(missing_ok=True)

    def write_trouble(self, error: Exception) -> str:
        """The cause of a failed write and its remedy, as the end of a sentence."""
        text = str(error)
        full = any(sign in text for sign in ("No space left", "RESOURCE_EXHAUSTED", "File too large", "quota"))
        if full and self.local is not None:
            free = shutil.disk_usage(self.local).free
            cause = f"the disk is full or a size limit is reached ({free:,} bytes free at {self.local}): {text}. "
            return cause + "Committed shards are intact; free space and run the same command again."
        if self.local is None and cause_of(error):
            return f"{self.trouble(error)} Committed shards are intact; the same command continues after them."
        return f"{plain(text)}. Committed shards are intact; remove the cause and run the same command again."
