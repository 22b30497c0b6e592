"""A study whole: the experiment whose dictionaries it takes, and what it asks of them."""

import dataclasses
import re
from pathlib import Path

from ml_collections import config_dict

from saejax.app.experiment import Experiment, default_config, experiment
from saejax.attribution import AttributionConfig
from saejax.core.config import from_config_dict, to_config_dict
from saejax.core.errors import ConfigError
from saejax.core.settings import Settings, setting

_NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,79}"


@dataclasses.dataclass(frozen=True)
class StudyConfig(Settings, section="study"):
    """Which behaviours, and how they are examined."""

    behaviours: tuple[str, ...] = setting(
        ("bracket", "quote"),
        "What the model does: names of docs/study.md's list, or name=pairs.jsonl for pairs of your own.",
    )
    train_pairs: int = setting(80, "Pairs of prompts from which features are found, for each behaviour.", low=1)
    test_pairs: int = setting(20, "Other pairs, on which interventions are measured.", low=2)
    least_accuracy: float = setting(
        0.8,
        "The share of pairs, of both kinds, in which the model prefers the right answer after the clean prompt and the "
        "other after the corrupt one. A behaviour with less is refused.",
        low=0,
        high=1,
    )
    dictionaries: tuple[str, ...] = setting(
        (),
        "Dictionaries that are there: runs, folders, files, hub ids. Empty: the experiment's own are trained first.",
    )
    graphs: int = setting(6, "Training pairs whose clean prompt gets an attribution graph, for each behaviour.", low=1)
    node_share: float = setting(0.8, "Share of the influence that a graph's nodes keep.", above=0, high=1)
    edge_share: float = setting(0.98, "Share of the influence that its edges keep.", above=0, high=1)
    groups: int = setting(10, "Groups of features that are intervened on, for each behaviour.", low=1)
    group_size: int = setting(5, "Features of a group, all of one layer.", low=1)
    controls: int = setting(10, "Random groups of as many features that fire as much, for each group.", low=1)
    positions: int = setting(5, "The last tokens at which groups are patched one by one.", low=1)
    resamples: int = setting(5, "Other prompts whose values a group gets, for each group.", low=1)
    singles: int = setting(
        10, "Features of each graph whose predicted effect is compared with the measured one.", low=2
    )
    every: int = setting(100, "Results after which the table on disk is brought up to date.", low=1)


@dataclasses.dataclass(frozen=True)
class Study:
    """What `saejax study` does.

    Attributes:
        experiment: model, text, capture and training; its run's folder holds the study.
        study: behaviours and interventions.
        attribution: of the graphs.
    """

    experiment: Experiment
    study: StudyConfig
    attribution: AttributionConfig

    @property
    def folder(self) -> Path:
        return self.experiment.run_dir / "study"

    def behaviours(self) -> dict[str, str]:
        """{name: file of its pairs, or empty}.

        Raises:
            ConfigError: none, a name twice, or one that cannot name files.
        """
        named = [entry.partition("=")[::2] for entry in self.study.behaviours]
        if not named:
            raise ConfigError("study.behaviours is empty: name one, as in --config.study.behaviours=bracket,quote")
        for name, _ in named:
            if not re.fullmatch(_NAME, name):
                raise ConfigError(f"study.behaviours names {name!r}; a name is at most 80 of A-Z a-z 0-9 . _ -")
            if [n for n, _ in named].count(name) > 1:
                raise ConfigError(f"study.behaviours names {name!r} twice; names must differ.")
        return dict(named)


def default_study() -> config_dict.ConfigDict:
    """Every key with its default: those of an experiment, and the sections `study` and `attribution`."""
    config = default_config()
    config.study = to_config_dict(StudyConfig())
    config.attribution = to_config_dict(AttributionConfig())
    return config


def study(config: config_dict.ConfigDict) -> Study:
    """The boundary: a ConfigDict in, a checked, frozen study out.

    Raises:
        ConfigError: no study's config, an unknown key, a value of the wrong type, or settings that cannot be run.
    """
    content = config.to_dict()
    if missing := {"study", "attribution"} - content.keys():
        raise ConfigError(
            f"The config has no section {' or '.join(sorted(missing))}: it must begin as saejax.study.default_study(), "
            "as configs/study_quickstart.py does."
        )
    own, attribution = (content.pop(name) for name in ("study", "attribution"))
    rest = config_dict.ConfigDict(content)
    found = Study(
        experiment(rest),
        from_config_dict(StudyConfig, own, "config.study"),
        from_config_dict(AttributionConfig, attribution, "config.attribution"),
    )
    found.behaviours()
    return found
