"""The protocols of a training: a learner, its materials, and the folder that keeps it."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

from jax.sharding import Mesh

from saejax.checkpoints import Checkpoints
from saejax.coders import Coder, Sites
from saejax.core.metrics import Writer
from saejax.fit.trainable import Trainable
from saejax.parallel import Process
from saejax.store import BatchSource, RowSource, StoreReader
from saejax.trained import TrainedCoder
from saejax.training import Outcome, Setup, TrainConfig
from saejax.training.beside import Beside

Tell = Callable[[str], None]
# Hook points (read, written).
Sides = tuple[tuple[str, ...], tuple[str, ...]]
Held = tuple[Sequence[Checkpoints], Mapping[str, Any] | None]


@dataclasses.dataclass(frozen=True)
class Ready:
    """A training that can begin.

    Attributes:
        train: with every number that the settings left open.
        lines: said of it before it begins.
        identity: of the dictionary that it starts from, for the run's record; empty without one.
    """

    train: TrainConfig
    setup: Setup
    lines: Sequence[str]
    identity: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Learner(Protocol):
    """A coder, the coders of a sweep, a prefix: anything that `train` trains."""

    def ready(self, numbers: Mapping[str, Any], checkpoints: Sequence[Checkpoints], tell: Tell) -> Ready:
        """The training, about to begin; nothing is compiled or written.

        Args:
            numbers: what the settings left open when the run was begun (`resolve`).
            checkpoints: of each program; none where nothing is kept.

        Raises:
            ConfigError, DataError: settings, devices, data or a source that do not fit each other.
        """
        ...


class Folder(Protocol):
    """The place where a training is kept."""

    def held(self, process: Process) -> contextlib.AbstractContextManager[Held]:
        """Hold it, against every other writer.

        Returns:
            The checkpoints of each program, opened; and the numbers of a begun training that its settings left open
            (`resolve`), None where it is complete.

        Raises:
            ConfigError: a package is missing that the training needs.
            DataError: it holds another training, or was made from other data.
            BusyError: another process trains there.
        """
        ...

    def recorded(
        self, ready: Ready, process: Process, checkpoints: Sequence[Checkpoints]
    ) -> contextlib.AbstractContextManager[Setup]:
        """Write what is trained from what; the setup with where its rows and its members' checkpoints go."""
        ...

    def ended(self, ready: Ready, outcome: Outcome, process: Process) -> None:
        """Record how a session ended, and say so."""
        ...


@dataclasses.dataclass
class Unsaved:
    """A training of which nothing is kept but what its writers take: a `Folder`."""

    writers: Sequence[Writer] = ()
    began: Ready | None = None

    @contextlib.contextmanager
    def held(self, process: Process) -> Iterator[Held]:
        yield (), {}

    @contextlib.contextmanager
    def recorded(self, ready: Ready, process: Process, checkpoints: Sequence[Checkpoints]) -> Iterator[Setup]:
        self.began = ready
        yield dataclasses.replace(ready.setup, writers={"": self.writers})

    def ended(self, ready: Ready, outcome: Outcome, process: Process) -> None:
        """Nothing is kept."""


@dataclasses.dataclass(frozen=True)
class Data:
    """Activations that a coder learns from.

    Attributes:
        batches: of several processes, the rows of this one.
        heldout: for validation; None for none.
        open_reader: of the store that the batches come from; None where there is none.
        slow: said where the training waits for the batches; empty for the usual.
    """

    batches: BatchSource
    heldout: RowSource | None
    open_reader: Callable[[], StoreReader] | None = None
    slow: str = ""


class Materials(Protocol):
    """The origin of a coder and its data: an experiment's stores and model, arrays, a planted world."""

    @property
    def experiment(self) -> Trainable: ...

    @property
    def sites(self) -> Sides:
        """The hook points that the coder reads and writes, in order."""
        ...

    def with_train(self, train: TrainConfig) -> Self:
        """The same under another section `train`."""
        ...

    def rows(self) -> int:
        """Activations among which a batch is drawn."""
        ...

    def build(self) -> Coder:
        """The coder to train; the batch size is a number by then."""
        ...

    def data(self, hook_points: Sequence[str], mesh: Mesh | None, tell: Tell) -> Data:
        """The data, opened; on a mesh that several processes share each has the rows of its devices."""
        ...

    def beside(self, coder: Coder, sites: Sites, mesh: Mesh) -> Beside | None:
        """The second loss that section `train` asks for (`train.through`); None for none."""
        ...

    def source_coder(self) -> TrainedCoder:
        """The dictionary that train.init_from names."""
        ...
