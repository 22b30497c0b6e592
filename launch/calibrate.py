"""Measure what this machine really reaches, for plans: about a minute.

    python -m launch.calibrate [--name=here]

The same as `saejax calibrate`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("calibrate")
