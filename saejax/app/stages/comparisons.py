"""Several dictionaries evaluated on one text, beside each other: paired differences, and latents that they share."""

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saejax.core.errors import DataError
from saejax.evals import SAME, Documents, compare, stability
from saejax.runs import Run
from saejax.trained import TrainedCoder

# Of these metrics the table says who is better; the others' differences can be had from documents.npz.
_METRICS = (("fve", "FVE"), ("loss_recovered", "loss recovered"))
# A matching of 4,096 latents takes seconds, and pairs grow with the square: so many dictionaries of a hook point.
_MATCHED = 8


def comparisons(
    folder: Path, rows: Sequence[Mapping[str, Any]], saes: Mapping[str, TrainedCoder]
) -> list[dict[str, Any]]:
    """The sections that stand below the table: {"title", "lead", "columns", "rows"}.

    Args:
        folder: with a folder for each dictionary.
        rows: eval.json of each, with "name"; or {"name", "error"}.
        saes: those whose weights are at hand.
    """
    by_sites: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Mapping[str, Any]]] = {}
    for row in rows:
        if "error" not in row:
            by_sites.setdefault((tuple(row["reads"]), tuple(row["writes"])), []).append(row)
    apart = [line for group in by_sites.values() for line in _paired_differences(folder, group)]
    alike = [line for group in by_sites.values() for line in _alike(group, saes)]
    sections = []
    if apart:
        lead = (
            "Each dictionary minus the first of its hook point, document by document on the same resamples: difference "
            "and 95 % interval. It is better or worse only where the interval excludes 0."
        )
        columns = [("dictionary", "name", ""), ("against", "against", "")]
        for metric, label in _METRICS:
            columns += [(label, metric, ""), ("verdict", f"{metric}_verdict", "")]
        sections.append({"title": "Differences", "lead": lead, "columns": columns, "rows": apart})
    if alike:
        lead = (
            "What latents of two dictionaries write: mean |cos| of the pairs, and the share of pairs above "
            f"{SAME}. Matched one to one up to 4,096 latents; above it the largest |cos| of each latent, both ways. "
            f"Of the first {_MATCHED} dictionaries of a hook point."
        )
        columns = [("dictionary", "name", ""), ("and", "other", ""), ("pairs", "method", "")]
        columns += [("mean |cos|", "mean", ".4f"), (f"above {SAME}", "share", ".1%")]
        sections.append({"title": "Shared latents", "lead": lead, "columns": columns, "rows": alike})
    return sections


def _paired_differences(folder: Path, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    first, lines = rows[0], []
    for row in rows[1:]:
        line: dict[str, Any] = {"name": row["name"], "against": first["name"]}
        try:
            differences = compare(_documents(folder, row), _documents(folder, first))
        except DataError as error:
            lines.append(line | {"fve_verdict": f"not compared: {error}"})
            continue
        for metric, _ in _METRICS:
            if difference := differences.get(metric):
                interval = " [{:+.4f}, {:+.4f}]".format(*difference.interval) if difference.interval else ""
                line |= {metric: f"{difference.value:+.4f}{interval}", f"{metric}_verdict": difference.verdict}
        lines.append(line)
    return lines


def _documents(folder: Path, row: Mapping[str, Any]) -> Documents:
    """Raises DataError where there are none, or those of another evaluation than eval.json."""
    path = Run(folder / row["name"]).documents
    if not path.is_file():
        raise DataError(f"no {path.name} beside eval.json: evaluate again, with --redo")
    documents = Documents.load(path)
    of_documents = {name: value for name, value in row["metrics"].items() if name in documents.metrics}
    if any(documents.metrics[name] != value for name, value in of_documents.items() if value is not None):
        raise DataError(f"{path} is of another evaluation than eval.json beside it: evaluate again, with --redo")
    return documents


def _alike(rows: Sequence[Mapping[str, Any]], saes: Mapping[str, TrainedCoder]) -> list[dict[str, Any]]:
    lines = []
    names = [row["name"] for row in rows if row["name"] in saes][:_MATCHED]
    for name, other in itertools.combinations(names, 2):
        with contextlib.suppress(DataError):  # an autoencoder and a cross-layer transcoder, say
            pair = stability(saes[name], saes[other])
            shown = {"method": pair.method, "mean": pair.mean, "share": pair.share_above}
            lines.append({"name": name, "other": other} | shown)
    return lines
