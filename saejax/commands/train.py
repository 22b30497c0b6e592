"""Train the experiment's sparse coder on its stored activations.

    saejax train --config=quickstart [--config.train.lr=3e-4]

Writes runs/<name>. Continues from the last good checkpoint. SIGTERM, SIGUSR1 (SLURM's
--signal=USR1@60) and Ctrl-C finish the step, save and exit with code 75; the same command then continues.
"""

from saejax.app.command import Command, Line


class Train(Command, on_page=True):
    def run(self, line: Line) -> int:
        from saejax.app.stages import run_train

        return run_train(line.workspace())
