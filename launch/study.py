"""From behaviours of a language model to the features that cause them, on one page.

    python -m launch.study --config=configs/study_quickstart.py

The same as `saejax study`; --help says all.
"""

from saejax.commands import launch

if __name__ == "__main__":
    launch("study")
