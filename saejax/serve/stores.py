"""The activation stores of a folder as they are now: rows, hook points, how far a capture is."""

import os
from pathlib import Path
from typing import Any

from saejax.core.errors import DataError, SaejaxError
from saejax.core.lease import held
from saejax.store import describe
from saejax.store.files import StoreFiles
from saejax.store.manifest import MANIFEST
from saejax.store.reader import any_manifest, committed_rows
from saejax.store.space import bytes_on_disk

SPLITS = ("train", "heldout")


class Stores:
    """All stores below a folder; each is read again only when its manifest or its commits have changed."""

    def __init__(self, root: Path):
        self.root = root
        self._kept: dict[Path, tuple[Any, dict[str, Any]]] = {}

    def rows(self) -> list[dict[str, Any]]:
        """Every store, those that moved last first."""
        names = sorted(path.name for path in _folders(self.root) if any(_is_store(path / s) for s in SPLITS))
        return sorted((self.row(name) for name in names), key=lambda row: (-row["updated"], row["name"]))

    def row(self, name: str) -> dict[str, Any]:
        """One store: its splits, with rows, hook points and what is left to capture."""
        splits = {s: self._split(self.root / name / s) for s in SPLITS if _is_store(self.root / name / s)}
        return {
            "name": name,
            "splits": splits,
            "bytes": sum(one["bytes"] or 0 for one in splits.values()),
            "updated": max((one["updated"] for one in splits.values()), default=0),
        }

    def lines(self, name: str) -> list[str]:
        """The lines of `saejax store info` about its splits."""
        splits = [self.root / name / split for split in SPLITS if _is_store(self.root / name / split)]
        return [line for path in splits for line in describe(path)]

    def _split(self, path: Path) -> dict[str, Any]:
        commits = path / "commits"
        stamps = tuple(one.stat().st_mtime_ns for one in (path / MANIFEST, commits) if one.exists())
        before = self._kept.get(path)
        if before is None or before[0] != stamps:
            before = self._kept[path] = (stamps, _split_row(path) | {"updated": max(stamps, default=0) / 1e9})
        row = before[1]
        if row["complete"]:
            return row | {"state": "complete"}
        try:
            return row | {"state": "running" if held(path) is not None else "stopped"}
        except DataError as error:
            return row | {"state": "stopped", "error": row["error"] or str(error)}


def _split_row(path: Path) -> dict[str, Any]:
    files = StoreFiles(str(path))
    try:
        manifest = any_manifest(files)
        header = manifest.header
        lm, text = (header.identity.get(key, {}) for key in ("lm", "text"))
        return {
            "complete": manifest.complete,
            "rows": manifest.n_tokens if manifest.complete else committed_rows(files, header),
            "rows_total": manifest.n_tokens if manifest.complete else header.requested_tokens,
            "bytes": bytes_on_disk(files),
            "hook_points": dict(header.hook_points),
            "dtype": header.layout.dtype,
            "shards": len(manifest.shards) or header.layout.shards(header.requested_tokens),
            "model": str(lm.get("model") or ""),
            "text": str(text.get("source") or ""),
            "error": None,
        }
    except SaejaxError as error:
        nothing = dict.fromkeys(("rows", "rows_total", "bytes", "dtype", "shards", "model", "text"))
        return {"complete": False, "hook_points": {}, **nothing, "error": str(error)}


def _is_store(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _folders(root: Path) -> list[Path]:
    try:
        with os.scandir(root) as entries:
            return [Path(one.path) for one in entries if one.name[0] != "." and one.is_dir()]
    except OSError:
        return []
