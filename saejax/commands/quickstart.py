"""Pipeline with the experiment quickstart: from text to an evaluated SAE of the demo model, in minutes.

    saejax quickstart                              a few minutes on 2 CPU cores
    saejax quickstart:tiny                         a smoke test of seconds
    saejax quickstart --config.coder.k=32 --config.name=mine

Each stage continues where it was; what is done is not done again. Exits with 1 when a gate fails, with 75 when a
signal stopped the training (all saved; run it again).
"""

from saejax.commands.pipeline import Pipeline


class Quickstart(Pipeline, on_page=False):
    pass
