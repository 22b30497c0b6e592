"""Each change that was tried on the training of TopK: before, after, and the difference with an interval.

    (the activations and the peers: as benchmarks/quality/run.py says)
    python -m benchmarks.quality.changes

Each training is a line of changes.jsonl beside this file; what is there already is not run again. Then changes.md is
made. What was not kept and has no setting stands here, as a function of the start or of the optimizer.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks.quality.ours import Hooks, train_ours
from benchmarks.quality.sets import SETS, DataSet, variance_of
from benchmarks.quality.table import Figures, difference

HERE = Path(__file__).parent
LINES, TABLE = HERE / "changes.jsonl", HERE / "changes.md"
SEEDS = (0, 1, 2)
# (data set, k, rate): the rate that fitted best with the settings of before, among 1e-3, 3e-3, 1e-2.
AT = (("demo", 24, 1e-2), ("encoder", 24, 3e-3), ("truth", 12, 3e-3))

# The defaults of 2026-11-22, at which a tenth of the tokens made a latent dead.
BEFORE_CODER = {"encoder_centre": False}
BEFORE_TRAIN = {"b2": 0.999, "b_enc_rate": 1.0, "decay_fraction": 0.2, "final_lr_fraction": 0.1}

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A way to train: keys of the coder and of the training, the share of the tokens after which a latent is dead, and
    what is no setting."""

    coder: dict[str, Any] = dataclasses.field(default_factory=dict)
    train: dict[str, Any] = dataclasses.field(default_factory=dict)
    dead_share: float | None = None
    hooks: Hooks | None = None
    preset: str = "topk"

    def train_on(self, data: DataSet, k: int, lr: float, seed: int) -> Row:
        coder = {"preset": self.preset, "k": k, "target_l0": float(k)} | self.coder
        if self.dead_share:
            coder["dead_after_tokens"] = max(1, round(self.dead_share * data.tokens))
        found, rows_FD, seconds = train_ours(data, coder, {"lr": lr} | self.train, seed, self.hooks)
        row = {name: round(value, 6) for name, value in found.figures().items()}
        if found.latents is not None and found.y_hat is not None:
            scores = data.scores(rows_FD, found.latents, found.y_hat).figures
            row |= {name: round(scores[name], 6) for name in ("mcc", "f1")}
        return row | {"seconds": round(seconds, 1), "error": [float(f"{e:.7g}") for e in found.error]}


def _rows_of_data(params: Row, x_ND: np.ndarray) -> Row:
    """Decoder rows along tokens less the mean, the encoder their transpose."""
    random, n = np.random.default_rng(5), params["W_dec"].shape[0]
    rows = x_ND[random.choice(len(x_ND), n, replace=False)] - x_ND.mean(0)
    rows = jnp.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9))
    return params | {"W_dec": rows, "W_enc": rows.T}


BEFORE = Setting(BEFORE_CODER, BEFORE_TRAIN, 0.1)
CENTRE = Setting({}, BEFORE_TRAIN, 0.1)
B2 = Setting({}, BEFORE_TRAIN | {"b2": 0.99}, 0.1)
BIAS = Setting({}, BEFORE_TRAIN | {"b2": 0.99, "b_enc_rate": 3.0}, 0.1)
DEAD = Setting({}, BIAS.train, 0.003)
DECAY = Setting({}, BIAS.train | {"decay_fraction": 0.3, "final_lr_fraction": 0.0}, 0.003)


def _changed(base: Setting, **changes: Any) -> Setting:
    coder, train = base.coder | changes.pop("coder", {}), base.train | changes.pop("train", {})
    return dataclasses.replace(base, coder=coder, train=train, **changes)


# (what, before, after). The first five are kept; each begins where the one before it ends.
CHANGES: tuple[tuple[str, Setting, Setting], ...] = (
    ("the encoder sees x less the mean (`coder.encoder_centre`)", BEFORE, CENTRE),
    ("Adam's b2 0.99 for 0.999 (`train.b2`)", CENTRE, B2),
    ("b_enc at three times the rate (`train.b_enc_rate`)", B2, BIAS),
    ("dead after 0.3 % of the tokens, not 10 % (`coder.dead_after_tokens`)", BIAS, DEAD),
    ("the rate falls to 0 over the last 30 %, not to a tenth over 20 %", DEAD, DECAY),
    ("b2 0.99 without the centre", BEFORE, _changed(BEFORE, train={"b2": 0.99})),
    ("dead after 0.1 % of the tokens", DECAY, _changed(DECAY, dead_share=0.001)),
    ("dead after 1 % of the tokens", DECAY, _changed(DECAY, dead_share=0.01)),
    ("b_enc at ten times the rate", DECAY, _changed(DECAY, train={"b_enc_rate": 10.0})),
    ("AuxK at weight 1", DECAY, _changed(DECAY, coder={"auxk_coefficient": 1.0})),
    ("AuxK with 8 latents of a token", DECAY, _changed(DECAY, coder={"auxk_k": 8})),
    ("averaged weights (`train.ema_decay` 0.99)", DECAY, _changed(DECAY, train={"ema_decay": 0.99})),
    ("decoder rows along tokens", DECAY, _changed(DECAY, hooks=Hooks(start=_rows_of_data))),
    ("b_dec at the geometric median", DECAY, _changed(DECAY, coder={"b_dec_init": "geometric_median"})),
    ("the encoder at the best scale (`coder.encoder_scale` 0)", DECAY, _changed(DECAY, coder={"encoder_scale": 0.0})),
    ("the encoder sees whitened x, to the power 1/4", DECAY, _changed(DECAY, hooks=Hooks(whitening=0.25))),
    ("the encoder sees whitened x", DECAY, _changed(DECAY, hooks=Hooks(whitening=0.5))),
    ("Muon, rate 3 x", DECAY, _changed(DECAY, train={"optimizer": "muon"})),
    ("no clipping", DECAY, _changed(DECAY, train={"clip_norm": 0.0})),
    ("Multi-TopK", DECAY, _changed(DECAY, coder={"multi_topk_coefficient": 0.125})),
)


HEAD = """# What was tried on the training

`python -m benchmarks.quality.changes`: {date}, 2 CPU cores, 24 GB, no GPU. TopK on three data sets ({sets}), each at
the rate that fitted best before; means over {seeds} seeds, each a start of the coder and an order of the data. FVE on
held-out rows; dead: latents that are silent there. In brackets the 95 % interval of the difference, over seeds and
documents that are drawn alike; bold where it excludes 0. The first five changes are kept, and each begins where the one
before it ends; all others begin where the fifth ends.

"""


def train_all(stores: str, ends: float) -> None:
    """Every training that is not there, until the time is over."""
    there = {(row["set"], row["setting"], row["seed"]) for row in read()}
    for name, _, _ in AT:
        SETS[name].prepare(stores)
    for seed in SEEDS:
        for what, setting in settings().items():
            for name, k, lr in AT:
                if (name, what, seed) in there:
                    continue
                if time.monotonic() > ends:
                    return
                row = {"set": name, "setting": what, "seed": seed, "date": time.strftime("%Y-%m-%d")}
                row |= setting.train_on(SETS[name], k, lr, seed)
                with LINES.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(*(f"{key}={value}" for key, value in row.items() if key != "error"), flush=True)


def settings() -> dict[str, Setting]:
    """{what it is called in the lines: a setting}, each once."""
    return {"before": BEFORE} | {what: after for what, _, after in CHANGES}


def read() -> list[Row]:
    return [json.loads(line) for line in LINES.read_text(encoding="utf-8").splitlines()] if LINES.exists() else []


def table(rows: list[Row]) -> list[str]:
    """Markdown: a line for each change and data set."""
    names = {id(setting): what for what, setting in settings().items()}
    lines = ["| change | data | FVE | difference | dead | MCC | F1 |", "|---|---|---|---|---|---|---|"]
    for what, before, _ in CHANGES:
        for name, _, _ in AT:
            sides = [_of(rows, name, one) for one in (names[id(before)], what)]
            seeds = {row["seed"] for row in sides[0]} & {row["seed"] for row in sides[1]}
            if not seeds:
                continue
            pair = [sorted((r for r in side if r["seed"] in seeds), key=lambda r: r["seed"]) for side in sides]
            lines.append(f"| {' | '.join([what, SETS[name].title, *_cells(SETS[name], *pair)])} |")
    return lines


def _cells(data: DataSet, before: list[Row], after: list[Row]) -> list[str]:
    def means(name: str, form: str) -> str:
        if name not in before[0]:
            return "-"
        return ", ".join(format(float(np.mean([row[name] for row in side])), form) for side in (before, after))

    a, b = (Figures(np.array([row["error"] for row in side]), variance_of(data), {}) for side in (before, after))
    return [means("fve", ".4f"), difference(b, a), means("dead", ".1%"), means("mcc", ".3f"), means("f1", ".3f")]


def _of(rows: list[Row], data: str, setting: str) -> list[Row]:
    return [row for row in rows if (row["set"], row["setting"]) == (data, setting)]


_STORES = flags.DEFINE_string("stores", "stores", "The folder of the captured activations.")
_MINUTES = flags.DEFINE_float("minutes", 1e9, "Start no training after so many minutes; the next call goes on.")
_ONLY_TABLE = flags.DEFINE_bool("only_table", False, "Train nothing; make the table again.")


def main(_: list[str]) -> None:
    if not _ONLY_TABLE.value:
        train_all(_STORES.value, time.monotonic() + 60 * _MINUTES.value)
    rows = read()
    dates = sorted({row["date"] for row in rows})
    sets = "; ".join(f"{SETS[name].title}: {k} of {SETS[name].d_sae:,} latents, rate {lr:g}" for name, k, lr in AT)
    head = HEAD.format(date=" to ".join(dict.fromkeys((dates[0], dates[-1]))), sets=sets, seeds=len(SEEDS))
    TABLE.write_text(head + "\n".join(table(rows)) + "\n", encoding="utf-8")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    app.run(main)
