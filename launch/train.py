"""Train the experiment's sparse coder on its stored activations.

    python -m launch.train --config=configs/quickstart.py [--config.train.lr=3e-4]

Writes runs/<name>. Continues from the last good checkpoint. SIGTERM, SIGUSR1 (SLURM's
--signal=USR1@60) and Ctrl-C finish the step, save and exit with code 75; the same command then continues.
"""

from saejax.app import cli

_CONFIG = cli.define_config()


def main() -> int:
    from saejax.app.experiment import experiment
    from saejax.app.stages import run_train
    from saejax.app.workspace import Workspace

    return run_train(Workspace(experiment(_CONFIG.value)))


if __name__ == "__main__":
    cli.run(main)
