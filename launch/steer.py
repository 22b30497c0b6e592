"""Let the model continue a prompt, as it is and with some latents of a dictionary changed.

    python -m launch.steer runs/quickstart --feature=123 --scale=5 "Once upon a time"

The same as `saejax steer`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("steer")
