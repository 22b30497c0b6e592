"""The whole experiment: capture, train, evaluate, report; then one table of what came out.

    python -m launch.pipeline --config=configs/quickstart.py[:preset] [--config.train.lr=3e-4]

The same as `saejax pipeline`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("pipeline")
