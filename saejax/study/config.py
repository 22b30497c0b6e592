"""A study whole: the experiment whose dictionaries it takes, and what it asks of them."""

import dataclasses
import re
from pathlib import Path

from ml_collections import config_dict

from saejax.app.experiment import Experiment, experiment
from saejax.app.study_config import StudyConfig
from saejax.attribution import AttributionConfig
from saejax.core.errors import ConfigError

_BEHAVIOUR_NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,79}"


@dataclasses.dataclass(frozen=True)
class Study:
    """Settings of `saejax study`.

    Attributes:
        experiment: model, text, capture and training, and the sections `study` and `attribution`; its run's folder
            holds the study.
    """

    experiment: Experiment

    @property
    def study(self) -> StudyConfig:
        return self.experiment.study

    @property
    def attribution(self) -> AttributionConfig:
        return self.experiment.attribution

    @property
    def folder(self) -> Path:
        return self.experiment.run_dir / "study"

    def behaviours(self) -> dict[str, str]:
        """{name: file of its pairs, or empty}."""
        named = [entry.partition("=")[::2] for entry in self.study.behaviours]
        if not named:
            raise ConfigError("study.behaviours is empty: name one, as in --config.study.behaviours=bracket,quote")
        for name, _ in named:
            if not re.fullmatch(_BEHAVIOUR_NAME, name):
                raise ConfigError(f"study.behaviours names {name!r}; a name is at most 80 of A-Z a-z 0-9 . _ -")
            if [n for n, _ in named].count(name) > 1:
                raise ConfigError(f"study.behaviours names {name!r} twice; names must differ.")
        return dict(named)


def study(config: config_dict.ConfigDict) -> Study:
    """The boundary: a ConfigDict in, a checked, frozen study out.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or settings that cannot be run.
    """
    study = Study(experiment(config))
    study.behaviours()
    return study
