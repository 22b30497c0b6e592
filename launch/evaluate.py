"""Evaluate a finished run, or any dictionaries, on held-out text and check the gates.

    python -m launch.evaluate --config=configs/quickstart.py [--redo]

The same as `saejax evaluate`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("evaluate")
