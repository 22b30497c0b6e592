"""Let the model continue a prompt, as it is and with some latents of a dictionary changed.

    saejax steer runs/quickstart --feature=123 --scale=5 "Once upon a time"
    saejax steer runs/quickstart --feature=3,17 --operation=zero "prompt" "another prompt"
    saejax steer their/folder --model=owner/name --feature=2:123 "prompt"      latent 123 of layer 2

The dictionary is a run, a saved folder, another project's, or of the hub. The change acts in every step, at every token
but the first. What the dictionary does not explain stays as it is.
"""

from saejax.app.command import Command, Line
from saejax.app.steer_settings import SteerSettings
from saejax.core.config import nearest
from saejax.core.errors import ConfigError
from saejax.core.settings import setting


class Steer(SteerSettings, Command, takes="words", answers=True):
    model: str = setting("", "The language model, where the dictionary does not say.")
    adapter: str = setting("", "Changes of the model: a LoRA adapter of `saejax adapt` or PEFT.")
    past_end: bool = setting(False, "Go on behind the token that ends a text.")

    def run(self, line: Line) -> None:
        from saejax.app.console import say
        from saejax.app.run_coders import with_model
        from saejax.app.steer import OPERATIONS, features, steer

        if not self.feature:
            raise ConfigError("--feature is missing: which latents, as in --feature=123 or --feature=3,17.")
        if len(line.words) < 2:
            raise ConfigError(
                'Give a dictionary and a prompt: saejax steer runs/quickstart --feature=123 "Once upon a"'
            )
        place, *prompts = line.words
        if self.operation not in OPERATIONS:  # before a model is loaded
            raise ConfigError(f"No operation {self.operation!r}.{nearest(self.operation, OPERATIONS)}")
        (sae,), lm = with_model([place], self.model, self.adapter)
        latents = features(self.feature, sae)
        how = {name: getattr(self, name) for name in ("operation", "tokens", "temperature", "top_p", "seed")}
        steered = steer(sae, lm, prompts, latents, self.scale, past_end=self.past_end, **how)
        say(f"{lm.identity['model']}, {sae!r}")
        say(f"latent {self.feature}: {steered[0].change}, at every token but the first")
        for one in steered:
            say(f"\n{one!r}")
