"""The Python of README and docs passes a strict type checker, as a user runs it on a program with such lines."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import ROOT

# extending.md holds files of their own, which test_docs runs.
PAGES = [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.stem != "extending")]
CODE = re.compile(r"^```(?:python|\{code-cell\} ipython3)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Not among the packages of `dev`: with its Node it takes 309 MB, and mypy checks the same pages below.
PYRIGHT = shutil.which("pyright") or shutil.which("basedpyright")
# Functions of a page stand without annotations; all else is --strict. Of other packages' stubs nothing is asked.
STRICT = ("--strict", "--allow-untyped-defs", "--allow-untyped-calls", "--ignore-missing-imports")


def check(folder: Path, *files: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "mypy", *STRICT, "--follow-imports=silent", "--cache-dir", str(folder / "cache")]
    env = os.environ | {"MYPYPATH": str(ROOT)}
    return subprocess.run([*words, *files], cwd=folder, env=env, capture_output=True, text=True, check=False)


def written(folder: Path) -> list[str]:
    """The Python of each page as a file in the folder, in the lines of the page, so that a failure says where it is."""
    files = []
    for page in PAGES:
        text, lines = page.read_text(encoding="utf-8"), list[str]()
        for block in CODE.finditer(text):
            lines += [""] * (text.count("\n", 0, block.start()) + 1 - len(lines)) + block[1].splitlines()
        if lines:
            files.append(re.sub(r"\W", "_", page.stem.lower()) + ".py")
            (folder / files[-1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert len(files) >= 15
    return files


@pytest.mark.ci
@pytest.mark.skipif(PYRIGHT is None, reason="neither pyright nor basedpyright is on the path")
def test_pages_pass_an_editor_s_checker(tmp_path: Path) -> None:
    """Pyright as VS Code runs it: what is completed and underlined there."""
    written(tmp_path)
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT)], "reportMissingModuleSource": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    words = [str(PYRIGHT), "--pythonpath", sys.executable, "--level", "error"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.ci
def test_pages_pass_a_strict_checker(tmp_path: Path) -> None:
    done = check(tmp_path, *written(tmp_path))
    assert done.returncode == 0, done.stdout

    lines = ["import numpy as np", "import saejax", "sae = saejax.train(np.zeros((9, 4)), d_saee=8)"]
    (tmp_path / "wrong.py").write_text("\n".join([*lines, "sae.encod(1)", "sae.d_in + ''", ""]))
    told = check(tmp_path, "wrong.py").stdout
    assert all(word in told for word in ('"d_saee" for "train"', 'has no attribute "encod"', "Unsupported operand"))
