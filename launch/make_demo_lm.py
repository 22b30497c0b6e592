"""Train the embedded demo language model again.

    python -m launch.make_demo_lm --out=/tmp/demo

Takes about an hour on 2 cores. The shipped model is in saejax/lm/demo/; training it again on another Python
version gives another corpus and so another model.
"""

from pathlib import Path

from absl import flags

from benchmarks.demo_lm.make import DemoConfig, make_demo
from saejax.app import cli
from saejax.core.errors import ConfigError

_OUT = flags.DEFINE_string("out", None, "Folder to write the model to.", required=True)
_STEPS = flags.DEFINE_integer("steps", DemoConfig.steps, "Training steps of 4,096 tokens.", lower_bound=1)


def main(words: list[str]) -> None:
    if words:
        raise ConfigError(f"Unexpected argument {words[0]!r}; the folder is --out=<folder>.")
    figures = make_demo(Path(_OUT.value), DemoConfig(steps=_STEPS.value), lambda line: print(line, flush=True))
    print(figures)


if __name__ == "__main__":
    cli.run_words(main)
