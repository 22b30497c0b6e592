"""What `pip install saejax` gives: a wheel is built, installed outside of the checkout, used in an empty folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from tiny import ROOT, SMALLER, one_device

pytestmark = pytest.mark.ci

# What a build reads.
SOURCES = ("saejax", "configs", "launch", "tests", "pyproject.toml", "setup.py", "README.md", "LICENSE")
THREE_LINES = """
import numpy as np, saejax
sae = saejax.load("runs/quickstart-tiny")
latents = sae.encode(np.random.default_rng(0).normal(size=(3, 128)).astype(np.float32))
print(sae.decode(latents).shape, latents.shape, (latents != 0).sum(1).tolist(), saejax.__file__, sep="|")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(source)]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True, capture_output=True, timeout=300)
    (built,) = folder.glob("saejax-*.whl")
    return built


class Installed:
    """A new environment with the wheel in it, and an empty folder to work in.

    It sees the packages of the environment that the tests run in by a .pth file, which adds their folder and runs none
    of the .pth files there: an editable saejax stays out of sight.
    """

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.bin = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        self.work = folder / "work"
        self.work.mkdir()
        venv.create(folder / "venv", with_pip=False)
        (self.site,) = (folder / "venv").glob("lib/python*/site-packages")
        places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (self.site / "tests.pth").write_text("".join(f"{place}\n" for place in sorted(places)))
        install = ["--python", str(self.bin / "python"), "install", "--no-deps", "--no-index", "--ignore-installed"]
        subprocess.run(
            [sys.executable, "-m", "pip", *install, str(wheel)], check=True, capture_output=True, timeout=300
        )

    def run(self, *command: str) -> str:
        """What the command printed; it must end well. Nothing of this environment is handed on but the way to sh.

        And how the tests compile, which only says how long it takes.
        """
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.work,
            env={
                "PATH": f"{self.bin}{os.pathsep}{os.defpath}",
                "HOME": str(self.work.parent),
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": one_device()["XLA_FLAGS"],
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), wheel)


def test_the_wheel_holds_what_a_user_needs_and_no_more(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = {path.name for path in (ROOT / "configs").glob("*.py")}
    assert {f"saejax/experiments/{name}" for name in configs} <= names
    models = {f"lm/{model}/{file}" for model in ("demo", "recall") for file in ("model.safetensors", "tokenizer.json")}
    needed = {"py.typed", "__main__.py", "reports/page.html"} | models
    assert {f"saejax/{name}" for name in needed} <= names
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "saejax").rglob("*") if path.is_file()}
    assert {name for name in package if "__pycache__" not in name} <= names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"saejax"}, "launch, configs, tests stay out"


def test_a_build_leaves_nothing_in_the_checkout(wheel: Path) -> None:
    """In build/ a user may have data: `make real` and the benchmarks keep theirs there."""
    assert wheel.is_file() and not any(ROOT.glob("*.whl"))
    assert not [*ROOT.glob("build/lib*"), *ROOT.glob("build/bdist*"), *ROOT.glob("build/temp*")]


def test_the_tiny_quickstart_and_three_lines_in_an_empty_folder(installed: Installed) -> None:
    # Where the environment lies below a repository, its commit is not taken for that of saejax.
    for words in (["init", "-q"], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "x", "--allow-empty"]):
        subprocess.run(["git", *words], cwd=installed.work.parent, check=True)
    said = installed.run("saejax", "quickstart:tiny", *SMALLER)
    assert "gates passed       6 of 6" in said
    run = installed.work / "runs" / "quickstart-tiny"
    assert sorted(path.name for path in installed.work.iterdir()) == ["runs", "stores"]
    assert (run / "report.html").is_file()
    environment = json.loads((run / "environment.json").read_text())
    assert environment["git"] is None and environment["command"][1:] == ["saejax", "quickstart:tiny", *SMALLER]
    shape, latents, kept, where = installed.run("python", "-c", THREE_LINES).strip().split("|")
    assert (shape, latents, kept) == ("(3, 128)", "(3, 1024)", "[24, 24, 24]")
    assert Path(where) == installed.site / "saejax" / "__init__.py"


def test_the_shipped_experiments_are_there_by_name(installed: Installed) -> None:
    listed = installed.run("saejax", "experiments")
    assert all(f"\n{path.stem} " in f"\n{listed}" for path in ROOT.glob("configs/[!_]*.py"))
    assert installed.run("saejax", "new", "mine", "--from=sweep_quickstart") == (
        "wrote mine.py; next: saejax sweep --config=mine.py\n"
    )
    hooks = installed.run("python", "-m", "saejax", "hooks", "--config=configs/quickstart.py:tiny")
    assert hooks.splitlines()[-1] == "capture.hook_points of quickstart-tiny: blocks.3.resid_post"
    (installed.work / "mine.py").unlink()
