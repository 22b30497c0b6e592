"""Doors open fast: each imports only what it needs before it works."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

_HEAVY = ("jax", "matplotlib", "scipy", "transformers", "tensorstore", "orbax", "pandas", "torch")
_MAIN = "import sys\nsys.argv = ['saejax', *{words}]\nfrom saejax.commands import main\nmain()"

# door -> (program, heavy packages that it may import, CPU seconds)
_DOORS = {
    "import saejax": ("import saejax", (), 1.0),
    "saejax --help": (_MAIN.format(words=["--help"]), (), 2.0),
    "saejax train --help": (_MAIN.format(words=["train", "--help"]), (), 2.0),
    "saejax experiments": (_MAIN.format(words=["experiments"]), ("jax", "tensorstore", "orbax"), 10.0),
    "saejax store info": (_MAIN.format(words=["store", "info", "nowhere"]), ("tensorstore",), 5.0),
    "stages": ("import saejax.app.stages", ("jax", "tensorstore", "orbax"), 10.0),
    "the page": ("import saejax.serve.application", ("jax", "tensorstore", "orbax"), 12.0),
}
_ENDED = f"import atexit, sys\natexit.register(lambda: print('imported:', *({set(_HEAVY)} & sys.modules.keys())))\n"


@pytest.mark.parametrize("door", _DOORS)
def test_a_door_imports_only_what_it_needs(door: str, tmp_path: Path) -> None:
    program, allowed, seconds = _DOORS[door]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", _ENDED + program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "imported:" in done.stdout, done.stderr
    imported = set(done.stdout.rpartition("imported:")[2].split())
    assert imported <= set(allowed), f"{door} imports {imported - set(allowed)}"
    took = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert took < seconds, f"{door} takes {took:.1f} CPU seconds"
