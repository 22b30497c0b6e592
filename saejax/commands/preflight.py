"""Try an experiment on a small part of it: devices, disk, model, memory, speed and 1,000 steps of training.

    saejax preflight --config=quickstart
    saejax preflight --config=mine.py --config.stores_dir=/fast/stores

Takes about a minute for a small model, and leaves nothing behind. Prints a table of what passed and what did not, with
a remedy for each that failed. Exits with 1 when something fails, with 75 when a signal stopped it.
"""

from saejax.app.command import Command, Line


class Preflight(Command, answers=True):
    def run(self, line: Line) -> int:
        from saejax.plans.command import of_this_machine
        from saejax.plans.preflight import run_preflight

        work = line.workspace()
        return run_preflight(work, of_this_machine(work.experiment))
