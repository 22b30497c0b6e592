"""Train many coders together, on one reading of the store, and compare them.

    python -m launch.sweep --config=configs/sweep_quickstart.py [--config.sweep.seeds=0,1,2]

Captures what is missing, then writes runs/<name>/<member> for each coder, and sweep.md, sweep.png, sweep.html. What
differs only in seed, learning rate and sparsity weight is one program; programs are spread over all devices.
Continues where it was: SIGTERM and Ctrl-C finish the step, save and exit with code 75. Exits with 1 when no member
stayed finite.
"""

from saejax.app import cli

_CONFIG = cli.define_config()


def main() -> int:
    from saejax.app.experiment import experiment
    from saejax.app.sweep.run import run_sweep
    from saejax.app.workspace import Workspace

    return run_sweep(Workspace(experiment(_CONFIG.value)))


if __name__ == "__main__":
    cli.run(main)
