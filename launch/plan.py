"""Say what an experiment will take: memory, disk, time, cost, on devices that need not be there.

    python -m launch.plan --config=configs/quickstart.py --device=h100

The same as `saejax plan`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("plan")
