"""Run text through the language model and store the activations of the experiment's hook points.

    saejax capture --config=quickstart [--config.capture.tokens=2000000]

Writes stores/<store>/train and stores/<store>/heldout. Stopped at any moment, the same command continues.
Several processes share one with --config.capture.parts=8 and, in each, --config.parallel.processes=0/4 (slurm, jax).
"""

from saejax.app.command import Command, Line


class Capture(Command, on_page=True):
    def run(self, line: Line) -> None:
        from saejax.app.stages import run_capture

        run_capture(line.workspace())
