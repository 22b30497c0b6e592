"""Write a run's report: curves, gates, densities and a browser of its features, in one HTML file.

    python -m launch.report --config=configs/quickstart.py [--redo]

The same as `saejax report`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("report")
