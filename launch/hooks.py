"""List a language model's hook points: names, shapes, TransformerLens's names, and what can be stored.

    python -m launch.hooks                                      the embedded demo model
    python -m launch.hooks gpt2                                 a name of configs/models.py, a hub id, or a folder
    python -m launch.hooks /path/to/folder [--backend=torch]
    python -m launch.hooks --config=configs/gpt2_small.py       the model of an experiment, and what it captures

The same point of several blocks is one line, in the form that capture.hook_points takes; --all lists each.
Of models that the JAX decoder knows, config.json alone is read (or fetched): no weights. Others are loaded by PyTorch,
because what stands where is measured.
"""

from pathlib import Path

from absl import flags

from saejax.app import cli
from saejax.core.errors import ConfigError

_CONFIG = cli.define_config()
_REVISION = flags.DEFINE_string("revision", "", "Commit, tag or branch of a hub id.")
_BACKEND = flags.DEFINE_string("backend", "auto", "jax, torch, or auto: jax where its decoder knows the architecture.")
_ALL = flags.DEFINE_bool("all", False, "Each hook point in a line of its own.")


def main(words: list[str]) -> int:
    from saejax.app.experiment import experiment
    from saejax.app.hook_list import print_experiment, print_model

    if _CONFIG.value is None:
        return print_model(*_named(words, _REVISION.value), _BACKEND.value, _ALL.value)
    for flag in (_REVISION, _BACKEND):
        if flag.present:
            raise ConfigError(f"--{flag.name} goes with a model; with --config set --config.lm.{flag.name}.")
    if words:
        raise ConfigError(f"Give a model ({words[0]}) or --config, not both.")
    return print_experiment(experiment(_CONFIG.value), _ALL.value)


def _named(words: list[str], revision: str) -> tuple[list[str], str]:
    """(words, revision) with the hub id and commit for a name of configs/models.py."""
    from configs.models import MODELS

    if len(words) != 1 or words[0] not in MODELS or Path(words[0]).is_dir():
        return words, revision
    return [MODELS[words[0]].model], revision or MODELS[words[0]].revision


if __name__ == "__main__":
    cli.run_words_or_config(main)
