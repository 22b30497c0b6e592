"""Each change that was tried on the training: before, after, and the difference with an interval.

    (the activations and the peers: as benchmarks/quality/run.py says)
    python -m benchmarks.quality.changes

Each training is a line of changes.jsonl beside this file; what is there already is not run again. Then changes.md is
made. What was not kept and has no setting stands here, as a function of the start or of the optimizer.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks.quality.ours import Hooks, train_ours
from benchmarks.quality.sets import SETS, DataSet, variance_of
from benchmarks.quality.table import Figures, difference
from saejax.coders.latents import ListedLatents
from saejax.coders.reconstruction import Matryoshka
from saejax.coders.term import Context, Term

HERE = Path(__file__).parent
LINES, TABLE = HERE / "changes.jsonl", HERE / "changes.md"
SEEDS = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class At:
    """Where the changes are tried on a data set.

    Attributes:
        l0: k, or target_l0.
        lr: TopK's: that which fitted best with the settings of before, among 1e-3, 3e-3, 1e-2; 0: the default.
        l1: of penalised families, for about that L0.
    """

    l0: int
    lr: float
    l1: dict[str, float]


AT = {
    "demo": At(24, 1e-2, {"gated": 1.5, "standard": 1.6}),
    "encoder": At(24, 3e-3, {"gated": 3.4, "standard": 2.2}),
    "truth": At(12, 3e-3, {"gated": 1.7, "standard": 1.0}),
    "truth_large": At(8, 0.0, {}),
    "smollm2": At(32, 0.0, {}),
}
# Slow: there the kept changes alone are tried; of the second ones those alone that begin at the defaults of 2026-11-27.
NEW_ONLY = ("truth_large", "smollm2")
KEPT_ONLY = ("encoder", *NEW_ONLY)

# The defaults of 2026-11-22, at which a tenth of the tokens made a latent dead.
NO_LIFT = {"lift_coefficient": 0.0}
BEFORE_CODER = {"encoder_centre": False, **NO_LIFT}
BEFORE_TRAIN = {"b2": 0.999, "b_enc_rate": 1.0, "decay_fraction": 0.2, "final_lr_fraction": 0.1}

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A way to train: keys of the coder and of the training, and what is no setting.

    Families other than topk have the default learning rate.

    Attributes:
        dead_share: of the tokens, after which a latent is dead.
        falls_from, falls_over: k falls from so many times its value over such a share of the training.
    """

    coder: dict[str, Any] = dataclasses.field(default_factory=dict)
    train: dict[str, Any] = dataclasses.field(default_factory=dict)
    dead_share: float | None = None
    falls_from: float | None = None
    falls_over: float = 0.9
    hooks: Hooks | None = None
    preset: str = "topk"

    def train_on(self, data: DataSet, seed: int, at: At | None = None) -> Row:
        """The figures of one training, at the set's own L0 and rate or at others."""
        at = at or AT[data.name]
        coder = {"preset": self.preset, "k": at.l0, "target_l0": float(at.l0)} | self.coder
        if self.preset in at.l1:
            coder["l1_coefficient"] = at.l1[self.preset]
        if self.dead_share:
            coder["dead_after_tokens"] = max(1, round(self.dead_share * data.tokens))
        if self.falls_from:
            coder |= {"k_start": round(self.falls_from * at.l0), "k_anneal_fraction": self.falls_over}
        train = {"lr": at.lr if self.preset == "topk" else 0.0} | self.train
        found, rows_FD, seconds = train_ours(data, coder, train, seed, self.hooks)
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


def _active_subspace(params: Row, x_ND: np.ndarray) -> Row:
    """Decoder rows in the span of the first half of the principal components, the encoder their multiple as before."""
    _, components = np.linalg.eigh(np.cov(x_ND, rowvar=False, dtype=np.float64))
    half = jnp.asarray(components[:, components.shape[1] // 2 :], jnp.float32)
    rows = params["W_dec"] @ half @ half.T
    rows = rows / jnp.linalg.norm(rows, axis=1, keepdims=True)
    scale = jnp.linalg.norm(params["W_enc"]) / jnp.linalg.norm(params["W_dec"])
    return params | {"W_dec": rows, "W_enc": scale * rows.T}


def aligned(params: Row) -> Row:
    """The encoder's rows moved along the decoder's, so that the inner product of a pair is 1."""
    rows_FD, columns_DF = params["W_dec"], params["W_enc"]
    missing_F = (1 - (rows_FD.T * columns_DF).sum(0)) / jnp.square(rows_FD).sum(1)
    return params | {"W_enc": columns_DF + missing_F * rows_FD.T}


class _ByFrequency(Matryoshka):
    """The prefixes are of the latents that fire for most tokens of the batch; of equals the lower are before."""

    def blocks(self, latents: ListedLatents) -> jax.Array:
        order_F = jnp.argsort(-latents.counts())
        rank_F = jnp.zeros_like(order_F).at[order_F].set(jnp.arange(order_F.size))
        return jnp.searchsorted(jnp.asarray(self.prefixes), rank_F[latents.at], side="right").astype(jnp.int32)

    def _of_list(self, c: Context, latents: ListedLatents, none: jax.Array) -> jax.Array:
        """With the list in the order of rows and blocks, which decoding asks of it."""
        order_P = jnp.argsort(latents.rows * len(self.prefixes) + self.blocks(latents))
        in_order = {name: getattr(latents, name)[order_P] for name in ("values", "indices", "rows")}
        return super()._of_list(c, dataclasses.replace(latents, **in_order), none)


def by_frequency(term: Term) -> Term:
    """The term with `_ByFrequency` in place of Matryoshka's prefixes; other terms as they are."""
    return _ByFrequency(**vars(term)) if isinstance(term, Matryoshka) else term


def _changed(base: Setting, **changes: Any) -> Setting:
    coder, train = base.coder | changes.pop("coder", {}), base.train | changes.pop("train", {})
    return dataclasses.replace(base, coder=coder, train=train, **changes)


BEFORE = Setting(BEFORE_CODER, BEFORE_TRAIN, 0.1)
CENTRE = _changed(BEFORE, coder={"encoder_centre": True})
B2 = _changed(CENTRE, train={"b2": 0.99})
BIAS = _changed(B2, train={"b_enc_rate": 2.0})
DEAD = _changed(BIAS, dead_share=0.003)
DECAY = _changed(DEAD, train={"decay_fraction": 0.3, "final_lr_fraction": 0.0})
LIFT = _changed(DECAY, coder={"lift_coefficient": 1e-3})
LENGTH = _changed(LIFT, train={"b_enc_rate": None})

# jumprelu, gated and standard as they were.
_AT_ONCE = {"sparsity_warmup_fraction": 0.05, **NO_LIFT}
AT_HALF = Setting(_AT_ONCE | {"target_l0_start": 0.0, "threshold_init": 0.001}, preset="jumprelu")
AT_TWICE = _changed(AT_HALF, coder={"target_l0_start": 2.0})
_IN_A_FIFTH = {"sparsity_warmup_fraction": 0.2}
GATED_BEFORE = Setting(_AT_ONCE | {"encoder_centre": False}, preset="gated")
# As they are, without Lift and with it.
JUMPRELU_UNLIFTED, GATED_UNLIFTED = (Setting(NO_LIFT, preset=name) for name in ("jumprelu", "gated"))
JUMPRELU, GATED, STANDARD = (Setting(preset=name) for name in ("jumprelu", "gated", "standard"))
STANDARD_LIFTED = _changed(STANDARD, train={"b_enc_rate": 2.0})
STANDARD_BEFORE = _changed(STANDARD_LIFTED, coder=NO_LIFT)


@dataclasses.dataclass(frozen=True)
class Change:
    """What it is called in the lines, a setting, and what it became; `kept`: it is the default now.

    `everywhere`: it is tried on slow data too, as those are that were kept.
    """

    what: str
    before: Setting
    after: Setting
    kept: bool = False
    everywhere: bool = False


# The defaults of 2026-11-27.
NOW = {f"{name}, 2026-11-27": Setting(preset=name) for name in ("topk", "batchtopk", "matryoshka", "jumprelu")}
# What is no change itself.
BEFORES = {"topk": BEFORE, "jumprelu": AT_HALF, "gated": GATED_BEFORE, "standard": STANDARD_BEFORE} | NOW


def _unrolled(steps: int, rate: float = 0.3, everywhere: bool = False) -> tuple[Change, ...]:
    more = "" if rate == 0.3 else f" at a rate of {rate:g} (`coder.lista_rate`)"
    return tuple(
        Change(
            f"{before.preset}: the encoder looks {steps} more time{'s' * (steps > 1)} (`coder.lista_steps`){more}",
            before,
            _changed(before, coder={"lista_steps": steps} | ({"lista_rate": rate} if more else {})),
            everywhere=everywhere or (steps, rate, before.preset) == (1, 0.1, "jumprelu"),
        )
        for before in NOW.values()
    )


# The parts of LISTA-Matryoshka (github.com/chanind/claude-auto-research-synthsaebench): there k falls from 60 to 25,
# in 200,000 steps until the last. Here the threshold has so many steps to follow.
_DETACHED = {"prefixes_detached": True}
_WIDTHS = {"prefixes": (1 / 32, 1 / 8, 1 / 2, 1.0)}
TOPK, MATRYOSHKA = NOW["topk, 2026-11-27"], NOW["matryoshka, 2026-11-27"]
LISTA_MATRYOSHKA = (
    *(
        Change(
            f"{before.preset}: k falls from 2.4 k over nine tenths of the training (`coder.k_start`)",
            before,
            _changed(before, falls_from=2.4),
            everywhere=True,
        )
        for before in NOW.values()
        if before.preset != "jumprelu"
    ),
    *(
        Change(
            f"{before.preset}: k falls from 3 k over half of the training",
            before,
            _changed(before, falls_from=3.0, falls_over=0.5),
            everywhere=True,
        )
        for before in NOW.values()
        if before.preset != "jumprelu"
    ),
    *(
        Change(f"matryoshka: {what}", MATRYOSHKA, _changed(MATRYOSHKA, **changes), everywhere=True)
        for what, changes in (
            ("a prefix teaches its own latents (`coder.prefixes_detached`)", {"coder": _DETACHED}),
            ("1/32, 1/8, 1/2 and all latents (`coder.prefixes`)", {"coder": _WIDTHS}),
            ("prefixes of the latents that fire most often", {"hooks": Hooks(term=by_frequency)}),
            ("detached prefixes and one more look", {"coder": _DETACHED | {"lista_steps": 1}}),
            (
                "LISTA-Matryoshka: these three and one more look",
                {"coder": _DETACHED | _WIDTHS | {"lista_steps": 1}, "falls_from": 2.4},
            ),
        )
    ),
)

# TopK's kept ones begin where the one before ends.
CHANGES = (
    Change("the encoder sees x less the mean (`coder.encoder_centre`)", BEFORE, CENTRE, True),
    Change("Adam's b2 0.99 for 0.999 (`train.b2`)", CENTRE, B2, True),
    Change("b_enc at twice the rate (`train.b_enc_rate`)", B2, BIAS, True),
    Change("dead after 0.3 % of the tokens, not 10 % (`coder.dead_after_tokens`)", BIAS, DEAD, True),
    Change("the rate falls to 0 over the last 30 %, not to a tenth over 20 %", DEAD, DECAY, True),
    Change("dead latents that are negative for every token are raised (`coder.lift_coefficient`)", DECAY, LIFT, True),
    Change("b_enc's rate by the length of the training (on the first and the last data that is 2)", LIFT, LENGTH, True),
    Change("b2 0.99 without the centre", BEFORE, _changed(BEFORE, train={"b2": 0.99})),
    Change("all of these without the centre", LIFT, _changed(LIFT, coder={"encoder_centre": False}), everywhere=True),
    Change("dead after 0.1 % of the tokens", LIFT, _changed(LIFT, dead_share=0.001)),
    Change("dead after 1 % of the tokens", LIFT, _changed(LIFT, dead_share=0.01)),
    Change("b_enc at three times the rate", LIFT, _changed(LIFT, train={"b_enc_rate": 3.0})),
    Change("b_enc at ten times the rate", LIFT, _changed(LIFT, train={"b_enc_rate": 10.0})),
    Change("AuxK at weight 1", LIFT, _changed(LIFT, coder={"auxk_coefficient": 1.0})),
    Change("AuxK with 8 latents of a token", LIFT, _changed(LIFT, coder={"auxk_k": 8})),
    Change("averaged weights (`train.ema_decay` 0.99)", LIFT, _changed(LIFT, train={"ema_decay": 0.99})),
    Change("decoder rows along tokens", LIFT, _changed(LIFT, hooks=Hooks(start=_rows_of_data))),
    Change(
        "all rows in the first half of the principal components",
        LIFT,
        _changed(LIFT, hooks=Hooks(start=_active_subspace)),
    ),
    Change(
        "k falls from 96 over a fifth of the training (`coder.k_start`)",
        LIFT,
        _changed(LIFT, coder={"k_start": 96, "k_anneal_fraction": 0.2}),
    ),
    Change("b_dec at the geometric median", LIFT, _changed(LIFT, coder={"b_dec_init": "geometric_median"})),
    Change(
        "the encoder at the best scale (`coder.encoder_scale` 0)", LIFT, _changed(LIFT, coder={"encoder_scale": 0.0})
    ),
    Change("the encoder sees whitened x, to the power 1/4", LIFT, _changed(LIFT, hooks=Hooks(whitening=0.25))),
    Change("the encoder sees whitened x", LIFT, _changed(LIFT, hooks=Hooks(whitening=0.5))),
    Change("Muon", LIFT, _changed(LIFT, train={"optimizer": "muon"})),
    Change("no clipping", LIFT, _changed(LIFT, train={"clip_norm": 0.0})),
    Change("Multi-TopK", LIFT, _changed(LIFT, coder={"multi_topk_coefficient": 0.125})),
    Change("jumprelu: b_enc starts at 2 x target_l0 latents a token, not at half of all", AT_HALF, AT_TWICE, True),
    Change("jumprelu: at 4 x; thresholds from 0.01; half the training to rise", AT_TWICE, JUMPRELU_UNLIFTED, True),
    Change("jumprelu: dead latents are raised", JUMPRELU_UNLIFTED, JUMPRELU, True),
    Change("jumprelu: with the centre, b2 0.99", JUMPRELU, _changed(JUMPRELU, coder={"encoder_centre": True})),
    Change("jumprelu: b2 0.99", JUMPRELU, _changed(JUMPRELU, train={"b2": 0.99})),
    Change("jumprelu: thresholds from 0.1", JUMPRELU, _changed(JUMPRELU, coder={"threshold_init": 0.1})),
    Change("jumprelu: a window of 0.03", JUMPRELU, _changed(JUMPRELU, coder={"bandwidth": 0.03})),
    Change("jumprelu: no AuxK", JUMPRELU, _changed(JUMPRELU, coder={"auxk_coefficient": 0.0})),
    Change(
        "jumprelu: the pre-activation loss", JUMPRELU, _changed(JUMPRELU, coder={"pre_activation_coefficient": 3e-6})
    ),
    Change("jumprelu: the frequency penalty", JUMPRELU, _changed(JUMPRELU, coder={"frequency_coefficient": 1e-3})),
    Change("gated: with the centre; half the training to rise", GATED_BEFORE, GATED_UNLIFTED, True),
    Change("gated: dead latents are raised", GATED_UNLIFTED, GATED, True),
    Change("gated: a fifth of the training to rise", GATED, _changed(GATED, coder=_IN_A_FIFTH)),
    Change("standard: dead latents are raised", STANDARD_BEFORE, STANDARD_LIFTED, True),
    Change("standard: b_enc at 5 times the rate, in short trainings at more", STANDARD_LIFTED, STANDARD, True),
    Change("standard: a fifth of the training to rise", STANDARD, _changed(STANDARD, coder=_IN_A_FIFTH)),
    Change("standard: without the centre", STANDARD, _changed(STANDARD, coder={"encoder_centre": False})),
    *_unrolled(1, everywhere=True),
    *_unrolled(2),
    *_unrolled(1, 0.1),
    *(
        Change(
            f"{before.preset}: aligned training (arXiv:2605.18629): <w_enc, w_dec> is 1 for every latent",
            before,
            _changed(before, hooks=Hooks(after=aligned)),
            everywhere=before.preset == "topk",
        )
        for before in NOW.values()
    ),
    *LISTA_MATRYOSHKA,
    # Above on demo and truth when they began at earlier defaults.
    *(
        Change(f"topk: {what}", TOPK, _changed(TOPK, **changes), everywhere=True)
        for what, changes in (
            ("Multi-TopK (`coder.multi_topk_coefficient`)", {"coder": {"multi_topk_coefficient": 0.125}}),
            ("the encoder sees whitened x, to the power 1/4", {"hooks": Hooks(whitening=0.25)}),
        )
    ),
)


HEAD = """# What was tried on the training

`python -m benchmarks.quality.changes`: {date}, 2 CPU cores, 24 GB, no GPU. Means over {seeds} seeds (or as many as the
row says), each a start of the coder and an order of the data. FVE on held-out rows; dead: latents that are silent
there. In brackets the 95 % interval of the difference, over seeds and documents that are drawn alike; bold where it
excludes 0. Where L0 moves, FVE moves with it.

{sets}

The rates are TopK's, those that fitted best before; the other families have the default. Bold changes are kept. They
were tried on the encoder's layer too, one more was, and most of what begins at the defaults of 2026-11-27; of that
most on SmolLM2, and two on the larger truth. Of TopK each kept change begins where the one before it ends, and what was
not kept where the last ends. "To rise": the penalty grows from 0 over so much of the training.

"""


def train_all(stores: str, ends: float, sets: Sequence[str], asked: str) -> None:
    """Every training that is not there, of a setting with `asked` in its name, until the time is over."""
    there = {(row["set"], row["setting"], row["seed"]) for row in read()}
    for name, what, seed in work():
        if (name, what, seed) in there or name not in sets or asked not in what:
            continue
        SETS[name].prepare(stores)
        if time.monotonic() > ends:
            return
        row = {"set": name, "setting": what, "seed": seed, "date": time.strftime("%Y-%m-%d")}
        row |= settings()[what].train_on(SETS[name], seed)
        with LINES.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(*(f"{key}={value}" for key, value in row.items() if key != "error"), flush=True)


def work() -> list[tuple[str, str, int]]:
    """(data set, setting, seed) in the order of training: the slow data set last, and what is kept first."""
    kept = {*BEFORES, *(change.what for change in CHANGES if change.kept or change.everywhere)}
    every = [(name, what, seed) for name in AT for seed in SEEDS for what in settings()]
    today = {id(setting) for setting in NOW.values()}
    new = {*NOW, *(change.what for change in CHANGES if change.everywhere and id(change.before) in today)}
    wanted = [one for one in every if one[1] in (new if one[0] in NEW_ONLY else kept) or one[0] not in KEPT_ONLY]
    return sorted(wanted, key=lambda one: (one[0] in KEPT_ONLY, one[1] not in kept))


def settings() -> dict[str, Setting]:
    """{what it is called in the lines: a setting}, each once."""
    return BEFORES | {change.what: change.after for change in CHANGES}


def read() -> list[Row]:
    return [json.loads(line) for line in LINES.read_text(encoding="utf-8").splitlines()] if LINES.exists() else []


def table(rows: list[Row]) -> list[str]:
    """Markdown: a line for each change and data set."""
    names = {id(setting): what for what, setting in settings().items()}
    lines = ["| change | data | L0 | FVE | difference | dead | MCC | F1 |", "|---|---|---|---|---|---|---|---|"]
    for change in CHANGES:
        for name in AT:
            sides = [_of(rows, name, one) for one in (names[id(change.before)], change.what)]
            seeds = {row["seed"] for row in sides[0]} & {row["seed"] for row in sides[1]}
            if not seeds:
                continue
            pair = [sorted((r for r in side if r["seed"] in seeds), key=lambda r: r["seed"]) for side in sides]
            what = f"**{change.what}**" if change.kept else change.what
            fewer = "" if len(seeds) == len(SEEDS) else f", {len(seeds)} seed{'s' * (len(seeds) > 1)}"
            lines.append(f"| {' | '.join([what, SETS[name].title + fewer, *_cells(SETS[name], *pair)])} |")
    return lines


def _cells(data: DataSet, before: list[Row], after: list[Row]) -> list[str]:
    def means(name: str, form: str) -> str:
        if name not in before[0]:
            return "-"
        return ", ".join(format(float(np.mean([row[name] for row in side])), form) for side in (before, after))

    a, b = (Figures(np.array([row["error"] for row in side]), variance_of(data), {}) for side in (before, after))
    figures = [means("l0", ".1f"), means("fve", ".4f"), difference(b, a)]
    return [*figures, means("dead", ".1%"), means("mcc", ".3f"), means("f1", ".3f")]


def _of(rows: list[Row], data: str, setting: str) -> list[Row]:
    return [row for row in rows if (row["set"], row["setting"]) == (data, setting)]


_STORES = flags.DEFINE_string("stores", "stores", "The folder of the captured activations.")
_SETS = flags.DEFINE_list("sets", list(AT), "Train on these alone.")
_CHANGES = flags.DEFINE_string("changes", "", "Train those alone that have this in their name.")
_MINUTES = flags.DEFINE_float("minutes", 1e9, "Start no training after so many minutes; the next call goes on.")
_ONLY_TABLE = flags.DEFINE_bool("only_table", False, "Train nothing; make the table again.")


def main(_: list[str]) -> None:
    if not _ONLY_TABLE.value:
        train_all(_STORES.value, time.monotonic() + 60 * _MINUTES.value, _SETS.value, _CHANGES.value)
    rows = read()
    dates = sorted({row["date"] for row in rows})
    sets = "\n".join(
        f"- {SETS[name].title}: L0 {at.l0} of {SETS[name].d_sae:,} latents, rate {at.lr or 'by default'}"
        for name, at in AT.items()
    )
    head = HEAD.format(date=" to ".join(dict.fromkeys((dates[0], dates[-1]))), sets=sets, seeds=len(SEEDS))
    TABLE.write_text(head + "\n".join(table(rows)) + "\n", encoding="utf-8")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    app.run(main)
