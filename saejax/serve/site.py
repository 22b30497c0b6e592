"""The folders and experiments that every part of the server knows."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from saejax.serve.folders import Folders


@dataclasses.dataclass(frozen=True)
class Site:
    """The limits of one server.

    Attributes:
        folders: the only ones that it looks into.
        experiments: {label: file}: the only ones that it executes; the shipped ones and those of the command line.
        commands: {name: summary} of the commands that the page starts.
        jobs_at_once: processes that it runs at a time; others wait.
    """

    folders: Folders
    experiments: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    commands: Mapping[str, str] = dataclasses.field(default_factory=dict)
    jobs_at_once: int = 1
