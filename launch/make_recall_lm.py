"""Train the embedded second model of `saejax prefix` again.

    python -m launch.make_recall_lm --out=/tmp/recall

The shipped model is in saejax/lm/recall/.
"""

import dataclasses
import sys
from pathlib import Path

from benchmarks.recall_lm.make import RecallConfig, make_recall
from saejax.app.cli import run
from saejax.app.command import Command, Line
from saejax.core.errors import ConfigError
from saejax.core.settings import setting


@dataclasses.dataclass(frozen=True)
class MakeRecall(Command, takes="words"):
    out: str = setting("", "Folder to write the model to.")
    steps: int = setting(RecallConfig.steps, "Training steps of `batch` records.", low=1)
    lr: float = setting(RecallConfig.lr, "Peak learning rate.")

    def run(self, line: Line) -> None:
        line.refuse_words("the folder is --out=<folder>.")
        if not self.out:
            raise ConfigError("--out is missing: the folder to write the model to.")
        config = RecallConfig(steps=self.steps, lr=self.lr)
        print(make_recall(Path(self.out), config, lambda text: print(text, flush=True)))


if __name__ == "__main__":
    run(MakeRecall, sys.argv, help_code=1)
