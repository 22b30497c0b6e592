"""An attribution graph as a value: its nodes, and the direct effect of each on each.

Only features and logits are acted on, so only they have a row. A square matrix would be mostly errors' empty rows: of a
prompt of 8,192 tokens and 26 layers 200 GB.

Shape letters: N nodes, R of them with a row, A active features, L layers, S tokens of the prompt, V logits.
"""

import dataclasses
import io
import itertools
import json
import math
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from saejax.core.errors import DataError
from saejax.core.files import read_bounded, write_bytes

# What damaged or foreign bytes raise on the way.
_FAULTS = (ValueError, KeyError, TypeError, OSError, EOFError, NotImplementedError, RuntimeError, zipfile.BadZipFile)


def to_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """An uncompressed .npz."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]  # the stub fears for allow_pickle
    return buffer.getvalue()


def from_bytes(raw: bytes, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Those of the named arrays that are there."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as file:
            there = {name: file.getinfo(f"{name}.npy") for name in names if f"{name}.npy" in file.namelist()}
            # Stored as they are, the entries are no longer than the file.
            if any(info.compress_type != zipfile.ZIP_STORED for info in there.values()):
                raise DataError("an array in it is compressed")
            return {name: _array(file.read(info)) for name, info in there.items()}
    except _FAULTS as error:
        raise DataError(f"{type(error).__name__}: {error}") from None


def _array(raw: bytes) -> np.ndarray:
    stream = io.BytesIO(raw)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise DataError("an array in it is of another version")
    shape, by_columns, dtype = np.lib.format.read_array_header_1_0(stream)
    body = raw[stream.tell() :]
    if dtype.hasobject or by_columns or any(size < 0 for size in shape):
        raise DataError(f"an array in it is {dtype} {shape}")
    if math.prod(shape) * dtype.itemsize != len(body):
        raise DataError(f"an array in it is {dtype} {shape}, in {len(body)} bytes")
    return np.frombuffer(body, dtype).reshape(shape)


LARGEST = 32 << 30  # bytes of a graph's file
_ARRAY_KINDS = {
    "tokens": (np.int32, 1),
    "features": (np.int32, 2),
    "activations": (np.float32, 1),
    "logits": (np.int32, 1),
    "probabilities": (np.float32, 1),
    "weights": (np.float32, 2),
}


@dataclasses.dataclass(frozen=True)
class Graph:
    """Direct effects between the nodes of one prompt.

    The N = A + L S + S + V nodes stand in this order: features, errors (layer by layer, token by token), tokens,
    logits. weights[r, s] is what source s adds to target targets[r] while attention patterns, norms' scales and all
    other nodes stay: to a feature's pre-activation, or to a logit less the mean of all logits.

    Attributes:
        tokens: int32 [S], ids of the prompt.
        strings: the tokens as text.
        hook_points: L names, where the dictionaries write; the errors stand there. A layer is a place in this list.
        features: int32 [A, 3]: the layer whose input the feature reads, its token's place, its number.
        activations: float32 [A].
        logits: int32 [V], ids of the tokens whose logits are nodes, the likeliest first.
        probabilities: float32 [V], theirs.
        weights: float32 [R, N], row target, column source; R = A + V, the features and then the logits.
        names: what the graph is of: model, dictionaries, prompt.
    """

    tokens: np.ndarray
    strings: tuple[str, ...]
    hook_points: tuple[str, ...]
    features: np.ndarray
    activations: np.ndarray
    logits: np.ndarray
    probabilities: np.ndarray
    weights: np.ndarray
    names: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, (dtype, rank) in _ARRAY_KINDS.items():
            value = getattr(self, name)
            if value.dtype != dtype or value.ndim != rank:
                raise DataError(f"A graph's {name} is {value.dtype} {value.shape}; it must be {dtype.__name__}.")
        wanted = {
            "strings": (len(self.strings), len(self.tokens)),
            "activations": (len(self.activations), self.n_features),
            "probabilities": (len(self.probabilities), len(self.logits)),
            "features": (self.features.shape[1], 3),
            "weights": (self.weights.shape, (len(self.targets), self.n_nodes)),
        }
        for name, (got, want) in wanted.items():
            if got != want:
                raise DataError(f"A graph's {name} is {got} long; its nodes make it {want}.")
        last = [len(self.hook_points) - 1, len(self.tokens) - 1, np.iinfo(np.int32).max]
        if ((self.features < 0) | (self.features > last)).any():
            raise DataError("A graph's features name a layer, a token or a latent that is not there.")
        if len(np.unique(self.features, axis=0)) < self.n_features or len(np.unique(self.logits)) < len(self.logits):
            raise DataError("A graph's features or logits name one twice.")
        for name in ("activations", "probabilities", "weights"):
            if not np.isfinite(getattr(self, name)).all():
                raise DataError(f"A graph's {name} are not all finite numbers.")

    @property
    def n_features(self) -> int:
        return len(self.features)

    @property
    def n_errors(self) -> int:
        return len(self.hook_points) * len(self.tokens)

    @property
    def n_nodes(self) -> int:
        return self.n_features + self.n_errors + len(self.tokens) + len(self.logits)

    @property
    def parts(self) -> dict[str, slice]:
        """Slices of the nodes of each kind: features, errors, tokens, logits."""
        kinds = ("features", "errors", "tokens", "logits")
        sizes = (self.n_features, self.n_errors, len(self.tokens), len(self.logits))
        ends = itertools.accumulate(sizes)
        return {kind: slice(end - size, end) for kind, size, end in zip(kinds, sizes, ends, strict=True)}

    @property
    def targets(self) -> np.ndarray:
        """int [R]: the nodes that have a row, in the order of the rows."""
        return np.r_[self.parts["features"], self.parts["logits"]]

    @property
    def matrix(self) -> np.ndarray:
        """float32 [N, N]: the weights with the empty rows of errors and tokens; for small graphs."""
        matrix_NN = np.zeros((self.n_nodes,) * 2, np.float32)
        matrix_NN[self.targets] = self.weights
        return matrix_NN

    def save(self, path: str | Path) -> None:
        """One .npz file, whole or not at all."""
        texts = {"strings": self.strings, "hook_points": self.hook_points, "names": self.names}
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAY_KINDS}
        written = np.frombuffer(json.dumps(texts).encode(), np.uint8)
        write_bytes(path, to_bytes(arrays | {"texts": written}))

    @classmethod
    def load(cls, path: str | Path) -> "Graph":
        """The graph that `save` wrote.

        Raises:
            DataError: it is no graph, or a damaged one.
        """
        raw = read_bounded(path, LARGEST)
        try:
            arrays = from_bytes(raw, ("texts", *_ARRAY_KINDS))
            texts: dict[str, Any] = json.loads(arrays.pop("texts").tobytes())
            return cls(
                **arrays,
                strings=tuple(map(str, texts["strings"])),
                hook_points=tuple(map(str, texts["hook_points"])),
                names={str(name): str(value) for name, value in texts["names"].items()},
            )
        except (DataError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{path} is no graph of saejax, or it is damaged: {error}") from None
