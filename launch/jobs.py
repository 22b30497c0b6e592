"""Run an experiment as jobs: scripts for Slurm, or one job after another on this machine.

    python -m launch.jobs slurm --config=configs/quickstart.py:tiny --out=jobs

The same as `saejax jobs`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("jobs")
