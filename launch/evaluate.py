"""Evaluate a finished run on held-out text and check its gates.

    python -m launch.evaluate --config=configs/quickstart.py [--redo]

Writes runs/<name>/eval.json. Exits with 1 when a gate fails.
"""

from absl import flags

from saejax.app import cli

_CONFIG = cli.define_config()
_REDO = flags.DEFINE_boolean("redo", False, "Evaluate again although eval.json is there.")


def main() -> int:
    from saejax.app.experiment import experiment
    from saejax.app.stages import run_evaluate
    from saejax.app.workspace import Workspace

    return run_evaluate(Workspace(experiment(_CONFIG.value)), redo=_REDO.value)


if __name__ == "__main__":
    cli.run(main)
