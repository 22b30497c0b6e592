"""features.sqlite is there as a whole: whoever writes it may be killed at any moment."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny.feature_tables import made_up, written

from saejax.reports.feature_table import read_features
from saejax.runs import Run

# Writes the two tables in turn, for ever; a line says that it began.
_WRITER = """
import sys
from pathlib import Path
from tiny.feature_tables import made_up, written
tables = made_up(200, 1), made_up(200, 2)
print(flush=True)
while True:
    for table in tables:
        written(Path(sys.argv[1]), table)
"""


@pytest.mark.ci
def test_a_writer_of_features_that_is_killed_leaves_the_old_table_or_the_new_one(tmp_path: Path) -> None:
    path = written(tmp_path / Run.features, made_up(200, 1))
    whole = [read_features(written(tmp_path / str(seed) / Run.features, made_up(200, seed)).parent) for seed in (1, 2)]
    rng = random.Random(0)
    for _ in range(12):
        command = [sys.executable, "-c", _WRITER, str(path)]
        tests = str(Path(__file__).resolve().parents[1])
        paths = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths}) as process:
            assert process.stdout
            process.stdout.readline()
            time.sleep(rng.uniform(0, 0.3))
            process.send_signal(signal.SIGKILL)
        assert read_features(tmp_path) in whole
    written(path, made_up(200, 2))
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == [Run.features], "what a kill left is taken away"
