"""README and docs/ say what is true: their Python runs (`make docs`), their commands exist, their links lead somewhere.

Marks in the first line of a block: ```python runs; ```python no-run is only compiled (it needs the network or hours);
```python PATH is a new file and ```diff changes files, both in a copy of the package that the page's later blocks see.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pytest
from tiny import ROOT, tiny_experiment
from tiny.browser import CHROMIUM
from tiny.cdp import chromium
from tiny.prefixes import small_prefix

import saejax
from saejax.app import experiments
from saejax.app.prefix import run_prefix
from saejax.app.stages import run_capture, run_train
from saejax.app.workspace import Workspace
from saejax.commands import COMMANDS
from saejax.experiment import default_config

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.md"))
LINKED = [*PAGES, *NOTEBOOKS, ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its first line without the fence, its text, and where it begins."""

    info: str
    text: str
    line: int


def blocks(page: Path, language: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = [Block(m[1].strip(), m[2], text.count("\n", 0, m.start()) + 2) for m in FENCE.finditer(text)]
    return [block for block in found if block.info.split(" ")[0] == language]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


# --- Python -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the blocks run: with a run and a store called quickstart, as after `make quickstart`, but much smaller, and
    the prefix of latentwire_quickstart."""
    folder = tmp_path_factory.mktemp("docs")
    e = tiny_experiment(folder, top={"name": "quickstart"}, capture={"hook_points": ("blocks.3.resid_post",)})
    run_capture(Workspace(e))
    assert run_train(Workspace(e)) == 0
    prefix = {"second": "", "heldout": 10, "timed": 1}
    name, train = "latentwire_quickstart", {"tokens": 16, "validate_every": 0}
    assert run_prefix(small_prefix(folder / "runs", name, prefix=prefix, train=train)) == 0
    return folder


def in_process(page: Path) -> list[Block]:
    return [block for block in blocks(page, "python") if block.info == "python"]


def script(found: list[Block], path: Path) -> str:
    """The blocks as one file, each in the lines that it has on the page, so that a failure says where it is."""
    lines: list[str] = []
    for block in found:
        lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")  # of the kernel's own libraries
def test_a_notebook_s_kernel_completes_names_and_shows_objects(folder: Path) -> None:
    """As Jupyter does it: keys and doors by the kernel's completion, and HTML of what a cell ends with."""
    from jupyter_client.manager import start_new_kernel  # `make docs` has it, for the site's notebooks

    manager, kernel = start_new_kernel(cwd=str(folder))

    def shown(code: str) -> str:
        """The HTML of a cell's value."""
        outputs: list[Any] = []
        reply = kernel.execute_interactive(code, output_hook=outputs.append, timeout=300)
        assert reply["content"]["status"] == "ok", reply["content"]
        (data,) = [one["content"]["data"] for one in outputs if one["msg_type"] == "execute_result"]
        return str(data["text/html"])

    def completed(code: str) -> list[str]:
        matches = kernel.complete(code, reply=True, timeout=60)["content"]["matches"]
        return [match.rpartition(".")[2] for match in matches]

    try:
        begin = "import saejax\nsae, lm = saejax.load('runs/quickstart'), saejax.load_lm('demo')\nsae"
        assert "blocks." in shown(begin) and "demo" in shown("lm")
        assert "<details" in shown("saejax.default_config()")
        text = "'def area(width, height):\\n    return width * height\\n' * 9"
        assert "fve" in shown(f"saejax.evaluate(sae, lm, {text})")
        assert "<code>" in shown(f"saejax.features(sae, lm, {text}, progress=False)")
        assert "<iframe" in shown("saejax.report('runs/quickstart')")
        assert {"train", "study", "plan"} <= set(completed("saejax."))
        assert "d_sae=" in completed("saejax.train(x, d_s") and "W_dec" in completed("sae.W_")
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.ci
@pytest.mark.parametrize("page", [page for page in PAGES if in_process(page) and page.stem != "extending"], ids=name_of)
def test_python_of_a_page_runs_from_top_to_bottom(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    runpy.run_path(script(in_process(page), folder / f"{page.stem}.py"))


def test_few_blocks_are_left_out() -> None:
    left_out = [(page.name, block.line) for page in PAGES for block in blocks(page, "python") if "no-run" in block.info]
    assert len(left_out) <= 3, f"compiled only: {left_out}"
    for page in PAGES:
        for block in blocks(page, "python"):
            compile(block.text, f"{page}:{block.line}", "exec")


def changed(text: str, hunk: str, where: str) -> str:
    """`text` with a hunk of a diff applied: the lines it shows as they were must be there once."""
    lines = [line for line in hunk.splitlines() if line]
    before = "\n".join(line[1:] for line in lines if line[0] in " -")
    after = "\n".join(line[1:] for line in lines if line[0] in " +")
    assert text.count(f"{before}\n") == 1, f"{where}: not there once:\n{before}"
    return text.replace(f"{before}\n", f"{after}\n")


def apply_changes(page: Path, block: Block, checkout: Path) -> None:
    first, *hunks = re.split(r"^@@.*\n", block.text, flags=re.MULTILINE)
    path = checkout / first.removeprefix("--- ").strip()
    text = path.read_text(encoding="utf-8")
    for hunk in hunks:
        text = changed(text, hunk, f"{page.name}:{block.line}")
    path.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with all files and changes of docs/extending.md in it."""
    checkout = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "saejax", checkout / "saejax", ignore=shutil.ignore_patterns("__pycache__"))
    page = ROOT / "docs" / "extending.md"
    for block in blocks(page, "python"):
        if block.info.endswith(".py"):
            (checkout / block.info.split(" ")[1]).write_text(block.text, encoding="utf-8")
    for block in blocks(page, "diff"):
        apply_changes(page, block, checkout)
    return checkout


def examples() -> Iterator[tuple[str, str]]:
    """(heading, code) of each worked example of docs/extending.md that has code to run."""
    page = ROOT / "docs" / "extending.md"
    text = page.read_text(encoding="utf-8")
    for section in re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]:
        code = "\n".join(m[2] for m in FENCE.finditer(section) if m[1].strip() == "python")
        if code:
            yield section.splitlines()[0].removeprefix("## "), code


@pytest.mark.ci
@pytest.mark.parametrize("code", [pytest.param(code, id=heading) for heading, code in examples()])
def test_worked_examples_run_in_a_changed_copy(code: str, checkout: Path, tmp_path: Path) -> None:
    if "import torch" in code:
        pytest.importorskip("torch")
    check = "import saejax, os; assert saejax.__file__.startswith(os.environ['CHECKOUT']), saejax.__file__\n"
    done = subprocess.run(
        [sys.executable, "-c", check + code],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(checkout), "CHECKOUT": str(checkout)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_notebooks_run(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    runpy.run_path(script(blocks(notebook, "{code-cell}"), tmp_path / "cells.py"))


# --- commands ---------------------------------------------------------------------------------------------------------


def test_the_cheat_sheet_has_every_command_and_every_function() -> None:
    text = (ROOT / "docs" / "cheat-sheet.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if not re.search(rf"saejax {name}\b", text)] == []
    assert [name for name in saejax.__all__ if not re.search(rf"(saejax\.|`){name}\b", text)] == []


COMMAND = re.compile(r"\b(?:saejax|python -m launch\.)(?=[ a-z])")


def command_lines(page: Path) -> list[str]:
    """Every `saejax ...` and `python -m launch....` of the page's shell blocks, as `command word word ...`."""
    found = []
    for block in blocks(page, "bash"):
        for whole in block.text.replace("\\\n", " ").splitlines():
            line = whole.partition(" #")[0]
            for start in COMMAND.finditer(line):
                if start.start() == 0 or line[start.start() - 1] in ' "':
                    words = line[start.end() :].strip().rstrip("&").strip()
                    # The quote that began before the command, as in --wrap="srun saejax ...".
                    found.append(words.rstrip('"') if words.count('"') % 2 else words)
    return found


def settings(words: list[str]) -> Any:
    """The ConfigDict that --config names; of a file that the reader is to write, all defaults."""
    given = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
    name, _, preset = given.get("config", "quickstart").partition(":")
    name = name.removeprefix("configs/").removesuffix(".py")
    return experiments.shipped(name, preset) if name in experiments.names() else default_config()


@pytest.mark.parametrize("page", [page for page in PAGES if command_lines(page)], ids=name_of)
def test_commands_of_a_page_exist_with_their_experiments_and_keys(page: Path) -> None:
    for line in command_lines(page):
        command, *words = shlex.split(line)
        name, _, preset = command.partition(":")
        assert name in COMMANDS, f"{page.name}: {line!r}: no such command"
        if preset:
            experiments.shipped(name, preset)
        flags = {*COMMANDS[name].flags(), "help"}
        config = settings(words)
        for word in words:
            if not word.startswith("--"):
                continue
            key = word[2:].partition("=")[0]
            if key.startswith("config."):
                section = config
                for part in key.split(".")[1:]:
                    assert part in section, f"{page.name}: {line!r}: no key {key}"
                    section = section[part]
            else:
                assert key == "config" or key in flags, f"{page.name}: {line!r}: no flag --{key}"


@pytest.mark.soak
def test_lines_of_the_page_of_formats_run_one_after_the_other(tmp_path: Path) -> None:
    page = ROOT / "docs" / "formats.md"
    lines = [line for block in blocks(page, "bash") if block.info == "bash" for line in block.text.splitlines()]
    assert len(lines) > 8
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for line in lines:
        words = shlex.split(line, comments=True)
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for page in PAGES:
        for block in blocks(page, "bash"):
            for target in re.findall(r"^make ([a-z-]+)", block.text, re.MULTILINE):
                assert target in targets, f"{page.name}:{block.line}: make {target}"


# --- links and lengths ------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of its headings, as GitHub and the site make them."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)} links {target}"
        assert not anchor or anchor in anchors(there), f"{name_of(page)} links {target}: no such heading"


def test_every_page_is_on_the_site() -> None:
    listed = {line.rpartition("<")[2].rstrip(">") for line in _toctrees().splitlines()}
    for page in [*PAGES, *NOTEBOOKS]:
        name = os.path.relpath(page.with_suffix(""), ROOT / "docs")
        assert name in listed or name == "index", f"docs/index.md does not list {name}"


def test_headings_of_every_page_of_the_site_begin_at_one_and_leave_none_out() -> None:
    """Sphinx stops where a page begins at a second level; pages that programs write are pages of the site too."""
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    pages = {page for pattern in conf["include_patterns"] for page in ROOT.glob(pattern.replace("**.md", "**/*.md"))}
    left_out = {"docs/_build", *conf["exclude_patterns"]}
    for page in sorted(pages):
        if any(name_of(page).startswith(name) for name in left_out):
            continue
        prose = FENCE.sub("", page.read_text(encoding="utf-8"))
        levels = [len(marks) for marks in re.findall(r"^(#+) ", prose, re.MULTILINE)]
        steps = [0, *levels]
        deeper = [(before, level) for before, level in zip(steps, levels, strict=False) if level > before + 1]
        assert levels and not deeper, f"{name_of(page)}: headings go down by more than one level: {deeper}"


def _toctrees() -> str:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    trees = [m[2] for m in FENCE.finditer(text) if m[1].strip() == "{toctree}"]
    return textwrap.dedent("\n".join(trees))


def test_readme_is_short_and_lines_are_not_long() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
    for page in [*PAGES, *NOTEBOOKS]:
        if page.stem == "reference":  # generated: tables
            continue
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            table_or_literal = line.startswith(("|", "    "))
            assert len(line) <= 120 or table_or_literal, f"{name_of(page)}:{number} has {len(line)} characters"


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on the path")
@pytest.mark.parametrize("width", [390, 1200])
def test_a_line_of_code_is_not_cut_at_the_edge_of_its_block(width: int, tmp_path: Path) -> None:
    """The site's own style sheet: a line of 120 letters goes on below where its block is narrower."""
    style = (ROOT / "docs" / "static" / "saejax.css").as_uri()
    code = f"<pre style='overflow: auto; font-family: monospace'>{'x = 1  # ' * 13}xx</pre>"
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><link rel=stylesheet href='{style}'><article class=content>{code}</article>")
    with chromium() as tab:
        tab.size(width, 800, phone=width < 500)
        tab.open(page.as_uri())
        assert tab.evaluate("getComputedStyle(document.querySelector('pre')).whiteSpace") == "pre-wrap"
        assert tab.evaluate(
            "(({scrollWidth, clientWidth}) => scrollWidth <= clientWidth)(document.querySelector('pre'))"
        )
