"""Evaluate a finished run, or any dictionaries, on held-out text and check the gates.

    saejax evaluate --config=quickstart [--redo]
    saejax evaluate --config=quickstart --sae=runs/mine,their/folder,owner/name
    saejax evaluate --config=quickstart --probes=95_toxic_is,117_us_state_* [--sae=...]

Writes runs/<name>/eval.json; of a sweep one for each member. With --sae the model, the text and the settings of the
evaluation are the config's, and no store or training is needed: writes runs/<name>/evaluated/<dictionary>/eval.json,
and table.html of all that were named, with table.md, table.png, and for a paper table.csv, table.tex, table.svg and
table.pdf. Exits with 1 when a gate fails or a dictionary cannot be evaluated.
--probes also asks what k latents tell about the texts of sae-probes, and writes probes.json beside each eval.json.
"""

from saejax.app.command import DICTIONARIES, Command, Line
from saejax.core.settings import setting


class Evaluate(Command, on_page=True):
    redo: bool = setting(False, "Evaluate again although eval.json is there.")
    sae: tuple[str, ...] = setting((), DICTIONARIES)
    probes: str = setting(
        "",
        "Sparse probing: all, or names and patterns of data sets with commas; first_letter for splitting and "
        "absorption, which all has too.",
    )

    def run(self, line: Line) -> int:
        from saejax.app.probes import probed, run_probes
        from saejax.app.stages import run_dictionaries, run_evaluate
        from saejax.app.sweep.members import of_each

        work = line.workspace()
        words = list(self.sae) if "sae" in line.present else None
        # Refused before the evaluation where they cannot run.
        probes = probed(work.experiment.probes, self.probes) if "probes" in line.present else None
        if words is None:
            code = of_each(work, lambda one: run_evaluate(one, self.redo))
        else:
            code = run_dictionaries(work, words, self.redo)
        return code if probes is None else max(code, run_probes(work, probes, words, self.redo))
