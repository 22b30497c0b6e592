"""Train a latent prefix for frozen models, and compare it with text, truncated text and others.

    python -m launch.prefix --config=configs/latentwire_quickstart.py [--config.prefix.latents=12]

The same as `saejax prefix`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("prefix")
