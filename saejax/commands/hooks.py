"""List a language model's hook points: names, shapes, TransformerLens's names, and what can be stored.

    saejax hooks                            the embedded demo model
    saejax hooks gpt2                       a preset of the experiment models, a hub id, or a folder
    saejax hooks /path/to/folder [--backend=torch]
    saejax hooks --config=gpt2_small        the model of an experiment, and what it captures

The same point of several blocks is one line, in the form that capture.hook_points takes; --all lists each.
For a model that the JAX decoder knows, only config.json is read (or fetched), and no weights. PyTorch loads any other
model, because its hook points and widths are measured on a few tokens.
"""

from pathlib import Path

from saejax.app import experiments
from saejax.app.command import Command, Line
from saejax.core.errors import ConfigError
from saejax.core.settings import setting


class Hooks(Command, takes="either", answers=True):
    revision: str = setting("", "Commit, tag or branch of a hub id.")
    backend: str = setting("auto", "jax, torch, or auto: jax where its decoder knows the architecture.")
    all: bool = setting(False, "Each hook point in a line of its own.")

    def run(self, line: Line) -> None:
        from saejax.app.hook_list import each, folded, header, hook_table, of_experiment
        from saejax.lm import list_hook_points

        as_lines = each if self.all else folded
        if line.config is None:
            if len(line.words) > 1:
                raise ConfigError(f"Name one model, not {len(line.words)}: {', '.join(line.words)}.")
            model = list_hook_points(*self._model(*line.words), self.backend)
            print("\n".join([*header(model), "", *hook_table(as_lines(model.points))]))
            return
        for flag in ("revision", "backend"):
            if flag in line.present:
                raise ConfigError(f"--{flag} goes with a model; with --config set --config.lm.{flag}.")
        if line.words:
            raise ConfigError(f"Give a model ({line.words[0]}) or --config, not both.")
        e = line.experiment
        for model, points, captured in of_experiment(e):
            print("\n".join([*header(model), "", *hook_table(as_lines(points, captured)), ""]))
        print(f"capture.hook_points of {e.name}: {', '.join(e.capture.hook_points)}")

    def _model(self, name: str = "demo") -> tuple[str, str]:
        """(name, revision), with the hub id and commit for a preset of the experiment `models`."""
        models = experiments.module("models").MODELS
        if name not in models or Path(name).is_dir():
            return name, self.revision
        return models[name].model, self.revision or models[name].revision
