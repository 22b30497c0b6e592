"""Activations at the last token of each text, in batches of texts of about one length, kept on disk.

A text is bos, where the experiment puts it in front of documents, and the last tokens of the text: what does not fit
is cut off on the left. Padding stands on the right, outside of every attention. sae-probes does the same.
"""

import dataclasses
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_bounded, write_bytes
from saejax.core.progress import Progress
from saejax.lm.forward import Model, apart, compiled

# Rows are as long as the shortest of these lengths that holds the text: few programs, little padding.
_SHORTEST = 8
_LARGEST_FILE = 16 << 30


@dataclasses.dataclass(frozen=True)
class Reader:
    """A language model that reads texts for their last token.

    Attributes:
        names: hook points, by the model's own names.
        prepend_bos: put the model's bos in front of each text, where it has one.
        max_tokens: of a text with its bos; at most what the model reads.
        dtype: of the model, for the identity of what is kept.
    """

    lm: Model
    names: tuple[str, ...]
    prepend_bos: bool
    max_tokens: int
    batch_tokens: int
    dtype: str
    folder: Path

    def __post_init__(self) -> None:
        tokenizer = self.lm.tokenizer
        if self.prepend_bos and tokenizer.bos_unknown:
            raise ConfigError(
                f"text.prepend_bos is True, and no file in {tokenizer.folder} says which token is bos. Name it by "
                "bos_token in tokenizer_config.json (null: the model has none), or set text.prepend_bos=False."
            )

    @property
    def longest(self) -> int:
        return min(self.max_tokens, self.lm.config.context_length)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of each text as the model gets them."""
        tokenizer = self.lm.tokenizer
        bos, encode = (tokenizer.bos, tokenizer.encode_behind_bos) if self.prepend_bos else ([], tokenizer.encode_many)
        room = self.longest - len(bos)
        tokens = [bos + ids[-room:] for ids in encode(list(texts))]
        if empty := next((i for i, ids in enumerate(tokens, 1) if not ids), 0):
            raise DataError(f"Text {empty} has no tokens, and the model puts none in front of a text: leave it out.")
        return tokens

    def of_texts(self, name: str, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """{hook point: float32 [N, d]} at the last token of each text; read from disk where they are kept.

        `name` is that of the files, and of the progress.
        """
        return self.of_ids(name, self.ids(texts))

    def of_ids(self, name: str, ids: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
        """As `of_texts`, of texts that are tokens already, as the model gets them."""
        if (most := max(map(len, ids), default=0)) > self.longest:
            raise DataError(f"A text of {name} has {most} tokens, and the model is to read at most {self.longest}.")
        paths = {hook: self._path(name, hook, ids) for hook in self.names}
        if missing := tuple(hook for hook, path in paths.items() if not path.is_file()):
            for hook, rows in dataclasses.replace(self, names=missing)._run(name, ids).items():
                if not np.isfinite(rows).all():
                    raise DataError(f"{name}: activations at {hook} are NaN or infinite; set lm.dtype=float32.")
                with io.BytesIO() as raw:
                    np.save(raw, rows, allow_pickle=False)
                    write_bytes(paths[hook], raw.getvalue())
        widths = self.lm.hook_points()
        return {hook: _read_rows(path, (len(ids), widths[hook])) for hook, path in paths.items()}

    def _path(self, name: str, hook: str, ids: Sequence[Sequence[int]]) -> Path:
        known = {"lm": self.lm.identity, "dtype": self.dtype, "hook_point": hook} | apart(self.lm, self.longest)
        digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode())
        for row in ids:
            digest.update(np.asarray([len(row), *row], "<i8").tobytes())
        return self.folder / f"{name}-{digest.hexdigest()[:16]}.npy"

    def _run(self, name: str, ids: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
        widths = self.lm.hook_points()
        out = {hook: np.empty((len(ids), widths[hook]), np.float32) for hook in self.names}
        programs: dict[int, Callable[..., Any]] = {}
        with Progress(f"read {name}", len(ids), unit="texts") as progress:
            for length, places in self._batches([len(row) for row in ids]):
                arrays = _padded([ids[i] for i in places], self._rows(length), length)
                if length not in programs:
                    programs[length] = compiled(self.lm, self._forward, self.lm.params, arrays)
                captured = programs[length](self.lm.params, arrays)
                for hook, rows in captured.items():
                    out[hook][places] = np.asarray(rows)[: len(places)]
                progress.advance(len(places))
        return out

    def _forward(self, params: Any, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        _, captured = self.lm.apply(params, arrays["tokens"], arrays["positions"], arrays["segments"], self.names)
        last_R = arrays["last"]
        return {hook: rows[jnp.arange(len(last_R)), last_R].astype(jnp.float32) for hook, rows in captured.items()}

    def _rows(self, length: int) -> int:
        return max(1, self.batch_tokens // length)

    def _batches(self, lengths: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """(length of the rows, which texts), the short ones first."""
        doubled = (_SHORTEST << i for i in range(32))
        bounds = [*(size for size in doubled if size < self.longest), self.longest]
        bucket_N = np.searchsorted(bounds, lengths)
        for bucket, length in enumerate(bounds):
            places = np.flatnonzero(bucket_N == bucket)
            for start in range(0, len(places), self._rows(length)):
                yield length, places[start : start + self._rows(length)]


def _padded(ids: Sequence[Sequence[int]], rows: int, length: int) -> dict[str, np.ndarray]:
    """Packed rows [R, S] of one text each, and where its last token is; rows without a text are padding."""
    tokens, positions = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
    segments, last = np.full((rows, length), -1, np.int32), np.zeros(rows, np.int32)
    for i, row in enumerate(ids):
        n = len(row)
        tokens[i, :n], positions[i, :n], segments[i, :n], last[i] = row, np.arange(n), 0, n - 1
    return {"tokens": tokens, "positions": positions, "segments": segments, "last": last}


def _read_rows(path: Path, shape: tuple[int, int]) -> np.ndarray:
    try:
        rows = np.load(io.BytesIO(read_bounded(path, _LARGEST_FILE)), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{path} is damaged ({error}); delete it.") from None
    if rows.shape != shape or rows.dtype != np.float32:
        raise DataError(f"{path} holds {rows.dtype} {list(rows.shape)} in place of float32 {list(shape)}; delete it.")
    return rows
