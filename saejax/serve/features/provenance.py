"""The origin of a run and of the examples of its features: command, commit, document, shard of the held-out store."""

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saejax.app.experiment import Experiment, recorded
from saejax.core.errors import SaejaxError
from saejax.core.files import read_object, stamp
from saejax.lm import load_tokenizer
from saejax.runs import Run
from saejax.runs.provenance import read_provenance
from saejax.serve.caches import Cache
from saejax.serve.features.browser import Browser
from saejax.serve.features.coders import Dictionaries, Place
from saejax.serve.problems import Problem
from saejax.store import StoreReader
from saejax.store.files import StoreFiles
from saejax.store.manifest import Manifest
from saejax.store.reader import complete_manifest

_AROUND = 256  # rows on each side that are looked at


class Provenance:
    """Traces runs, features and examples to what they were made from.

    Args:
        cache: of provenance.
        browser: gives the features.
        dictionaries: for foreign ones, which say themselves where they come from.
        stores: the folder of all stores.
    """

    def __init__(self, cache: Cache, browser: Browser, dictionaries: Dictionaries, stores: Path):
        self._cache, self._browser, self._dictionaries, self._stores = cache, browser, dictionaries, stores

    def of(self, place: Place, feature: int | None, example: int = 0) -> dict[str, Any]:
        """{run, feature, example, why}: what is null is not known or was not asked for, and `why` says which.

        Raises:
            Problem: 404: no such feature or example.
            DataError: a damaged file of the run.
        """
        answer: dict[str, Any] = {"run": self._run(place), "feature": None, "example": None, "why": []}
        if feature is None:
            return answer
        told = self._browser.feature(place, feature)
        if told is None:
            answer["why"].append(f"{place.name} has no report, and so no examples.")
            return answer
        details = told["feature"]
        kept = ("density", "max", "mean", "layer")
        answer["feature"] = {"id": feature, "hook_point": told["hook_point"], "model": told["model"]} | {
            key: details[key] for key in kept if key in details
        }
        examples = details.get("examples") or []
        if not examples and example == 0:
            answer["why"].append("The feature never fired in the scan of the report: it has no example.")
            return answer
        if not 0 <= example < len(examples):
            raise Problem(404, f"Feature {feature} of {place.name} has no example {example}; it has {len(examples)}.")
        answer["example"], answer["why"] = self._example(place, _Example.of(examples[example], told))
        return answer

    def _run(self, place: Place) -> dict[str, Any]:
        """The record in a run's files; of a foreign dictionary its own."""
        if (folder := place.folder) is None:
            sae = self._dictionaries.coder(place)
            return {"name": place.name, "dictionary": sae.describe()}
        run = Run(folder)
        places = (run.config, run.environment, run.provenance, run.evaluation)
        files = dict(zip(("config", "environment", "provenance", "eval"), places, strict=True))
        key = ("run", str(folder), *(stamp(path) for path in files.values()))

        def make() -> dict[str, Any]:
            content = {name: read_object(path) if path.is_file() else None for name, path in files.items()}
            environment, evaluation = content["environment"] or {}, content["eval"] or {}
            sessions = environment.get("sessions")
            session = sessions[-1] if sessions and isinstance(sessions, list) else environment
            session = session if isinstance(session, dict) else {}
            return {
                "name": place.name,
                "config": content["config"] or evaluation.get("experiment"),
                "environment": session or None,
                "command": session.get("command"),
                "provenance": content["provenance"],
                "evaluated": None if Run(folder).exists else {k: evaluation.get(k) for k in ("source", "sha256", "on")},
            }

        return self._cache.get(
            key, make, lambda _: 500 + 3 * sum(known.size for path in files.values() if (known := stamp(path)))
        )

    def _example(self, place: Place, example: "_Example") -> tuple[dict[str, Any], list[str]]:
        """(where an example comes from, sentences about what is not known)."""
        folder = place.folder
        assert folder is not None  # a foreign dictionary has no report
        # With its own name, by which its store may be called.
        run = Run(folder)
        e = recorded(run.config, self._run(place)["config"])
        path = self._heldout(e)

        def make() -> tuple[dict[str, Any], list[str]]:
            return _traced(e, path, read_provenance(run), example)

        stamps = (stamp(run.provenance), stamp(path / "manifest.json"), stamp(run.config))
        return self._cache.get(("example", str(folder), example, *stamps), make, lambda _: 4000)

    def _heldout(self, e: Experiment) -> Path:
        """The place of an experiment's held-out store, below the folder of stores.

        Raises:
            Problem: 404: it lies elsewhere.
        """
        path = Path(os.path.realpath(self._stores / (e.store or e.name) / "heldout"))
        if self._stores not in path.parents:
            raise Problem(404, f"The store {e.store or e.name} of the run lies outside of the server's stores.")
        return path


@dataclasses.dataclass(frozen=True)
class _Example:
    """A passage of a report: its document, the place of token `peak` in its piece of it, and the first point read."""

    document: str
    index: int | None
    position: int | None
    tokens: tuple[str, ...]
    peak: int
    hook_point: str

    @classmethod
    def of(cls, example: dict[str, Any], told: dict[str, Any]) -> "_Example":
        tokens = tuple(told["vocab"][token] for token in example["tokens"])
        index = example.get("index")
        first = re.split(", | -> ", str(told["hook_point"]))[0]
        index, position = (value if type(value) is int else None for value in (index, example.get("position")))
        return cls(str(example.get("document", "")), index, position, tokens, example["peak"], first)


def _traced(e: Experiment, path: Path, record: dict[str, Any], example: _Example) -> tuple[dict[str, Any], list[str]]:
    """(where an example comes from, why of what is null), from the held-out store at `path`.

    Args:
        record: provenance.json of the run.
    """
    lm = record.get("lm", {})
    why: list[str] = []
    origin: dict[str, Any] = {
        "document": example.document,
        "document_index": example.index,
        "position": example.position,
        "text": "".join(example.tokens),
        "split": "heldout",
        "model": lm.get("model") or e.lm.model,
        "revision": lm.get("revision") or e.lm.revision or None,
        "weights_sha256": lm.get("weights_sha256"),
        **dict.fromkeys(("store", "shard", "row", "shard_sha256", "array")),
    }
    if not origin["revision"]:
        why.append("The model has no revision: it is no repository of the hub, or none was given (lm.revision).")
    try:
        place, reasons = _stored(e, path, record, example)
    except SaejaxError as error:
        place, reasons = {}, [f"The held-out store cannot be read: {error}"]
    return origin | place, [*why, *reasons]


def _stored(e: Experiment, path: Path, record: dict[str, Any], example: _Example) -> tuple[dict[str, Any], list[str]]:
    """(store, shard, row, shard_sha256, array, as far as they are known, and why not)."""
    if not (path / "manifest.json").is_file():
        streamed = " The run trained on activations of the running model (capture.into=training)."
        return {}, [f"There is no held-out store at {path}.{streamed * (e.capture.into == 'training')}"]
    manifest = complete_manifest(StoreFiles(path))
    known = record.get("heldout", {}).get("fingerprint")
    if known and known != manifest.fingerprint:
        return {}, [f"{path} is another store by now than the one that the run was made with."]
    answer: dict[str, Any] = {"store": str(path)}
    if example.index is None or example.position is None:
        return answer, []
    if {"merged", "imported"} & manifest.header.identity.keys():
        return answer, [f"{path} was merged or imported: its documents have other numbers than the report's text."]
    passages = passages_at(path, manifest, example.index, example.position)
    if not passages:
        return answer, [
            f"The token is not in the held-out store: it holds {manifest.n_tokens:,} rows, and the report scans "
            f"{e.report.tokens:,} tokens of the text itself."
        ]
    passage, why = _that_reads(e, passages, example.tokens, example.peak)
    hashes = manifest.shards[passage.shard][1]
    array = next(name for name in (example.hook_point, *manifest.header.hook_points) if name in hashes)
    at = {"shard": passage.shard, "row": passage.row, "shard_sha256": hashes[array], "array": array}
    return answer | at, why


def _that_reads(
    e: Experiment, passages: "Sequence[Passage]", tokens: Sequence[str], peak: int
) -> "tuple[Passage, list[str]]":
    """Of several pieces of one document the one that reads as an example does, whose token `peak` is the passage's."""
    if len(passages) == 1:
        return passages[0], []
    several = f"The document has {len(passages)} pieces with a token at this position"
    try:
        tokenizer = load_tokenizer(e.lm.model, e.lm.revision)
    except SaejaxError:
        return passages[0], [f"{several}, and without the model's tokenizer this is the first of them."]

    def reads(passage: "Passage") -> bool:
        here = {peak + offset: token for offset, token in passage.tokens.items() if 0 <= peak + offset < len(tokens)}
        return [tokens[at] for at in here] == tokenizer.token_strings(list(here.values()))

    same = [passage for passage in passages if reads(passage)]
    if len(same) == 1:
        return same[0], []
    return (same or passages)[0], [f"{several}, of which {len(same)} read as the example does; this is the first."]


@dataclasses.dataclass(frozen=True)
class Passage:
    """A stored token and its neighbours in its piece of a document.

    Attributes:
        shard: by its number in the store's commits.
        row: of the store, as `StoreReader.rows` counts.
        tokens: {distance: token id}, of this token (0) and of those that are stored before and after it.
    """

    shard: int
    row: int
    tokens: dict[int, int]


def passages_at(path: Path, manifest: Manifest, document: int, position: int) -> list[Passage]:
    """The tokens of a document that stand at `position` of a piece of it; a long document has several pieces.

    Raises:
        DataError: the store is damaged.
    """
    reader, order = StoreReader.open(path), manifest.row_order
    passages = []
    for k, shard in enumerate(order.shards.tolist()):
        start, stop = int(order.starts[k]), int(order.starts[k + 1])
        stream = reader.stream_places(k)  # rows of a shard, in the order in which they came
        documents = reader.array_rows("document", start, stop)[stream]
        if manifest.header.parts == 1 and documents[0] > document:
            break  # documents come in order
        if not (documents == document).any():
            continue
        positions = reader.array_rows("position", start, stop)[stream]
        tokens = reader.array_rows("token_id", start, stop)[stream]
        for at in np.flatnonzero((documents == document) & (positions == position)).tolist():
            inside = _piece(documents, positions, at)
            around = {int(positions[i]) - position: int(tokens[i]) for i in inside}
            passages.append(Passage(shard, start + int(stream[at]), around))
    return passages


def _piece(documents: np.ndarray, positions: np.ndarray, at: int) -> range:
    """The rows around one that are of its piece: of its document, with positions that rise."""
    low, high = max(0, at - _AROUND), min(len(documents), at + _AROUND + 1)
    goes_on = (documents[low : high - 1] == documents[low + 1 : high]) & (np.diff(positions[low:high]) > 0)
    breaks = low + 1 + np.flatnonzero(~goes_on)  # each is the first row of a piece
    return range(max([low, *breaks[breaks <= at]]), min([high, *breaks[breaks > at]]))
