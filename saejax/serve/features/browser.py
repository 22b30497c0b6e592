"""What the list of features and the page of one feature show: the table, with what was said and noted since."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from saejax.core.files import Stamp, finite, stamp
from saejax.report.explanations import EXPLANATIONS, read_explanations, with_explanations
from saejax.serve.caches import Cache
from saejax.serve.features.building import Indexes, Preparing
from saejax.serve.features.coders import Dictionaries, Place
from saejax.serve.features.notes import EVALUATION, NOTES, Note, read_notes, save_note
from saejax.serve.features.table import FeatureTable, Wanted
from saejax.serve.problems import Problem
from saejax.trained import TrainedCoder

MOST_ROWS = 1000
V = TypeVar("V")


@dataclasses.dataclass(frozen=True)
class Asked:
    """One window of a search: `limit` rows from `offset` on, by one of table.SORTS."""

    wanted: Wanted = dataclasses.field(default_factory=Wanted)
    sort: str = "id"
    down: bool = False
    offset: int = 0
    limit: int = 200


@dataclasses.dataclass(frozen=True)
class Said:
    """What models and people said of features: {feature: explanations, the newest first}, {feature: note}.

    `version` is another one when a word of it is.
    """

    explanations: dict[int, list[dict[str, Any]]]
    notes: dict[int, Note]
    version: tuple[Any, ...]

    def label(self, feature: int) -> str | None:
        """The note's label, else the newest explanation."""
        if (note := self.notes.get(feature)) and note["label"]:
            return str(note["label"])
        return str(said[0]["text"]) if (said := self.explanations.get(feature)) else None

    def matching(self, wanted: Wanted) -> list[int]:
        """Features of whose explanations, label or note the text is a part, as far as the scope covers these."""
        text, found = wanted.searched, set()
        if not text or wanted.scope not in ("any", "explained", "label"):
            return []
        for feature, note in self.notes.items():
            texts = [note["label"]] if wanted.scope == "label" else [note["label"], note["note"]]
            if any(text in one.lower() for one in texts):
                found.add(feature)
        if wanted.scope != "label":
            found |= {f for f, said in self.explanations.items() if any(text in one["text"].lower() for one in said)}
        return sorted(found)


class Browser:
    """Lists, features and notes of dictionaries.

    Args:
        cache: of features.
        indexes: of features.json.gz.
        dictionaries: for those that have no report.
        own: the server's folder, for notes of foreign dictionaries.
    """

    def __init__(self, cache: Cache, indexes: Indexes, dictionaries: Dictionaries, own: Path):
        self._cache, self._indexes, self._dictionaries, self._own = cache, indexes, dictionaries, own

    def table(self, place: Place) -> FeatureTable | Preparing | None:
        """The table of a dictionary's report, or how far its index is; None without a report.

        Raises:
            DataError: the report's file is damaged.
        """
        return None if place.features is None else self._indexes.table(place.features)

    def said(self, place: Place, table: FeatureTable | None) -> Said:
        """What was said of a dictionary's features.

        Raises:
            DataError: a damaged line of explanations.jsonl or notes.jsonl.
        """
        about = {} if table is None else {key: table.head[key] for key in ("step", "sha256") if key in table.head}
        explanations: dict[int, list[dict[str, Any]]] = {}
        version: Stamp | None = None
        if (folder := place.folder) is not None:
            path = folder / EXPLANATIONS
            version = stamp(path)
            explanations = self._kept(
                ("explanations", str(path), version, json.dumps(about, sort_keys=True)),
                path,
                lambda: _explained(folder, about),
            )
        notes_folder = self.notes_folder(place)
        noted = stamp(notes_folder / NOTES), stamp(notes_folder / EVALUATION)
        notes = self._kept(("notes", str(notes_folder), noted), notes_folder / NOTES, lambda: read_notes(notes_folder))
        return Said(explanations, notes, (version, noted))

    def notes_folder(self, place: Place) -> Path:
        """Where the notes of a dictionary lie: beside its report, or in the server's own folder."""
        return self._own / "notes" / place.name if place.folder is None else place.folder

    def note(self, place: Place, feature: int, label: str, note: str) -> Note:
        """Save a note of a feature.

        Raises:
            Problem: 404: the dictionary has no such feature; 503: its index is being made.
            ConfigError, BusyError, DataError: as `save_note`.
        """
        table = self._ready(place)
        if table is None:
            there = feature < self._dictionaries.coder(place).n_latents
        else:
            there = table.row_of(feature) is not None
        if not there:
            raise _no_feature(place, feature)
        return save_note(self.notes_folder(place), feature, label, note)

    def rows(self, place: Place, asked: Asked) -> dict[str, Any]:
        """A window of the list: {total, all, dead, offset, has_examples, preparing, rows}.

        Raises:
            DataError: a damaged file, or no dictionary there.
        """
        table = self.table(place)
        if isinstance(table, Preparing):
            found: dict[str, Any] = {"total": 0, "all": 0, "dead": 0, "has_examples": True, "rows": []}
            return found | {"offset": asked.offset, "preparing": dataclasses.asdict(table)}
        said = self.said(place, table)
        if table is None:
            return self._rows_without(self._dictionaries.coder(place), asked, said)
        order = self._order(table, asked, said)
        window = order[asked.offset : asked.offset + min(asked.limit, MOST_ROWS)].tolist()
        rows = [
            {
                "id": (feature := int(table.ids[row])),
                "density": float(table.density[row]),
                "max": float(table.strongest[row]),
                "token": table.top(row),
                "label": said.label(feature),
            }
            for row in window
        ]
        counts = {"total": len(order), "all": len(table), "dead": table.dead, "offset": asked.offset}
        return counts | {"has_examples": True, "preparing": None, "rows": rows}

    def feature(self, place: Place, number: int) -> dict[str, Any] | None:
        """{vocab, feature, note, hook_point, model, layer} of one feature; None without a report.

        Raises:
            Problem: 404: there is no such feature; 503: the index is being made.
            DataError: a damaged file.
        """
        table = self._ready(place)
        if table is None:
            return None
        row = table.row_of(number)
        if row is None:
            raise _no_feature(place, number)
        said = self.said(place, table)
        vocab, feature = self._feature(table, row)
        if number in said.explanations:
            feature = feature | {"explanations": said.explanations[number]}
        return {
            "vocab": vocab,
            "feature": feature,
            "note": said.notes.get(number),
            "hook_point": table.head.get("hook_point", ""),
            "model": table.head.get("model", ""),
            "layer": feature.get("layer"),
        }

    def marks(self, place: Place, features: list[int]) -> list[dict[str, Any]]:
        """{token, label, density} of each feature, null where it is not known."""
        table = self.table(place)
        own = table if isinstance(table, FeatureTable) else None
        said = self.said(place, own)
        rows = [None if own is None else own.row_of(feature) for feature in features]
        return [
            {
                "token": None if own is None or row is None else own.top(row),
                "label": said.label(feature),
                "density": None if own is None or row is None else float(own.density[row]),
            }
            for feature, row in zip(features, rows, strict=True)
        ]

    def _ready(self, place: Place) -> FeatureTable | None:
        """As `table`, once its index is made. Raises Problem, 503, before."""
        table = self.table(place)
        if isinstance(table, Preparing):
            raise Problem(503, f"The features of {place.name} are being prepared. Ask again in a while.")
        return table

    def _feature(self, table: FeatureTable, row: int) -> tuple[list[str], dict[str, Any]]:
        """As `FeatureTable.feature`, for JSON, kept."""

        def make() -> tuple[bytes]:
            return (json.dumps(finite(table.feature(row))).encode(),)

        raw = self._cache.get(("feature", table.key, row), make, lambda one: len(one[0]) + 200)[0]
        vocab, feature = json.loads(raw)
        return vocab, feature

    def _order(self, table: FeatureTable, asked: Asked, said: Said) -> np.ndarray:
        """The rows that are wanted in their order, int32."""

        def make() -> np.ndarray:
            order = table.order(asked.sort, asked.down)
            matching = table.matching(asked.wanted, table.rows_of(said.matching(asked.wanted)))
            found: np.ndarray = order[matching[order]]
            return found

        version = said.version if asked.wanted.searched else ()
        key = ("order", table.key, asked.wanted, asked.sort, asked.down, version)
        return self._cache.get(key, make, lambda order: order.nbytes + 500)

    def _rows_without(self, sae: TrainedCoder, asked: Asked, said: Said) -> dict[str, Any]:
        """The list of a dictionary that has no report: numbers and what was noted."""
        wanted, count = asked.wanted, sae.n_latents
        numbers: Any = range(count)
        if text := wanted.searched:
            named = [int(n)] if (n := text.strip().removeprefix("#")).isdecimal() and len(n) < 19 else []
            numbers = sorted(f for f in {*said.matching(wanted), *named} if f < count)
        if asked.sort == "id" and asked.down:
            numbers = numbers[::-1]
        window = numbers[asked.offset : asked.offset + min(asked.limit, MOST_ROWS)]
        rows = [{"id": f, "density": None, "max": None, "token": None, "label": said.label(f)} for f in window]
        counts = {"total": len(numbers), "all": count, "dead": 0, "offset": asked.offset}
        return counts | {"has_examples": False, "preparing": None, "rows": rows}

    def _kept(self, key: tuple[Any, ...], path: Path, make: Callable[[], V]) -> V:
        return self._cache.get(key, make, lambda _: 2 * _size(path))


def _size(path: Path) -> int:
    """Bytes of a file, and some for what surrounds it; of one that is not there some."""
    known = stamp(path)
    return 200 + (known.size if known else 0)


def _explained(folder: Path, about: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """{feature: explanations} of a folder, of the checkpoint or dictionary that the table is about."""
    rows = read_explanations(folder)
    features = [{"id": feature} for feature in sorted({row["feature"] for row in rows})]
    table = with_explanations(about | {"features": features}, rows)
    return {one["id"]: one["explanations"] for one in table["features"] if "explanations" in one}


def _no_feature(place: Place, feature: int) -> Problem:
    return Problem(404, f"{place.name} has no feature {feature}.")
