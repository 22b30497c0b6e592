"""Run text through the language model and store the activations of the experiment's hook points.

    python -m launch.capture --config=configs/quickstart.py [--config.capture.tokens=2000000]

Writes stores/<store>/train and stores/<store>/heldout. Stopped at any moment, the same command continues.
Several processes share one with --config.capture.parts=8 and, in each, --config.parallel.processes=0/4 (slurm, jax).
"""

from saejax.app import cli

_CONFIG = cli.define_config()


def main() -> None:
    from saejax.app.experiment import experiment
    from saejax.app.stages import run_capture
    from saejax.app.workspace import Workspace

    run_capture(Workspace(experiment(_CONFIG.value)))


if __name__ == "__main__":
    cli.run(main)
