"""Train the embedded demo language model again.

    python -m launch.make_demo_lm --out=/tmp/demo

Takes about an hour on 2 cores. The shipped model is in saejax/lm/demo/; training it again on another Python
version gives another corpus and so another model.
"""

import dataclasses
import sys
from pathlib import Path

from benchmarks.demo_lm.make import DemoConfig, make_demo
from saejax.app.cli import run
from saejax.app.command import Command, Line
from saejax.core.errors import ConfigError
from saejax.core.settings import setting


@dataclasses.dataclass(frozen=True)
class MakeDemo(Command, takes="words"):
    out: str = setting("", "Folder to write the model to.")
    steps: int = setting(DemoConfig.steps, "Training steps of 4,096 tokens.", low=1)

    def run(self, line: Line) -> None:
        line.refuse_words("the folder is --out=<folder>.")
        if not self.out:
            raise ConfigError("--out is missing: the folder to write the model to.")
        config = DemoConfig(steps=self.steps)
        print(make_demo(Path(self.out), config, lambda text: print(text, flush=True)))


if __name__ == "__main__":
    run(MakeDemo, sys.argv, help_code=1)
