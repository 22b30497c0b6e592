"""The settings of `saejax steer`, which the page's requests have too."""

import dataclasses

from saejax.core.settings import Settings, setting


@dataclasses.dataclass(frozen=True)
class SteerSettings(Settings):
    """The latents that are changed, the change, and how the model continues."""

    feature: str = setting("", "Which latents: 123, 3,17, or layer:latent.")
    scale: float = setting(5.0, "The number of the operation, in the latent's own unit.")
    operation: str = setting(
        "add", "add (f + scale), set (f = scale), scale (scale f), zero (f = 0), least, most (f no lower, no higher)."
    )
    tokens: int = setting(40, "How many tokens are written.", low=1)
    temperature: float = setting(0.0, "0 takes the likeliest token.", low=0.0)
    top_p: float = setting(1.0, "Draw from the likeliest tokens that make up this share.", above=0, high=1)
    seed: int = setting(0, "Of the draws.")
