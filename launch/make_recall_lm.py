"""Train the embedded second model of `saejax prefix` again.

    python -m launch.make_recall_lm --out=/tmp/recall

The shipped model is in saejax/lm/recall/.
"""

import sys
from functools import partial
from pathlib import Path

from absl import flags

from benchmarks.recall_lm.make import RecallConfig, make_recall
from saejax.app.cli import Command, Line, run
from saejax.core.errors import ConfigError


def main(line: Line) -> None:
    if line.words:
        raise ConfigError(f"Unexpected argument {line.words[0]!r}; the folder is --out=<folder>.")
    config = RecallConfig(steps=line.flags["steps"], lr=line.flags["lr"])
    print(make_recall(Path(line.flags["out"]), config, lambda text: print(text, flush=True)))


_FLAGS = (
    partial(flags.DEFINE_string, "out", None, "Folder to write the model to.", required=True),
    partial(flags.DEFINE_integer, "steps", RecallConfig.steps, "Training steps of `batch` records.", lower_bound=1),
    partial(flags.DEFINE_float, "lr", RecallConfig.lr, "Peak learning rate."),
)

if __name__ == "__main__":
    run(Command(__doc__, main, "words", _FLAGS), sys.argv, help_code=1)
