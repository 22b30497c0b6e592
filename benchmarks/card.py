"""What a graphics card computes: the numbers of the CPU, the largest exactly, and the same bits every time.

    python -m benchmarks.card [--output=benchmarks/card.md] [--parts=largest,bits:topk] [--minutes=10]

Three questions, each answered by processes of their own on the one card, as many side by side as there are cores for:

    largest    the k largest of rows with many equal numbers, against numpy's stable sort
    bits       `saejax.train` with a preset's defaults, twice in one process; then in a process that reads the first
               one's compiled programs, and in one that compiles them anew
    numbers    every coder of benchmarks.equality takes 20 steps of plain SGD in float32, on the card and on the CPU

Each answer is a file as soon as it is known, so that what the minutes do not reach is "not measured" and nothing else
is lost. Exits with 1 where a number is farther off than LIMIT, a selection is another, or bits differ within a process
or between two that share compiled programs. Without a card there is nothing to ask: it says so, and ends with 2.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1e-4  # 20 steps of float32 sums in another order
PRESETS = (
    "topk",
    "batchtopk",
    "matryoshka",
    "jumprelu",
    "standard",
    "gated",
    "transcoder",
    "crosscoder_batchtopk",
    "clt",
)
PARTS = ("largest", *(f"bits:{preset}" for preset in PRESETS), "numbers")
# Wide enough for the sums by sorted pairs: 2,048 x 768 x 6,144 is above kernels.segments' bar for one product.
ROWS, WIDTH, LATENTS, BATCH, STEPS = 8_192, 768, 6_144, 2_048, 40
_SITES = {"transcoder": 2, "crosscoder_batchtopk": 2, "clt": 2}
_ASKED = ((6_144, 8), (6_144, 32), (24_576, 64), (24_576, 300))
_CORES = 4  # what one process takes while XLA compiles for a card


# --- in a process of its own -------------------------------------------------------------------------------------


def write_numbers(folder: Path) -> None:
    """<coder>.npz each: losses and gradients' norms by step, kept latents by step, parameters after the last."""
    from benchmarks.equality import CODERS, LAYERS, B, trained

    for name in CODERS:
        found = trained(name)
        columns = {metric: found.column(metric) for metric in ("loss", "grad_norm")}
        columns["kept latents"] = np.rint(found.column("l0") * B * LAYERS)
        np.savez(folder / f"{name.replace('/', ' ')}.npz", **columns, **found.end)


def write_largest(folder: Path) -> None:
    """largest.json: {what was selected: whether it is numpy's choice}"""
    import jax

    from saejax.kernels.selection import largest_mask, largest_of_rows

    found = {}
    for width, k in _ASKED:
        # Steps of 1/64: many numbers are equal at every border.
        values = np.round(np.abs(np.random.default_rng(width + k).normal(size=(256, width))) * 64).astype(np.float32)
        order = np.argsort(-values, axis=1, kind="stable")[:, :k]
        for falling in (True, False):
            got = np.asarray(jax.jit(lambda v, k=k, f=falling: largest_of_rows(v, k, f))(values))
            want = order if falling else np.sort(order, axis=1)
            found[f"{k} of {width:,}, {'falling' if falling else 'by index'}"] = bool((got == want).all())
        flat = np.zeros(values.size, bool)
        flat[np.argsort(-values.ravel(), kind="stable")[: 256 * k]] = True
        mask = np.asarray(jax.jit(lambda v, k=k: largest_mask(v, 256 * k))(values))
        found[f"{256 * k:,} of 256 x {width:,}"] = bool((mask.ravel() == flat).all())
        (folder / "largest.json").write_text(json.dumps(found))


def write_bits(folder: Path, preset: str) -> None:
    """<preset>.json: of each of two trainings the hash of all parameters, and seconds with compilation."""
    import saejax

    rng = np.random.default_rng(0)
    codes = (rng.random((ROWS, 512)) < 0.03) * rng.exponential(1.0, (ROWS, 512))
    x = {
        f"h{i}": (codes @ rng.normal(size=(512, WIDTH)) + 0.1 * rng.normal(size=(ROWS, WIDTH))).astype(np.float32)
        for i in range(_SITES.get(preset, 1))
    }
    more: dict[str, Any] = {"writes": ("h0", "h1")} if preset == "clt" else {}
    more |= {"reads": ("h0", "h1")} if preset in ("clt", "crosscoder_batchtopk") else {}
    found = []
    for _ in range(2):
        started = time.perf_counter()
        sae = saejax.train(x, preset, d_sae=LATENTS, tokens=STEPS * BATCH, batch_size=BATCH, progress=False, **more)
        digest = hashlib.sha256()
        for name in sorted(sae.params):
            digest.update(np.asarray(sae.params[name]).tobytes())
        found.append({"bits": digest.hexdigest()[:16], "seconds": round(time.perf_counter() - started, 1)})
        (folder / f"{preset}.json").write_text(json.dumps(found))


def write(part: str, folder: Path) -> None:
    kind, _, preset = part.partition(":")
    folder.mkdir(parents=True, exist_ok=True)
    if preset:
        write_bits(folder, preset)
    else:
        {"numbers": write_numbers, "largest": write_largest}[kind](folder)


# --- asking ------------------------------------------------------------------------------------------------------


def ask(parts: Sequence[str], folder: Path, minutes: float) -> None:
    """Let processes write their answers below `folder`, until all have or the time is over."""
    ends, running = time.monotonic() + 60 * minutes, list[subprocess.Popen[bytes]]()
    bits = [part for part in parts if part.startswith("bits:")]
    rounds = [[(part, "card", part) for part in parts], [(p, which, p) for p in bits for which in ("again", "anew")]]
    if "numbers" in parts:
        rounds[0].insert(0, ("numbers", "cpu", "cpu"))
    for jobs in rounds:
        for part, which, programs in jobs:
            while len(running) >= max(1, (os.cpu_count() or 1) // _CORES) and time.monotonic() < ends:
                running = _still(running)
            if time.monotonic() < ends:
                cache = folder / "programs" / f"{programs} {'anew' if which == 'anew' else ''}".replace(":", " ")
                running.append(_start(part, folder / which, "cpu" if which == "cpu" else "cuda", cache))
        while running and time.monotonic() < ends:
            running = _still(running)
    for process in running:
        process.kill()


def _still(running: list[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    """Those that run after a moment; what the others leave says how they ended."""
    time.sleep(0.2)
    return [process for process in running if process.poll() is None]


def _start(part: str, folder: Path, platforms: str, programs: Path) -> subprocess.Popen[bytes]:
    more = {"JAX_PLATFORMS": platforms, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    more |= {"JAX_COMPILATION_CACHE_DIR": str(programs), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.card", f"--part={part}", f"--save={folder}"]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | more)


def lines(folder: Path, parts: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """(a line of the page, whether what it says is good)"""
    if "largest" in parts:
        yield from [("| the largest, with many equal | numpy's choice |", True), ("|---|---|", True)]
        for name, good in (_json(folder / "card/largest.json") or {"not measured": False}).items():
            yield f"| {name} | {'yes' if good else 'no'} |", good
        yield "", True
    if presets := [part.partition(":")[2] for part in parts if part.startswith("bits:")]:
        heading = (
            "preset",
            "seconds, first and second",
            "twice in a process",
            "programs shared",
            "programs compiled anew",
        )
        yield from [(f"| {' | '.join(heading)} |", True), ("|---|---|---|---|---|", True)]
        for preset in presets:
            first, again, anew = (_json(folder / which / f"{preset}.json") for which in ("card", "again", "anew"))
            hashes = [
                x[i]["bits"] if x and len(x) > i else None for x, i in ((first, 0), (first, 1), (again, 0), (anew, 0))
            ]
            words = ["not measured" if None in (hashes[0], h) else _SAME[hashes[0] == h] for h in hashes[1:]]
            seconds = ", ".join(str(run["seconds"]) for run in first or ())
            yield f"| {preset} | {seconds} | {' | '.join(words)} |", words[:2] == [_SAME[True]] * 2
        yield "", True
    if "numbers" in parts:
        from benchmarks.equality import CODERS

        yield "| coder | largest relative difference of card and CPU | as many latents at every step |", True
        yield "|---|---|---|", True
        for name in CODERS:
            files = [folder / which / f"{name.replace('/', ' ')}.npz" for which in ("card", "cpu")]
            if not all(file.exists() for file in files):
                yield f"| {name} | not measured | |", False
                continue
            card, cpu = (dict(np.load(file)) for file in files)
            same = bool((card.pop("kept latents") == cpu.pop("kept latents")).all())
            apart = max(float(np.abs(card[key] - cpu[key]).max() / (np.abs(cpu[key]).max() or 1)) for key in cpu)
            yield f"| {name} | {apart:.0e} | {'yes' if same else 'no'} |", apart <= LIMIT and same


_SAME = {True: "the same bits", False: "other bits"}


def _json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


_HEAD = """# What a card computes

`python -m benchmarks.card`: {date}, {card}, Python {python}, jax {jax}. Bits: {steps} steps of {batch:,} rows, {width}
-> {latents:,} latents, each preset's defaults; several processes side by side on the card, so that seconds say little.
XLA times several kernels for a product and takes the fastest: a process that compiles anew may round otherwise, and the
last column says whether it did. Numbers: 20 steps of plain SGD in float32 (`python -m benchmarks.equality` has the
sizes): losses, gradients' norms, parameters and statistics.

"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the page there")
    parser.add_argument("--parts", default=",".join(PARTS), help="what is asked")
    parser.add_argument("--minutes", type=float, default=10.0, help="give up what is not done by then")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--save", type=Path, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.part:
        write(told.part, told.save)
        return 0
    parts = told.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts: there is no {', '.join(unknown)}; there are {', '.join(PARTS)}")
    code = "import jax, json; print(json.dumps([jax.default_backend(), jax.devices()[0].device_kind, jax.__version__]))"
    asked = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    backend, card, version = json.loads(asked.stdout.splitlines()[-1])
    if backend != "gpu":
        print(f"benchmarks.card: JAX sees {card}, no card")
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        ask(parts, Path(temporary), told.minutes)
        table = list(lines(Path(temporary), parts))
    about = {"date": time.strftime("%Y-%m-%d"), "card": card, "python": platform.python_version(), "jax": version}
    text = _HEAD.format(**about, steps=STEPS, batch=BATCH, width=WIDTH, latents=LATENTS)
    text += "\n".join(line for line, _ in table) + "\n"
    print(text)
    if told.output:
        told.output.write_text(text)
    return 0 if all(good for _, good in table) else 1


if __name__ == "__main__":
    sys.exit(main())
