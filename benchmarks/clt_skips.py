"""Do trained cross-layer transcoders skip a step that the model takes? On the model of tests/tiny/two_steps.py.

    PYTHONPATH=tests python -m benchmarks.clt_skips

token -> A (MLP 0) -> B (MLP 1) -> answer, where half of A is no B. Each line: a dictionary trained on the MLPs' inputs
and outputs, with the mean over seeds and the least and largest: FVE at both outputs together, L0 at `end` (a faithful
dictionary needs 2 for the answer and 2 for what nobody reads), MLP 1's share of influence that layer 0 has
(`skipped(...).shares[1]`), and how far what it says is from the model's MLP 1 at half of step A (`response_errors`).
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import app, flags
from tiny import two_steps

import saejax
from saejax.attribution import AttributionConfig, attribute
from saejax.attribution.skipping import response_errors, skipped
from saejax.trained import TrainedCoder

_SEEDS = flags.DEFINE_integer("seeds", 3, "Trainings of each kind.")
_PROMPTS = flags.DEFINE_integer("prompts", 2048, "Prompts of eight tokens to train on.")
_STEPS = flags.DEFINE_integer("steps", 1000, "Steps of 512 activations.")
CONFIG = AttributionConfig(max_features=0, chunk=16, block=64)
HELD_OUT = 256

_TANH = {"sparsity_warmup_fraction": 1.0, "reconstruction": "mse", "normalize": "mean_square"}
# Name, whether it is a CLT, and the settings of `saejax.train`.
KINDS: list[tuple[str, bool, str, dict[str, Any]]] = [
    (f"{kind}, {what}", kind == "CLT", preset, settings)
    for what, preset, settings in [
        *((f"relu + {l1} L1", "standard", {"l1_coefficient": l1}) for l1 in (0.1, 1.0)),
        *((f"JumpReLU + {w} tanh", "jumprelu_tanh", {"tanh_coefficient": w} | _TANH) for w in (0.01, 0.1)),
    ]
    for kind in ("transcoders", "CLT")
]


def activations(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """{hook point: [N, D]} of all tokens but bos."""
    names = [*two_steps.READS, *two_steps.WRITES]
    _, seen = two_steps.lm().run(tokens, capture=names)
    return {name: np.asarray(seen[name])[:, 1:].reshape(-1, two_steps.WIDTH) for name in names}


def trained(x: dict[str, np.ndarray], is_clt: bool, preset: str, settings: dict[str, Any], seed: int) -> list[Any]:
    tokens = 512 * _STEPS.value
    common = {"d_sae": 16, "init": "uniform", "batch_size": 512, "tokens": tokens, "lr": 3e-3, "seed": seed}
    common |= {"progress": False, "unit_decoder_every": 0} | settings
    if is_clt:
        sides = {"reads": two_steps.READS, "writes": two_steps.WRITES}
        return [saejax.train(x, preset, topology="clt", **sides, **common)]
    return [
        saejax.train({read: x[read], write: x[write]}, preset, topology="transcoder", **common)
        for read, write in zip(two_steps.READS, two_steps.WRITES, strict=True)
    ]


def measured(saes: Sequence[TrainedCoder], x: dict[str, np.ndarray]) -> tuple[float, float, float, float]:
    """FVE, L0 at `end`, skipped share, response error; the last two are means over a prompt of each question."""
    left = total = l0 = 0.0
    for sae in saes:
        read, y = (np.stack([x[name] for name in names], 1) for names in (sae.sites.reads, sae.sites.writes))
        given = read if sae.coder.topology.stacked else read[:, 0]
        f = np.asarray(sae.encode(given))
        left += float(((y - np.asarray(sae.decode(f, given)).reshape(y.shape)) ** 2).sum())
        total += float(((y - y.mean(0)) ** 2).sum())
        l0 += float((f[6::7] != 0).sum() / len(f[6::7]))
    shares, errors = [], []
    for question in two_steps.X:
        tokens = np.array([two_steps.BOS, two_steps.WORD, question, 6, 6, 6, two_steps.WORD, two_steps.END], np.int32)
        graph = attribute(two_steps.lm(), saes, tokens, CONFIG)
        shares.append(skipped(two_steps.lm(), saes, graph, CONFIG).shares[1])
        errors.append(response_errors(two_steps.lm(), saes, tokens)[1])
    return 1 - left / total, l0, float(np.mean(shares)), float(np.mean(errors))


def main(_: list[str]) -> None:
    x, heldout = activations(two_steps.prompts(_PROMPTS.value)), activations(two_steps.prompts(HELD_OUT, seed=1))
    print("| dictionary | FVE | L0 at `end` | share skipped at MLP 1 | response error of MLP 1 | seconds |")
    print("|---|---|---|---|---|---|")
    for name, saes in (
        ("transcoders by hand", two_steps.transcoders()),
        ("CLT by hand, faithful", two_steps.clt()),
        ("CLT by hand, skips", two_steps.clt((1, 1))),
    ):
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in measured(saes, heldout))} | |", flush=True)
    for name, is_clt, preset, settings in KINDS:
        started = time.perf_counter()
        found = [measured(trained(x, is_clt, preset, settings, seed), heldout) for seed in range(_SEEDS.value)]
        cells = [f"{np.mean(v):.2f} ({min(v):.2f} to {max(v):.2f})" for v in zip(*found, strict=True)]
        print(f"| {name} | {' | '.join(cells)} | {time.perf_counter() - started:.0f} |", flush=True)


if __name__ == "__main__":
    app.run(main)
