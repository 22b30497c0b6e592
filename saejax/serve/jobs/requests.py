"""The bodies of POST requests. A field that is not named here is refused."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from saejax.core.settings import Settings, settings_of
from saejax.plans.devices import PlanSettings

Name = Annotated[str, StringConstraints(max_length=1024)]
_Settings = Annotated[dict[Annotated[str, StringConstraints(max_length=200)], Any], Field(max_length=500)]
LARGEST_INT = (1 << 31) - 1


def of(settings: type[Settings], name: str, **narrower: Any) -> Any:
    """The field of a body that is a setting: default, range and meaning are those that are declared there.

    The range of a list's items is refused by the settings that are made of the body.
    """
    known, default = settings_of(settings)[name], getattr(settings, name)
    field = {"default": default, "description": known.doc}
    if isinstance(default, int | float):
        high = LARGEST_INT if known.high is None and isinstance(default, int) else known.high
        field |= {"ge": known.low, "le": high, "gt": known.above, "lt": known.below}
    return Field(**field | narrower)


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class ExperimentBody(Body):
    """An experiment or run to begin with, and keys to set.

    Attributes:
        experiment: a label of the site's experiments; or empty, and
        run: the name of a run or sweep that is there.
        preset: of the experiment.
        config: {"train.lr": 3e-4, ...}.
    """

    experiment: Name = ""
    run: Name = ""
    preset: Name = ""
    config: _Settings = {}


class JobBody(ExperimentBody):
    """A command of `saejax` that the page offers, and the experiment that it is run with."""

    command: Name


class PlanBody(ExperimentBody):
    """An experiment, and what `saejax plan` takes of devices."""

    device: Name = of(PlanSettings, "device")
    devices: tuple[int, ...] = of(PlanSettings, "devices", default=(1,), min_length=1, max_length=8)


class StopBody(Body):
    """The run whose trainer is told to save and end."""

    run: Name


class TrainBody(Body):
    """A training on activations that are there."""

    layer_idx: int = Field(ge=0, le=10_000, description="The block whose activations are read.")
    activation_data_path: Name = Field(
        description="A file that `saejax store import` reads, a folder of them, or a store: its name or folder."
    )
    heldout_data_path: Name = Field("", description="The same, for validation.")
    hook_point: Name = Field("", description="Where several are meant: which one; of files the name it gets.")
    latent_dim: int | None = Field(None, ge=1, le=1 << 24, description="Latents (coder.d_sae).")
    batch_size: int | None = Field(None, ge=2, le=1 << 24, description="Activations that are in memory at a time.")
    max_samples: int | None = Field(None, ge=1, le=1 << 50, description="At most so many activations (train.max_rows).")
    max_epochs: float | None = Field(None, gt=0, le=1e6, description="train.tokens is so many times the activations.")
    learning_rate: float | None = Field(None, gt=0, le=1e6, description="train.lr")
    early_stopping_patience: int | None = Field(
        None, ge=0, le=1_000_000, description="Validations without a better FVE after which training stops."
    )
    val_check_interval: float | None = Field(
        None, ge=0, le=1 << 30, description="Up to 1: the share of an epoch between validations; above: steps."
    )
    accumulate_grad_batches: int | None = Field(None, ge=1, le=1 << 20, description="Batches in one step.")
    gradient_accumulation_steps: int | None = Field(None, ge=1, le=1 << 20, description="The same.")
    num_workers: int | None = Field(None, ge=0, le=256, description="Blocks read ahead (train.blocks_ahead).")
    preset: Name = Field("", description="The coder: topk, batchtopk, jumprelu, ... (coder.preset).")
    sparsity: int | Name | None = Field(None, description="A number is coder.k, a word is the preset.")
    name: Name = Field("", description="The run's name; empty makes one.")
    run: Name = Field("", description="A run whose model and text the store is of; found where it can be.")
    experiment: Name = Field("", description="The same, as an experiment.")
    config: _Settings = Field({}, description="Any other keys, which come last.")
