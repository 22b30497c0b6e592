"""The settings as data for a form: every key with its documentation, and its value in an experiment or a run."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saejax.app import experiments
from saejax.app.keys import sections
from saejax.core.config import to_json
from saejax.serve.jobs.experiments import OWN, base, flat
from saejax.serve.jobs.requests import ExperimentBody
from saejax.serve.site import Site


def settings(site: Site) -> dict[str, Any]:
    """The answer of `GET /api/settings`: experiments, commands, and the sections with their keys in order."""
    return {
        "experiments": [_experiment_entry(name, path) for name, path in site.experiments.items()],
        "commands": [{"name": name, "text": text} for name, text in site.commands.items()],
        "sections": keys(),
    }


def values(site: Site, experiment: str = "", preset: str = "", run: str = "") -> dict[str, Any]:
    """The answer of `GET /api/experiments/{label}`: the value of every key.

    Raises:
        ConfigError, Problem: there is no such experiment, preset or run.
    """
    e = base(site, ExperimentBody(experiment=experiment, run=run, preset=preset))
    return {"name": run or experiment, "values": flat(e)}


@functools.cache
def keys() -> list[dict[str, Any]]:
    """Each section's keys; the first section, of the experiment itself, has no name."""
    return [
        {
            "name": section.name,
            "doc": section.doc,
            "settings": [
                {
                    "key": key.name,
                    "type": key.type,
                    "optional": key.optional,
                    "default": to_json(key.default),
                    "base": to_json(key.known.base),
                    "range": key.known.range(),
                    "choices": None if key.known.choices is None else list(key.known.choices),
                    "doc": key.known.doc,
                    "decides": key.decides,
                    "sweep": key.per_member,
                    "place": key.known.place,
                }
                for key in section.keys
                if key.name not in OWN
            ],
        }
        for section in sections()
    ]


def _experiment_entry(name: str, path: Path) -> dict[str, Any]:
    shipped = name in experiments.names() and path == experiments.folder() / f"{name}.py"
    return {"name": name, "listed": not shipped, **_of_file(path, path.stat().st_mtime_ns)}


@functools.lru_cache(maxsize=100)
def _of_file(path: Path, changed: int) -> Mapping[str, Any]:
    try:
        module = experiments.load(path)
    except Exception as error:  # whatever the code of a listed file raises
        return {"summary": f"cannot be read ({type(error).__name__}: {error})", "presets": []}
    presets = [preset for preset in getattr(module, "PRESETS", ()) if preset]
    return {"summary": (module.__doc__ or "").strip().partition("\n")[0], "presets": presets}
