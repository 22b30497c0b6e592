"""provenance.json: the stores, the model and the text that a run was made from, which whoever reads it compares.

    train, heldout   the stores: where each was found, its rows, its fingerprint; only the last may never change
    lm, text         the identities of model and text, as a captured store has them

What is empty is not known yet, as the text of imported activations. Whoever comes to know it adds it, and from then on
it must agree.
"""

from collections.abc import Callable
from typing import Any

from saejax.core.config import differences
from saejax.core.errors import DataError
from saejax.core.files import read_object, write_json
from saejax.runs.folder import Run

STORES = ("train", "heldout")

# {"train": ..., "heldout": ..., "lm": ..., "text": ...}, a JSON dict each.
Provenance = dict[str, dict[str, Any]]


def read_provenance(run: Run) -> Provenance:
    """The record of a run; empty where there is none. Raises DataError: it is damaged."""
    if not run.provenance.is_file():
        return {}
    content = read_object(run.provenance)
    if not all(isinstance(value, dict) for value in content.values()):
        raise DataError(f"{run.provenance} is damaged; restore it or delete it.")
    return content


def verify_provenance(run: Run, now: Provenance, assumed: Callable[[], Provenance] = dict) -> Provenance:
    """The record of a run with what `now` adds to it; without a record it counts as made from `assumed()`.

    Raises:
        DataError: the run was made from something else; each difference is listed.
    """
    known = read_provenance(run) or assumed()
    if changed := [line for key, of in now.items() if of for line in _changes(key, known.get(key, {}), of)]:
        raise DataError(
            f"{run.path} was made from something else:\n  " + "\n  ".join(changed) + "\n"
            "Restore what it was made from (a store may lie elsewhere, its content counts), or choose another "
            "--config.name."
        )
    return {key: known.get(key, {}) | now.get(key, {}) for key in known | now}


def record_provenance(run: Run, content: Provenance, tell: Callable[[str], None] | None = None) -> None:
    """Write down what a run was made from; `tell` what its record did not have."""
    before = read_provenance(run)
    new = [key for key, value in content.items() if value and not before.get(key)]
    if new and tell:
        named = ", ".join(f"{key} {content[key]['store']}" if key in STORES else key for key in new)
        tell(f"{run.path} did not record what it was made from ({named}): what is there now is recorded, and compared")
    if content != before:
        write_json(run.provenance, content)


def _changes(key: str, known: dict[str, Any], now: dict[str, Any]) -> list[str]:
    if key not in STORES:
        both = [name for name in known if name in now]  # an import may know the model's name and nothing else of it
        return differences({name: known[name] for name in both}, {name: now[name] for name in both}, key)
    if not known or known["fingerprint"] == now["fingerprint"]:
        return []
    shown = "{store} ({rows:,} rows, fingerprint {fingerprint:.12})"
    return [f"{key}: {shown.format(**known)} -> {shown.format(**now)}"]
