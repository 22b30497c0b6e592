"""Train many coders together, on one reading of the store, and compare them.

    python -m launch.sweep --config=configs/sweep_quickstart.py [--config.sweep.seeds=0,1,2]

The same as `saejax sweep`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("sweep")
