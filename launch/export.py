"""Write a run as the files that other tools show, explain and score it from.

    python -m launch.export delphi runs/quickstart out

The same as `saejax export`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("export")
