"""`saejax.report`: the page of a run, in a notebook or a program."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from saejax.app.run_coders import experiment_of
from saejax.app.stages.report import run_report
from saejax.app.training_folders import open_workspace
from saejax.core.files import read_object
from saejax.core.notebook import html_frame
from saejax.runs import Run


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """The report of a run; a notebook shows its page.

    Attributes:
        page: report.html, which needs no other file. What features fire on lies beside it in features.sqlite.
        figures: {name: value} of the run's evaluation; empty where it is not evaluated.
    """

    page: Path
    figures: Mapping[str, float]

    def __repr__(self) -> str:
        return f"Report({str(self.page)!r})"

    def _repr_html_(self) -> str:
        return html_frame(self.page)


def report(run: str | os.PathLike[str], *, redo: bool = False) -> Report:
    """The page of a run, written where it is not there or shows something else: report("runs/quickstart")

    It is what `saejax report` writes: curves, gates, densities and a browser of the features.

    Args:
        run: the folder of a run, or of one member of a sweep.
        redo: make the features again although they are there.

    Raises:
        ConfigError: the run is of a prefix and no coder.
        DataError: no such run, no finished training, or held-out text that is another one than it was.
    """
    page = run_report(open_workspace(experiment_of(Path(run))), redo)
    evaluation = Run(page.parent).evaluation
    return Report(page, read_object(evaluation)["metrics"] if evaluation.is_file() else {})
