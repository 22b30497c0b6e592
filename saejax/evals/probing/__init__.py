"""Probes of latents: k-sparse after sae-probes, first letters, splitting and absorption after SAEBench."""

from saejax.evals.probing.compare import Mean, difference, mean_over
from saejax.evals.probing.config import ProbesConfig
from saejax.evals.probing.datasets import LabelledTexts, chosen, data_folder, files, needed, read
from saejax.evals.probing.first_letter import Absorbed, Task, absorbed, first_letters, refused_coder, splits, task_of
from saejax.evals.probing.last_token import Reader
from saejax.evals.probing.sparse import Scores, Split, fit, probe_activations, probe_latents, ranked, split

__all__ = [
    "Absorbed",
    "LabelledTexts",
    "Mean",
    "ProbesConfig",
    "Reader",
    "Scores",
    "Split",
    "Task",
    "absorbed",
    "chosen",
    "data_folder",
    "difference",
    "files",
    "first_letters",
    "fit",
    "mean_over",
    "needed",
    "probe_activations",
    "probe_latents",
    "ranked",
    "read",
    "refused_coder",
    "split",
    "splits",
    "task_of",
]
