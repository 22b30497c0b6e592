"""Measure what this machine really reaches, for plans: about a minute.

    saejax calibrate
    saejax plan --config=quickstart --device=here

Writes one device into the file of your devices (docs/planning.md): speed of products and memory, of train steps of six
kinds of coder, of a language model, of the store, the evaluation and the report.
"""

from saejax.app.command import Command, Line
from saejax.core.settings import setting


class Calibrate(Command, takes="words"):
    name: str = setting("here", "What plans call this machine.")

    def run(self, line: Line) -> None:
        from saejax.plans.calibrate import run_calibrate

        line.refuse_words("`saejax calibrate` measures this machine.")
        run_calibrate(self.name)
