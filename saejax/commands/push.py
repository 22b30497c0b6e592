"""Put a dictionary into a repository of the Hugging Face hub, with a model card.

    saejax push runs/quickstart owner/name
    saejax push runs/quickstart owner/name --format=saelens --folder=blocks.3.hook_resid_pre --private

The source is what saejax.load takes. The repository is made where it is missing. Files of the same names are replaced
in one commit; folders of this machine are not told. saejax.load("owner/name@commit/folder") reads it back. The token is
HF_TOKEN, or that of `hf auth login`.
"""

from saejax.app.command import Line, OfCheckpoint
from saejax.core.settings import setting


class Push(OfCheckpoint, takes="words"):
    format: str = setting("saejax", "saejax, or one that `saejax formats` names.")
    private: bool = setting(False, "Where the repository is made, only you can read it.")
    folder: str = setting("", "Folder in the repository; empty for its root.")
    revision: str = setting("", "Branch, made where it is missing; empty for main.")

    def run(self, line: Line) -> None:
        from saejax.app.push import run_push

        run_push(line.words, self.format, self.private, self.folder, self.revision, self.checkpoint)
