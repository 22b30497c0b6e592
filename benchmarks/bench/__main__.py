"""The benchmark: `make bench`, or

    python -m benchmarks.bench [--quick] [--rows=topk-6144,...] [--sections=training,...] [--minutes=10] [--output=FILE]
    python -m benchmarks.bench --render                 # page and pictures from the JSON alone
    python -m benchmarks.bench --list                   # the rows

Everybody in turn, in several rounds, on this machine: saejax, the peers (in an environment of their own,
benchmarks/peers/make_env.sh), and the floor. Results go to benchmarks/bench/results.json after every row, then to
benchmarks/RESULTS.md. Ctrl-C keeps what was measured. On a GPU the rows are those of GPUs.
"""

import argparse
import math
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.bench import device_costs, frame, render, selection, sums, system, training
from benchmarks.bench.protocol import PYTHON_PATH, ROOT

SECTIONS: tuple[frame.Section, ...] = (training, selection, sums, system, device_costs)
RESULTS = ROOT / "benchmarks/bench/results.json"
PAGE = ROOT / "benchmarks/RESULTS.md"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = {"type": lambda text: [name for name in text.split(",") if name], "default": []}
    parser.add_argument("--quick", action="store_true", help="few rows, three rounds: about five minutes on two cores")
    parser.add_argument("--rounds", type=int, help="how often everybody has a turn (5; 3 with --quick)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no row after so many minutes")
    parser.add_argument("--rows", metavar="NAME,...", help="these rows alone", **names)
    parser.add_argument("--sections", metavar="NAME,...", help="these sections alone", **names)
    parser.add_argument(
        "--peers", default=ROOT / "build/peers-venv/bin/python", help="Python of the peers' environment"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON; the page is beside it if it is another")
    parser.add_argument("--folder", type=Path, help="where activations and stores go for the time (a temporary folder)")
    parser.add_argument("--render", action="store_true", help="measure nothing; write page and pictures from the JSON")
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    told = parser.parse_args(arguments)
    if told.rounds is not None and told.rounds < 1:
        parser.error(f"--rounds {told.rounds} must be 1 at least")
    return told


def device() -> tuple[str, str]:
    """(backend, its device) that JAX finds, asked in a process of its own: the driver holds neither threads nor memory.

    Raises:
        SystemExit: JAX does not start.
    """
    code = "import jax; d = jax.devices()[0]; print(jax.default_backend()); print(d.device_kind)"
    asked = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    if asked.returncode:
        raise SystemExit(f"JAX does not start here: {asked.stderr.strip().splitlines()[-1]}")
    backend, kind = asked.stdout.strip().splitlines()[-2:]
    return ("cpu", "no accelerator") if backend == "cpu" else ("gpu", kind)


def peers_python(path: Path, backend: str) -> Path | None:
    """A Python that can import the peers: the named one, or on a GPU this one, whose torch may know the card."""
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    for python in [Path(sys.executable), path] if backend == "gpu" else [path]:
        command = [str(python), str(ROOT / "benchmarks/peers/step_worker.py"), "--check"]
        if not python.exists():
            continue
        asked = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=ROOT)
        if asked.returncode == 0 and (backend == "cpu" or asked.stdout.startswith("cuda")):
            return python
    return None


def main(arguments: list[str]) -> int:
    given = parse(arguments)
    page = PAGE if given.output == RESULTS else given.output.with_suffix(".md")
    if given.render:
        render.write(SECTIONS, given.output, page)
        return 0
    backend, kind = device()
    rounds = given.rounds or (3 if given.quick else 5)
    with tempfile.TemporaryDirectory(prefix="saejax-bench-", dir=given.folder) as folder:
        peers = None if given.list else peers_python(Path(given.peers), backend)
        told = frame.Told(given.quick, rounds, Path(folder), backend, peers)
        try:
            wanted = frame.chosen(SECTIONS, told, given.rows, given.sections)
        except ValueError as wrong:
            print(wrong, file=sys.stderr)
            return 2
        if given.list:
            print("\n".join(f"{section.NAME:<14}{row.name}" for section, row in wanted))
            return 0
        if peers is None:
            print("The peers are not there, so nobody is compared: sh benchmarks/peers/make_env.sh installs them.")
        # Where files lie on this machine is nobody's business.
        words = [argument for argument in arguments if not argument.startswith(("--peers", "--output"))]
        about = frame.about_machine(kind, shlex.join(["python", "-m", "benchmarks.bench", *words]))
        about["peers"] = peers is not None
        whole = frame.measure(wanted, told, given.output, about, given.minutes)
    render.write(SECTIONS, given.output, page)
    print(f"{given.output} and {page} are written.")
    return 0 if whole else 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
