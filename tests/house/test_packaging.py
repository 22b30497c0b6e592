"""What a newcomer's two commands stand on: pyproject.toml, constraints.txt, the Makefile, launch scripts."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from saejax.core.extras import installing

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PYTHONS = ("3.11", "3.12", "3.13")
# Distributions that are not called like their module.
OTHERWISE = {"pynvml": "nvidia-ml-py", "sklearn": "scikit-learn"}
PIN = re.compile(r'[A-Za-z0-9._-]+==[0-9][0-9a-z.]*( ; python_version (<|>=) "3\.\d+")?')


def pins(python: str) -> dict[str, str]:
    """The versions that constraints.txt names for one Python; a name pinned twice is an error."""
    found: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} is pinned twice for Python {python}"
            found[name] = str(requirement.specifier).removeprefix("==")
    return found


def named_requirements() -> list[Requirement]:
    """Everything that pyproject.toml names, all extras included."""
    project = PROJECT["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    return [Requirement(text) for text in texts]


def installed_closure() -> Iterator[tuple[str, Requirement]]:
    """(who, what) for all that pyproject.toml names and what that needs in turn, as far as installed here."""
    waiting = [("pyproject.toml", requirement) for requirement in named_requirements()]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        who, requirement = waiting.pop()
        yield who, requirement
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        try:
            needed = importlib.metadata.requires(key[0]) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of an extra, or of another platform
        for inner in map(Requirement, needed):
            extras = requirement.extras or {""}
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in {*extras, ""}):
                waiting.append((key[0], inner))


def test_constraints_hold_names_and_versions_only() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wrong = [line for line in lines if line and not line.startswith("#") and not PIN.fullmatch(line)]
    assert not wrong, f"not 'name==version', with at most a python_version marker: {wrong}"


@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_pin_all_that_pyproject_names_within_its_ranges(python: str) -> None:
    pinned = pins(python)
    for requirement in named_requirements():
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt has no {requirement.name} for Python {python}"
        assert requirement.specifier.contains(version), f"{requirement} does not allow the pinned {version}"


def test_constraints_pin_all_that_those_need_in_turn() -> None:
    pinned = pins(".".join(map(str, sys.version_info[:2])))
    missing = {
        f"{requirement.name} (needed by {who})"
        for who, requirement in installed_closure()
        # What a wheel pins exactly by itself (torch its CUDA libraries) needs no pin here.
        if canonicalize_name(requirement.name) not in pinned
        and "==" not in str(requirement.specifier)
        # The cuda and tpu extras of jax bring what the machine's drivers need.
        and not (who == "jax" and requirement.marker is not None and "extra" in str(requirement.marker))
    }
    assert not missing, f"constraints.txt lacks {sorted(missing)}"


def test_pyproject_names_all_that_the_code_imports() -> None:
    homes = importlib.metadata.packages_distributions()
    named = {canonicalize_name(requirement.name) for requirement in named_requirements()}
    unnamed: set[str] = set()
    for path in (path for room in ("saejax", "launch", "configs") for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                tops = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                tops = {node.module.partition(".")[0]}
            else:
                continue
            foreign = tops - sys.stdlib_module_names - {"saejax", "launch", "configs", "benchmarks"}
            # A module that is not installed belongs to an extra: its distribution is taken to have its name.
            homes_of = {top: homes.get(top, [OTHERWISE.get(top, top)]) for top in foreign}
            unnamed |= {top for top, own in homes_of.items() if not named & {canonicalize_name(d) for d in own}}
    assert not unnamed, f"imported, but not in pyproject.toml: {sorted(unnamed)}"


def test_every_folder_of_code_and_every_data_file_is_packaged() -> None:
    package = ROOT / "saejax"
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    code = {path.parent for path in files if path.suffix == ".py"}
    bare = sorted(str(folder.relative_to(ROOT)) for folder in code if not (folder / "__init__.py").is_file())
    assert not bare, f"folders without an __init__.py are left out of the package: {bare}"
    packaged: set[Path] = set()
    for name, patterns in PROJECT["tool"]["setuptools"]["package-data"].items():
        folder = ROOT.joinpath(*name.split("."))
        packaged.update(path for pattern in patterns for path in folder.glob(pattern))
    left = sorted(str(path.relative_to(ROOT)) for path in set(files) - packaged if path.suffix != ".py")
    assert not left, f"no package-data pattern of pyproject.toml takes {left}"


def test_readme_names_the_two_commands() -> None:
    readme = (ROOT / PROJECT["project"]["readme"]).read_text(encoding="utf-8")
    assert "make quickstart" in readme and "make test" in readme


def test_launch_scripts_are_thin() -> None:
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.glob("launch/*.py")}
    assert lengths, "no launch scripts"
    long = {name: length for name, length in lengths.items() if length > 60}
    assert not long, f"launch scripts of more than 60 lines; move the work into saejax: {long}"


# --- the Makefile, with made-up interpreters: nothing is installed ------------------------------------------

# Answers like `python -c` of the given version; `-m venv` makes a folder whose python writes a log.
INTERPRETER = """#!/bin/sh
here={here}
case "$1 $2" in
  "--version ") echo "Python {version}" ;;
  "-c import sys; sys.exit(sys.version_info < (3, 11))") exit {too_old} ;;
  "-c import ensurepip, venv") exit {no_venv} ;;
  "-c import sys; print(int(sys.version_info[:2] == (3, 11)))") echo {is_311} ;;
  "-m venv")
    rm -rf "$4"; mkdir -p "$4/bin"; ln -s "$here/$(basename $0)" "$4/bin/python"
    echo "venv $4" >> log ;;
  "-m pip") echo "pip $*" >> log ;;
  "-m pytest") echo "pytest" >> log ;;
esac
"""


class Checkout:
    """A folder with the Makefile and, on its PATH, interpreters that only log what they are asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "interpreters"
        self.bin.mkdir()
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder / name)
        for tool in ("sh", "rm", "mkdir", "ln", "touch", "basename", "date", "make"):
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)

    def python(self, name: str, version: str, venv: bool = True) -> None:
        path = self.bin / name
        minor = int(version.split(".")[1])
        path.write_text(
            INTERPRETER.format(
                here=self.bin, version=version, too_old=int(minor < 11), no_venv=int(not venv), is_311=int(minor == 11)
            )
        )
        path.chmod(0o755)

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        (self.folder / "log").write_text("")
        environment = {"PATH": str(self.bin)}
        return subprocess.run(
            [str(self.bin / "make"), *arguments],
            cwd=self.folder, env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def log(self) -> list[str]:
        return (self.folder / "log").read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def of_make(test: Callable[..., None]) -> Callable[..., None]:
    """A test of the Makefile, for .ci/run."""
    without = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make on this machine")
    return pytest.mark.ci(without(test))


@of_make
def test_make_refuses_an_old_python_in_one_line(checkout: Checkout) -> None:
    checkout.python("python3", "3.10.1")
    done = checkout.make("install")
    assert done.returncode != 0 and checkout.log() == []
    first, *rest = done.stderr.splitlines()
    assert first.startswith("saejax needs Python 3.11 or newer") and "older than 3.11" in first
    assert all(line.startswith("make:") for line in rest)


@of_make
def test_make_names_a_missing_venv_module(checkout: Checkout) -> None:
    checkout.python("python3.12", "3.12.1", venv=False)
    done = checkout.make("install", "PYTHON=python3.12")
    assert done.returncode != 0 and "apt-get install python3-venv" in done.stderr


@of_make
def test_make_looks_for_a_newer_python_where_python3_is_too_old(checkout: Checkout) -> None:
    checkout.python("python3", "3.9.2")
    checkout.python("python3.12", "3.12.1")
    done = checkout.make("install")
    assert done.returncode == 0, done.stderr
    assert checkout.log()[0] == "venv .venv" and "Python 3.12.1 makes .venv" in done.stdout


@of_make
def test_make_installs_once_and_again_when_the_pins_change(checkout: Checkout) -> None:
    checkout.python("python3", "3.12.1")
    os.utime(checkout.bin / "python3", (1_000_000_000, 1_000_000_000))
    checkout.make("test")
    made, installed, tested = checkout.log()
    assert (
        made == "venv .venv"
        and installed.endswith("-c constraints.txt -e .[dev,s3,serve,probes]")
        and tested == "pytest"
    )
    checkout.make("test", "install")
    assert checkout.log() == ["pytest"]
    later = (ROOT / "Makefile").stat().st_mtime + 10**9
    os.utime(checkout.folder / "constraints.txt", (later, later))
    checkout.make("install")
    assert [line.split(" -c ")[1] for line in checkout.log()] == ["constraints.txt -e .[serve]"]


@of_make
def test_make_builds_the_environment_anew_when_its_interpreter_is_gone(checkout: Checkout) -> None:
    checkout.python("python3", "3.12.1")
    checkout.make("install")
    (checkout.bin / "python3").rename(checkout.bin / "python3.13")
    done = checkout.make("install")
    assert done.returncode == 0, done.stderr
    made, installed = checkout.log()
    assert made == "venv .venv" and installed.endswith("-e .[serve]")


@of_make
@pytest.mark.parametrize(
    ("version", "torch", "extras"),
    [
        ("3.11.4", None, ".[dev,s3,serve,probes,torch]"),
        ("3.11.4", "0", ".[dev,s3,serve,probes]"),
        ("3.13.0", None, ".[dev,s3,serve,probes]"),
        ("3.13.0", "1", ".[dev,s3,serve,probes,torch]"),
    ],
)
def test_make_test_installs_torch_where_it_should(
    checkout: Checkout, version: str, torch: str | None, extras: str
) -> None:
    name = "python" + version.rpartition(".")[0]
    checkout.python(name, version)
    checkout.make("test", f"PYTHON={name}", *([] if torch is None else [f"TORCH={torch}"]))
    made, installed, _ = checkout.log()
    assert made == f"venv .venv-{name}" and installed.endswith(f"-e {extras}")


def test_what_a_message_says_to_install_is_the_extra() -> None:
    """By name it could be installed neither from a checkout nor before the package is published."""
    extras = PROJECT["project"]["optional-dependencies"]
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "saejax").rglob("*.py"))
    named = set(re.findall(r"installing\(['\"](\w+)['\"]\)", source))
    assert len(named) >= 6 and "pip install 'saejax[" not in source
    for extra in named:
        assert installing(extra) == "pip install " + " ".join(f"'{package}'" for package in extras[extra])
