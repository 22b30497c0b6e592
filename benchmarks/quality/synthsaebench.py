"""SynthSAEBench's recipe: saejax beside SAELens on the same world at a size for two cores, or alone at the real size.

    sh benchmarks/peers/make_env.sh
    build/peers-venv/bin/python benchmarks/peers/make_synthsaebench.py small
    python -m benchmarks.quality.synthsaebench [--minutes=60]
    sh benchmarks/truth_on_gpu.sh

Each training is a line of synthsaebench.jsonl beside this file; what is there already is not run again. Then
synthsaebench.md is made. All dictionaries are scored by saejax, on the same samples.
"""

import dataclasses
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags
from ml_collections import config_dict

import saejax
from saejax.evals.truth import World, plant
from saejax.experiment import shipped

HERE, FOLDER = Path(__file__).parent, Path("build/truth/dictionaries")
LINES, TABLE = HERE / "synthsaebench.jsonl", HERE / "synthsaebench.md"
BATCH, SEEDS = 1024, (0, 1, 2)
FIGURES = ("f1", "mcc", "fve", "l0", "dead")
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Size:
    """A world and how long is trained on it.

    Attributes:
        preset: of configs/truth.py, for where no world was saved.
        world: the folder of one that SAELens saved; "": `preset` plants it.
        d_in, d_sae, k: of the dictionaries.
        features: of the world, for the table.
        peers: SAELens trains too.
    """

    preset: str
    world: str
    d_in: int
    d_sae: int
    k: int
    samples: int
    features: str
    peers: bool = False

    def config(self) -> config_dict.ConfigDict:
        config = shipped("truth", "saelens" if self.world else self.preset)
        if self.world:
            config.truth.source = self.world
        return config


SIZES = {
    "small": Size(
        "synthsaebench_small",
        "build/truth/small",
        256,
        256,
        5,
        1_024_000,
        "1,024 features in 256 dimensions, 7.2 of which fire at a time",
        peers=True,
    ),
    "16k": Size(
        "synthsaebench_16k",
        "",
        768,
        4096,
        25,
        200_000_000,
        "16,384 features in 768 dimensions, 34 of which fire at a time",
    ),
}


def ours(k: int) -> dict[str, Row]:
    """{what it is called: keys of the coder}."""
    presets: dict[str, Row] = {"batchtopk": {"k": k}, "matryoshka": {"k": k}, "jumprelu": {"target_l0": float(k)}}
    once = {f"{name}, looks once more": keys | {"lista_steps": 1} for name, keys in presets.items()}
    recipe = {"lista_steps": 1, "prefixes": (1 / 32, 1 / 8, 1 / 2, 1.0), "prefixes_detached": True}
    recipe |= {"k_start": round(2.4 * k), "k_anneal_fraction": 0.9}
    named = presets | once | {"matryoshka, as LISTA-Matryoshka": presets["matryoshka"] | recipe}
    return {name: {"preset": name.partition(",")[0]} | keys for name, keys in named.items()}


# SAELens's, and the rates that it is tried at with the first seed.
FAMILIES, RATES = ("batchtopk", "matryoshka"), (1e-2, 3e-2, 3e-3, 1e-1)

# (F1, MCC, explained variance) at width 4,096, L0 25 and 200 million samples of SynthSAEBench-16k (arXiv 2602.14687).
PUBLISHED = {
    "matryoshka": (0.879, 0.793, 0.779),
    "batchtopk": (0.732, 0.757, 0.792),
    "jumprelu": (0.732, 0.753, 0.795),
    "standard": (0.556, 0.604, 0.765),
    "matching pursuit": (0.446, 0.693, 0.835),
}

HEAD = """# SynthSAEBench's recipe

`python -m benchmarks.quality.synthsaebench`: {date}. Means over seeds, behind them the standard deviation, in batches
of {batch:,}. saejax has its defaults. All dictionaries are scored by saejax, on the same samples; last, those that
SAELens can read by SAELens's own evaluation too, on other samples. "Looks once more" is `coder.lista_steps=1`; "as
LISTA-Matryoshka" has besides prefixes of 1/32, 1/8, 1/2 and all latents, detached, and a k that falls from 2.4 times
its last value (github.com/chanind/claude-auto-research-synthsaebench). A world is named by the begin of its sha256. The
same command makes it again on the same machine, and made another one on another processor.
"""
SMALL = """
## At a size for two cores

The world is SAELens's (`benchmarks/peers/make_synthsaebench.py small`): {features}; dictionaries of {d_sae:,} latents,
k {k}, {samples:,} samples; 2 CPU cores, 24 GB, no GPU. SAELens has its recipe at the rate with the best F1 of its
first seed: {rates}.

"""
WHOLE = """
## At the size that was published

{features}; dictionaries of {d_sae:,} latents, L0 {k}. `sh benchmarks/truth_on_gpu.sh` trains saejax's on {samples:,}
samples. Published is SAELens's, with as many samples, on a GPU.

"""


def saved(size: Size) -> str:
    """Which world it is; "" where `preset` plants it."""
    return plant(World(source=size.world)).saved if size.world else ""


def jobs(size: Size) -> Iterator[tuple[str, str, float, int]]:
    """(trainer, family, rate, seed), what has a peer first; a rate of 0 is saejax's default.

    A peer is tried at several rates with the first seed; its others have the best.
    """
    beside = [family for family in ours(size.k) if family in FAMILIES]
    for seed in SEEDS:
        yield from (("saejax", family, 0.0, seed) for family in beside)
        if size.peers and not seed:
            yield from (("SAELens", family, rate, seed) for family in FAMILIES for rate in RATES)
        elif size.peers:
            yield from (("SAELens", family, best_rate(_rows(size, family)), seed) for family in FAMILIES)
    yield from (("saejax", family, 0.0, seed) for seed in SEEDS for family in ours(size.k) if family not in beside)


def _rows(size: Size, family: str) -> list[Row]:
    """SAELens's so far of a family."""
    of = ("SAELens", family, size.samples, saved(size))
    return [row for row in read() if _way(row) == of]


def best_rate(rows: list[Row]) -> float:
    """That with the best F1 of the first seed."""
    return float(max((row for row in rows if not row["seed"]), key=lambda row: row["f1"])["lr"])


def train(size: Size, trainer: str, family: str, rate: float, seed: int) -> Row:
    """The scores of one training."""
    config, started = size.config(), time.perf_counter()
    config.seed = seed
    world, named = saved(size), family.replace(", ", "-").replace(" ", "-")
    out = FOLDER / f"{size.preset}{world[:8]}-{size.samples}-{trainer}-{named}-{rate:g}-{seed}"
    if trainer == "SAELens":
        shutil.rmtree(out, ignore_errors=True)
        job = {"world": size.world, "out": str(out), "family": family, "k": size.k, "d_in": size.d_in}
        job |= {"d_sae": size.d_sae, "lr": rate, "samples": size.samples, "seed": seed}
        _peer("train_synthsaebench.py", job)
        scores = saejax.truth(config, saejax.load(out, hook_points=("x",)))
    else:
        config.coder.update(ours(size.k)[family] | {"d_sae": size.d_sae})
        config.train.tokens, config.train.batch_size, config.train.lr = size.samples, BATCH, rate
        config.runs_dir, config.name = str(out.parent), out.name
        scores = saejax.truth(config)
    row = {"trainer": trainer, "family": family, "lr": rate, "seed": seed, "samples": size.samples}
    row |= {"date": time.strftime("%Y-%m-%d")}
    row |= {name: round(float(scores.figures[name]), 5) for name in FIGURES}
    row["seconds"] = round(time.perf_counter() - started, 1)
    row["world"] = world
    # SAELens has no encoder that looks again.
    if size.peers and (trainer == "SAELens" or "lista_steps" not in ours(size.k)[family]):
        row["by_saelens"] = _by_saelens(size, out, trainer == "SAELens")
    return row


def _by_saelens(size: Size, out: Path, theirs: bool) -> Row:
    """SAELens's own scores of a dictionary, on other samples of the same world."""
    folder = out if theirs else out / "saelens"
    if not theirs:
        saejax.load(out).save(folder, format="saelens")
    found: Row = json.loads(_peer("score_synthsaebench.py", {"world": size.world, "dictionary": str(folder)}))
    return found


def _peer(script: str, job: Row) -> str:
    """The last line that SAELens's side prints."""
    command = ["build/peers-venv/bin/python", f"benchmarks/peers/{script}", json.dumps(job)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    return printed.strip().rpartition("\n")[2]


def read() -> list[Row]:
    return [json.loads(line) for line in LINES.read_text(encoding="utf-8").splitlines()] if LINES.exists() else []


def table(rows: list[Row], d_sae: int) -> list[str]:
    """Markdown: a line for each way to train."""
    head = [
        "trainer",
        "family",
        "world",
        "million samples",
        "seeds",
        "F1",
        "MCC",
        "FVE",
        "L0",
        "dead",
        "F1, MCC, FVE by SAELens",
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for way in dict.fromkeys(map(_way, rows)):
        mine = [row for row in rows if _way(row) == way]
        best = best_rate(mine)
        seeds = [row for row in mine if row["lr"] == best]
        cells = [f"{np.mean([r[n] for r in seeds]):.3f}" for n in FIGURES[:3]]
        if len(seeds) > 1:
            cells = [f"{cell} ({np.std([r[n] for r in seeds]):.3f})" for cell, n in zip(cells, FIGURES, strict=False)]
        cells += [f"{np.mean([r['l0'] for r in seeds]):.2f}", f"{np.mean([r['dead'] for r in seeds]) / d_sae:.1%}"]
        theirs = [row["by_saelens"] for row in seeds if "by_saelens" in row]
        cells.append(", ".join(f"{np.mean([r[n] for r in theirs]):.3f}" for n in FIGURES[:3]) if theirs else "-")
        trainer, family, samples, world = way
        named = f"{family}, rate {best:g}" if best else family
        about = [trainer, named, world[:8] or "planted", f"{samples / 1e6:.4g}", str(len(seeds))]
        lines.append(f"| {' | '.join([*about, *cells])} |")
    return lines


def _way(row: Row) -> tuple[str, str, int, str]:
    return row["trainer"], row["family"], row["samples"], row["world"]


def page(rows: list[Row]) -> str:
    """The Markdown of the table's file."""
    dates = sorted({row["date"] for row in rows})
    text = HEAD.format(date=" to ".join(dict.fromkeys((dates[0], dates[-1]))), batch=BATCH)
    for (named, size), title in zip(SIZES.items(), (SMALL, WHOLE), strict=True):
        rates = ", ".join(f"{rate:g}" for rate in sorted({row["lr"] for row in rows if row["lr"]}))
        text += title.format(**dataclasses.asdict(size), rates=rates)
        lines = table([row for row in rows if row["size"] == named], size.d_sae)
        if named == "16k":
            lines += [
                f"| published | {name} | published | 200 | - | {' | '.join(map(str, of))} | 25 | - | - |"
                for name, of in PUBLISHED.items()
            ]
        text += "\n".join(lines) + "\n"
    return text


_SIZE = flags.DEFINE_enum("size", "small", list(SIZES), "The world and the dictionaries.")
_WORLD = flags.DEFINE_string("world", "", "Folder of a world that SAELens saved, in place of the size's own.")
_SAMPLES = flags.DEFINE_integer("samples", 0, "Of a training; 0: as many as the size says.")
_MINUTES = flags.DEFINE_float("minutes", 1e9, "Start no training after so many minutes; the next call goes on.")


def main(_: list[str]) -> None:
    size = SIZES[_SIZE.value]
    size = dataclasses.replace(size, world=_WORLD.value or size.world, samples=_SAMPLES.value or size.samples)
    ends = time.monotonic() + 60 * _MINUTES.value
    key = ("size", "samples", "world", "trainer", "family", "lr", "seed")
    done, world = {tuple(row[name] for name in key) for row in read()}, saved(size)
    for job in jobs(size):
        if (_SIZE.value, size.samples, world, *job) in done:
            continue
        if time.monotonic() > ends:
            break
        row = {"size": _SIZE.value} | train(size, *job)
        with LINES.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)
    text = page(read())
    TABLE.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    app.run(main)
