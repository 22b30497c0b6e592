"""Sums over each document, each resample of the documents and each group of tokens, collected while text goes by.

W resamples and, in front of them, the text as it is; M documents of a batch; G groups of tokens; R all dimensions that
a coder writes, side by side. Of what has a dimension only the resamples' sums are kept ([W, R], float32, on the
device), so memory does not grow with the text.
"""

import dataclasses
import functools
import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.evals.breakdown import Breakdown, broken_down
from saejax.evals.centred import about_zero, variance
from saejax.evals.intervals import RESAMPLES, Documents, weights
from saejax.evals.reconstruction import Reconstruction, metrics_of
from saejax.evals.splice import splice_metrics
from saejax.kernels.dense import EXACT
from saejax.text import PackedRows

# Rows of the file of sums that are read at a time.
_ROWS_READ = 4096


@dataclasses.dataclass(frozen=True)
class Slots:
    """The document of a batch, and the groups, of each of its B tokens.

    Attributes:
        documents: int64 [M], places in the list of all documents so far.
        slots: int32 [B], number of the document in the batch; -1 for padding.
        codes: int32 [K, B], a group of each of K breakdowns, numbered through; -1 for none.
        weights: float64 [1 + W, M]; the first row is ones.
        on_device: float32 [W, M'], zeros beyond M: few shapes, so few programs.
    """

    documents: np.ndarray
    slots: np.ndarray
    codes: np.ndarray
    weights: np.ndarray
    on_device: jax.Array
    n_groups: int


class Columns:
    """Sums of per-token numbers: over each document, each resample, and each group of each resample."""

    def __init__(self, n_groups: int):
        self._n_groups = n_groups
        self._documents: dict[str, list[np.ndarray]] = {}
        self._at: list[np.ndarray] = []
        self.resampled: dict[str, np.ndarray] = {}
        self.groups: dict[str, np.ndarray] = {}

    def add(self, batch: Slots, columns: Mapping[str, np.ndarray]) -> None:
        count, n_groups = len(batch.documents), self._n_groups
        inside = batch.slots >= 0
        self._at.append(batch.documents)
        for name, given_B in columns.items():
            value_B = np.asarray(given_B, np.float64)
            own_M = np.bincount(batch.slots[inside], value_B[inside], count)
            grouped_MG = np.zeros(count * n_groups)
            for codes_B in batch.codes:
                some = inside & (codes_B >= 0)
                places = batch.slots[some].astype(np.int64) * n_groups + codes_B[some]
                grouped_MG += np.bincount(places, value_B[some], count * n_groups)
            self._documents.setdefault(name, []).append(own_M)
            _add(self.resampled, name, batch.weights @ own_M)
            _add(self.groups, name, batch.weights @ grouped_MG.reshape(count, n_groups))

    def documents(self, count: int) -> dict[str, np.ndarray]:
        """{name: [N]}: a document that goes on in the next batch is one."""
        at = np.concatenate(self._at)
        return {name: np.bincount(at, np.concatenate(parts), count) for name, parts in self._documents.items()}


def _add(totals: dict[str, np.ndarray], name: str, value: np.ndarray) -> None:
    totals[name] = totals[name] + value if name in totals else value


class Dimensions:
    """Sums of [B, R] and of its squares over each resample, [W, R], on the device."""

    def __init__(self) -> None:
        self._totals: jax.Array | None = None

    def add(self, batch: Slots, values_BR: jax.Array) -> np.ndarray:
        """Add a batch; returns the sums of its documents, float32 [M, R]."""
        if self._totals is None:
            self._totals = jnp.zeros((2, RESAMPLES, values_BR.shape[1]), jnp.float32)
        self._totals, sums_MR = _accumulated(self._totals, batch.on_device, jnp.asarray(batch.slots), values_BR)
        return np.asarray(sums_MR)[: len(batch.documents)]

    def sums(self) -> tuple[np.ndarray, np.ndarray]:
        """(sums, sums of squares), float64 [W, R]."""
        assert self._totals is not None, "add at least one batch"
        first, second = np.asarray(self._totals, np.float64)
        return first, second


@functools.partial(jax.jit, donate_argnums=0)
def _accumulated(totals: jax.Array, weights_WM: jax.Array, slots_B: jax.Array, values_BR: jax.Array) -> Any:
    own_MB = jax.nn.one_hot(slots_B, weights_WM.shape[1], axis=0)
    product = functools.partial(jnp.matmul, precision=EXACT)
    sums_MR, squares_MR = product(own_MB, values_BR), product(own_MB, jnp.square(values_BR))
    return totals + jnp.stack([product(weights_WM, sums_MR), product(weights_WM, squares_MR)]), sums_MR


@functools.partial(jax.jit, static_argnums=2)
def _of_groups(values_BR: jax.Array, codes_KB: jax.Array, n_groups: int) -> jax.Array:
    """Sums over the tokens of each group, [G, R]."""
    own_GB = jax.nn.one_hot(codes_KB, n_groups, axis=0).sum(1)
    return jnp.matmul(own_GB, values_BR, precision=EXACT)


@jax.jit
def mean_of(y_BR: jax.Array, keep_B: jax.Array) -> jax.Array:
    """[R], over the tokens to keep."""
    return jnp.where(keep_B[:, None], y_BR, 0).sum(0) / jnp.maximum(keep_B.sum(), 1)


@jax.jit
def away_from(y_BR: jax.Array, keep_B: jax.Array, centre_R: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(y - centre, zeros where a token is not kept; its squared length [B])."""
    values_BR = jnp.where(keep_B[:, None], y_BR - centre_R[None], 0)
    return values_BR, jnp.square(values_BR).sum(1)


class TextSums:
    """The part of the sums that every coder of the same sites shares: of the text, of what the sites write, of the loss
    without a coder.

    Sums of y are taken about the mean of the first batch, which is near the mean of all, and are moved there in the
    end. For that the sum of y of each document is needed: these wait in a temporary file, [N, R] of float32, until the
    end of the `with` block.
    """

    def __init__(self, n_groups: int):
        self.n_groups = n_groups
        self.columns, self._dimensions = Columns(n_groups), Dimensions()
        self._numbers: list[int] = []
        self._in_group: list[np.ndarray] = []
        self._hash = hashlib.sha256()
        self._centre_R: jax.Array | None = None
        self._groups_GR: np.ndarray | float = 0.0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed at the end)
        self._at: list[np.ndarray] = []

    def __enter__(self) -> "TextSums":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def add(
        self, packed: PackedRows, codes_KB: np.ndarray, y_BR: jax.Array, keep_B: Any, losses: Mapping[str, Any]
    ) -> Slots:
        """Add a batch: y [B, R] with the tokens to keep, and sums of the loss by token, {name: [B]}."""
        for array in (packed.tokens, packed.documents, packed.keep):
            self._hash.update(np.ascontiguousarray(array).tobytes())
        batch = self._slots(packed, codes_KB)
        if self._centre_R is None:
            self._centre_R = mean_of(y_BR, keep_B)
        values_BR, square_B = away_from(y_BR, keep_B, self._centre_R)
        sums_MR = self._dimensions.add(batch, values_BR)
        self._file.write(np.ascontiguousarray(sums_MR, np.float32).tobytes())
        self._at.append(batch.documents)
        self._groups_GR = self._groups_GR + np.asarray(
            _of_groups(values_BR, jnp.asarray(codes_KB), self.n_groups), np.float64
        )
        self.columns.add(batch, {"tokens": np.asarray(keep_B), "square": np.asarray(square_B), **losses})
        self._note_groups(batch, np.asarray(keep_B))
        return batch

    def _slots(self, packed: PackedRows, codes_KB: np.ndarray) -> Slots:
        document_B = packed.documents.ravel()
        inside = document_B >= 0
        # Documents come in rising order: only the last of a batch goes on in the next.
        numbers_M, slot = np.unique(document_B[inside], return_inverse=True)
        slots_B = np.full(len(document_B), -1, np.int32)
        slots_B[inside] = slot
        goes_on = bool(self._numbers) and len(numbers_M) > 0 and self._numbers[-1] == int(numbers_M[0])
        first = len(self._numbers) - goes_on
        self._numbers += numbers_M[int(goes_on) :].tolist()
        drawn_WM = weights(numbers_M)
        padded = np.zeros((RESAMPLES, max(8, 1 << (len(numbers_M) - 1).bit_length())), np.float32)
        padded[:, : len(numbers_M)] = drawn_WM
        whole = np.concatenate([np.ones((1, len(numbers_M))), drawn_WM.astype(np.float64)])
        return Slots(first + np.arange(len(numbers_M)), slots_B, codes_KB, whole, jnp.asarray(padded), self.n_groups)

    def _note_groups(self, batch: Slots, keep_B: np.ndarray) -> None:
        seen_MG = np.zeros((len(batch.documents), self.n_groups), bool)
        for codes_B in batch.codes:
            some = keep_B & (codes_B >= 0) & (batch.slots >= 0)
            seen_MG[batch.slots[some], codes_B[some]] = True
        if self._at[:-1] and len(batch.documents) and self._at[-2][-1:] == batch.documents[:1]:
            seen_MG[0] |= self._in_group[-1][-1]
            self._in_group[-1] = self._in_group[-1][:-1]
        self._in_group.append(seen_MG)

    @property
    def numbers(self) -> np.ndarray:
        """Places of the documents in the source, int64 [N]."""
        return np.asarray(self._numbers, np.int64)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def documents_of_groups(self) -> np.ndarray:
        """Documents with a token in each group, int64 [G]."""
        return np.concatenate(self._in_group).sum(0)

    def dimension_sums(self) -> tuple[np.ndarray, np.ndarray]:
        return self._dimensions.sums()

    def variances(self) -> tuple[np.ndarray, np.ndarray]:
        """Sums of ||y - mean||^2 over each document [N] and each group [G], mean that of all kept tokens; float64."""
        tokens_N, square_N = (self.columns.documents(len(self._numbers))[name] for name in ("tokens", "square"))
        tokens_G, square_G = (self.columns.groups[name][0] for name in ("tokens", "square"))
        assert self._centre_R is not None
        at, width = np.concatenate(self._at), int(self._centre_R.shape[0])
        total_R = np.zeros(width)
        for rows in self._rows(width):
            total_R += rows.sum(0, dtype=np.float64)
        away_R = total_R / tokens_N.sum()
        along = np.concatenate([rows @ away_R for rows in self._rows(width)])
        along_N = np.bincount(at, along, len(self._numbers))
        length2 = float(away_R @ away_R)
        of_groups = square_G - 2 * np.asarray(self._groups_GR) @ away_R + tokens_G * length2
        return square_N - 2 * along_N + tokens_N * length2, of_groups

    def _rows(self, width: int) -> Any:
        self._file.seek(0)
        while data := self._file.read(4 * width * _ROWS_READ):
            yield np.frombuffer(data, np.float32).reshape(-1, width)


# Columns of a text and of a coder that make the metrics of the splice.
_LOSSES = ("predicted", "ce_clean", "ce_zero", "ce_sae", "kl")


@dataclasses.dataclass(frozen=True)
class Shared:
    """The sums that all coders of an evaluation share.

    Attributes:
        x, x2: of what is written (about a constant) and of its square over each resample, float64 [W, R].
        variance_N, variance_G: ||y - mean||^2 over each document and each group.
    """

    text: TextSums
    breakdowns: Sequence[Breakdown]
    x: np.ndarray
    x2: np.ndarray
    variance_N: np.ndarray
    variance_G: np.ndarray

    @classmethod
    def of(cls, text: TextSums, breakdowns: Sequence[Breakdown]) -> "Shared":
        return cls(text, breakdowns, *text.dimension_sums(), *text.variances())


class CoderSums:
    """Collects what a coder makes of each batch."""

    def __init__(self, n_groups: int):
        self._columns, self._errors = Columns(n_groups), Dimensions()
        self._centre_R: jax.Array | None = None

    def add(self, batch: Slots, error_BR: jax.Array, keep_B: np.ndarray, columns: Mapping[str, Any]) -> None:
        """Add y - y_hat [B, R], the tokens to keep, and numbers of each token {name: [B]}.

        Errors are summed about the mean of the first batch's, which is far from 0 where a coder lacks a bias.
        """
        if self._centre_R is None:
            self._centre_R = mean_of(error_BR, keep_B)
        self._errors.add(batch, away_from(error_BR, keep_B, self._centre_R)[0])
        self._columns.add(batch, {name: np.asarray(value) for name, value in columns.items()})

    def against(
        self, shared: Shared, writes: tuple[str, ...], metrics: Mapping[str, float], whole: Reconstruction
    ) -> tuple[Documents, dict[str, Any]]:
        text = shared.text
        count = len(text.numbers)
        with np.errstate(divide="ignore", invalid="ignore"):
            resampled = self._metrics(shared, writes, whole)
        columns = text.columns.documents(count) | self._columns.documents(count)
        del columns["square"]
        documents = Documents(
            text.sha256, writes, text.numbers, columns | {"variance": shared.variance_N}, dict(metrics), resampled
        )
        groups = text.columns.groups | self._columns.groups
        return documents, broken_down(shared.breakdowns, groups, shared.variance_G, text.documents_of_groups())

    def _metrics(self, shared: Shared, writes: tuple[str, ...], whole: Reconstruction) -> dict[str, np.ndarray]:
        """{metric: [W]}: of each resample what `Reconstruction` and `splice_metrics` say of the text."""
        of_text, own = ({n: v[1:] for n, v in one.resampled.items()} for one in (shared.text.columns, self._columns))
        assert self._centre_R is not None
        error_WR, error2_WR = about_zero(of_text["tokens"], self._centre_R, *self._errors.sums())
        sums = {"n": of_text["tokens"], "x": shared.x, "x2": shared.x2, "e": error_WR, "e2": error2_WR, **own}
        resampled = metrics_of(sums, whole.counts.size, whole.varies)
        losses = {name: (of_text | own)[name] for name in _LOSSES if name in of_text | own}
        if "ce_clean" in losses:
            resampled |= splice_metrics(losses)
        if len(writes) > 1:
            varied_WR = sums["n"][:, None] * variance(sums["n"], shared.x, shared.x2)
            parts = zip(*(np.split(a, len(writes), axis=1) for a in (error2_WR, varied_WR)), strict=True)
            for name, (error2, varied) in zip(writes, parts, strict=True):
                resampled[f"fve/{name}"] = 1 - error2.sum(1) / varied.sum(1)
        return resampled
