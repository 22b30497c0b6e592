"""Training recipes: how much effort a training makes, whatever is trained. A config file applies one by its name."""

import dataclasses
from typing import Any

from saejax.core.config import nearest
from saejax.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class TrainingRecipe:
    """Factors on what a config asks for, and keys of `TrainConfig` that it sets.

    Attributes:
        title: what it is for.
        tokens, lr: the config's values are multiplied by these. train.lr=0 stays 0: it knows the number of steps.
        settings: keys of TrainConfig with the values they get.
    """

    title: str
    tokens: float
    lr: float
    settings: dict[str, Any]


TRAINING_RECIPES: dict[str, TrainingRecipe] = {
    "fast": TrainingRecipe(
        "a first look: a quarter of the activations, three times a learning rate that is set; it ends at 0",
        tokens=1 / 4,
        lr=3.0,
        settings={"schedule": "linear", "warmup_fraction": 0.02, "final_lr_fraction": 0.0, "validate_every": 1000},
    ),
    "thorough": TrainingRecipe(
        "the coder to keep: three times the activations, averaged weights, validation every quarter of an epoch",
        tokens=3.0,
        lr=1.0,
        settings={
            "final_lr_fraction": 0.0,
            "ema_decay": 0.999,
            "validate_epochs": 0.25,
        },
    ),
}


def apply_training_recipe(train: Any, name: str) -> None:
    """Changes the `train` section of a config (a ConfigDict) in place.

    Raises:
        ConfigError: no recipe of this name.
    """
    if name not in TRAINING_RECIPES:
        raise ConfigError(f"There is no training recipe {name!r}.{nearest(name, TRAINING_RECIPES)}")
    recipe = TRAINING_RECIPES[name]
    train.tokens = max(train.batch_size, round(train.tokens * recipe.tokens))
    train.lr = train.lr * recipe.lr
    train.update(recipe.settings)
