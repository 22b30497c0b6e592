"""Expansions 4, 6 and 8 side by side, each with its own k and learning rate, on the quickstart's store.

    saejax sweep --config=sweep_expansion

Configs A, B and C of the RTX 6000 report: 4x, k 64, lr 3e-4; 6x, k 48, lr 2e-4; 8x, k 32, lr 1e-4. There on GPT-2
small, here on the demo model's residual stream (width 128), in a few minutes on 2 CPU cores.
"""

from ml_collections import config_dict

from saejax.experiment import shipped


def get_config() -> config_dict.ConfigDict:
    c = shipped("quickstart")
    c.name = "sweep-expansion"
    c.train.tokens = 2_048_000
    c.sweep.points = (
        "A: coder.expansion=4,coder.k=64,train.lr=3e-4",
        "B: coder.expansion=6,coder.k=48,train.lr=2e-4",
        "C: coder.expansion=8,coder.k=32,train.lr=1e-4",
    )
    return c
