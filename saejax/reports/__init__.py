"""The page of a run: `render(run_dir)` writes one self-contained `report.html`.

Python reads and checks the files of the run's folder (`read`), chooses what the page says about them
(`summary`) and puts data, style and script into one file (`page`). Everything drawn is drawn by the small
hand-written scripts beside this file; the page asks the network for nothing and forbids itself to.
"""

from saejax.reports.page import render

__all__ = ["render"]
