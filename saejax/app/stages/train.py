"""The stage that trains: the experiment's stores -> a run folder."""

import dataclasses
from collections.abc import Callable

from jax.sharding import Mesh

from saejax.app.fit import Data, train_run
from saejax.app.left_open import with_batch_size
from saejax.app.loading import load
from saejax.app.workspace import Workspace, verify_stores
from saejax.coders import Coder
from saejax.core.errors import EXIT_PREEMPTED, ConfigError
from saejax.parallel import joined, own_rows
from saejax.runs.provenance import Provenance
from saejax.store import Batches, StoreReader
from saejax.store.files import StoreFiles
from saejax.store.manifest import MANIFEST
from saejax.trained import TrainedCoder


def run_train(work: Workspace) -> int:
    """Train the coder. Returns 0, or EXIT_PREEMPTED when a signal stopped it (all is saved)."""
    work = with_batch_size(work)
    e = work.experiment
    with joined(e.parallel) as process:
        outcome = train_run(e, Stored(work), process)
    return EXIT_PREEMPTED if outcome is not None and outcome.stopped else 0


@dataclasses.dataclass(frozen=True)
class Stored:
    """An experiment's own stores and model, as what is trained on."""

    work: Workspace

    def known(self) -> Provenance:
        return verify_stores(self.work.experiment)

    def made_from(self) -> Provenance:
        return self.work.made_from()

    def coder(self) -> Coder:
        return self.work.build()

    def data(self, mesh: Mesh, tell: Callable[[str], None]) -> Data:
        work, t = self.work, self.work.experiment.train
        stored = work.experiment.capture.into == "store"
        batches = work.training(rows=own_rows(mesh, t.batch_size, t.accumulate, t.neighbours))
        if isinstance(batches, Batches) and t.neighbours > 1:
            tell(
                f"train: windows of {t.neighbours} neighbouring tokens: {batches.epoch_rows:,} activations an epoch, "
                f"{batches.used:.1%} of the store; the others stand alone"
            )
        open_reader = (lambda: work.reader("train")) if stored else None
        return Data(batches, _heldout(work, tell), *work.sites, open_reader)

    def source_coder(self) -> TrainedCoder:
        return load(self.work.experiment.train.init_from)


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
