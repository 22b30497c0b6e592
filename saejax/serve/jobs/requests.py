"""The bodies of POST requests. A field that is not named here is refused."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

_Name = Annotated[str, StringConstraints(max_length=1024)]
_Key = Annotated[str, StringConstraints(max_length=200)]
_Settings = Annotated[dict[_Key, Any], Field(max_length=500)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class ExperimentBody(_Body):
    """An experiment or run to begin with, and keys to set.

    Attributes:
        experiment: a label of the site's experiments; or empty, and
        run: the name of a run or sweep that is there.
        preset: of the experiment.
        config: {"train.lr": 3e-4, ...}.
    """

    experiment: _Name = ""
    run: _Name = ""
    preset: _Name = ""
    config: _Settings = {}


class JobBody(ExperimentBody):
    """A command of `saejax` that the page offers, and the experiment that it is run with."""

    command: _Name


class PlanBody(ExperimentBody):
    """On which devices: a name of `saejax plan --device`, empty for this machine; and how many of them."""

    device: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{0,40}$")] = ""
    devices: Annotated[list[Annotated[int, Field(ge=1, le=1024)]], Field(min_length=1, max_length=8)] = [1]


class StopBody(_Body):
    """The run whose trainer is told to save and end."""

    run: _Name


class TrainBody(_Body):
    """A training on activations that are there."""

    layer_idx: int = Field(ge=0, le=10_000, description="The block whose activations are read.")
    activation_data_path: _Name = Field(
        description="A .parquet, .npy or .safetensors file of [N, d], a folder of them, or a store: its name or folder."
    )
    heldout_data_path: _Name = Field("", description="The same, for validation.")
    hook_point: _Name = Field("", description="Where several are meant: which one; of files the name it gets.")
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
    preset: _Name = Field("", description="The coder: topk, batchtopk, jumprelu, ... (coder.preset).")
    sparsity: int | _Name | None = Field(None, description="A number is coder.k, a word is the preset.")
    name: _Name = Field("", description="The run's name; empty makes one.")
    run: _Name = Field("", description="A run whose model and text the store is of; found where it can be.")
    experiment: _Name = Field("", description="The same, as an experiment.")
    config: _Settings = Field({}, description="Any other keys, which come last.")
