"""study.json: which study the tables of a folder are of. Tables of two studies are never mixed.

It holds what decides the tables: settings, pairs, model, seed, and once they are there the dictionaries. The bar of the
baseline and what pages show are not of it: with others the same tables give another page.
"""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from saejax.app import console
from saejax.app.experiment import Experiment
from saejax.core.config import to_json
from saejax.core.errors import DataError
from saejax.core.files import read_object, write_json, writing
from saejax.lm import LanguageModel
from saejax.runs.made import differing, listed
from saejax.studies.behaviours import Pair, as_jsonl
from saejax.trained import TrainedCoder

_FILE = "study.json"
# Named by their pairs and their fingerprints, or not of the tables.
_NOT_OF_TABLES = ("behaviours", "dictionaries", "least_accuracy", "node_share", "edge_share")


def folder_of(e: Experiment) -> Path:
    """The folder of an experiment's study, in that of its run."""
    return e.run_dir / "study"


def begin_record(e: Experiment, lm: LanguageModel, pairs: Mapping[str, Mapping[str, Sequence[Pair]]]) -> None:
    """Writes study.json, or goes on with the study that the folder holds.

    A folder with another study whose graphs are not begun is begun anew: nothing but a baseline is lost.
    """
    folder = folder_of(e)
    path = folder / _FILE
    digests = {
        name: {split: hashlib.sha256(as_jsonl(rows).encode()).hexdigest() for split, rows in splits.items()}
        for name, splits in pairs.items()
    }
    of = {
        "study": {name: value for name, value in to_json(e.study).items() if name not in _NOT_OF_TABLES},
        "attribution": to_json(e.attribution),
        "lm": lm.identity,
        "seed": e.seed,
        "pairs": digests,
    }
    there = [name for name in ("graphs", "pairs", "baseline.csv") if (folder / name).exists()]
    if path.is_file():
        if not (changed := differing(read_object(path), of)):
            return
        if "graphs" in there:
            raise _refusal(folder, changed)
        console.say(f"study: {folder} held the baseline of another study and no graphs; it is begun anew")
        with writing(folder):
            (folder / "baseline.csv").unlink(missing_ok=True)
            shutil.rmtree(folder / "pairs", ignore_errors=True)
    elif there:
        raise DataError(
            f"{folder} holds {', '.join(there)} and no {_FILE}, which says of which study they are. Choose another "
            "--config.name, or delete the folder."
        )
    write_json(path, of | {"dictionaries": None})


def record_dictionaries(e: Experiment, named: Mapping[str, TrainedCoder]) -> None:
    """Writes the dictionaries' fingerprints into study.json.

    Raises:
        DataError: the folder holds results of others.
    """
    path, of = folder_of(e) / _FILE, {"dictionaries": {name: sae.fingerprint() for name, sae in named.items()}}
    before = read_object(path)
    if before.get("dictionaries") is None:
        write_json(path, before | of)
    elif changed := differing(before, of):
        raise _refusal(path.parent, changed)


def _refusal(folder: Path, changed: list[str]) -> DataError:
    return DataError(
        f"{folder} holds another study ({listed(changed)}). Choose another --config.name, restore these settings, or "
        "delete the folder."
    )
