"""The manifest that makes a folder a checkpoint: what is in each file, and what is in each array.

Orbax restores a flipped bit silently, reads a missing chunk as zeros and casts dtypes without a word
(each measured). So `integrity.json`, written last, lists the size and sha256 of every
file and the path, dtype and shape of every leaf; a folder without it is not a checkpoint. The manifest
also carries the sha256 of itself.
"""

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax

from saejax.core.errors import DataError
from saejax.core.files import LARGEST_JSON, read_bounded, write_bytes

INTEGRITY_FORMAT = 1
INTEGRITY = "integrity.json"
META = "meta"

# One leaf of a saved tree: {"path": "opt/0/mu/W_enc", "dtype": "float32", "shape": [768, 24576]}.
Leaf = dict[str, Any]

# Put there by file systems and desktops, read by nobody.
_HARMLESS = (".nfs", ".DS_Store")


def leaves(item: str, tree: Any) -> list[Leaf]:
    """Describe every leaf of `tree` (arrays or `jax.ShapeDtypeStruct`s): path, dtype, shape.

    Raises:
        DataError: a leaf that is no array; the message names it.
    """
    rows = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            raise DataError(
                f"checkpoint item {item!r}: leaf {name!r} is of type {type(leaf).__name__}, not an array. "
                "Wrap it in jnp.asarray, or put it into the meta dict."
            )
        if not path:  # Orbax wants a container.
            raise DataError(f"checkpoint item {item!r} is a bare array: put it into a dict.")
        rows.append({"path": name, "dtype": str(leaf.dtype), "shape": [int(n) for n in leaf.shape]})
    return rows


def check_leaves(item: str, saved: list[Leaf], asked: list[Leaf], where: Path) -> None:
    """Require `asked` to be exactly the leaves that were `saved`: same paths, dtypes and shapes.

    Raises:
        DataError: names the first leaf that differs, with both values.
    """
    have = {leaf["path"]: leaf for leaf in saved}
    want = {leaf["path"]: leaf for leaf in asked}
    for path in [*want, *have]:
        if path not in have or path not in want:
            lacks = "the checkpoint" if path not in have else "the tree asked for"
            raise DataError(
                f"{where}: {lacks} has no leaf {item}/{path}. "
                "Restore with the configuration (coder and optimiser) that saved it."
            )
        for field in ("dtype", "shape"):
            if have[path][field] != want[path][field]:
                raise DataError(
                    f"{where}: {item}/{path} was saved with {field} {have[path][field]}, but {field} "
                    f"{want[path][field]} is asked for. Restore as saved, then convert explicitly."
                )


def write_integrity(folder: Path, step: int, items: Mapping[str, list[Leaf]]) -> None:
    """Make every file under `folder` durable, then write its manifest atomically as the last file."""
    for directory, _, _ in os.walk(folder):
        _sync(Path(directory))
    files = {name: _file_digest(folder / name, sync=True) for name in _files_below(folder) if name != INTEGRITY}
    body = {"format": INTEGRITY_FORMAT, "step": step, "items": dict(items), "files": files}
    write_bytes(folder / INTEGRITY, _encode(body))
    _sync(folder)
    _sync(folder.parent)


def read_integrity(folder: Path) -> dict[str, Any]:
    """The manifest of the checkpoint in `folder`: keys format, step, items, files.

    Raises:
        DataError: missing, unreadable, changed by a single bit, or of another format.
    """
    path = folder / INTEGRITY
    if not path.exists():
        raise DataError(f"{folder} is not a complete checkpoint: it has no {INTEGRITY}.")
    raw = read_bounded(path, LARGEST_JSON)
    try:
        body = json.loads(raw)["body"]
        intact = _encode(body) == raw
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise DataError(f"{path} is damaged: its content does not match its own sha256.")
    if body["format"] != INTEGRITY_FORMAT:
        raise DataError(
            f"{path} has format {body['format']}, this saejax reads format {INTEGRITY_FORMAT}. "
            "Use the version that wrote it."
        )
    return body


def problems(folder: Path, names: Collection[str] | None = None) -> list[str]:
    """Problems of the checkpoint in `folder`, one line per file; empty when it is good.

    Args:
        names: items to look at; all when None. The files that belong to no item are always looked at.

    An unexpected file counts where Orbax would read it, within an item's folder.
    """
    try:
        manifest = read_integrity(folder)
    except DataError as error:
        return [str(error).rstrip(".")]
    items = {*manifest["items"], META}
    skipped = set() if names is None else items - {*names, META}
    expected = {k: v for k, v in manifest["files"].items() if _top(k) not in skipped}
    present = {name for name in _files_below(folder) if _top(name) not in skipped}
    lines = []
    for name, entry in expected.items():
        if name not in present:
            lines.append(f"{folder / name} is missing")
            continue
        now = _file_digest(folder / name, known_size=entry["size"])
        if now["size"] != entry["size"]:
            lines.append(f"{folder / name} has {now['size']} bytes instead of {entry['size']}")
        elif now["sha256"] != entry["sha256"]:
            lines.append(f"{folder / name} has changed since it was written: sha256 mismatch")
    for name in sorted(present - set(expected)):
        if _top(name) in items and not Path(name).name.startswith(_HARMLESS):
            lines.append(f"{folder / name} is unexpected: it was not there when the checkpoint was written")
    return lines


def _encode(body: dict[str, Any]) -> bytes:
    """The one byte string that stands for `body`: any other bytes on disk are damage."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"sha256":"{digest}","body":{text}}}\n'.encode()


def _file_digest(path: Path, *, sync: bool = False, known_size: int | None = None) -> dict[str, Any]:
    """Size and sha256 of a file; the sha256 is empty (not computed) when the size is not `known_size`."""
    with open(path, "rb") as handle:
        if sync:
            os.fsync(handle.fileno())
        size = os.fstat(handle.fileno()).st_size
        if known_size is not None and size != known_size:
            return {"size": size, "sha256": ""}
        return {"size": size, "sha256": hashlib.file_digest(handle, "sha256").hexdigest()}


def _files_below(folder: Path) -> list[str]:
    """Every file under `folder`, as sorted paths relative to it with forward slashes."""
    return sorted(
        (Path(directory) / name).relative_to(folder).as_posix()
        for directory, _, names in os.walk(folder)
        for name in names
    )


def _top(name: str) -> str:
    return name.split("/", 1)[0]


def _sync(directory: Path) -> None:
    """fsync a directory, so that the names in it survive a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
