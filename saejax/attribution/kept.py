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
from saejax.core.errors import DataError
from saejax.core.files import read_bounded, read_json, write_bytes, write_json

_LARGEST_ROWS = 16 << 30
_PLAN = "graph.json"
_ARRAYS = {"targets": (np.int64, 1), "sums": (np.float64, 1), "features": (np.float32, 2), "others": (np.float32, 2)}


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

    @classmethod
    def of(cls, targets: np.ndarray, rows: np.ndarray, n_features: int, row_features: int) -> "Chunk":
        """The part of whole rows [C, A + O] that is kept."""
        features, others = rows[:, :n_features], np.ascontiguousarray(rows[:, n_features:])
        sums = np.abs(rows).sum(1, dtype=np.float64)
        places = None
        if row_features and row_features < n_features:
            largest = np.argpartition(-np.abs(features), row_features, axis=1)[:, :row_features]
            places = np.sort(largest, axis=1).astype(np.int32)
            features = np.take_along_axis(features, places, axis=1)
        return cls(targets.astype(np.int64), sums, np.ascontiguousarray(features), others, places)

    def __len__(self) -> int:
        return len(self.targets)


class Kept:
    """The chunks so far, in the order in which they were computed."""

    def __init__(self, levels: np.ndarray, first_logit: int, probabilities: np.ndarray):
        """`levels` [A]: the layer that each feature reads, as its effects come from layers below alone."""
        self.chunks: list[Chunk] = []
        self._levels, self._first_logit, self._probabilities = levels, first_logit, probabilities

    def influence(self) -> np.ndarray:
        """float64 [A], of each feature on the logits through the rows there are.

        One pass over the rows from the last layer to the first: a feature's influence is known when its row's turn
        comes. Sums are taken row by row, so that they are the same numbers every time.
        """
        influence_A = np.zeros(len(self._levels))
        levels = np.append(self._levels, np.iinfo(np.int32).max)  # the last of logits
        rows = [
            (int(levels[min(node, len(self._levels))]), c, i)
            for c, chunk in enumerate(self.chunks)
            for i, node in enumerate(chunk.targets)
        ]
        for _, c, i in sorted(rows, key=lambda row: -row[0]):
            chunk = self.chunks[c]
            node = chunk.targets[i]
            is_logit = node >= self._first_logit
            weight = self._probabilities[node - self._first_logit] if is_logit else influence_A[node]
            share = weight / max(chunk.sums[i], 1e-10)
            if share:
                at = slice(None) if chunk.places is None else chunk.places[i]
                influence_A[at] += share * np.abs(chunk.features[i])
        return influence_A

    def best(self, count: int) -> np.ndarray:
        """The `count` features of most influence that have no row yet; of equal ones the first."""
        seen = np.concatenate([chunk.targets for chunk in self.chunks])
        influence = self.influence()
        influence[seen[seen < self._first_logit]] = -1
        order = np.argsort(-influence, kind="stable")[:count]
        return order[influence[order] >= 0]

    def weights(self, nodes: np.ndarray, features: np.ndarray, n_others: int) -> np.ndarray:
        """[nodes, features + n_others]: the rows of `nodes`, of the chosen sources; 0 where a row has less."""
        column = np.full(len(self._levels), -1)
        column[features] = np.arange(len(features))
        row_of = {int(node): row for row, node in enumerate(nodes)}
        weights = np.zeros((len(nodes), len(features) + n_others), np.float32)
        for chunk in self.chunks:
            rows = np.array([row_of[int(node)] for node in chunk.targets])
            weights[rows, len(features) : len(features) + chunk.others.shape[1]] = chunk.others
            if chunk.places is None:
                weights[rows, : len(features)] = chunk.features[:, features]
                continue
            for row, places, values in zip(rows, chunk.places, chunk.features, strict=True):
                at = column[places]
                weights[row, at[at >= 0]] = values[at >= 0]
        return weights


@dataclasses.dataclass(frozen=True)
class OnDisk:
    """A folder with the rows of one graph: graph.json says of which, rows_00000.npz and so on hold a chunk each."""

    folder: Path

    @classmethod
    def open(cls, folder: str | Path, what: dict[str, Any]) -> "OnDisk":
        """The folder, made if it is not there."""
        folder = Path(folder)
        plan = folder / _PLAN
        if not plan.exists():
            if folder.is_dir() and any(folder.glob("rows_*.npz")):
                raise DataError(
                    f"{folder} holds rows of a graph, but no {_PLAN} to say of which. Choose another folder."
                )
            write_json(plan, what)
        there = read_json(plan)
        differs = [name for name in what if not isinstance(there, dict) or there.get(name) != what[name]]
        if differs:
            raise DataError(
                f"{folder} holds rows of another graph: {', '.join(differs)} differ. Choose another folder, or delete "
                "this one."
            )
        return cls(folder)

    def read(self, number: int, targets: np.ndarray, n_features: int, n_others: int, row_features: int) -> Chunk | None:
        path = self._path(number)
        if not path.exists():
            return None
        wide = row_features if 0 < row_features < n_features else n_features
        try:
            arrays = from_bytes(read_bounded(path, _LARGEST_ROWS), (*_ARRAYS, "places"))
            chunk = Chunk(**arrays)
            kinds = {name: (getattr(chunk, name).dtype, getattr(chunk, name).ndim) for name in _ARRAYS}
            shapes = (chunk.features.shape, chunk.others.shape, chunk.sums.shape)
            whole = (len(targets), wide), (len(targets), n_others), (len(targets),)
            places = chunk.places is None or (
                chunk.places.dtype == np.int32
                and chunk.places.shape == whole[0]
                and bool(((chunk.places >= 0) & (chunk.places < n_features)).all())
            )
            if not (
                kinds == _ARRAYS
                and shapes == whole
                and places
                and (chunk.places is None) == (wide == n_features)
                and np.array_equal(chunk.targets, targets)
            ):
                raise DataError("its arrays are not those of this chunk")
            return chunk
        except (DataError, TypeError) as error:
            raise DataError(f"{path} is damaged ({error}). Delete it: its rows are computed again.") from None

    def write(self, number: int, chunk: Chunk) -> None:
        arrays = {name: getattr(chunk, name) for name in _ARRAYS}
        write_bytes(self._path(number), to_bytes(arrays | ({} if chunk.places is None else {"places": chunk.places})))

    def _path(self, number: int) -> Path:
        return self.folder / f"rows_{number:05d}.npz"
