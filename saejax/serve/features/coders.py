"""Dictionaries in memory, and the language model that belongs to the one in use. All of it runs in the worker."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from saejax.app.load import load
from saejax.app.run_coders import coder_at, model_config
from saejax.core.errors import ConfigError, SaejaxError
from saejax.core.files import stamp
from saejax.interventions import Interventions
from saejax.lm import LanguageModel, LMConfig
from saejax.lm.forward import Model
from saejax.lm.pair import load_models
from saejax.runs import Run
from saejax.serve.caches import Cache
from saejax.serve.features.texts import Reader
from saejax.serve.worker import Worker
from saejax.trained import TrainedCoder

# Parameters lie on the host and on the device.
_COPIES = 2


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a dictionary.

    Attributes:
        name: as requests call it.
        path: the folder of a run or of an evaluated dictionary, or where a foreign one lies.
        foreign: it is no run's.
    """

    name: str
    path: Path
    foreign: bool = False

    @property
    def folder(self) -> Path | None:
        """The folder of its report: of a run that of the attempt that is kept. A foreign one has none."""
        return None if self.foreign else Run(self.path).counted().path

    @property
    def features(self) -> Path | None:
        """Its features.sqlite, if there is one."""
        path = Run(self.folder).features if self.folder is not None else None
        return path if path is not None and path.is_file() else None

    def coder(self) -> TrainedCoder:
        """Read it.

        Raises:
            DataError: there is none, or it cannot be read.
        """
        return load(self.path) if self.foreign else coder_at(str(self.folder))

    def state(self) -> tuple[object, ...]:
        """Another one when other parameters lie there."""
        at = self.path if self.folder is None else self.folder
        folder = Run(at).checkpoints
        if folder.is_dir():
            # A run of the same name may be trained anew: its steps are called as before.
            steps = sorted((step.name, stamp(step)) for step in folder.iterdir())
            return (str(at), *steps, stamp(Run(at).evaluation))
        inside = sorted(one.name for one in at.iterdir() if one.is_file()) if at.is_dir() else []
        return (str(at), stamp(at), *((name, stamp(at / name)) for name in inside[:100]))


class Dictionaries:
    """Loads dictionaries and models, and keeps them: coders in the cache, one model beside it.

    Args:
        cache: of inference.
        worker: in whose thread everything is read.
    """

    def __init__(self, cache: Cache, worker: Worker):
        self.cache, self.worker = cache, worker
        self._model: tuple[LMConfig, Model] | None = None
        self._readers: dict[tuple[Any, ...], Reader] = {}
        self._inside: tuple[Any, Interventions] | None = None

    def coder(self, place: Place) -> TrainedCoder:
        """The dictionary of a place; loaded in the worker.

        Raises:
            DataError: it cannot be read.
            Problem: the worker is busy.
        """

        return self.cache.get(("coder", *place.state()), lambda: self.worker.run(place.coder), size_of)

    def model(self, place: Place, sae: TrainedCoder) -> Model:
        """The language model of a dictionary; to be called within the worker, and only there.

        Raises:
            ConfigError: it is not said which it is.
            DataError: it cannot be read.
        """
        wanted = self._wanted(place, sae)
        if self._model is None or self._model[0] != wanted:
            self._model, self._readers, self._inside = None, {}, None  # its memory first
            self._model = (wanted, load_models(wanted))
        return self._model[1]

    def reader(self, place: Place, sae: TrainedCoder) -> tuple[TrainedCoder, Reader]:
        """(the dictionary with the model's names, what gives it the model's activations); only within the worker.

        Raises:
            ConfigError, DataError: as `model`; or the dictionary does not fit the model.
        """
        lm = self.model(place, sae)
        named = sae.at(lm)
        # What the dictionary has compiled stays with it.
        key = ("named", self._model and self._model[0], *place.state())
        named = sae if named.sites == sae.sites else self.cache.get(key, lambda: named, size_of)
        sites = (named.sites.reads, named.sites.writes, named.sites.stacked)
        if sites not in self._readers:
            self._readers[sites] = Reader(lm, named)
        return named, self._readers[sites]

    def inside(self, place: Place, sae: TrainedCoder) -> Interventions:
        """The dictionary in its model, as "dictionary", for steering; the last one is kept. Only within the worker.

        Raises:
            ConfigError, DataError: as `model`; or JAX does not run the model, or the dictionary does not fit it.
        """
        lm = self.model(place, sae)
        if not isinstance(lm, LanguageModel):
            raise ConfigError(f"{lm.identity['model']} is no single model that JAX runs: its text cannot be steered.")
        if self._inside is None or self._inside[0] != place.state():
            self._inside = (place.state(), Interventions(lm, {"dictionary": sae}))
        return self._inside[1]

    def described(self, place: Place, sae: TrainedCoder) -> tuple[str, str]:
        """(hook points, model) of a dictionary as a report names them; "" for a model that is not known."""
        reads, writes = (", ".join(names) for names in (sae.sites.reads, sae.sites.writes))
        try:
            model = self._wanted(place, sae).model
        except SaejaxError:
            model = ""
        return reads if reads == writes else f"{reads} -> {writes}", model

    def _wanted(self, place: Place, sae: TrainedCoder) -> LMConfig:
        if place.foreign:
            if not sae.origin.model:
                raise ConfigError(
                    f"{place.name} does not say which language model it belongs to: its features can be looked at, and "
                    "nothing that needs the model can be done."
                )
            return sae.origin.lm
        return model_config(str(place.folder), sae)


def size_of(sae: TrainedCoder) -> int:
    """Bytes of a dictionary in memory."""
    return _COPIES * sum(np.asarray(value).nbytes for value in sae.params.values())
