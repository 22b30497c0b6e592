"""Train the embedded demo language model again.

    python -m launch.make_demo_lm --out=/tmp/demo

Takes about an hour on 2 cores. The shipped model is in saejax/lm/demo/; training it again on another Python
version gives another corpus and so another model.
"""

import sys
from functools import partial
from pathlib import Path

from absl import flags

from benchmarks.demo_lm.make import DemoConfig, make_demo
from saejax.app.cli import Command, Line, run
from saejax.core.errors import ConfigError


def main(line: Line) -> None:
    if line.words:
        raise ConfigError(f"Unexpected argument {line.words[0]!r}; the folder is --out=<folder>.")
    config = DemoConfig(steps=line.flags["steps"])
    print(make_demo(Path(line.flags["out"]), config, lambda text: print(text, flush=True)))


_FLAGS = (
    partial(flags.DEFINE_string, "out", None, "Folder to write the model to.", required=True),
    partial(flags.DEFINE_integer, "steps", DemoConfig.steps, "Training steps of 4,096 tokens.", lower_bound=1),
)

if __name__ == "__main__":
    run(Command(__doc__, main, "words", _FLAGS), sys.argv, help_code=1)
