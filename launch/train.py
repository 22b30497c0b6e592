"""Train the experiment's sparse coder on its stored activations.

    python -m launch.train --config=configs/quickstart.py [--config.train.lr=3e-4]

The same as `saejax train`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("train")
