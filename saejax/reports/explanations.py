"""explanations.jsonl of a run: the words of language models about its features, one JSON object a line.

    {"feature": 7, "text": "...", "by": "<model>", "scores": {"detection": 0.9, "fuzzing": 0.8}, "step": ..., ...}

The last line of a feature and a model counts. A text of null stands for a feature with too few passages. Of the other
keys only "step", the checkpoint that was explained, and "sha256", of the dictionary, are read here.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saejax.core.errors import DataError
from saejax.core.files import LARGEST_JSON, read_if_there
from saejax.runs import Run
from saejax.runs.made import differing

EXPLANATIONS = Run.explanations
_LONGEST_TEXT = 2000


def read_explanations(run_dir: Path) -> list[dict[str, Any]]:
    """The rows, oldest first; none where there is no file. A torn last line (the process was killed) is ignored.

    Raises:
      DataError: a line that is not such a row; names it.
    """
    path = run_dir / EXPLANATIONS
    rows = []
    lines = (read_if_there(path, LARGEST_JSON) or b"").split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            row = line
        if row is None or (row is line and number == len(lines)):
            continue
        if fault := _fault(row):
            raise DataError(f"{path}, line {number} is damaged: {fault}; remove that line")
        rows.append(row)
    return rows


def explanations_of(run_dir: Path, of: Mapping[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """{feature: [{"text", "by", "scores": {"detection", "fuzzing"}}]} of what was said about a table of features.

    Of several models the one that spoke last is the first. A score that was not measured is not there.

    Args:
      of: the table's "step" and "sha256", where it says them: rows about another checkpoint or dictionary are left out.

    Raises:
      DataError: a damaged line.
    """
    latest: dict[tuple[int, str], dict[str, Any]] = {}
    for row in read_explanations(run_dir):
        latest.pop((row["feature"], row["by"]), None)
        if not differing(row, of):
            latest[row["feature"], row["by"]] = row
    texts: dict[int, list[dict[str, Any]]] = {}
    for row in reversed(latest.values()):
        if row["text"] is not None:
            scores = {kind: value for kind, value in row["scores"].items() if value is not None}
            texts.setdefault(row["feature"], []).append({"text": row["text"], "by": row["by"], "scores": scores})
    return texts


def _fault(row: Any) -> str:
    """The fault of a row, or nothing."""
    if not isinstance(row, dict):
        return "it is no JSON object"
    if type(row.get("feature")) is not int or row["feature"] < 0:
        return f"the feature is {str(row.get('feature'))[:40]!r}, not a number"
    text, by, scores = row.get("text"), row.get("by"), row.get("scores")
    if not (text is None or (isinstance(text, str) and len(text) <= _LONGEST_TEXT)):
        return f"the text is not one of at most {_LONGEST_TEXT:,} letters"
    if not isinstance(by, str) or len(by) > _LONGEST_TEXT:
        return "it does not say which model it is by"
    if not isinstance(scores, dict) or not all(
        kind in ("detection", "fuzzing") and (value is None or (type(value) in (int, float) and 0 <= value <= 1))
        for kind, value in scores.items()
    ):
        return f"the scores are {str(scores)[:80]}, not detection and fuzzing between 0 and 1"
    return ""
