"""SynthSAEBench's recipe at a size for two cores: saejax and SAELens on the same world of SAELens's own generator.

    sh benchmarks/peers/make_env.sh
    build/peers-venv/bin/python benchmarks/peers/make_synthsaebench.py small
    python -m benchmarks.quality.synthsaebench [--minutes=60]

Each training is a line of synthsaebench.jsonl beside this file; what is there already is not run again. Then
synthsaebench.md is made. All dictionaries are scored by saejax, on the same samples.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

import saejax
from saejax.evals.truth import World, plant
from saejax.experiment import shipped

HERE, WORLD, FOLDER = Path(__file__).parent, Path("build/truth/small"), Path("build/truth/dictionaries")
LINES, TABLE = HERE / "synthsaebench.jsonl", HERE / "synthsaebench.md"
K, WIDTH, SAMPLES, BATCH, SEEDS = 5, 256, 1_024_000, 1024, (0, 1, 2)
FAMILIES, RATES = ("batchtopk", "matryoshka"), (3e-4, 1e-3, 3e-3)
FIGURES = ("f1", "mcc", "fve", "l0", "dead")
Row = dict[str, Any]

# The published table: width 4,096, L0 25, 200 million samples of SynthSAEBench-16k (arXiv 2602.14687).
PUBLISHED = {"matryoshka": (0.879, 0.793, 0.779), "batchtopk": (0.732, 0.757, 0.792)}

HEAD = """# SynthSAEBench's recipe on two cores

`python -m benchmarks.quality.synthsaebench`: {date}, 2 CPU cores, 24 GB, no GPU. The world is SAELens's
(`benchmarks/peers/make_synthsaebench.py small`): 1,024 features in 256 dimensions, 7.2 of them fire at a time. All
dictionaries have {width} latents, k {k} and {samples:,} samples in batches of {batch:,}; means over seeds, with the
standard deviation behind. saejax has its defaults. SAELens has its recipe at the rate with the best F1 of {rates}.
`lista_steps=1` is the encoder that looks again.

"""
TAIL = """
The published table, for the shape of the numbers and not to compare with: another world (16,384 features in 768
dimensions, 34 fire), {width_16k:,} latents, L0 25, 200 million samples, on a GPU.

"""


def jobs() -> list[tuple[str, str, float, int]]:
    """(trainer, family, rate, seed); a rate of 0 is saejax's default."""
    ours = [("saejax", family + more, 0.0) for more in ("", " lista_steps=1") for family in FAMILIES]
    theirs = [("saelens", family, rate) for family in FAMILIES for rate in RATES]
    return [(*job, seed) for seed in SEEDS for job in (*ours, *theirs)]


def train(trainer: str, family: str, rate: float, seed: int) -> Row:
    """The scores of one training."""
    config, started = shipped("truth", "saelens"), time.perf_counter()
    config.truth.source, config.seed = str(WORLD), seed
    out = FOLDER / f"{trainer}-{family.replace(' ', '-')}-{rate:g}-{seed}"
    shutil.rmtree(out, ignore_errors=True)
    if trainer == "saelens":
        job = {"world": str(WORLD), "out": str(out), "family": family, "k": K, "d_in": 256, "d_sae": WIDTH}
        job |= {"lr": rate, "samples": SAMPLES, "seed": seed}
        python, script = "build/peers-venv/bin/python", "benchmarks/peers/train_synthsaebench.py"
        subprocess.run([python, script, json.dumps(job)], check=True, stdout=sys.stderr, stderr=subprocess.DEVNULL)
        scores = saejax.truth(config, saejax.load(out, hook_points=("x",)))
    else:
        preset, _, more = family.partition(" ")
        config.coder.preset, config.coder.d_sae, config.coder.k = preset, WIDTH, K
        config.coder.lista_steps = int(more.partition("=")[2] or 0)
        config.train.tokens, config.train.batch_size, config.train.lr = SAMPLES, BATCH, 0.0
        config.runs_dir, config.name = str(out.parent), out.name
        scores = saejax.truth(config)
    row = {"trainer": trainer, "family": family, "lr": rate, "seed": seed, "date": time.strftime("%Y-%m-%d")}
    row |= {name: round(float(scores.figures[name]), 5) for name in FIGURES}
    return row | {"seconds": round(time.perf_counter() - started, 1), "world": plant(World(source=str(WORLD))).saved}


def read() -> list[Row]:
    return [json.loads(line) for line in LINES.read_text(encoding="utf-8").splitlines()] if LINES.exists() else []


def table(rows: list[Row]) -> list[str]:
    lines = ["| trainer | family | seeds | F1 | MCC | FVE | L0 | dead |", "|---|---|---|---|---|---|---|---|"]
    for trainer, family in dict.fromkeys((row["trainer"], row["family"]) for row in rows):
        mine = [row for row in rows if (row["trainer"], row["family"]) == (trainer, family)]
        rates = {row["lr"]: [r for r in mine if r["lr"] == row["lr"]] for row in mine}
        best = max(rates, key=lambda rate: np.mean([row["f1"] for row in rates[rate]]))
        seeds = rates[best]
        cells = [f"{np.mean([r[n] for r in seeds]):.3f} ({np.std([r[n] for r in seeds]):.3f})" for n in FIGURES[:3]]
        cells += [f"{np.mean([r['l0'] for r in seeds]):.2f}", f"{np.mean([r['dead'] for r in seeds]) / WIDTH:.1%}"]
        named = f"{family}, rate {best:g}" if best else family
        lines.append(f"| {trainer} | {' | '.join([named, str(len(seeds)), *cells])} |")
    return lines


_MINUTES = flags.DEFINE_float("minutes", 1e9, "Start no training after so many minutes; the next call goes on.")


def main(_: list[str]) -> None:
    ends, there = time.monotonic() + 60 * _MINUTES.value, read()
    done = {(row["trainer"], row["family"], row["lr"], row["seed"]) for row in there}
    for job in jobs():
        if job in done or time.monotonic() > ends:
            continue
        row = train(*job)
        with LINES.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)
    rows = read()
    dates = sorted({row["date"] for row in rows})
    numbers = {"width": WIDTH, "k": K, "samples": SAMPLES, "batch": BATCH, "rates": ", ".join(f"{r:g}" for r in RATES)}
    head = HEAD.format(date=" to ".join(dict.fromkeys((dates[0], dates[-1]))), **numbers)
    published = ["| family | F1 | MCC | FVE |", "|---|---|---|---|"]
    published += [f"| {name} | {' | '.join(f'{value:.3f}' for value in row)} |" for name, row in PUBLISHED.items()]
    text = head + "\n".join(table(rows)) + "\n" + TAIL.format(width_16k=4096) + "\n".join(published) + "\n"
    TABLE.write_text(text, encoding="utf-8")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    app.run(main)
