"""Try an experiment on a small part of it: devices, disk, model, memory, speed and 1,000 steps of training.

    python -m launch.preflight --config=configs/quickstart.py[:preset] [--config.train.lr=3e-4]

The same as `saejax preflight`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("preflight")
