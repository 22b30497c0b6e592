"""A dictionary by where its activations lie: the same planted rows with a mean of 0, 3, 10 and 30 a coordinate.

    python -m benchmarks.offset [--output=benchmarks/offset.md]

20,000 rows in 32 dimensions, sums of 256 directions that are each present in 2 % of them. All settings by default but
k=5 (of the presets that select) and 256 latents: 48 steps. `before` is b_enc's rate without the activations' spread
(train.b_enc_rate), as it was until 2026-11-25. L0 and FVE are of the first 4,000 rows; a latent is dead where it is 0
for all of them.
"""

import argparse
import contextlib
import datetime
import os
import platform
from pathlib import Path
from unittest import mock

import jax
import numpy as np

import saejax

ROWS, WIDTH, DIRECTIONS, LATENTS, MEANS = 20_000, 32, 256, 256, (0, 3, 10, 30)
SELECTING = ("topk", "batchtopk", "matryoshka")
PRESETS = (*SELECTING, "standard", "gated", "jumprelu")


def planted() -> np.ndarray:
    """[N, D], without a mean of its own to speak of."""
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(DIRECTIONS, WIDTH))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return ((rng.random((ROWS, DIRECTIONS)) < 0.02) * rng.exponential(size=(ROWS, DIRECTIONS))) @ directions


def figures(x: np.ndarray, preset: str) -> str:
    """L0, FVE and dead latents of a dictionary that is trained on x."""
    how = {"k": 5} if preset in SELECTING else {}
    sae = saejax.train(x, preset, d_sae=LATENTS, progress=False, **how)
    seen = x[:4000]
    latents = sae.encode(seen)
    left = seen - sae.decode(latents)
    fve = 1 - np.square(left).sum() / np.square(seen - seen.mean(0)).sum()
    return f"{(latents != 0).sum(1).mean():.2f}, {fve:.3f}, {int((latents == 0).all(0).sum())}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    rows, base = [], planted()
    for preset in PRESETS:
        for name in ("before", "now"):
            line = []
            for mean in MEANS:
                x = (base + mean).astype(np.float32)
                with contextlib.ExitStack() as old:
                    if name == "before":
                        old.enter_context(mock.patch("saejax.fit.beginning.read_spread", lambda *_: (1.0,)))
                    line.append(figures(x, preset))
            rows.append(f"| {preset}, {name} | {' | '.join(line)} |")
            print(rows[-1], flush=True)
    software = f"Python {platform.python_version()}, jax {jax.__version__}"
    machine = f"{datetime.date.today()}, {os.cpu_count()} CPU cores, {software}"
    text = [
        "# A dictionary by where its activations lie",
        "",
        f"`python -m benchmarks.offset`: {machine}. L0, FVE, dead latents of {LATENTS};",
        "the same rows in each column, with another mean. `before`: b_enc's rate without the activations' spread.",
        "",
        f"| preset | {' | '.join(f'mean {mean}' for mean in MEANS)} |",
        f"|---|{'---|' * len(MEANS)}",
        *rows,
        "",
        "Presets that select do not depend on the mean any more. Those with a penalty or a threshold of their own do:",
        "scales bring activations to one length with their mean, so that a penalty weighs more beside the squared",
        "error of what is left. Take the mean off such activations, or lower coder.l1_coefficient.",
    ]
    if output is not None:
        output.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
