"""Two language models on the same tokens, for model diffing: the interface of one, for capture and evaluation."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from saejax.core.errors import ConfigError
from saejax.lm.forward import Begin, Edit, Forward, Model, compiled_forward
from saejax.lm.model import LMConfig, load_lm
from saejax.text import PackedRows, Tokenizer

PREFIX = "second."


def load_models(wanted: LMConfig, mesh: Mesh | None = None) -> Model:
    """The model of a section `lm`, or both of them as one. Raises: as `load_lm` and `ModelPair`."""

    def loaded(model: str, revision: str, adapter: str = "") -> Model:
        return load_lm(
            model,
            revision=revision,
            dtype=wanted.dtype,
            backend=wanted.backend,
            device=wanted.device,
            mesh=mesh,
            center_writing_weights=wanted.center_writing_weights,
            adapter=adapter,
        )

    first = loaded(wanted.model, wanted.revision, wanted.adapter)
    return ModelPair(first, loaded(wanted.second, wanted.second_revision)) if wanted.second else first


@dataclasses.dataclass(frozen=True)
class ModelPair:
    """The first model under its own names, the second's hook points as `second.blocks.3.resid_post`.

    Raises:
        ConfigError: the two do not share a tokenizer.
    """

    first: Model
    second: Model

    def __post_init__(self) -> None:
        if self.first.tokenizer.sha256 != self.second.tokenizer.sha256:
            raise ConfigError(
                f"lm.model {self.first.identity['model']} and lm.second {self.second.identity['model']} have different "
                "tokenizers, so their activations cannot be compared token by token. Choose two of one family."
            )

    @property
    def config(self) -> Any:
        """The first model's, with the context that both can read."""
        length = min(self.first.config.context_length, self.second.config.context_length)
        return dataclasses.replace(self.first.config, context_length=length)

    @property
    def params(self) -> dict[str, Any]:
        return {"first": self.first.params, "second": self.second.params}

    @property
    def tokenizer(self) -> Tokenizer:
        return self.first.tokenizer

    @property
    def identity(self) -> dict[str, Any]:
        return self.first.identity | {"second": self.second.identity}

    @property
    def pure(self) -> bool:
        return self.first.pure and self.second.pure

    @property
    def longest_mixed(self) -> int:
        return min(self.first.longest_mixed, self.second.longest_mixed)

    def hook_points(self) -> dict[str, int]:
        return self.first.hook_points() | {f"{PREFIX}{name}": d for name, d in self.second.hook_points().items()}

    def hook_point(self, name: str) -> str:
        """The canonical name of a hook point of either; TransformerLens names are accepted."""
        if not name.startswith(PREFIX):
            return self.first.hook_point(name)
        try:
            return PREFIX + self.second.hook_point(name.removeprefix(PREFIX))
        except ConfigError as error:
            raise ConfigError(f"{name!r}, of lm.second {self.second.identity['model']}: {error}") from None

    def owner(self, name: str) -> Model:
        return self.second if name.startswith(PREFIX) else self.first

    def activations(self, text: str, hook_point: str) -> np.ndarray:
        return self.owner(hook_point).activations(text, hook_point.removeprefix(PREFIX))

    def apply(
        self,
        params: Any,
        tokens: jax.Array,
        positions: jax.Array,
        segments: jax.Array,
        capture: Sequence[str] = (),
        edits: Mapping[str, Edit] | None = None,
        begin: Begin | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(logits of the first model, activations of both) of packed rows. Pure.

        What is not used is removed by XLA: without captures of the second model it does not run.
        """
        rows = (tokens, positions, segments)
        theirs = {name.removeprefix(PREFIX): edit for name, edit in (edits or {}).items() if name.startswith(PREFIX)}
        ours = {name: edit for name, edit in (edits or {}).items() if not name.startswith(PREFIX)}
        wanted = [name.removeprefix(PREFIX) for name in capture if name.startswith(PREFIX)]
        of_first = [name for name in capture if not name.startswith(PREFIX)]
        logits, captured = self.first.apply(params["first"], *rows, of_first, ours, begin)
        if wanted:
            _, other = self.second.apply(params["second"], *rows, wanted, theirs)
            captured = captured | {PREFIX + name: value for name, value in other.items()}
        return logits, captured

    def start_of(self, names: Sequence[str]) -> str:
        ours = [name for name in names if not name.startswith(PREFIX)]
        return self.first.start_of(ours) if ours else ""

    def measures_loss(self, names: Sequence[str]) -> bool:
        ours = [name for name in names if not name.startswith(PREFIX)]
        return bool(ours or not names) and self.first.measures_loss(ours)

    def into_residual(self, hook_point: str, rows_FD: np.ndarray) -> np.ndarray | None:
        return self.owner(hook_point).into_residual(hook_point.removeprefix(PREFIX), rows_FD)

    def readout(self) -> tuple[jax.Array, jax.Array] | None:
        return self.first.readout()

    def placed(self, mesh: Mesh) -> dict[str, Any]:
        return {"first": self.first.placed(mesh), "second": self.second.placed(mesh)}

    def rows_that_fit(self, names: Sequence[str], length: int) -> int:
        return min(model.rows_that_fit(points, length) for model, points, _ in self._of_each(names))

    def make_forward(self, names: Sequence[str], shape: tuple[int, int], mesh: Mesh) -> Forward:
        if self.pure:
            return compiled_forward(self, names, shape, mesh)
        parts = [(model.make_forward(points, shape, mesh), prefix) for model, points, prefix in self._of_each(names)]

        def forward(packed: PackedRows) -> Any:
            results = [(prefix, *part(packed)) for part, prefix in parts]
            captured = {prefix + name: value for prefix, values, _ in results for name, value in values.items()}
            return captured, np.logical_and.reduce([np.asarray(finite) for *_, finite in results])

        return forward

    def _of_each(self, names: Sequence[str]) -> list[tuple[Model, list[str], str]]:
        """(model, its hook points, their prefix) of those models that have any of `names`."""
        ours = [name for name in names if not name.startswith(PREFIX)]
        theirs = [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]
        return [part for part in ((self.first, ours, ""), (self.second, theirs, PREFIX)) if part[1]]
