"""Write dictionaries in another project's format, or read another project's into saejax's.

    saejax convert runs/quickstart out --to=saelens
    saejax convert gemma-scope/layer_20/width_16k/average_l0_71 out --to=saejax
    saejax convert runs/layer0 runs/layer1 out --to=circuit-tracer      a set of several layers

A source is a run, a saved folder, a foreign dictionary, or a folder of several. What is written is read back and
compared with its source. What a format cannot say is refused: `saejax formats` has the table.
"""

from saejax.app.command import Line, OfCheckpoint
from saejax.core.errors import ConfigError
from saejax.core.settings import setting


class Convert(OfCheckpoint, takes="words"):
    to: str = setting("", "The format: saejax, or one that `saejax formats` names.")
    hook_points: tuple[str, ...] = setting(
        (), "What the dictionary reads, or reads,writes, where its files do not say: blocks.6.resid_pre."
    )

    def run(self, line: Line) -> None:
        from saejax.app.console import say
        from saejax.app.convert import conversions

        if len(line.words) < 2:
            raise ConfigError("Give a source and a destination, as in: saejax convert runs/quickstart out --to=saelens")
        *sources, target = line.words
        for converted in conversions(sources, target, self.to, self.hook_points, self.checkpoint):
            say(repr(converted))
