"""List a language model's hook points: names, shapes, TransformerLens's names, and what can be stored.

    saejax hooks                            the embedded demo model
    saejax hooks gpt2                       a preset of the experiment models, a hub id, or a folder
    saejax hooks /path/to/folder [--backend=torch]
    saejax hooks --config=gpt2_small        the model of an experiment, and what it captures

The same point of several blocks is one line, in the form that capture.hook_points takes; --all lists each.
For a model that the JAX decoder knows, only config.json is read (or fetched), and no weights. PyTorch loads any other
model, because its hook points and widths are measured on a few tokens.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from saejax.app import experiments
from saejax.app.command import Command, Line
from saejax.core.errors import ConfigError
from saejax.core.settings import setting


@dataclasses.dataclass(frozen=True)
class Hooks(Command, takes="either", answers=True):
    revision: str = setting("", "Commit, tag or branch of a hub id.")
    backend: str = setting("auto", "jax, torch, or auto: jax where its decoder knows the architecture.")
    all: bool = setting(False, "Each hook point in a line of its own.")

    def run(self, line: Line) -> int:
        from saejax.app.hook_list import print_experiment, print_model

        if line.config is None:
            words, revision = self._preset(line.words)
            return print_model(words, revision, self.backend, self.all)
        for flag in ("revision", "backend"):
            if flag in line.present:
                raise ConfigError(f"--{flag} goes with a model; with --config set --config.lm.{flag}.")
        if line.words:
            raise ConfigError(f"Give a model ({line.words[0]}) or --config, not both.")
        return print_experiment(line.experiment, self.all)

    def _preset(self, words: Sequence[str]) -> tuple[list[str], str]:
        """(words, revision) with the hub id and commit for a preset of the experiment `models`."""
        models = experiments.module("models").MODELS
        if len(words) != 1 or words[0] not in models or Path(words[0]).is_dir():
            return list(words), self.revision
        return [models[words[0]].model], self.revision or models[words[0]].revision
