"""saejax, SAELens and dictionary_learning on the same stored activations: same tokens, order, width, prefixes and L0.

    make quickstart                       # captures stores/quickstart
    sh benchmarks/peers/make_env.sh       # the peers' environment
    python -m benchmarks.quality.run

For each family and trainer: two or three learning rates at k = 24, the best of them also at k = 12 and 48. Each run is
a line of results.jsonl beside this file; what is there already is not run again. Then table.md and l0_fve.png are made.

The best rate is the one with the largest FVE once its L0 is brought to k along the slope of that trainer's topk curve,
which is the same for all three rates; the table's FVE is read off the curve through the three k, at L0 = 24.
"""

import json
import math
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.peers.measure import measure
from saejax.coders import CoderConfig, build
from saejax.store import Batches, StoreReader
from saejax.trained import make_sites
from saejax.training import TrainConfig
from saejax.training.optim import make_optimizer, make_schedule
from saejax.training.start import make_prepare
from saejax.training.state import make_init
from saejax.training.step import default_hyper, make_step

FAMILIES = ("topk", "batchtopk", "jumprelu", "matryoshka")
TRAINERS = ("saejax", "saelens", "dictionary_learning")
KS = (24, 12, 48)
# For matryoshka the least was left out: for all trainers it had been the worst of topk and batchtopk.
RATES = dict.fromkeys(FAMILIES, (1e-3, 3e-3, 1e-2)) | {"matryoshka": (3e-3, 1e-2)}
D_SAE, PREFIXES = 1024, (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
HOOK_POINT = "blocks.3.resid_post"
HERE = Path(__file__).parent

_STORE = flags.DEFINE_string("store", "stores/quickstart", "Captured activations, with train and heldout.")
_PEERS = flags.DEFINE_string("peers", "build/peers-venv/bin/python", "Python of the peers' environment.")
_TOKENS = flags.DEFINE_integer("tokens", 1_024_000, "Activations that each coder is trained on.")
_BATCH = flags.DEFINE_integer("batch", 1024, "Activations in a batch.")
_DEAD = flags.DEFINE_integer("dead_after", 100_000, "Tokens without firing after which a latent is dead.")
_FAMILIES = flags.DEFINE_list("families", list(FAMILIES), "Train these; topk must be there or trained already.")
_ONLY_TABLE = flags.DEFINE_bool("only_table", False, "Train nothing; make the table and the picture again.")

Row = dict[str, Any]


def batches() -> Batches:
    return Batches(StoreReader.open(f"{_STORE.value}/train", [HOOK_POINT]), _BATCH.value, seed=0)


def write_arrays(folder: Path) -> None:
    """The batches in the order in which saejax sees them, for the peers; and the held-out rows."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "A.npy").exists():
        source = batches()
        shape = (_TOKENS.value // _BATCH.value * _BATCH.value, source.hook_points[HOOK_POINT])
        rows = np.lib.format.open_memmap(folder / "part.npy", mode="w+", dtype=np.float32, shape=shape)
        for i, batch in zip(range(shape[0] // _BATCH.value), source.iterate(0), strict=False):
            rows[i * _BATCH.value : (i + 1) * _BATCH.value] = batch[HOOK_POINT]
        rows.flush()
        (folder / "part.npy").rename(folder / "A.npy")
    heldout = StoreReader.open(f"{_STORE.value}/heldout", [HOOK_POINT])
    np.save(folder / "H.npy", heldout.rows(0, heldout.n_tokens)[HOOK_POINT].astype(np.float32))


def train_ours(family: str, k: int, lr: float, heldout: np.ndarray) -> Row:
    """The preset as it is, with the training defaults."""
    prefixes = PREFIXES if family == "matryoshka" else ()
    told = CoderConfig(family, d_sae=D_SAE, k=k, target_l0=float(k), dead_after_tokens=_DEAD.value, prefixes=prefixes)
    config = TrainConfig(tokens=_TOKENS.value, batch_size=_BATCH.value, lr=lr)
    source = batches()
    coder = build(told, source.hook_points[HOOK_POINT], config.steps)
    sites = make_sites(told, coder.topology, (HOOK_POINT,), (HOOK_POINT,), source.statistics)
    optimizer = make_optimizer(config)
    prepare = make_prepare(told, coder, sites, source)
    state = jax.jit(make_init(coder, optimizer, config, prepare))(0)
    step = jax.jit(make_step(coder, optimizer, make_schedule(config), sites, config), donate_argnums=0)
    started, hyper = time.perf_counter(), default_hyper(0)
    for _, batch in zip(range(config.steps), source.iterate(0), strict=False):
        state, _ = step(state, {HOOK_POINT: jnp.asarray(batch[HOOK_POINT])}, hyper)
    jax.block_until_ready(state)
    seconds = time.perf_counter() - started
    alone, params = coder.inference(state.evaluated(), state.stats)
    scale = sites.read_scales[0]

    @jax.jit
    def encode(x_BD: jax.Array) -> tuple[jax.Array, jax.Array]:
        latents = alone.encode(params, x_BD * scale)
        return latents.dense(), alone.decode(params, latents, x_BD * scale) / scale

    found = measure(lambda x: encode(jnp.asarray(x)), heldout)
    return {"peer": "saejax", "family": family, "k": k, "lr": lr} | found | {"seconds": round(seconds, 2)}


def train_peer(peer: str, family: str, k: int, lr: float, arrays: Path) -> Row:
    out = arrays / f"line-{os.getpid()}.jsonl"
    out.unlink(missing_ok=True)
    groups = ["--groups", *map(str, PREFIXES)] if family == "matryoshka" else []
    files = ["--activations", str(arrays / "A.npy"), "--heldout", str(arrays / "H.npy"), "--out", str(out)]
    sizes = ["--k", str(k), "--d-sae", str(D_SAE), "--tokens", str(_TOKENS.value), "--batch-size", str(_BATCH.value)]
    rest = ["--lr", str(lr), "--dead-after", str(_DEAD.value), *groups]
    script = HERE.parent / "peers" / "train_peers.py"
    command = [_PEERS.value, str(script), "--peer", peer, "--family", family, *files, *sizes, *rest]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    row = json.loads(out.read_text(encoding="utf-8"))
    out.unlink()
    return row


def train_all(results: Path) -> None:
    arrays = Path("build/quality")
    write_arrays(arrays)
    heldout = np.load(arrays / "H.npy")

    def once(family: str, trainer: str, k: int, lr: float) -> None:
        if any(_is(row, family, trainer, k) and row["lr"] == lr for row in read(results)):
            return
        ours = trainer == "saejax"
        row = train_ours(family, k, lr, heldout) if ours else train_peer(trainer, family, k, lr, arrays)
        row |= {"tokens": _TOKENS.value, "batch": _BATCH.value, "dead_after": _DEAD.value}
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(*(f"{key}={row[key]}" for key in ("peer", "family", "k", "lr", "l0", "fve", "dead")), flush=True)

    for family in _FAMILIES.value:
        for trainer in TRAINERS:
            for lr in RATES[family]:
                once(family, trainer, KS[0], lr)
            best = best_rate(read(results), family, trainer)
            if family == "topk":
                for k in KS[1:]:
                    once(family, trainer, k, best)
    for family in _FAMILIES.value:
        for trainer in TRAINERS:
            for k in KS[1:]:
                once(family, trainer, k, best_rate(read(results), family, trainer))


# --- the table and the picture ---------------------------------------------------------------------------------


def read(results: Path) -> list[Row]:
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()] if results.exists() else []


def _is(row: Row, family: str, trainer: str, k: int) -> bool:
    return (row["family"], row["peer"], row["k"]) == (family, trainer, k)


def best_rate(rows: list[Row], family: str, trainer: str) -> float:
    """The rate with the largest FVE at L0 = 24, each run brought there along the slope of the trainer's topk."""
    slope = _slope(rows, trainer)
    tried = [row for row in rows if _is(row, family, trainer, KS[0])]
    return max(tried, key=lambda row: row["fve"] - slope * math.log(row["l0"] / KS[0]))["lr"]


def _slope(rows: list[Row], trainer: str) -> float:
    """dFVE / dlog L0 of topk between the smallest and the largest k; 0 while they are not there (topk's L0 is k)."""
    low, high = ([r["fve"] for r in rows if _is(r, "topk", trainer, k)] for k in (min(KS), max(KS)))
    return (max(high) - max(low)) / math.log(max(KS) / min(KS)) if low and high else 0.0


def curve(rows: list[Row], family: str, trainer: str) -> list[Row]:
    """The runs at the best rate, by their L0."""
    lr = best_rate(rows, family, trainer)
    return sorted(
        (r for r in rows if (r["family"], r["peer"], r["lr"]) == (family, trainer, lr)), key=lambda r: r["l0"]
    )


def at_l0(points: list[Row], l0: float, slope: float) -> float:
    """FVE of a curve at an L0, straight between neighbours over log L0; outside of it from its end, along `slope`."""
    x, wanted = np.log([row["l0"] for row in points]), math.log(l0)
    nearest = min(max(wanted, x[0]), x[-1])
    return float(np.interp(nearest, x, [row["fve"] for row in points])) + slope * (wanted - nearest)


def table(rows: list[Row]) -> Iterator[str]:
    yield "| family | trainer | best lr | L0 at each k | FVE at each k | dead at k 24 | FVE at L0 24 |"
    yield "|---|---|---|---|---|---|---|"
    for family in FAMILIES:
        for trainer in TRAINERS:
            points = sorted(curve(rows, family, trainer), key=lambda row: row["k"])
            l0 = ", ".join(f"{row['l0']:.1f}" for row in points)
            fve = ", ".join(f"{row['fve']:.4f}" for row in points)
            dead = next(row["dead"] for row in points if row["k"] == KS[0])
            at = at_l0(curve(rows, family, trainer), KS[0], _slope(rows, trainer))
            yield f"| {family} | {trainer} | {points[0]['lr']:g} | {l0} | {fve} | {dead:.1%} | {at:.4f} |"


def picture(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    colours = dict(zip(TRAINERS, ("#0072b2", "#d55e00", "#009e73"), strict=True))
    for axes, family in zip(figure.subplots(2, 2, sharex=True, sharey=True).flat, FAMILIES, strict=True):
        for trainer in TRAINERS:
            points = curve(rows, family, trainer)
            label = f"{trainer}, lr {points[0]['lr']:g}"
            axes.plot(
                [p["l0"] for p in points], [p["fve"] for p in points], marker="o", color=colours[trainer], label=label
            )
        axes.set(title=family, xscale="log")
        axes.set_xticks([12, 24, 48], ["12", "24", "48"])
        axes.minorticks_off()
        axes.grid(True, color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right")
    figure.supxlabel("L0 on held-out tokens (log scale)")
    figure.supylabel("FVE: fraction of variance explained")
    return figure


def main(_: list[str]) -> None:
    results = HERE / "results.jsonl"
    if not _ONLY_TABLE.value:
        train_all(results)
    rows = read(results)
    if missing := [f"{t} {f}" for f in FAMILIES for t in TRAINERS if not any(_is(r, f, t, KS[0]) for r in rows)]:
        print(f"no table yet, these are not trained: {', '.join(missing)}")
        return
    lines = list(table(rows))
    (HERE / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    picture(rows).savefig(HERE / "l0_fve.png", dpi=110)
    print("\n".join(lines))


if __name__ == "__main__":
    app.run(main)
