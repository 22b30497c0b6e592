"""The stage that trains: the experiment's stores -> a run folder."""

import dataclasses
from collections.abc import Callable, Sequence

from jax.sharding import Mesh

from saejax.app.console import say
from saejax.app.experiment import Experiment
from saejax.app.load import load
from saejax.app.training_folders import RunFolder
from saejax.app.workspace import Workspace, verify_stores
from saejax.coders import Coder
from saejax.core.errors import EXIT_PREEMPTED, ConfigError
from saejax.fit.coders import Coders
from saejax.fit.learner import Data, Sides
from saejax.fit.train import train
from saejax.parallel import joined, own_rows
from saejax.runs import Provenance
from saejax.store import Batches, StoreReader
from saejax.store.files import StoreFiles
from saejax.store.manifest import MANIFEST, read_manifest
from saejax.trained import TrainedCoder
from saejax.training import TrainConfig


def run_train(work: Workspace) -> int:
    """Train the coder. Returns 0, or EXIT_PREEMPTED when a signal stopped it (all is saved)."""
    stored = Stored(work)
    with joined(work.experiment.parallel) as process:
        outcome = train(Coders.alone(stored), RunFolder(stored.e, stored), process, say)
    return EXIT_PREEMPTED if outcome is not None and outcome.stopped else 0


@dataclasses.dataclass(frozen=True)
class Stored:
    """An experiment's own stores and model: `fit.Materials`."""

    work: Workspace

    @property
    def e(self) -> Experiment:
        return self.work.experiment

    def with_train(self, train: TrainConfig) -> "Stored":
        return Stored(dataclasses.replace(self.work, experiment=dataclasses.replace(self.e, train=train)))

    def sides(self) -> Sides:
        return self.work.sites

    def rows(self) -> int:
        c = self.e.capture
        if c.into == "training":
            return c.buffer_rows
        manifest = read_manifest(StoreFiles(self.e.store_dir("train")))
        stored = manifest.n_tokens if manifest else c.tokens
        return min(stored, self.e.train.max_rows or stored)

    def coder(self) -> Coder:
        return self.work.build()

    def known(self) -> Provenance:
        return verify_stores(self.e)

    def made_from(self) -> Provenance:
        return self.work.made_from()

    def data(self, hook_points: Sequence[str], mesh: Mesh | None, tell: Callable[[str], None]) -> Data:
        work, t = self.work, self.e.train
        stored = self.e.capture.into == "store"
        rows = own_rows(mesh, t.batch_size, t.accumulate, t.neighbours) if mesh else None
        batches = work.training(hook_points, rows)
        if mesh and isinstance(batches, Batches) and t.neighbours > 1:
            tell(
                f"train: windows of {t.neighbours} neighbouring tokens: {batches.epoch_rows:,} activations an epoch, "
                f"{batches.used:.1%} of the store; the others stand alone"
            )
        open_reader = (lambda: work.reader("train")) if stored else None
        heldout = work.reader("heldout", hook_points) if hook_points else _heldout(work, tell)
        return Data(batches, heldout, open_reader)

    def source_coder(self) -> TrainedCoder:
        return load(self.e.train.init_from)


def _heldout(work: Workspace, tell: Callable[[str], None]) -> StoreReader | None:
    """The held-out activations; None where the training's were made elsewhere and there are no others.

    Raises:
        ConfigError: there are none, but training is to stop or to keep its best by them.
    """
    e = work.experiment
    path = e.store_dir("heldout")
    if work.origin("train") is None or StoreFiles(path).read(MANIFEST) is not None:
        return work.reader("heldout")
    for key in ("early_stop_patience", "keep_best"):
        if value := getattr(e.train, key):
            raise ConfigError(
                f"train.{key} needs held-out activations, and there is no store at {path}. Make one (saejax store "
                f"import {path} <files>), or leave train.{key}={value} away."
            )
    tell(f"train: there is no store at {path}, so nothing is validated during training")
    return None
