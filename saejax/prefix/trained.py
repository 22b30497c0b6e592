"""A trained prefix: encoder and adapters with their parameters, for analysis."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from saejax.prefix.config import PrefixConfig
from saejax.prefix.encoder import Encoder, Weights
from saejax.prefix.records import Record
from saejax.prefix.samples import encoder_ids
from saejax.runs.made import digest
from saejax.text import Tokenizer


@dataclasses.dataclass(frozen=True)
class TrainedPrefix:
    """Encoder and adapters after a training. It holds no language model.

    Attributes:
        config: of the experiment.
        tokenizer: of the first model, where the encoder reads its tokens.
        step: of the checkpoint.
    """

    encoder: Encoder
    params: Weights
    config: PrefixConfig
    tokenizer: Tokenizer | None
    step: int

    def fingerprint(self) -> str:
        """sha256 of what it computes: the encoder's sizes and every parameter."""
        return digest(self.encoder.to_meta(), *map(np.asarray, jax.tree.leaves(self.params)))

    def embeddings(self, records: Sequence[Record]) -> dict[str, np.ndarray]:
        """{model: [N, P, M] float32}: what stands before a prompt in place of the records' contexts."""
        rows, batches = self.config.eval_rows, []
        ids_NL = encoder_ids(records, self.config, self.tokenizer)
        for start in range(0, len(ids_NL), rows):
            part = ids_NL[start : start + rows]
            filled = np.concatenate([part, np.repeat(part[-1:], min(rows, len(ids_NL)) - len(part), axis=0)])
            made = jax.device_get(_prefixes(self.encoder, self.params, filled))
            batches.append({name: values[: len(part)] for name, values in made.items()})
        return {name: np.concatenate([one[name] for one in batches]) for name in batches[0]}


@functools.partial(jax.jit, static_argnums=0)
def _prefixes(encoder: Encoder, params: Weights, ids_BL: jax.Array) -> dict[str, jax.Array]:
    return encoder.prefixes(params, ids_BL)
