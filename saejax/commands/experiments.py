"""List the shipped experiments, with their presets.

    saejax experiments

Any of them is --config=<name>[:preset] of a command; `saejax new mine --from=<name>` writes it to be edited.
"""

from saejax.app.command import Command, Line


class Experiments(Command, takes="words", answers=True):
    def run(self, line: Line) -> None:
        from saejax.app import experiments

        line.refuse_words("`saejax experiments` lists all.")
        print(experiments.listing())
        print("\nsaejax pipeline --config=quickstart:tiny runs one (sweep_*: saejax sweep);")
        print("saejax new mine --from=quickstart writes one to edit.")
