"""The architecture as a test: who may import whom, and what is written nowhere.

`violations(root)` reads every Python file of a checkout with `ast` and returns one line per broken rule.
The first tests break each rule in a small made-up tree, so that the checker itself is known to work; then it
reads this checkout.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def rooms_of_design(text: str) -> tuple[dict[str, int], frozenset[str]]:
    """({room: level}, doors above all rooms) of the table of rooms in docs/design.md: the one place that says them."""
    levels: dict[str, int] = {}
    doors = {"", "__main__"}  # saejax/__init__.py and saejax/__main__.py
    for level, rooms in re.findall(r"^\| (L\d+|top) \| ([^|]+) \|", text, re.MULTILINE):
        names = re.findall(r"`(\w+)`", rooms)
        if level == "top":
            doors.update(names)
        else:
            levels.update(dict.fromkeys(names, int(level[1:])))
    return levels, frozenset(doors)


# Imports go down only, and rooms on one level do not know each other.
LEVEL_OF, TOP = rooms_of_design((ROOT / "docs" / "design.md").read_text(encoding="utf-8"))

ABOVE = frozenset({"configs", "launch", "tests"})
TORCH = frozenset({"torch", "torchvision", "torchax"})
# Where torch may be imported, inside functions: models of transformers, and the module that SAEBench evaluates.
IN_TORCH = ("saejax.lm.torch_hooks", "saejax.interop.saebench", "saejax.trained.torch_module")
PICKLERS = frozenset({"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"})
UNSAFE_YAML = frozenset({"load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all"})
SKIPPED = frozenset({"build", "dist", "runs", "stores", "node_modules", "__pycache__"})


def python_files(root: Path) -> Iterator[Path]:
    """Every .py file of the checkout, without hidden folders (environments, caches) and what stages write."""
    for folder, names, files in os.walk(root):
        names[:] = sorted(n for n in names if n not in SKIPPED and not n.startswith("."))
        yield from (Path(folder, f) for f in sorted(files) if f.endswith(".py"))


def module_name(path: Path, root: Path) -> str:
    """saejax/coders/topk.py -> saejax.coders.topk; a package's __init__.py is the package."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, module: str, is_package: bool, known: frozenset[str]) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of all that a module imports, anywhere in it, at run time or for types only.

    `from a import b` is `a.b` where that is a module in `known`, otherwise `a`. A constant name given to
    `importlib.import_module` or `__import__` counts too.
    """
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                outer = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*outer, *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in known else base
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0].value
            if called in {"import_module", "__import__"} and isinstance(name, str) and not name.startswith("."):
                yield node.lineno, name


def room_of(module: str) -> str:
    """saejax.coders.topk -> coders; saejax -> the empty name of saejax/__init__.py."""
    return [*module.split("."), ""][1]


def import_fault(module: str, target: str) -> str | None:
    """Why `module`, a part of saejax, may not import `target`; None when it may."""
    top = target.partition(".")[0]
    if top in ABOVE:
        return f"imports {target}: saejax never imports {top}, which stands above it"
    if top in TORCH and not module.startswith(IN_TORCH):
        return f"imports {target}: torch is an extra and lives in saejax/lm/torch_hooks alone"
    mine, theirs = room_of(module), room_of(target)
    if top != "saejax" or mine == theirs or mine in TOP or mine not in LEVEL_OF:
        return None
    if theirs in TOP:
        return f"imports {target}, which stands above all rooms"
    if theirs not in LEVEL_OF:
        return None  # the unknown room is reported once, at its own files
    if LEVEL_OF[theirs] > LEVEL_OF[mine]:
        levels = f"level {LEVEL_OF[mine]} ({mine}) may not know level {LEVEL_OF[theirs]} ({theirs})"
        return f"imports {target}: {levels}"
    if LEVEL_OF[theirs] == LEVEL_OF[mine]:
        return f"imports {target}: {mine} and {theirs} are on one level and do not know each other"
    return None


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The circles of an import graph: one shortest circle for each module that imports itself in the end.

    Each circle is reported once, beginning with its alphabetically first module.
    """
    found: dict[frozenset[str], list[str]] = {}
    for start in sorted(graph):
        paths = [[start]]
        seen: set[str] = set()
        while paths:
            path = paths.pop(0)
            following = graph.get(path[-1], set())
            if start in following:
                found.setdefault(frozenset(path), path)
                break
            for module in sorted(following - seen):
                seen.add(module)
                paths.append([*path, module])
    return list(found.values())


def _call_fault(node: ast.Call) -> str | None:
    """What is wrong with one call, whichever file it stands in."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    owner_name = owner.id if isinstance(owner, ast.Name) else ""
    if name in {"eval", "exec"} and (owner is None or owner_name == "builtins"):
        return f"calls {name}(): text is never run as code"
    if name in UNSAFE_YAML and owner_name == "yaml":
        return f"calls yaml.{name}(): use yaml.safe_load"
    if name == "read_pickle":
        return "calls read_pickle(): no pickle anywhere, a pickle runs code when it is read"
    given = {keyword.arg for keyword in node.keywords}
    if (owner_name, name) == ("torch", "load") and "weights_only" not in given:
        return "calls torch.load() without weights_only=True: files are read without pickle"
    if name == "load" and owner_name in {"np", "numpy"} and len(node.args) > 2:
        return "passes allow_pickle by its place: name it, and say False"
    for keyword in node.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if keyword.arg == "trust_remote_code" and value is not False:
            return "passes trust_remote_code: a checkpoint's own code is never run"
        if keyword.arg == "allow_pickle" and value is not False:
            return "passes allow_pickle: files are read without pickle"
        if keyword.arg == "weights_only" and value is not True:
            return "passes weights_only other than True: files are read without pickle"
    return None


def _asks_for_code(node: ast.Call) -> bool:
    """Whether a checkpoint is opened by transformers and left to ask whether its own code may run."""
    named = isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"
    # What is passed on as a dict is looked at where the dict is.
    return named and not any(keyword.arg in ("trust_remote_code", None) for keyword in node.keywords)


def forbidden(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """(line, reason) of everything that no file may hold: pickle, eval, exec, unsafe yaml, remote code."""
    for line, target in imports(tree, module, is_package=False, known=frozenset()):
        if target.split(".")[0] in PICKLERS:
            yield line, f"imports {target}: no pickle anywhere, a pickle runs code when it is read"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (fault := _call_fault(node)):
            yield node.lineno, fault
        elif isinstance(node, ast.Call) and module.startswith("saejax") and _asks_for_code(node):
            yield node.lineno, "calls from_pretrained without trust_remote_code=False: it would ask on the terminal"
        elif isinstance(node, ast.ImportFrom) and node.module == "yaml":
            for alias in node.names:
                if alias.name in UNSAFE_YAML:
                    yield node.lineno, f"imports yaml.{alias.name}: use yaml.safe_load"
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                named = isinstance(key, ast.Constant) and key.value == "trust_remote_code"
                if named and not (isinstance(value, ast.Constant) and value.value is False):
                    yield node.lineno, "passes trust_remote_code: a checkpoint's own code is never run"


def violations(root: Path) -> list[str]:
    """One line, "file:line: reason", for every rule that the checkout under `root` breaks."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in python_files(root)}
    names = {path: module_name(path, root) for path in trees}
    known = frozenset(names.values())
    graph: dict[str, set[str]] = {}
    lines: list[str] = []
    strangers: set[str] = set()
    for path, tree in trees.items():
        module, place = names[path], path.relative_to(root).as_posix()
        if "utils" in path.relative_to(root).with_suffix("").parts:
            lines.append(f"{place}:1: nothing is called utils: name it after what it does")
        lines += [f"{place}:{line}: {reason}" for line, reason in forbidden(tree, module)]
        if module.split(".")[0] != "saejax":
            continue
        if (room := room_of(module)) not in LEVEL_OF and room not in TOP and room not in strangers:
            strangers.add(room)
            lines.append(
                f"{place}:1: unknown room saejax/{room}: give it its level in the table of docs/design.md "
                "(top, if it stands above all rooms)"
            )
        found = set(imports(tree, module, path.name == "__init__.py", known))
        graph[module] = {target for _, target in found if target in known and target != module}
        for line, target in sorted(found):
            if fault := import_fault(module, target):
                lines.append(f"{place}:{line}: {fault}")
    lines += [f"a circle of imports: {' -> '.join([*circle, circle[0]])}" for circle in circles(graph)]
    return lines


# --- the checker on made-up trees ---------------------------------------------------------------------------

GOOD = {
    "saejax/__init__.py": "from saejax.app.load import load\n",
    "saejax.app.load.py": "from saejax import checkpoints\nfrom saejax.app.stages import run\n",
    "saejax/app/stages.py": "from saejax.evals.loss import config\nrun = config\n",
    "saejax/core/__init__.py": "",
    "saejax/core/errors.py": "class SaejaxError(Exception): ...\n",
    "saejax/kernels/__init__.py": "from saejax.core import errors\n",
    "saejax/store/reader.py": "from ..core.errors import SaejaxError\nfrom saejax import kernels\n",
    "saejax/coders/__init__.py": "from . import topk\nfrom .topk import TopK\n",
    "saejax/coders/topk.py": "from saejax.coders import base\nTopK = base\n",
    "saejax/coders/base.py": "import numpy as np\nx = np.load('a', allow_pickle=False)\n",
    "saejax/lm/torch_hooks.py": "import torch\nmodel = torch.nn.Linear(1, 1).eval()\n",
    "saejax/lm/decoder.py": "import importlib.util\nhas = importlib.util.find_spec('torch')\n",
    "saejax/checkpoints/__init__.py": "import saejax.store.reader\n",
    "saejax/plans/memory.py": "from saejax.app.stages import run\nplan = run\n",
    "saejax/evals/loss.py": "import yaml\nconfig = yaml.safe_load('a: 1')\n",
    "launch/train.py": "import saejax, torch\n",
    "tests/test_torch.py": "import torch\nimport launch.train\n",
    ".venv/lib/site-packages/foreign/utils.py": "import pickle\n",
    "runs/old/config.py": "eval('1')\n",
}

BAD = {
    "upward": (
        "saejax/core/a.py",
        "from saejax.training import loop",
        "level 0 (core) may not know level 5 (training)",
    ),
    "upward inside a function": ("saejax/store/a.py", "def f():\n    import saejax.lm.decoder", "may not know level 3"),
    "upward and relative": ("saejax/store/a.py", "from ..lm import decoder", "level 2 (store) may not know level 3"),
    "upward, the package form": ("saejax/core/a.py", "from saejax import kernels", "may not know level 1 (kernels)"),
    "upward by a string": (
        "saejax/core/a.py",
        "import importlib\nimportlib.import_module('saejax.lm.decoder')",
        "level 0 (core) may not know level 3 (lm)",
    ),
    "siblings": ("saejax/lm/a.py", "from saejax.coders import topk", "lm and coders are on one level"),
    "a door from a room": ("saejax/evals/a.py", "from saejax import experiment", "stands above all rooms"),
    "the package from a room": ("saejax/evals/a.py", "from saejax import Something", "stands above all rooms"),
    "configs": ("saejax/training/a.py", "import configs.quickstart", "saejax never imports configs"),
    "launch": ("saejax/app/b.py", "from launch import train", "saejax never imports launch"),
    "tests": ("saejax/plans/a.py", "import tests.conftest", "saejax never imports tests"),
    "torch": ("saejax/capture/a.py", "import torch.nn", "torch is an extra"),
    "torch in a function": ("saejax/lm/a.py", "def f():\n    from torch import nn", "torch is an extra"),
    "torch by a string": ("saejax/app/a.py", "__import__('torch')", "torch is an extra"),
    "pickle": ("tests/test_a.py", "import pickle", "no pickle anywhere"),
    "a cousin of pickle": ("launch/a.py", "from joblib import load", "no pickle anywhere"),
    "numpy's pickle": ("saejax/core/a.py", "import numpy\nnumpy.load('a', allow_pickle=True)", "passes allow_pickle"),
    "torch's pickle": ("tests/test_a.py", "import torch\ntorch.load('a', weights_only=False)", "passes weights_only"),
    "torch's pickle by default": ("launch/a.py", "import torch\ntorch.load('a')", "torch.load() without weights_only"),
    "numpy's pickle by its place": ("saejax/core/a.py", "import numpy\nnumpy.load('a', None, True)", "allow_pickle"),
    "pandas's pickle": ("benchmarks/a.py", "import pandas\npandas.read_pickle('a')", "read_pickle"),
    "eval": ("configs/a.py", "x = eval('1')", "calls eval()"),
    "exec": ("saejax/core/a.py", "import builtins\nbuiltins.exec('x = 1')", "calls exec()"),
    "yaml": ("saejax/core/a.py", "import yaml\nyaml.unsafe_load('a')", "use yaml.safe_load"),
    "yaml by name": ("saejax/core/a.py", "from yaml import unsafe_load", "use yaml.safe_load"),
    "remote code": ("saejax/lm/a.py", "f(trust_remote_code=True)", "trust_remote_code"),
    "remote code, left open": ("saejax/lm/a.py", "T.from_pretrained('a')", "without trust_remote_code=False"),
    "yaml by default": ("saejax/core/a.py", "import yaml\nyaml.load('a', yaml.Loader)", "use yaml.safe_load"),
    "remote code, passed on": ("saejax/lm/a.py", "f(trust_remote_code=config.trust)", "trust_remote_code"),
    "remote code in a dict": ("saejax/lm/a.py", "f(**{'trust_remote_code': True})", "trust_remote_code"),
    "utils.py": ("saejax/core/utils.py", "", "nothing is called utils"),
    "utils/": ("launch/utils/a.py", "", "nothing is called utils"),
    "a new room": (
        "saejax/dreams/a.py",
        "",
        "unknown room saejax/dreams: give it its level in the table of docs/design.md",
    ),
    "a new module": ("saejax/magic.py", "", "unknown room saejax/magic"),
}


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


def test_a_tree_that_keeps_the_rules_passes(tmp_path: Path) -> None:
    assert violations(write_tree(tmp_path, GOOD)) == []


@pytest.mark.parametrize("case", BAD)
def test_each_broken_rule_is_named_with_its_file(tmp_path: Path, case: str) -> None:
    name, text, reason = BAD[case]
    (line,) = violations(write_tree(tmp_path, {**GOOD, name: text}))
    assert line.startswith(f"{name}:") and reason in line


def test_a_circle_within_a_room_is_found(tmp_path: Path) -> None:
    circle = {
        "saejax/coders/a.py": "from . import b",
        "saejax/coders/b.py": "def f():\n    from saejax.coders.c import g",
        "saejax/coders/c.py": "import saejax.coders.a",
        "saejax/coders/outside.py": "from saejax.coders import a",
    }
    assert violations(write_tree(tmp_path, {**GOOD, **circle})) == [
        "a circle of imports: saejax.coders.a -> saejax.coders.b -> saejax.coders.c -> saejax.coders.a"
    ]


def test_a_circle_through_the_package_itself_is_found(tmp_path: Path) -> None:
    circle = {"saejax/coders/base.py": "from saejax.coders import TopK"}
    (line,) = violations(write_tree(tmp_path, {**GOOD, **circle}))
    assert line.startswith("a circle of imports: saejax.coders -> saejax.coders.topk -> saejax.coders.base")


# --- the checker on this checkout ---------------------------------------------------------------------------


def test_this_checkout_keeps_the_rules() -> None:
    found = violations(ROOT)
    assert not found, "\n" + "\n".join(found)


def test_every_module_is_imported_without_torch() -> None:
    """`import saejax` loads no torch; all modules but lm/torch_hooks work where torch cannot be imported."""
    code = """
        import importlib, pkgutil, sys
        import saejax
        for name in saejax.__all__:
            getattr(saejax, name)
        assert "torch" not in sys.modules, "import saejax imported torch"
        sys.modules["torch"] = None  # from here on `import torch` raises ImportError
        names = [m.name for m in pkgutil.walk_packages(saejax.__path__, "saejax.")]
        names = [n for n in names if not n.startswith("saejax.lm.torch_hooks")]
        for name in names:
            importlib.import_module(name)
        print(len(names))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2
