"""`/api/sae/train`: the fields that others' trainers have, as an experiment on activations that are there."""

import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saejax.app.experiment import Experiment
from saejax.coders import RECIPES, SPARSITIES, CoderConfig
from saejax.core.errors import ConfigError, DataError, SaejaxError
from saejax.serve.jobs.experiments import base, changed
from saejax.serve.jobs.places import allowed_path
from saejax.serve.jobs.requests import ExperimentBody, TrainBody
from saejax.serve.site import Site
from saejax.store.files import StoreFiles
from saejax.store.foreign import ENDINGS
from saejax.store.manifest import read_manifest
from saejax.store.parts import Naming, open_parts

_MOST_FILES = 10_000
_MOST_RUNS = 1000
_STANDARD: Mapping[str, Any] = {"batch_size": 512, "max_epochs": 10, "learning_rate": 1e-3}
_FAST: Mapping[str, Any] = {
    "latent_dim": 8192,
    "max_samples": 50_000,
    "max_epochs": 50,
    "learning_rate": 2e-3,
    "batch_size": 1024,
    "early_stopping_patience": 5,
    "val_check_interval": 0.25,
}
_NEED_HELDOUT = ("early_stopping_patience", "val_check_interval")


@dataclasses.dataclass(frozen=True)
class Activations:
    """Activations that a training reads.

    Attributes:
        rows: how many.
        stores_dir, store: where the store is or will be.
        hook_point: what is read of it.
        captured: it is a capture's, so model and text must be those of the capture.
        heldout: whether there are held-out ones too.
        imports: the words of the commands that make the store first.
    """

    rows: int
    stores_dir: str
    store: str
    hook_point: str
    captured: bool
    heldout: bool
    imports: tuple[tuple[str, ...], ...] = ()


def training(site: Site, body: TrainBody, fast: bool = False) -> tuple[Experiment, tuple[tuple[str, ...], ...]]:
    """(the experiment, the words of the `saejax` commands that come before `saejax train`).

    Fields that the request leaves out have `train-fast`'s values where `fast`, as far as the activations allow.

    Raises:
        ConfigError: fields that contradict each other or do not fit the activations; a path that may not be read.
        DataError: files that cannot be read, or a store that is not complete.
    """
    split = _store(site, body.activation_data_path)
    x = _files(site, body) if split is None else _of_store(split, body)
    sent = {key: value for key, value in body.model_dump().items() if value is not None}
    usual = {**_STANDARD, **(_FAST if fast else {})}
    if not x.heldout:
        for key in _NEED_HELDOUT:
            usual.pop(key, None)
            if sent.get(key):
                raise ConfigError(
                    f"{key} needs held-out activations, and {x.store} has none: give heldout_data_path, or leave it "
                    "away."
                )
    if "batch_size" not in sent:
        rows = min(x.rows, sent.get("max_samples") or usual.get("max_samples") or x.rows)
        # Four of them fit into the activations.
        usual["batch_size"] = min(usual["batch_size"], 1 << max(1, (rows // 4).bit_length() - 1))
    values = _values(usual | sent, x, fast)
    start = changed(_base(site, body, x), {}, site.folders.allowed)
    start = dataclasses.replace(start, stores_dir=x.stores_dir, name=body.name or start.name)
    return changed(start, values | dict(body.config), site.folders.allowed), x.imports


def _values(fields: Mapping[str, Any], x: Activations, fast: bool) -> dict[str, Any]:
    """The keys of an experiment that the fields set."""
    counts = [fields[key] for key in ("accumulate_grad_batches", "gradient_accumulation_steps") if key in fields]
    if len(set(counts)) > 1:
        raise ConfigError("accumulate_grad_batches and gradient_accumulation_steps are the same; give one of them.")
    batch, parts = fields["batch_size"], counts[0] if counts else 1
    rows = min(x.rows, fields.get("max_samples") or x.rows)
    if batch * parts > rows:
        raise ConfigError(
            f"batch_size {batch} x {parts} is more than the {rows:,} activations that there are; lower it."
        )
    values: dict[str, Any] = {
        "store": x.store,
        "hook_point": x.hook_point,
        "train.batch_size": batch * parts,
        "train.accumulate": parts,
        "train.tokens": max(batch * parts, math.floor(fields["max_epochs"] * rows)),
        "train.lr": fields["learning_rate"],
        **_coder(fields),
    }
    if rows < x.rows:
        values["train.max_rows"] = rows
    for name, key in (("latent_dim", "coder.d_sae"), ("early_stopping_patience", "train.early_stop_patience")):
        if fields.get(name):
            values[key] = fields[name]
    if interval := fields.get("val_check_interval"):
        values |= {"train.validate_epochs": interval} if interval <= 1 else {"train.validate_every": round(interval)}
    if not x.heldout:
        values["train.validate_every"] = 0
    if "num_workers" in fields:
        # A worker of others is a process that reads ahead; here a block is, in a thread.
        values["train.blocks_ahead"] = max(1, fields["num_workers"])
    if fast:
        values["coder.matmul_dtype"] = "bfloat16"
    return values


def _coder(fields: Mapping[str, Any]) -> dict[str, Any]:
    preset, sparsity = fields["preset"], fields.get("sparsity")
    if isinstance(sparsity, str):
        if preset and preset != sparsity:
            raise ConfigError(f"preset is {preset!r} and sparsity {sparsity!r}; give one of them, or sparsity as k.")
        preset = sparsity
    values: dict[str, Any] = {"coder.preset": preset} if preset else {}
    if isinstance(sparsity, int):
        if preset in RECIPES and "k" not in SPARSITIES[CoderConfig(preset=preset).resolved().sparsity].provides:
            raise ConfigError(f"sparsity is {sparsity}, and {preset} keeps no k latents; set its own keys in `config`.")
        values["coder.k"] = sparsity
    return values


def _base(site: Site, body: TrainBody, x: Activations) -> Experiment:
    """Model and text of the store, and defaults for all else."""
    runs, numbered = site.folders.runs, (f"{x.store}-{number}" for number in itertools.count(1))
    name = body.name or next(name for name in numbered if not (runs / name).exists())
    plain = Experiment(runs_dir=str(runs), name=name)
    if body.run or body.experiment:
        known = base(site, ExperimentBody(experiment=body.experiment, run=body.run))
    elif x.captured:
        known = _captured_by(site, x)
    else:
        return dataclasses.replace(plain, lm=dataclasses.replace(plain.lm, model=""))
    return dataclasses.replace(plain, lm=known.lm, text=known.text, capture=known.capture, parallel=known.parallel)


def _captured_by(site: Site, x: Activations) -> Experiment:
    """A run on the same store: it knows the model and the text.

    Raises:
        ConfigError: none is below the runs folder.
    """
    records = sorted(site.folders.runs.glob("*/config.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in records[:_MOST_RUNS]:
        try:
            e = base(site, ExperimentBody(run=path.parent.name))
        except SaejaxError:
            continue
        if e.store == x.store:
            return e
    raise ConfigError(
        f"{x.store} was captured, and no run here says of which model and text: give `experiment` or `run`, the one it "
        "was captured with."
    )


def _of_store(split: Path, body: TrainBody) -> Activations:
    if body.heldout_data_path:
        raise ConfigError(
            f"{body.activation_data_path} is a store, whose held-out activations are in its own split heldout; leave "
            "heldout_data_path away."
        )
    manifest = read_manifest(StoreFiles(split))
    if manifest is None or not manifest.complete:
        raise DataError(f"The store {split} is not complete; end its capture or import first.")
    return Activations(
        manifest.n_tokens,
        str(split.parents[1]),
        split.parent.name,
        _hook_point(list(manifest.header.hook_points), body),
        {"merged", "imported"}.isdisjoint(manifest.header.identity),
        (split.parent / "heldout" / "manifest.json").is_file(),
    )


def _store(site: Site, text: str) -> Path | None:
    """The training split of the store that a path names; None where it names files.

    Raises:
        ConfigError: it lies outside, or is the split of something else.
    """
    name = re.sub(r"/train$", "", text.rstrip("/"))
    for short in dict.fromkeys((name, re.sub(r"^stores/", "", name))):
        plain = re.fullmatch(r"[^/.@][^/]*", short)
        if plain and (site.folders.stores / short / "train" / "manifest.json").is_file():
            return allowed_path(str(site.folders.stores / short / "train"), site.folders.allowed)
    path = allowed_path(text, site.folders.allowed)
    for split in (path, path / "train"):
        if (split / "manifest.json").is_file():
            if split.name != "train":
                raise ConfigError(f"{text} is no training split; name the folder that holds train/.")
            return split
    return None


def _hook_point(there: list[str], body: TrainBody) -> str:
    if body.hook_point:
        if body.hook_point not in there:
            raise ConfigError(f"hook_point is {body.hook_point!r}; the store has {', '.join(there)}.")
        return body.hook_point
    of_block = [name for name in there if f"blocks.{body.layer_idx}." in f"{name}."]
    if not of_block:
        raise ConfigError(f"layer_idx is {body.layer_idx}; the store has {', '.join(there)}. Or give hook_point.")
    if len(of_block) > 1:
        raise ConfigError(f"Block {body.layer_idx} has {', '.join(of_block)} in the store; say which: hook_point.")
    return of_block[0]


def _files(site: Site, body: TrainBody) -> Activations:
    """Files, which are imported into a store of their own first; unchanged ones once only."""
    hook_point = body.hook_point or f"blocks.{body.layer_idx}.resid_post"
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.]{0,199}", hook_point):
        raise ConfigError(f"hook_point is {hook_point[:80]!r}; it must be a name such as blocks.6.resid_post.")
    splits = {"train": body.activation_data_path, "heldout": body.heldout_data_path}
    files = {split: _listed(site, text) for split, text in splits.items() if text}
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(body.activation_data_path.rstrip("/")).stem).strip("-") or "files"
    known = {
        split: [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        for split, paths in files.items()
    }
    store = f"{stem[:80]}-{hashlib.sha256(json.dumps([known, hook_point]).encode()).hexdigest()[:8]}"
    stores = site.folders.stores
    imports = tuple(
        ("store", "import", str(stores / store / split), *map(str, paths), f"--hook_point={hook_point}")
        for split, paths in files.items()
    )
    parts = {split: open_parts(paths, Naming(hook_point)) for split, paths in files.items()}
    rows = sum(part.n_rows for part in parts["train"])
    return Activations(rows, str(stores), store, hook_point, False, "heldout" in files, imports)


def _listed(site: Site, text: str) -> list[Path]:
    path = allowed_path(text, site.folders.allowed)
    if not path.is_dir():
        if path.suffix not in ENDINGS:
            raise ConfigError(f"{text} is neither a store nor a file that ends in {', '.join(ENDINGS)}.")
        if not path.is_file():
            raise ConfigError(f"{text} does not exist.")
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in ENDINGS and file.is_file())
    if not files:
        raise ConfigError(f"{text} is neither a store nor holds files that end in {', '.join(ENDINGS)}.")
    if len(files) > _MOST_FILES:
        raise ConfigError(f"{text} holds {len(files):,} files; at most {_MOST_FILES:,} are imported at a time.")
    if len({file.suffix for file in files}) > 1:
        raise ConfigError(f"{text} holds files of several kinds; name one of them, or a folder with one kind.")
    # A link in the folder may lead elsewhere.
    return [site.folders.allowed(str(file)) for file in files]
