"""The whole experiment: capture, train, evaluate, report; then one table of what came out.

    saejax pipeline --config=quickstart[:preset] [--config.train.lr=3e-4]
    saejax pipeline --config=mine.py

Each stage continues where it was; what is done is not done again. Exits with 1 when a gate fails, with 75 when a
signal stopped the training (all saved; run it again).
"""

from saejax.app.command import Command, Line
from saejax.core.settings import setting


class Pipeline(Command, on_page=True):
    anyway: bool = setting(False, "Start although disk or memory seem too small for all of it.")

    def run(self, line: Line) -> int:
        from saejax.app.stages import run_pipeline
        from saejax.plans.disk_and_memory import check_disk_and_memory

        work = line.workspace()
        if not self.anyway:
            check_disk_and_memory(work.experiment)
        return run_pipeline(work)
