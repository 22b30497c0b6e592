"""From behaviours of a language model to the features that cause them, on one page.

    saejax study --config=study_quickstart             minutes on 2 CPU cores
    saejax study --config=study_quickstart --config.study.behaviours=bracket,mine=pairs.jsonl
    saejax study --config=study_quickstart --config.study.dictionaries=runs/mine

Draws pairs of prompts, refuses behaviours that the model does not have, trains dictionaries if none are given, makes
an attribution graph for some prompts, and measures what ablating, patching and resampling groups of features does,
beside controls. Writes runs/<name>/study: CSV files, graphs and study.html. Continues where it was.
"""

from saejax.app.command import Command, Line


class Study(Command):
    def run(self, line: Line) -> int:
        from saejax.studies.run import run_study

        return run_study(line.experiment)
