"""Which MLPs of SmolLM2 carry what it knows: their outputs of the corrupt prompt in place of those of the clean one.

    python -m benchmarks.real.mlps [--behaviours=capital,opposite] [--pairs=32] [--window=6]       after --fetch

share of a window of MLPs = (difference - difference with their outputs exchanged) / (clean - corrupt difference), over
pairs of a behaviour of docs/study.md: 1 turns the whole behaviour over. The difference is that of the right answer's
logit and the wrong one's, at the last token.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.real.packages import MODEL
from saejax.lm import load_lm
from saejax.studies.behaviours import Pair, drawn


def shares(lm: Any, pairs: list[Pair], window: int) -> tuple[float, np.ndarray]:
    """(mean clean difference, the share of each window of MLPs, by its first)."""
    tokenizer, names = lm.tokenizer, [f"blocks.{i}.mlp_out" for i in range(lm.config.n_layer)]
    clean_RS, corrupt_RS = (
        jnp.asarray([tokenizer.bos + ids for ids in tokenizer.encode_behind_bos([getattr(p, part) for p in pairs])])
        for part in ("clean", "corrupt")
    )
    right_R, wrong_R = (
        np.array([ids[0] for ids in tokenizer.encode_many([getattr(p, part) for p in pairs])])
        for part in ("right", "wrong")
    )

    def difference(logits_RV: Any) -> float:
        z_RV, rows = np.asarray(logits_RV), np.arange(len(pairs))
        return float((z_RV[rows, right_R] - z_RV[rows, wrong_R]).mean())

    @jax.jit
    def run(tokens_RS: Any) -> tuple[Any, dict[str, Any]]:
        logits, seen = lm.run(tokens_RS, capture=names)
        return logits[:, -1], seen

    @jax.jit
    def exchanged(first: Any, others: dict[str, Any]) -> Any:
        def edit(i: int) -> Callable[[Any], Any]:
            return lambda y: jnp.where((first <= i) & (i < first + window), others[names[i]], y)

        return lm.run(clean_RS, edits={name: edit(i) for i, name in enumerate(names)})[0][:, -1]

    clean, (corrupt_logits, others) = difference(run(clean_RS)[0]), run(corrupt_RS)
    turn = clean - difference(corrupt_logits)
    firsts = range(len(names) - window + 1)
    return clean, np.array([(clean - difference(exchanged(first, others))) / turn for first in firsts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--behaviours", default="capital,opposite", help="names, with commas")
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument("--window", type=int, default=6, help="MLPs in a row")
    given = parser.parse_args()
    os.chdir(Path(__file__).resolve().parents[2])
    lm = load_lm(f"build/real/{MODEL}")
    for name in given.behaviours.split(","):
        pairs = drawn(name, lm.tokenizer, given.pairs, 0, 0)["train"]
        length = len(lm.tokenizer.encode(pairs[0].clean))
        pairs = [pair for pair in pairs if len(lm.tokenizer.encode(pair.clean)) == length]
        clean, found = shares(lm, pairs, given.window)
        print(f"{name}: {len(pairs)} pairs, logit difference {clean:.2f}; share by the first of {given.window} MLPs:")
        print("  " + " ".join(f"{first}:{share:.2f}" for first, share in enumerate(found)))


if __name__ == "__main__":
    main()
