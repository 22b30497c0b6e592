"""Write a run's report: curves, gates, densities and a browser of its features, in one HTML file.

    saejax report --config=quickstart [--redo]
    saejax report --config=quickstart --sae=their/folder

Writes runs/<name>/report.html, which opens without a network; of a sweep one for each member. With --sae it evaluates
as `saejax evaluate --sae` does, and writes runs/<name>/evaluated/<dictionary>/report.html.
"""

from saejax.app.command import DICTIONARIES, Command, Line
from saejax.core.settings import setting


class Report(Command, on_page=True):
    redo: bool = setting(False, "Make the report again although it is there.")
    sae: tuple[str, ...] = setting((), DICTIONARIES)

    def run(self, line: Line) -> int:
        from saejax.app.stages import run_dictionaries, run_report
        from saejax.app.sweep.members import of_each
        from saejax.app.workspace import Workspace

        work = line.workspace()
        if "sae" in line.present:
            return run_dictionaries(work, list(self.sae), self.redo, report=True)

        def make(one: Workspace) -> int:
            run_report(one, self.redo)
            return 0

        return of_each(work, make)
