"""The settings of a training: the keys here, and those of length and optimizer."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

from saejax.core.config import nearest
from saejax.core.errors import ConfigError
from saejax.core.settings import setting
from saejax.training.optim import OPTIMIZERS, OptimSettings

# The metrics that can be best, and what a better value is.
BETTER: dict[str, Callable[[float, float], bool]] = {
    "val/fve": operator.gt,
    "val/r2": operator.gt,
    "val/relative_error": operator.lt,
}

# How often something is done: as a count of steps it may be larger than any run.
_every = functools.partial(setting, high=math.inf, decides=False)


@dataclasses.dataclass(frozen=True)
class TrainConfig(OptimSettings):
    """Training of one coder."""

    max_skipped_steps: int = setting(
        10,
        "A step whose loss or gradient is not finite is not taken, but counted; after so many in a row training stops "
        "and says which rows they had. 1 stops at the first.",
        low=1,
        decides=False,
    )
    spike_factor: float = setting(
        0.0, "Nor is a step taken whose loss exceeds this many times the median of the last 32; 0 takes them.", low=0
    )
    resample_every: int = setting(
        0,
        "Every so many steps, latents that have not fired for half as long start anew from badly reconstructed tokens; "
        "0 never.",
        low=0,
        per_member=True,
    )
    resample_until_fraction: float = setting(
        0.5, "The share of training in which latents are resampled.", low=0, high=1, per_member=True
    )
    early_stop_patience: int = setting(
        0,
        "Stop when so many validations in a row did not raise val/fve; 0 never stops early.",
        low=0,
        needs=("heldout",),
    )
    early_stop_min_delta: float = setting(0.0, "A validation raises val/fve when it does so by more than this.", low=0)
    keep_best: str = setting(
        "",
        "A validation that is the best so far by this metric is saved, and that checkpoint stays too "
        '(`saejax.load(run, step="best")`); empty keeps none for being best.',
        choices=BETTER,
        decides=False,
        needs=("heldout", "run"),
    )
    init_from: str = setting(
        "",
        "A run, a saved coder or another project's dictionary, all that `saejax.load` reads: training starts from it, "
        "with fresh moments, the usual warm-up of the learning rate and the source's latents in its first step. More "
        "latents than it has are added. Empty starts fresh.",
        place="hub",
    )
    through: str = setting(
        "",
        "A second loss, of the language model with the reconstruction in it: kl, from what it predicts with its own "
        "activations; ce, of the next token. Each step reads rows of text for it, beside the activations. Empty: none.",
        choices=("kl", "ce"),
        needs=("text",),
    )
    through_weight: float = setting(
        1.0,
        "The second loss is made as large as the reconstruction's, times this. Weights of sparsity grow with the sum.",
        above=0,
    )
    through_from: float = setting(
        0.0, "The share of the training before the second loss, which costs nothing until then.", low=0, below=1
    )
    through_rows: int = setting(
        16, "Rows of text of a step, of text.context_length tokens each: a multiple of the devices.", low=1
    )
    through_parts: int = setting(
        1, "The rows are dealt into so many parts, which are computed one after the other. This saves memory.", low=1
    )
    through_errors: bool = setting(
        False,
        "With ce: the error of the reconstruction is added to it as a constant, so that the model computes what it "
        "does by itself and the loss is about the directions alone.",
    )
    through_in_turn: bool = setting(
        False,
        "A dictionary with a group of latents for each layer: each is rebuilt from what the replaced ones before it "
        "leave, not from what the model computes by itself.",
    )
    max_rows: int = setting(
        0, "Use at most so many stored activations (a sample limit); 0 uses all.", low=0, high=math.inf, needs=("rows",)
    )
    accumulate: int = setting(
        1,
        "The batch is taken in so many parts, one after the other, to save memory; each must divide among the devices "
        'along "data". The variance in FVU and FVE stays that of the whole batch, dead latents are those from before '
        "it, and statistics move once a step. batchtopk selects within a part, AuxK's residual has the variance of a "
        "part, and a target L0 is reached in each. A part has two activations at least: one alone has no variance.",
        low=1,
        per_member=True,
    )
    checkpoint_every: int = _every(1000, "Steps between checkpoints.", low=1, needs=("run",))
    keep_checkpoints: int = _every(3, "How many of the last checkpoints stay.", low=1, needs=("run",))
    keep_every: int = _every(
        0, "Also every checkpoint stays whose step is a multiple of this; 0 for none.", low=0, needs=("run",)
    )
    validate_every: int = setting(
        250,
        "Steps between validations on held-out activations; 0 for none.",
        low=0,
        high=math.inf,
        decides="early_stop_patience",
        needs=("validations",),
    )
    validate_epochs: float = setting(
        0.0,
        "Validations are this share of an epoch of the store apart; 0 leaves it to validate_every.",
        low=0,
        decides="early_stop_patience",
        needs=("validations", "epoch"),
    )
    log_every: int = _every(10, "Steps between rows of metrics.jsonl.", low=1)
    block_chunks: int = setting(
        64, "Inner chunks of the store that are shuffled together in memory.", low=1, needs=("order",)
    )
    blocks_ahead: int = setting(
        1,
        "Blocks of block_chunks chunks that are read ahead, all at the same time; 2 more are in memory. Raise it where "
        "train/data_wait shows that the training waits for a store in a bucket.",
        low=1,
        decides=False,
        needs=("order",),
    )
    shares: int = setting(
        1,
        "The store is dealt out to so many streams, and a batch is as many rows of each. Several processes then read "
        "the chunks of their own rows alone, where each has whole shares: a multiple of the processes.",
        low=1,
        needs=("order",),
    )
    neighbours: int = setting(
        1,
        "A batch consists of windows of so many consecutive tokens of one document, as the loss contrastive needs "
        "them: 2 for pairs. An epoch leaves out tokens that fill no window. A block of the store is then at least four "
        "whole shards in memory. 1 takes every token by itself.",
        low=1,
        high=1024,
        needs=("order",),
    )
    profile: bool = setting(
        False,
        "Trace some of a session's first steps into the run's folder, and say there what took the time: profile.md, "
        "profile.json and, of the trace, profile/. The report shows it. The numbers stay the same.",
        decides=False,
        needs=("run",),
    )
    monitor: bool = setting(
        True,
        "Each row of metrics.jsonl also has what the process and its devices take (memory, CPU, utilisation), and what "
        "the loop did since the row before. A warning says when the training waits for data or memory keeps growing. "
        "The numbers stay the same.",
        decides=False,
    )
    tensorboard: bool = setting(
        False, "Also write TensorBoard events into the run's folder.", decides=False, needs=("run",)
    )
    wandb: bool = setting(
        False,
        "Also send the rows of metrics.jsonl and the run's settings to Weights & Biases. WANDB_PROJECT names the "
        "project, else it is saejax; with WANDB_MODE=offline nothing leaves the machine.",
        decides=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.spike_factor <= 1:
            raise ConfigError(f"train.spike_factor is {self.spike_factor}: half of all losses are above; set 3, or 0.")
        self._check_batch()
        self._check_through()
        if self.resample_every and not OPTIMIZERS[self.optimizer].moments_per_latent:
            fitting = [name for name, optimizer in OPTIMIZERS.items() if optimizer.moments_per_latent]
            raise ConfigError(
                f"train.resample_every needs moments of each latent to reset, which {self.optimizer} has not; "
                f"use {', '.join(fitting[:-1])} or {fitting[-1]}."
            )
        for key in ("keep_best", "early_stop_patience"):
            if getattr(self, key) and not (self.validate_every or self.validate_epochs):
                raise ConfigError(f"train.{key} needs validations; set train.validate_every.")

    def _check_through(self) -> None:
        """Raise ConfigError for keys of the second loss that would do nothing, or give no gradient."""
        if not self.through:
            for field in dataclasses.fields(self):
                if field.name.startswith("through_") and (value := getattr(self, field.name)) != field.default:
                    raise ConfigError(f"train.{field.name}={value} does nothing without train.through: set kl or ce.")
        if self.through_errors and self.through != "ce":
            raise ConfigError(
                "train.through_errors with train.through=kl has no gradient: with its error the reconstruction is the "
                "activation. Set train.through=ce, or train.through_errors=False."
            )
        if self.through_errors and self.through_in_turn:
            raise ConfigError(
                "train.through_errors keeps what the model computes by itself, train.through_in_turn what it does "
                "with the reconstructions before. Set one of them."
            )
        if self.through_rows % self.through_parts:
            raise ConfigError(
                f"train.through_rows {self.through_rows} is not a multiple of train.through_parts {self.through_parts}."
            )

    def _check_batch(self) -> None:
        """Raise ConfigError if the batch cannot be what the other settings make of it."""
        if not self.batch_size:  # one will be found that can
            return
        if self.max_rows and self.max_rows < self.batch_size:
            raise ConfigError(f"train.max_rows is {self.max_rows}, less than one batch of {self.batch_size}.")
        if self.batch_size % self.shares:
            raise ConfigError(f"train.batch_size {self.batch_size} is not a multiple of train.shares {self.shares}.")
        if self.batch_size % self.accumulate:
            raise ConfigError(f"train.batch_size {self.batch_size} is not a multiple of accumulate {self.accumulate}.")
        if self.batch_size % (self.neighbours * self.accumulate) or self.batch_size % (self.neighbours * self.shares):
            raise ConfigError(
                f"train.batch_size {self.batch_size} cannot be dealt out in whole windows of train.neighbours "
                f"{self.neighbours}: it must be a multiple of neighbours x accumulate and of neighbours x shares."
            )
        if self.neighbours > 1 and self.batch_size // self.accumulate < 2 * self.neighbours:
            raise ConfigError(
                f"train.batch_size {self.batch_size} with train.accumulate {self.accumulate} leaves parts of one "
                f"window of train.neighbours {self.neighbours}, which nothing can be compared with. Raise batch_size "
                "or lower accumulate."
            )
        if self.batch_size // self.accumulate < 2:
            raise ConfigError(
                f"train.batch_size {self.batch_size} with train.accumulate {self.accumulate} leaves parts of one "
                "activation, which has no variance. Raise batch_size or lower accumulate: a part needs two."
            )

    def validation_interval(self, epoch_rows: int) -> int:
        """Steps between validations, for a store of `epoch_rows` activations; 0 for none."""
        if not self.validate_epochs:
            return self.validate_every
        return max(1, round(self.validate_epochs * epoch_rows / self.batch_size))


# How much effort a training makes, whatever is trained; a config file applies one by its name: {name: (factor of
# train.tokens, factor of train.lr, keys of TrainConfig with the values they get)}. train.lr=0 stays 0: it knows the
# number of steps.
TRAINING_RECIPES: dict[str, tuple[float, float, dict[str, Any]]] = {
    # A first look: a quarter of the activations, three times a learning rate that is set; it ends at 0.
    "fast": (
        1 / 4,
        3.0,
        {"schedule": "linear", "warmup_fraction": 0.02, "final_lr_fraction": 0.0, "validate_every": 1000},
    ),
    # The coder to keep: three times the activations, averaged weights, validation every quarter of an epoch.
    "thorough": (3.0, 1.0, {"final_lr_fraction": 0.0, "ema_decay": 0.999, "validate_epochs": 0.25}),
}


def apply_training_recipe(train: Any, name: str) -> None:
    """Changes the `train` section of a config (a ConfigDict) in place.

    Raises:
        ConfigError: no recipe of this name.
    """
    if name not in TRAINING_RECIPES:
        raise ConfigError(f"There is no training recipe {name!r}.{nearest(name, TRAINING_RECIPES)}")
    tokens, lr, settings = TRAINING_RECIPES[name]
    train.tokens = max(train.batch_size, round(train.tokens * tokens))
    train.lr = train.lr * lr
    train.update(settings)
