"""What a run was made from: `provenance.json` in its folder. Whoever reads the run later compares.

    train, heldout   the stores: where each was found, its rows, its fingerprint; only the last may never change
    lm, text         the identities of model and text, as a captured store has them

What is empty is not known yet, as the text of imported activations. Whoever comes to know it adds it, and from then on
it must agree.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from saejax.app.experiment import Experiment
from saejax.core.config import differences
from saejax.core.errors import DataError
from saejax.core.files import read_object, write_json
from saejax.store.files import StoreFiles
from saejax.store.manifest import Manifest, read_manifest

PROVENANCE = "provenance.json"
_STORES = ("train", "heldout")
# The fingerprint by which an earlier version may have recorded the same activations.
FORMER = "former_fingerprint"

# {"train": ..., "heldout": ..., "lm": ..., "text": ...}, a JSON dict each.
Provenance = dict[str, dict[str, Any]]


def of_stores(e: Experiment) -> Provenance:
    """What the stores of an experiment say, those that are there and complete.

    Raises:
        DataError: a damaged manifest.
    """
    splits = _STORES if e.capture.into == "store" else ("heldout",)  # else no store of the other is read
    manifests = {split: read_manifest(StoreFiles(e.store_dir(split))) for split in splits}
    there = {split: found for split, found in manifests.items() if found is not None and found.complete}
    identities = [manifest.header.identity for manifest in there.values()]
    return {
        **{split: _of_store(e.store_dir(split), there[split]) if split in there else {} for split in _STORES},
        "lm": {key: value for own in reversed(identities) for key, value in own.get("lm", {}).items() if value},
        "text": next((own["text"] for own in identities if "text" in own), {}),
    }


def _of_store(path: str, manifest: Manifest) -> dict[str, Any]:
    return {"store": path, "rows": manifest.n_tokens, "fingerprint": manifest.fingerprint}


def agreed(e: Experiment, found: Provenance, unrecorded: Provenance | None = None) -> Provenance:
    """What the run of an experiment was made from, with what `found` adds to it.

    A run without a record (it is new, or an earlier version made it) counts as made from `unrecorded`, by default the
    stores as they are.

    Raises:
        DataError: the run was made from something else; each difference is listed.
    """
    known = read_provenance(e.run_dir) or (of_stores(e) if unrecorded is None else unrecorded)
    if changed := [line for key, now in found.items() if now for line in _differences(key, known.get(key, {}), now)]:
        raise DataError(
            f"{e.run_dir} was made from something else:\n  " + "\n  ".join(changed) + "\n"
            "Restore what it was made from (a store may lie elsewhere, its content counts), or choose another "
            "--config.name."
        )
    return {key: known.get(key, {}) | found.get(key, {}) for key in known | found}


def _differences(key: str, known: dict[str, Any], now: dict[str, Any]) -> list[str]:
    if key not in _STORES:
        both = [name for name in known if name in now]  # an import may know the model's name and nothing else of it
        return differences({name: known[name] for name in both}, {name: now[name] for name in both}, key)
    same = not known or known["fingerprint"] in (now["fingerprint"], now.get(FORMER))
    return [] if same else [f"{key}: {_describe(known)} -> {_describe(now)}"]


def _describe(store: dict[str, Any]) -> str:
    return f"{store['store']} ({store['rows']:,} rows, fingerprint {store['fingerprint'][:12]})"


def write_down(e: Experiment, content: Provenance, tell: Callable[[str], None] | None = None) -> None:
    """Write down what a run was made from; `tell` what the record of an older run did not have."""
    before = read_provenance(e.run_dir)
    new = [key for key, value in content.items() if value and not before.get(key)]
    if new and tell:
        named = ", ".join(f"{key} {content[key]['store']}" if key in _STORES else key for key in new)
        tell(f"{e.run_dir} did not record what it was made from ({named}): what is there now is recorded, and compared")
    if content != before:
        write_json(e.run_dir / PROVENANCE, content)


def read_provenance(run: Path) -> Provenance:
    """The record of a run; empty where there is none.

    Raises:
        DataError: it is damaged.
    """
    path = run / PROVENANCE
    if not path.is_file():
        return {}
    content = read_object(path)
    if not all(isinstance(value, dict) for value in content.values()):
        raise DataError(f"{path} is damaged; restore it or delete it.")
    return content
