"""The whole experiment: capture, train, evaluate, report; then one table of what came out.

    python -m launch.pipeline --config=configs/quickstart.py[:preset] [--config.train.lr=3e-4]

Each stage continues where it was; what is done is not done again. Exits with 1 when a gate fails, with 75 when a
signal stopped the training (all saved; run it again).
"""

from saejax.app import cli

_CONFIG = cli.define_config()


def main() -> int:
    from saejax.app.experiment import experiment
    from saejax.app.stages import run_pipeline
    from saejax.app.workspace import Workspace

    return run_pipeline(Workspace(experiment(_CONFIG.value)))


if __name__ == "__main__":
    cli.run(main)
