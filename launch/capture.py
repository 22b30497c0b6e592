"""Run text through the language model and store the activations of the experiment's hook points.

    python -m launch.capture --config=configs/quickstart.py [--config.capture.tokens=2000000]

The same as `saejax capture`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("capture")
