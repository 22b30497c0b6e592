"""A run folder: every file's name, what is done and what runs now, provenance, rows, the attempt that counts.

    Run(path).evaluation          the place of eval.json; Run.evaluation is its name
    made(artifact, of, make)      what is on disk, or what `make` gives: "already done", "made of something else"

Nothing here knows an experiment.
"""

from saejax.runs.folder import Reading, Run, Sweep
from saejax.runs.made import differing, digest, made
from saejax.runs.provenance import Provenance

__all__ = ["Provenance", "Reading", "Run", "Sweep", "differing", "digest", "made"]
