"""bad_batch.json: the rows of the batch at which training gave up, their places in the store and their tokens."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from saejax.core.files import write_json
from saejax.store import METADATA_NAMES, BatchSource, StoreReader

NAME = "bad_batch.json"

# How many rows are shown at the top of the file, those that are not finite first, then the longest.
_WORST = 10

Blame = Callable[[int, Mapping[str, np.ndarray], dict[str, Any]], Path]


def make_blame(run_dir: Path, batches: BatchSource, open_reader: Callable[[], StoreReader] | None) -> Blame:
    """(number of the batch, its rows, what is known of the step) -> the file written.

    Activations that do not come from a store have no place in one: only their norms are written.

    Args:
        open_reader: of the store that the batches come from; None where there is none.
    """

    def blame(number: int, batch: Mapping[str, np.ndarray], known: dict[str, Any]) -> Path:
        columns: dict[str, Any] = {}
        for name, rows in batch.items():
            columns[f"norm of {name}"] = np.linalg.norm(rows.astype(np.float64), axis=1)
        places = batches.places(number)
        if places and open_reader:
            places = places | _token_columns(open_reader(), places["row"])
        columns = places | columns
        norm_B = np.max([values for name, values in columns.items() if name.startswith("norm of ")], axis=0)
        worst = np.argsort(-np.where(np.isfinite(norm_B), norm_B, np.inf), kind="stable")[:_WORST]
        content = known | {
            "batch": number,
            "rows_not_finite": int((~np.isfinite(norm_B)).sum()),
            "worst": [{name: values[i].item() for name, values in columns.items()} for i in worst],
            "all": {name: values.tolist() for name, values in columns.items()},
        }
        write_json(run_dir / NAME, content)
        return run_dir / NAME

    return blame


def _token_columns(reader: StoreReader, row_B: np.ndarray) -> dict[str, np.ndarray]:
    """token_id, document and position of rows of the store."""
    columns = {name: np.empty(len(row_B), np.int32) for name in METADATA_NAMES}
    size = reader.layout.chunk_rows
    for chunk in np.unique(row_B // size):
        here = row_B // size == chunk
        start = int(chunk) * size
        stop = min(reader.n_tokens, start + size)
        for name, values in columns.items():
            values[here] = reader.array_rows(name, start, stop)[row_B[here] - start]
    return columns
