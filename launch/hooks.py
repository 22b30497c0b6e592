"""List a language model's hook points: names, shapes, TransformerLens's names, and what can be stored.

    python -m launch.hooks [--config=configs/gpt2_small.py]

The same as `saejax hooks`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("hooks")
