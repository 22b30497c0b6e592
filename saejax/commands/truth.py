"""Train on activations whose features are known, and score which of them a dictionary found.

    saejax truth --config=truth [--config.coder.preset=topk --config.coder.k=12]
    saejax truth --config=truth --sae=runs/mine,their/folder,owner/name

Writes runs/<name>, with truth.json (figures with intervals) and truth.png; the same command continues a training that
was stopped. With --sae nothing is trained: the dictionaries are scored on the config's world, and
runs/<name>/scored/table.md has all that were named. Exits with 75 when a signal stopped the training.
"""

from saejax.app.command import Command, Line
from saejax.core.settings import setting


class Truth(Command):
    sae: tuple[str, ...] = setting(
        (), "A dictionary to score, and no training: a run, a folder, a file or a hub id; several with commas."
    )

    def run(self, line: Line) -> int:
        from saejax.app.truth import run_truth

        return run_truth(line.experiment, list(self.sae) if "sae" in line.present else None)
