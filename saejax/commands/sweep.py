"""Train many coders together, on one reading of the store, and compare them.

    saejax sweep --config=sweep_quickstart [--config.sweep.seeds=0,1,2]

Captures what is missing, then writes runs/<name>/<member> for each coder, and sweep.md, sweep.png, sweep.html; for a
paper also sweep.csv, sweep.tex, sweep.svg and sweep.pdf. Where members differ only in their seed, the tables have means
over seeds. What differs only in seed, learning rate and sparsity weight is one program; programs are spread over all
devices.
Continues where it was: SIGTERM and Ctrl-C finish the step, save and exit with code 75. Exits with 1 when no member
stayed finite.
--group=2 trains one of its programs alone, for as many jobs; the same command without it then makes the table.
"""

from saejax.app.command import Command, Line
from saejax.core.settings import setting


class Sweep(Command, on_page=True):
    group: int | None = setting(None, "Train this program alone, from 0.", low=0)
    max_l0: float | None = setting(
        None, "The line that says which setting to choose looks at those of at most this L0.", above=0
    )

    def run(self, line: Line) -> int:
        from saejax.app.sweep.run import run_sweep

        return run_sweep(line.workspace(), self.group, self.max_l0)
