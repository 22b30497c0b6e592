"""Sums over each document, each resample of the documents and each group of tokens, collected while text goes by.

W resamples and, in front of them, the text as it is; M documents of a batch; G groups of tokens; R all dimensions that
a coder writes, side by side. Of what has a dimension only the resamples' sums are kept ([W, R], float32, on the
device), so memory does not grow with the text.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import IO, Any

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

    def __init__(self) -> None:
        self._documents: dict[str, list[np.ndarray]] = {}
        self._at: list[np.ndarray] = []
        self.resampled: dict[str, np.ndarray] = {}
        self.groups: dict[str, np.ndarray] = {}

    def add(self, batch: Slots, columns: Mapping[str, np.ndarray]) -> None:
        count, n_groups = len(batch.documents), batch.n_groups
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
    """Sums of [B, R] and of its squares over each resample, [W, R], on the device, about `centre_R`.

    The centre is the mean of the first batch, which is near that of all, and may be far from 0.
    """

    centre_R: jax.Array
    _totals: jax.Array | None = None

    def add(self, batch: Slots, values_BR: jax.Array, keep_B: Any) -> tuple[jax.Array, jax.Array, np.ndarray]:
        """Add the tokens to keep of a batch.

        Returns:
            values less the centre, 0 for tokens that are not kept [B, R]; their squared length [B]; and their sums over
            each document, float32 [M, R].
        """
        if self._totals is None:
            self.centre_R = _mean(values_BR, keep_B)
            self._totals = jnp.zeros((2, RESAMPLES, values_BR.shape[1]), jnp.float32)
        away_BR, square_B = _away(values_BR, keep_B, self.centre_R)
        self._totals, sums_MR = _accumulated(self._totals, batch.on_device, jnp.asarray(batch.slots), away_BR)
        return away_BR, square_B, np.asarray(sums_MR)[: len(batch.documents)]

    def sums(self) -> tuple[np.ndarray, np.ndarray]:
        """(sums, sums of squares) about the centre, float64 [W, R]."""
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
def _mean(y_BR: jax.Array, keep_B: jax.Array) -> jax.Array:
    return jnp.where(keep_B[:, None], y_BR, 0).sum(0) / jnp.maximum(keep_B.sum(), 1)


@jax.jit
def _away(y_BR: jax.Array, keep_B: jax.Array, centre_R: jax.Array) -> tuple[jax.Array, jax.Array]:
    values_BR = jnp.where(keep_B[:, None], y_BR - centre_R[None], 0)
    return values_BR, jnp.square(values_BR).sum(1)


class TextSums:
    """The part of the sums that every coder of the same sites shares: of the text, of what the sites write, of the loss
    without a coder.

    Sums of y are moved from the first batch's mean to that of all in the end. For that the sum of y of each document is
    needed: these wait in `file`, a temporary one, [N, R] of float32.
    """

    def __init__(self, breakdowns: Sequence[Breakdown], n_groups: int, file: IO[bytes]):
        self.breakdowns, self.n_groups, self._file = breakdowns, n_groups, file
        self.columns, self._dimensions = Columns(), Dimensions()
        self._numbers: list[int] = []
        self._in_group: list[np.ndarray] = []
        self._hash = hashlib.sha256()
        self._groups_GR: np.ndarray | float = 0.0
        self._at: list[np.ndarray] = []

    def add(
        self, packed: PackedRows, codes_KB: np.ndarray, y_BR: jax.Array, keep_B: np.ndarray, losses: Mapping[str, Any]
    ) -> Slots:
        """Add a batch: y [B, R] with the tokens to keep, and sums of the loss by token, {name: [B]}."""
        for array in (packed.tokens, packed.documents, packed.keep):
            self._hash.update(np.ascontiguousarray(array).tobytes())
        batch = self._slots(packed, codes_KB)
        away_BR, square_B, sums_MR = self._dimensions.add(batch, y_BR, keep_B)
        self._file.write(np.ascontiguousarray(sums_MR, np.float32).tobytes())
        self._at.append(batch.documents)
        groups_GR = _of_groups(away_BR, jnp.asarray(codes_KB), self.n_groups)
        self._groups_GR = self._groups_GR + np.asarray(groups_GR, np.float64)
        self.columns.add(batch, {"tokens": keep_B, "square": np.asarray(square_B), **losses})
        seen_MG = np.zeros((len(batch.documents), self.n_groups), bool)
        for codes_B in codes_KB:
            some = keep_B & (codes_B >= 0) & (batch.slots >= 0)
            seen_MG[batch.slots[some], codes_B[some]] = True
        self._in_group.append(seen_MG)
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

    @property
    def numbers(self) -> np.ndarray:
        """Places of the documents in the source, int64 [N]."""
        return np.asarray(self._numbers, np.int64)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def documents_of_groups(self) -> np.ndarray:
        """Documents with a token in each group, int64 [G]."""
        seen_NG = np.zeros((len(self._numbers), self.n_groups), bool)
        for documents, seen_MG in zip(self._at, self._in_group, strict=True):
            seen_NG[documents] |= seen_MG
        return seen_NG.sum(0)

    @functools.cached_property
    def written(self) -> tuple[np.ndarray, np.ndarray]:
        """Sums of y (about a constant) and of its square over each resample, float64 [W, R]."""
        return self._dimensions.sums()

    @functools.cached_property
    def variances(self) -> tuple[np.ndarray, np.ndarray]:
        """Sums of ||y - mean||^2 over each document [N] and each group [G], mean that of all kept tokens; float64."""
        tokens_N, square_N = (self.columns.documents(len(self._numbers))[name] for name in ("tokens", "square"))
        tokens_G, square_G = (self.columns.groups[name][0] for name in ("tokens", "square"))
        width = len(self._dimensions.centre_R)
        total_R = np.zeros(width)
        for rows in self._rows(width):
            total_R += rows.sum(0, dtype=np.float64)
        away_R = total_R / tokens_N.sum()
        along = np.concatenate([rows @ away_R for rows in self._rows(width)])
        along_N = np.bincount(np.concatenate(self._at), along, len(self._numbers))
        length2 = float(away_R @ away_R)
        of_groups = square_G - 2 * np.asarray(self._groups_GR) @ away_R + tokens_G * length2
        return square_N - 2 * along_N + tokens_N * length2, of_groups

    def _rows(self, width: int) -> Any:
        self._file.seek(0)
        while data := self._file.read(4 * width * _ROWS_READ):
            yield np.frombuffer(data, np.float32).reshape(-1, width)


class CoderSums:
    """Collects what a coder makes of each batch."""

    def __init__(self) -> None:
        self._columns, self._errors = Columns(), Dimensions()

    def add(self, batch: Slots, error_BR: jax.Array, keep_B: np.ndarray, columns: Mapping[str, Any]) -> None:
        """Add y - y_hat [B, R], the tokens to keep, and numbers of each token {name: [B]}."""
        self._errors.add(batch, error_BR, keep_B)
        self._columns.add(batch, {name: np.asarray(value) for name, value in columns.items()})

    def against(
        self, text: TextSums, writes: tuple[str, ...], metrics: Mapping[str, float], whole: Reconstruction
    ) -> tuple[Documents, dict[str, Any]]:
        """The documents, and the figures of each group; `metrics` and `whole` are of all tokens."""
        variance_N, variance_G = text.variances
        with np.errstate(divide="ignore", invalid="ignore"):
            resampled = self._metrics(text, writes, whole)
        count = len(text.numbers)
        columns = text.columns.documents(count) | self._columns.documents(count)
        del columns["square"]
        columns["variance"] = variance_N
        documents = Documents(text.sha256, writes, text.numbers, columns, dict(metrics), resampled)
        groups = text.columns.groups | self._columns.groups
        return documents, broken_down(text.breakdowns, groups, variance_G, text.documents_of_groups())

    def _metrics(self, text: TextSums, writes: tuple[str, ...], whole: Reconstruction) -> dict[str, np.ndarray]:
        """{metric: [W]}: of each resample what `Reconstruction` and `splice_metrics` say of the text."""
        columns = {name: value[1:] for name, value in (text.columns.resampled | self._columns.resampled).items()}
        n_W, (x_WR, x2_WR) = columns["tokens"], text.written
        error_WR, error2_WR = about_zero(n_W, self._errors.centre_R, *self._errors.sums())
        sums = columns | {"n": n_W, "x": x_WR, "x2": x2_WR, "e": error_WR, "e2": error2_WR}
        resampled = metrics_of(sums, whole.counts.size, whole.varies)
        if "ce_clean" in columns:
            resampled |= splice_metrics(columns)
        if len(writes) > 1:
            varied_WR = n_W[:, None] * variance(n_W, x_WR, x2_WR)
            parts = zip(*(np.split(a, len(writes), axis=1) for a in (error2_WR, varied_WR)), strict=True)
            for name, (error2, varied) in zip(writes, parts, strict=True):
                resampled[f"fve/{name}"] = 1 - error2.sum(1) / varied.sum(1)
        return resampled
