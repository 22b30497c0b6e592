"""Lists and pages of features: the report's table, with what models and people said of it since."""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from saejax.core.files import Stamp, finite, stamp
from saejax.reports.explanations import EXPLANATIONS, explanations_of
from saejax.reports.feature_table import FeatureTable, Search
from saejax.serve.caches import Cache
from saejax.serve.features.coders import Dictionaries, Place
from saejax.serve.features.notes import EVALUATION, NOTES, Note, read_notes, save_note
from saejax.serve.problems import Problem
from saejax.trained import TrainedCoder

MOST_ROWS = 1000
V = TypeVar("V")


@dataclasses.dataclass(frozen=True)
class Window:
    """`limit` rows of a search from `offset` on, by one of `feature_table.SORTS`."""

    search: Search = dataclasses.field(default_factory=Search)
    sort: str = "id"
    down: bool = False
    offset: int = 0
    limit: int = 200

    def of(self, features: Any) -> Any:
        """The part of all features of the search that lies in the window."""
        return features[self.offset : self.offset + min(self.limit, MOST_ROWS)]


@dataclasses.dataclass(frozen=True)
class Remarks:
    """The words of models and people about features: {feature: explanations, the newest first}, {feature: note}.

    `version` is another one when a word of it is.
    """

    explanations: dict[int, list[dict[str, Any]]]
    notes: dict[int, Note]
    version: tuple[Any, ...]

    def label(self, feature: int) -> str | None:
        """The note's label, else the newest explanation."""
        if (note := self.notes.get(feature)) and note["label"]:
            return str(note["label"])
        return str(texts[0]["text"]) if (texts := self.explanations.get(feature)) else None

    def matching(self, search: Search) -> list[int]:
        """Features of whose explanations, label or note the text is a part, as far as the scope covers these."""
        word, scope = search.word, search.scope
        if not word or scope not in ("any", "explained", "label"):
            return []
        texts = {f: [note["label"], *([note["note"]] if scope != "label" else [])] for f, note in self.notes.items()}
        for feature, explanations in self.explanations.items() if scope != "label" else ():
            texts.setdefault(feature, []).extend(row["text"] for row in explanations)
        return sorted(feature for feature, lines in texts.items() if any(word in line.lower() for line in lines))


class Browser:
    """Lists, features and notes of dictionaries.

    Args:
        cache: of features.
        dictionaries: for those that have no report.
        own: the server's folder, for notes of foreign dictionaries.
    """

    def __init__(self, cache: Cache, dictionaries: Dictionaries, own: Path):
        self._cache, self._dictionaries, self._own = cache, dictionaries, own

    def remarks(self, place: Place, head: dict[str, Any] | None = None) -> Remarks:
        """The remarks on a dictionary's features.

        Args:
            head: of the report's table, which explanations must be about.

        Raises:
            DataError: a damaged line of explanations.jsonl or notes.jsonl.
        """
        of = {key: value for key, value in (head or {}).items() if key in ("step", "sha256")}
        explanations: dict[int, list[dict[str, Any]]] = {}
        version: Stamp | None = None
        if (folder := place.folder) is not None:
            path = folder / EXPLANATIONS
            version = stamp(path)
            key = ("explanations", str(path), version, json.dumps(of, sort_keys=True))
            explanations = self._cached(key, path, lambda: explanations_of(folder, of))
        at = self.notes_folder(place)
        noted = stamp(at / NOTES), stamp(at / EVALUATION)
        notes = self._cached(("notes", str(at), noted), at / NOTES, lambda: read_notes(at))
        return Remarks(explanations, notes, (version, noted))

    def notes_folder(self, place: Place) -> Path:
        """The folder with the notes of a dictionary: that of its report, or one of the server's own."""
        return self._own / "notes" / place.name if place.folder is None else place.folder

    def note(self, place: Place, feature: int, label: str, note: str) -> Note:
        """Save a note of a feature.

        Raises:
            Problem: 404: the dictionary has no such feature.
            ConfigError, BusyError, DataError: as `save_note`.
        """
        with _table_of(place) as table:
            known = table.has(feature) if table else feature < self._dictionaries.coder(place).n_latents
        if not known:
            raise _no_feature(place, feature)
        return save_note(self.notes_folder(place), feature, label, note)

    def rows(self, place: Place, window: Window) -> dict[str, Any]:
        """A window of the list: {total, all, dead, offset, has_examples, rows}.

        Raises:
            DataError: a damaged file, or no dictionary there.
        """
        with _table_of(place) as table:
            if table is None:
                return self._rows_without(self._dictionaries.coder(place), window, self.remarks(place))
            remarks = self.remarks(place, table.head)
            order = self._order(table, window, remarks)
            shown = table.rows(window.of(order))
            rows = [shown[feature] | {"label": remarks.label(feature)} for feature in window.of(order)]
            counts = {"total": len(order), "all": table.count, "dead": table.dead, "offset": window.offset}
        return counts | {"has_examples": True, "rows": rows}

    def feature(self, place: Place, number: int) -> dict[str, Any] | None:
        """{vocab, feature, note, hook_point, model, layer} of one feature; None without a report.

        Raises:
            Problem: 404: there is no such feature.
            DataError: a damaged file.
        """
        with _table_of(place) as table:
            if table is None:
                return None
            if not table.has(number):
                raise _no_feature(place, number)
            remarks = self.remarks(place, table.head)
            vocab, feature = self._feature(table, number)
            head = table.head
        if number in remarks.explanations:
            feature = feature | {"explanations": remarks.explanations[number]}
        return {
            "vocab": vocab,
            "feature": feature,
            "note": remarks.notes.get(number),
            "hook_point": head.get("hook_point", ""),
            "model": head.get("model", ""),
            "layer": feature.get("layer"),
        }

    def marks(self, place: Place, features: list[int]) -> list[dict[str, Any]]:
        """{token, label, density} of each feature, null where it is not known."""
        with _table_of(place) as table:
            rows = table.rows(features) if table else {}
            remarks = self.remarks(place, table.head if table else None)
        return [
            {key: rows.get(feature, {}).get(key) for key in ("token", "density")} | {"label": remarks.label(feature)}
            for feature in features
        ]

    def _feature(self, table: FeatureTable, number: int) -> tuple[list[str], dict[str, Any]]:
        """As `FeatureTable.feature`, for JSON, cached."""
        key = ("feature", table.version, number)
        raw = self._cache.get(key, lambda: json.dumps(finite(table.feature(number))), lambda raw: len(raw) + 200)
        vocab, feature = json.loads(raw)
        return vocab, feature

    def _order(self, table: FeatureTable, window: Window, remarks: Remarks) -> list[int]:
        """All features of a search in their order."""
        search, how = window.search, (window.sort, window.down)
        key = ("order", table.version, search, *how, remarks.version if search.word else ())
        return self._cache.get(
            key, lambda: table.matching(search, remarks.matching(search), *how), lambda order: 40 * len(order) + 500
        )

    def _rows_without(self, sae: TrainedCoder, window: Window, remarks: Remarks) -> dict[str, Any]:
        """The list of a dictionary that has no report: numbers and what was noted."""
        search, count = window.search, sae.n_latents
        numbers: Any = range(count)
        if search.word:
            named = {search.number} if search.number is not None else set()
            numbers = sorted(f for f in {*remarks.matching(search), *named} if f < count)
        if window.sort == "id" and window.down:
            numbers = numbers[::-1]
        unknown = dict.fromkeys(("density", "max", "token"))
        rows = [{"id": f, **unknown, "label": remarks.label(f)} for f in window.of(numbers)]
        counts = {"total": len(numbers), "all": count, "dead": 0, "offset": window.offset}
        return counts | {"has_examples": False, "rows": rows}

    def _cached(self, key: tuple[Any, ...], path: Path, make: Callable[[], V]) -> V:
        known = stamp(path)
        return self._cache.get(key, make, lambda _: 2 * (200 + (known.size if known else 0)))


def _table_of(place: Place) -> contextlib.AbstractContextManager[FeatureTable | None]:
    """The table of a dictionary's report, open for a while; None without a report."""
    return contextlib.nullcontext() if place.features is None else FeatureTable(place.features)


def _no_feature(place: Place, feature: int) -> Problem:
    return Problem(404, f"{place.name} has no feature {feature}.")
