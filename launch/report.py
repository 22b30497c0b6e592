"""Write a run's report: curves, gates, densities and a browser of its features, in one HTML file.

    python -m launch.report --config=configs/quickstart.py [--redo]

Writes runs/<name>/report.html, which opens without a network.
"""

from absl import flags

from saejax.app import cli

_CONFIG = cli.define_config()
_REDO = flags.DEFINE_boolean("redo", False, "Make the report again although it is there.")


def main() -> None:
    from saejax.app.experiment import experiment
    from saejax.app.stages import run_report
    from saejax.app.workspace import Workspace

    run_report(Workspace(experiment(_CONFIG.value)), redo=_REDO.value)


if __name__ == "__main__":
    cli.run(main)
