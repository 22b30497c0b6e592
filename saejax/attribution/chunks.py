"""Rows that are done: the influence they say so far, and how they lie on disk, where a killed graph finds them again.

    influence = p A + p A^2 + ...        over the rows there are, A_ts = |w_ts| / sum_s |w_ts|

With `row_features` a row keeps its largest effects of features alone. The sum stays that of the whole row, so that
what is left out is missing, and not given to others.

Shape letters: C rows of a chunk, A active features, O other sources (errors, tokens), Q features kept of a row.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from saejax.attribution.graph import from_bytes, to_bytes
from saejax.attribution.local import LocalModel
from saejax.attribution.settings import AttributionConfig
from saejax.core.errors import DataError
from saejax.core.files import read_bounded, read_json, write_bytes, write_json

_LARGEST_ROWS = 16 << 30
_PLAN = "graph.json"


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Rows of some targets.

    Attributes:
        targets: int64 [C], nodes.
        sums: float64 [C], of a whole row's absolute values.
        features: float32 [C, A], or [C, Q] with `places`.
        others: float32 [C, O].
        places: int32 [C, Q], which features; None where all are there.
    """

    targets: np.ndarray
    sums: np.ndarray
    features: np.ndarray
    others: np.ndarray
    places: np.ndarray | None = None


class Chunks:
    """The chunks so far, in the order in which they were computed."""

    def __init__(self, local: LocalModel, config: AttributionConfig, folder: Path | None):
        """`folder`: of `rows_folder`, where each chunk is written; one that is there is read, not computed."""
        self._local, self._config, self._folder = local, config, folder
        self._n_features = len(local.features)
        self._sparse = 0 < config.row_features < self._n_features
        self._chunks: list[Chunk] = []

    def __len__(self) -> int:
        return sum(len(chunk.targets) for chunk in self._chunks)

    def add(self, targets: np.ndarray) -> None:
        """The rows of these nodes, `config.chunk` at most.

        Raises:
            DataError: the chunk's file is damaged.
        """
        if self._folder is None:
            self._chunks.append(self._computed(targets))
            return
        path = self._folder / f"rows_{len(self._chunks):05d}.npz"
        if path.exists():
            self._chunks.append(self._read(path, targets))
            return
        chunk = self._computed(targets)
        write_bytes(path, to_bytes({name: array for name, array in vars(chunk).items() if array is not None}))
        self._chunks.append(chunk)

    def _computed(self, targets: np.ndarray) -> Chunk:
        rows, places = self._local.rows(targets, self._config.chunk), None
        features, others = rows[:, : self._n_features], np.ascontiguousarray(rows[:, self._n_features :])
        if self._sparse:
            count = self._config.row_features
            largest = np.argpartition(-np.abs(features), count, axis=1)[:, :count]
            places = np.sort(largest, axis=1).astype(np.int32)
            features = np.take_along_axis(features, places, axis=1)
        sums = np.abs(rows).sum(1, dtype=np.float64)
        return Chunk(targets.astype(np.int64), sums, np.ascontiguousarray(features), others, places)

    def _read(self, path: Path, targets: np.ndarray) -> Chunk:
        count, wide = len(targets), self._config.row_features if self._sparse else self._n_features
        kinds: dict[str, tuple[Any, tuple[int, ...]]] = {
            "targets": (np.int64, (count,)),
            "sums": (np.float64, (count,)),
            "features": (np.float32, (count, wide)),
            "others": (np.float32, (count, self._local.n_errors + self._local.n_tokens)),
        }
        kinds |= {"places": (np.int32, (count, wide))} if self._sparse else {}
        try:
            arrays = from_bytes(read_bounded(path, _LARGEST_ROWS), [field.name for field in dataclasses.fields(Chunk)])
            chunk, places = Chunk(**arrays), arrays.get("places", np.zeros(0, np.int32))
            if (
                {name: (array.dtype, array.shape) for name, array in arrays.items()} != kinds
                or ((places < 0) | (places >= self._n_features)).any()
                or not np.array_equal(chunk.targets, targets)
            ):
                raise DataError("its arrays are not those of this chunk")
            return chunk
        except (DataError, TypeError) as error:
            raise DataError(f"{path} is damaged ({error}). Delete it: its rows are computed again.") from None

    def influence(self) -> np.ndarray:
        """float64 [A], of each feature on the logits through the rows there are.

        One pass over the rows from the last layer to the first, as effects come from layers below alone: a feature's
        influence is known when its row's turn comes. Sums are taken row by row, so that they are the same numbers every
        time.
        """
        influence_A, first_logit = np.zeros(self._n_features), self._local.n_sources
        levels = np.append(self._local.features[:, 0], np.iinfo(np.int32).max)  # the last of logits
        rows = [
            (int(levels[min(node, self._n_features)]), node, i, chunk)
            for chunk in self._chunks
            for i, node in enumerate(chunk.targets)
        ]
        for _, node, i, chunk in sorted(rows, key=lambda row: -row[0]):
            is_logit = node >= first_logit
            weight = self._local.probabilities[node - first_logit] if is_logit else influence_A[node]
            share = weight / max(chunk.sums[i], 1e-10)
            if share:
                at = slice(None) if chunk.places is None else chunk.places[i]
                influence_A[at] += share * np.abs(chunk.features[i])
        return influence_A

    def best(self, count: int) -> np.ndarray:
        """The `count` features of most influence that have no row yet; of equal ones the first."""
        influence = self.influence()
        influence[self.features()] = -1
        order = np.argsort(-influence, kind="stable")[:count]
        return order[influence[order] >= 0]

    def features(self) -> np.ndarray:
        """The features that have a row, rising."""
        targets = np.concatenate([chunk.targets for chunk in self._chunks])
        return np.sort(targets[targets < self._n_features])

    def weights(self) -> np.ndarray:
        """The weights of a `Graph` of the features that have a row; 0 where a row has less."""
        features, n_logits = self.features(), len(self._local.logits)
        nodes = np.r_[features, self._local.n_sources + np.arange(n_logits)]
        column = np.full(self._n_features, -1)
        column[features] = np.arange(len(features))
        row_of = {int(node): row for row, node in enumerate(nodes)}
        n_others = self._local.n_errors + self._local.n_tokens
        weights = np.zeros((len(nodes), len(features) + n_others + n_logits), np.float32)
        for chunk in self._chunks:
            rows = np.array([row_of[int(node)] for node in chunk.targets])
            weights[rows, len(features) : len(features) + n_others] = chunk.others
            if chunk.places is None:
                weights[rows, : len(features)] = chunk.features[:, features]
                continue
            for row, places, values in zip(rows, chunk.places, chunk.features, strict=True):
                at = column[places]
                weights[row, at[at >= 0]] = values[at >= 0]
        return weights


def rows_folder(folder: str | Path, what: dict[str, Any]) -> Path:
    """The folder with the rows of one graph, made if it is not there.

    graph.json says `what` it is of, rows_00000.npz and so on hold a chunk each.

    Raises:
        DataError: it is of another graph, or does not say of which.
    """
    folder = Path(folder)
    plan = folder / _PLAN
    if not plan.exists():
        if folder.is_dir() and any(folder.glob("rows_*.npz")):
            raise DataError(f"{folder} holds rows of a graph, but no {_PLAN} to say of which. Choose another folder.")
        write_json(plan, what)
    there = read_json(plan)
    if differs := [name for name in what if not isinstance(there, dict) or there.get(name) != what[name]]:
        raise DataError(
            f"{folder} holds rows of another graph: {', '.join(differs)} differ. Choose another folder, or delete this "
            "one."
        )
    return folder
