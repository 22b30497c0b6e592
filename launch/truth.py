"""Train on activations whose features are known, and score which of them a dictionary found.

    python -m launch.truth --config=configs/truth.py [--config.coder.preset=topk --config.coder.k=12]

The same as `saejax truth`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("truth")
