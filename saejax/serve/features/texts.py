"""The latents that fire on a reader's own text, token by token."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.core.errors import ConfigError
from saejax.lm.forward import Model
from saejax.trained import TrainedCoder

_SHORTEST = 16  # tokens of a row at least: few lengths, so few programs
_MOST = 2048  # tokens in one program


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A text's tokens and the latents that are not 0 there, sorted by token; T tokens, E entries.

    Attributes:
        tokens: T strings that add up to the text (`Tokenizer.pieces`); the model's bos is not among them.
        at, latent: int32 [E]; latent f of group g is g F + f.
        value: float32 [E].
        n_latents: of the dictionary.
    """

    tokens: tuple[str, ...]
    at: np.ndarray
    latent: np.ndarray
    value: np.ndarray
    n_latents: int

    @property
    def bytes(self) -> int:
        """Of memory."""
        return sum(a.nbytes for a in (self.at, self.latent, self.value)) + 60 * len(self.tokens) + 500

    def per_token(self) -> list[int]:
        """The number of latents that fire at each token."""
        return np.bincount(self.at, minlength=len(self.tokens)).tolist()

    def strongest(self, count: int) -> list[dict[str, Any]]:
        """[{id, max, at}] of the `count` latents of the largest |value|, falling; `at` is the token."""
        order = np.lexsort((self.at, self.latent, -np.abs(self.value)))
        firsts = np.sort(np.unique(self.latent[order], return_index=True)[1])[:count]
        return [{"id": int(self.latent[e]), "max": float(self.value[e]), "at": int(self.at[e])} for e in order[firsts]]

    def activations(self, latent: int) -> list[float]:
        """A latent's value at each token."""
        here = self.latent == latent
        values = np.zeros(len(self.tokens), np.float64)
        values[self.at[here]] = self.value[here]
        return values.tolist()


class Reader:
    """A model's activations for one dictionary's input; programs are kept for the shapes that came.

    Args:
        lm: the model.
        sae: with the model's own names for its hook points (`TrainedCoder.at`).
    """

    def __init__(self, lm: Model, sae: TrainedCoder):
        self.lm, self._sites = lm, sae.sites
        self._run = jax.jit(self._forward) if lm.pure else self._eager

    def input(self, tokens_RS: np.ndarray, there_RS: np.ndarray) -> np.ndarray:
        """[R S, ...]: what the coder reads at each token; those that are not there are filling."""
        positions = np.broadcast_to(np.arange(tokens_RS.shape[1], dtype=np.int32), tokens_RS.shape)
        segments = np.where(there_RS, 0, -1).astype(np.int32)
        return np.asarray(self._run(self.lm.params, tokens_RS, np.where(there_RS, positions, 0), segments))

    def _forward(self, params: Any, tokens: Any, positions: Any, segments: Any) -> Any:
        _, captured = self.lm.apply(params, tokens, positions, segments, self._sites.hook_points)
        return self._sites.batch({name: x.reshape(-1, x.shape[-1]) for name, x in captured.items()})["x"]

    def _eager(self, params: Any, *arrays: np.ndarray) -> Any:
        return self._forward(params, *map(jnp.asarray, arrays))


def encoded(sae: TrainedCoder, reader: Reader, text: str) -> Encoded:
    """The latents of a text. One that is longer than the model reads is cut into pieces, each with the bos in front.

    Args:
        sae: with the model's own names for its hook points.
        reader: of the same.

    Raises:
        ConfigError: a text of no token.
    """
    tokenizer = reader.lm.tokenizer
    (ids,) = tokenizer.encode_behind_bos([text])
    if not ids:
        raise ConfigError("The text has no tokens: give some.")
    bos = tokenizer.bos
    context = reader.lm.config.context_length
    room = context - len(bos)
    if room < 1:
        raise ConfigError(f"The model reads {context} tokens: too few for a text.")
    pieces = [bos + ids[start : start + room] for start in range(0, len(ids), room)]
    # Of rows: a power of two, or all that the model reads.
    length = min(context, max(_SHORTEST, 1 << (max(map(len, pieces)) - 1).bit_length()))
    size = max(1, _MOST // length)
    firsts = range(0, len(pieces), size)
    parts = [_entries(sae, reader, pieces[first : first + size], length, len(bos)) for first in firsts]
    starts = np.cumsum([0, *(count for _, _, _, count in parts)])
    at = np.concatenate([local + start for (local, *_), start in zip(parts, starts, strict=False)])
    latent, value = (np.concatenate([one[i] for one in parts]) for i in (1, 2))
    strings = tuple(tokenizer.pieces(ids))
    return Encoded(strings, at.astype(np.int32), latent.astype(np.int32), value, sae.n_latents)


def _entries(
    sae: TrainedCoder, reader: Reader, pieces: Sequence[Sequence[int]], length: int, bos: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(at, latent, value, tokens) of what is not 0 at the tokens of some pieces, which are counted from 0."""
    shape = (1 << (len(pieces) - 1).bit_length(), length)
    tokens, there, inside = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, bool)
    for row, piece in enumerate(pieces):
        tokens[row, : len(piece)] = piece
        there[row, : len(piece)] = True
        inside[row, bos : len(piece)] = True
    there[len(pieces) :, 0] = True  # a row of nothing would be no number
    x = reader.input(tokens, there)[inside.ravel()]
    values, indices = sae.encode_sparse(x)
    at, column = np.nonzero(values)
    return at, indices[at, column], values[at, column], len(x)
