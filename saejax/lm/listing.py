"""A model's shape and hook points, as data; from its config.json if the JAX decoder runs it."""

import dataclasses

from saejax.lm import checkpoint
from saejax.lm.conventions import DecoderConfig
from saejax.lm.model import LMConfig, config_folder, load_lm, runs_in_torch
from saejax.lm.points import HookPoint
from saejax.lm.shape import ModelShape
from saejax.lm.torch_hooks import TorchModel


@dataclasses.dataclass(frozen=True)
class HookList:
    """One model: its shape, which comes from the model itself, and its hook points.

    Attributes:
        model: the folder or id.
        architecture: `model_type` of config.json, or the class of a PyTorch module.
        backend: what runs it, jax or torch.
        shape: its sizes.
        number_types: of the weights on disk, as in ("BF16",), or as PyTorch has loaded them; empty if some are
            not here.
        points: in the order in which the model computes them; in PyTorch the names in blocks first.
        names: what resolves other names of the points.
    """

    model: str
    architecture: str
    backend: str
    shape: ModelShape
    number_types: tuple[str, ...]
    points: tuple[HookPoint, ...]
    names: DecoderConfig | TorchModel = dataclasses.field(repr=False, compare=False)

    def hook_points(self) -> dict[str, int]:
        """{hook point: width} of those that can be stored."""
        return self.names.hook_points()

    def hook_point(self, name: str) -> str:
        """The canonical name; see `LanguageModel.hook_point`."""
        return self.names.hook_point(name)


def list_hook_points(
    model: str = "demo", revision: str = "", backend: str = "auto", dtype: str = "float32", device: str = ""
) -> HookList:
    """All hook points of a model with their shapes, names and dimensions; the arguments are those of `load_lm`.

    If the JAX decoder runs the model, only config.json is read (and fetched, for a hub id), and the headers of
    safetensors on disk. Nothing is loaded, so a model larger than this machine is listed too. If PyTorch runs it, the
    whole model is loaded, because shapes and names are measured on a few tokens.

    Raises:
        ConfigError: a `dtype` or `backend` that is not offered, or torch where it is not installed.
        DataError: it cannot be found, or it is a variant that nothing here runs; the message says what to do.
    """
    LMConfig(model, revision, dtype, backend=backend, device=device)
    folder = config_folder(model, revision)
    if runs_in_torch(folder, backend):
        lm = load_lm(model, revision=revision, dtype=dtype, backend="torch", device=device)
        theirs = {ours: name for name, ours in lm.synonyms.items()}

        def point(name: str, width: int) -> HookPoint:
            block, _, short = name.rpartition(".")
            alias = f"{block}.{theirs[short]}" if name in lm.aliases and short in theirs else ""
            return HookPoint(name, (width,), alias=alias, module=lm.aliases.get(name, ""))

        kind = str(next(lm.module.parameters()).dtype).removeprefix("torch.")
        points = tuple(point(name, width) for name, width in lm.hook_points().items())
        return HookList(model, type(lm.module).__name__, "torch", lm.config, (kind,), points, lm)
    config, types = checkpoint.stored(folder)
    architecture = checkpoint.read_config(folder)[0]["model_type"]
    return HookList(model, architecture, "jax", config, types, tuple(config.points()), config)
