"""Train a latent prefix for frozen models, and compare it with text, truncated text and others.

    saejax prefix --config=latentwire_quickstart [--config.prefix.latents=12]
    saejax prefix --config=latentwire              Llama-3.1-8B and Qwen2.5-7B, on a GPU

A text becomes a few latents, and adapters turn these into embeddings that stand before a model's prompt in place of the
text. Encoder and adapters are trained; the models are not. Writes runs/<name>, with prefix.json (figures with
intervals), prefix.md and report.html; the same command continues a training that was stopped. Exits with 75 when a
signal stopped it.
"""

from saejax.app.command import Command, Line
from saejax.core.settings import setting


class Prefix(Command):
    redo: bool = setting(False, "Evaluate again although prefix.json is there.")

    def run(self, line: Line) -> int:
        from saejax.app.prefix import run_prefix

        return run_prefix(line.experiment, self.redo)
