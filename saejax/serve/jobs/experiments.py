"""The experiment that a request asks for: a known one with some keys set. It is checked; nothing of it is executed."""

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saejax.app import experiments
from saejax.app.experiment import Experiment, experiment, from_json, read_experiment, well_named
from saejax.coders import CoderConfig
from saejax.core.config import nearest, to_json
from saejax.core.errors import ConfigError, SaejaxError
from saejax.runs import Run, Sweep
from saejax.serve.jobs.places import Allowed, with_allowed_places
from saejax.serve.jobs.requests import ExperimentBody
from saejax.serve.problems import Problem
from saejax.serve.site import Site

# Where runs and stores lie is the server's own.
OWN = ("runs_dir", "stores_dir")


def requested(site: Site, body: ExperimentBody) -> Experiment:
    """The experiment that a request means.

    Raises:
        ConfigError: no such experiment, preset or key; a value of another type or out of its range; a place that may
            not be read.
        Problem: 404: no such run.
    """
    return changed(base(site, body), body.config, site.folders.allowed)


def base(site: Site, body: ExperimentBody) -> Experiment:
    """The experiment that a request begins with, in the server's folders.

    Raises:
        ConfigError, Problem: as `requested`.
    """
    if bool(body.experiment) == bool(body.run):
        raise ConfigError("Give `experiment` or `run`: what to begin with, one of them.")
    if body.run:
        if body.preset:
            raise ConfigError("A run has no presets; leave `preset` away.")
        return _of_run(site, body.run)
    e = experiment(_settings(site.experiments, body.experiment, body.preset))
    return dataclasses.replace(e, runs_dir=str(site.folders.runs), stores_dir=str(site.folders.stores))


def changed(e: Experiment, config: Mapping[str, Any], allowed: Allowed) -> Experiment:
    """An experiment with some keys set.

    A run that gets another name keeps its store. Another preset takes along the values that were the old one's.

    Raises:
        ConfigError: as `requested`.
    """
    values = copy.deepcopy(to_json(e))
    if config.get("coder.preset", e.coder.preset) != e.coder.preset:
        values["coder"] = _without_preset(e.coder)
    for key, value in config.items():
        if key in OWN:
            raise ConfigError(f"{key} is the server's own and cannot be set; start the server with another folder.")
        _set(values, key, value)
    if values["name"] != e.name and not values["store"]:
        values["store"] = e.store or e.name
    return with_allowed_places(e, well_named(from_json(values)), allowed)


def flat(e: Experiment) -> dict[str, Any]:
    """{"coder.k": 32, ...}: every key's value, as config.json holds it."""
    values = {}
    sections: list[tuple[str, Mapping[str, Any]]] = [("", to_json(e))]
    while sections:
        above, section = sections.pop()
        for key, value in section.items():
            if isinstance(value, Mapping):
                sections.append((f"{above}{key}.", value))
            else:
                values[f"{above}{key}"] = value
    return values


def _settings(known: Mapping[str, Path], label: str, preset: str) -> Any:
    if label not in known:
        raise ConfigError(f"There is no experiment {label[:80]!r}.{nearest(label[:80], known)}")
    try:
        module = experiments.load(known[label])
        presets = [name for name in getattr(module, "PRESETS", ()) if name]
        if preset and preset not in presets:
            raise ConfigError(f"{label} has no preset {preset[:80]!r}.{nearest(preset[:80], presets or ['none'])}")
        return experiments.settings(module, preset)
    except SaejaxError:
        raise
    except Exception as error:  # whatever the code of a listed file raises
        raise ConfigError(f"The experiment {label} cannot be read ({type(error).__name__}: {error}).") from error


def _of_run(site: Site, name: str) -> Experiment:
    folder = site.folders.run(name)
    sweep = Sweep(folder)
    if not sweep.exists and not Run(folder).exists:
        raise Problem(404, f"{name} is no run.")
    e = read_experiment(sweep.experiment if sweep.exists else Run(folder).config)
    store, stores = e.store or e.name, str(site.folders.stores)
    # A run goes on with the store it was begun on, wherever that lies.
    elsewhere = "://" in e.stores_dir or (Path(e.stores_dir) / store).is_dir()
    if elsewhere and not (site.folders.stores / store).is_dir():
        stores = e.stores_dir
    return dataclasses.replace(e, runs_dir=str(folder.parent), name=folder.name, store=store, stores_dir=stores)


def _without_preset(coder: CoderConfig) -> dict[str, Any]:
    """The coder's settings without what its preset gave it."""
    plain = to_json(CoderConfig(preset=coder.preset))
    preset = to_json(CoderConfig(preset=coder.preset).resolved())
    return {key: plain[key] if value == preset[key] else value for key, value in to_json(coder).items()}


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, leaf = key.split(".")
    node = values
    for i, section in enumerate(sections):
        inner = node.get(section)
        if not isinstance(inner, dict):
            above = ".".join(["config", *sections[:i]])
            raise ConfigError(f"Unknown key {above}.{section}.{nearest(section, node)}")
        node = inner
    if isinstance(node.get(leaf), dict):
        raise ConfigError(f"{key} is a section; set one of its keys, as {key}.{next(iter(node[leaf]))}.")
    node[leaf] = value
