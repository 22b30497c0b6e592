"""Settings of the probes."""

import dataclasses
import math

from saejax.core.errors import ConfigError
from saejax.core.settings import Settings, setting

PENALTIES = ("l1", "l2")


@dataclasses.dataclass(frozen=True)
class ProbesConfig(Settings, section="probes"):
    """Sparse probing and the first-letter task: `saejax evaluate --probes`. Defaults are those of the projects."""

    data: str = setting(
        "",
        "Folder of the data sets: <name>.csv or .csv.zst with the columns prompt and target, of two classes, in it or "
        "in its cleaned_data/. Empty: those of the installed package sae-probes.",
        place="path",
    )
    ks: tuple[int, ...] = setting((1, 2, 5, 10, 16, 100), "Latents that a probe sees.", low=1)
    penalty: str = setting(
        "l1", "Of the logistic regressions on latents; that on activations has l2.", choices=PENALTIES
    )
    seed: int = setting(42, "Of the choice of rows and of the fits.", low=0)
    train_rows: int = setting(
        0, "Training rows of a data set, both classes alike; 0: all but 100, at most 1,024.", low=0
    )
    test_rows: int = setting(0, "Test rows of a data set at most; 0: all that are left.", low=0)
    max_tokens: int = setting(
        1024, "The last tokens of a text that the model reads; at most what the model can read.", low=2
    )
    batch_tokens: int = setting(8192, "Tokens in a forward pass, padding included.", low=1)
    words: int = setting(0, "First letters: words of the vocabulary at most, drawn by `seed`; 0: all.", low=0)
    most_latents: int = setting(10, "First letters: latents of the largest probe for a letter.", low=1)
    split_gain: float = setting(
        0.03, "First letters: a latent more is a split where the probe's F1 rises by more than this.", low=0, high=1
    )
    least_f1: float = setting(
        0.6, "First letters: the F1 on held-out words above which the model knows a letter.", low=0, below=1
    )
    least_letters: int = setting(20, "First letters: refused where the model knows fewer letters.", low=1, high=26)
    resamples: int = setting(10_000, "Resamples of an interval.", low=100, high=math.inf)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ks or len(set(self.ks)) < len(self.ks):
            raise ConfigError(f"probes.ks is {self.ks}; give different numbers of latents, as in 1,2,5.")
