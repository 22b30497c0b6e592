"""Settings of attribution."""

import dataclasses

from saejax.core.settings import Settings, setting


@dataclasses.dataclass(frozen=True)
class AttributionConfig(Settings, section="attribution"):
    """The size of a graph, and its computation."""

    max_features: int = setting(
        7500,
        "Features of a graph at most: those that matter most to the logits, by the rows that are there when each chunk "
        "is chosen. 0: all that are active.",
        low=0,
    )
    logits: int = setting(10, "Logits of a graph at most.", low=1)
    logit_mass: float = setting(
        0.95, "No more logits than have this share of the probability together.", above=0, high=1
    )
    silent: int = setting(
        1,
        "How many of the first tokens have no features and no errors. A model has its sink there, on its bos or on "
        "what stands first, and dictionaries are not trained on it. 0 for one that was (capture.drop_first=0).",
        low=0,
    )
    chunk: int = setting(64, "Rows computed at once: memory grows with it.", low=1)
    rank_every: int = setting(4, "Chunks of rows between two rankings of the features that have none yet.", low=1)
    row_features: int = setting(
        0,
        "Effects of features kept of a row, the largest; the others count in the row's sum and are 0 in the graph. It "
        "bounds the memory of long prompts, where millions are active. 0: all.",
        low=0,
    )
    block: int = setting(4096, "Decoder rows of active features gathered at once.", low=1)
