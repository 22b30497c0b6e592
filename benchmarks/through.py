"""Is a dictionary better for the model when the last part of its training sees the model's own loss?

    saejax capture --config=quickstart
    python -m benchmarks.through --config=quickstart [--probes=first_letter,95_toxic_is]
    python -m benchmarks.through --config=quickstart --layers=1,3
    saejax capture --config=coders:clt
    python -m benchmarks.through --config=coders:clt --graphs=16
    saejax capture --config=smollm2                        # after `make real ARGS=--fetch`
    python -m benchmarks.through --config=smollm2
    python -m benchmarks.through --config=smollm2 --kinds=none,kl --probes=first_letter --words=5000

Each seed trains a dictionary with the settings of the experiment. From it trainings of --tokens activations go on,
alike but for `train.through`: none, which is the control; kl; ce; of a cross-layer transcoder in_turn, which is kl with
`train.through_in_turn`. lora leaves the first one as it is, and adapts the model to it in as many steps of as much text
(`saejax adapt`), where the dictionary writes one hook point; both lets the dictionary learn in the same steps. With
--layers there is one autoencoder after each of these blocks, side by side: in_turn has one loss of them all, alone lets
each go on with kl by itself. The held-out text judges all. A training is a line of
through.jsonl beside this file; what is there already is not run again. Then through.md is made.
"""

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

import saejax
from saejax.app.adapt import run_adapt
from saejax.app.experiment import with_settings
from saejax.app.graph_faithful import faithfulness
from saejax.app.stages import run_capture, run_evaluate, run_train
from saejax.app.workspace import Workspace
from saejax.attribution import AttributionConfig, attribute
from saejax.attribution.layers import at_model
from saejax.core.files import read_json
from saejax.evals.evaluate import evaluate
from saejax.experiment import experiment
from saejax.through.adapt import Adaptation

HERE = Path(__file__).parent
LINES, TABLE = HERE / "through.jsonl", HERE / "through.md"
HEAD = """# Losses through the model

`python -m benchmarks.through` (docs/through.md says what was asked and found): means over the seeds, in brackets the
least and the largest. CE gap closed: against the training `none` of the same seed.
"""
KINDS = ("first", "none", "kl", "in_turn", "alone", "ce", "lora", "both")
KEPT = ("fve", "ce_clean", "ce_sae", "ce_zero", "kl", "ce_sae_in_turn", "kl_in_turn", "l0", "dead_fraction")
LETTERS = ("absorption_fraction", "full_absorption")
MORE = ("auc_", "graph_", *LETTERS)
# Of graphs of prompts of so many tokens, means over the prompts: scores, edges on the way, what the dictionary skips.
GRAPHED, PROMPT = ("replacement", "completeness", "path", "skipped", "error"), 16

_CONFIG = flags.DEFINE_string("config", "quickstart", "The experiment.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Trainings of each kind.")
_KINDS = flags.DEFINE_list("kinds", [], f"Of {', '.join(KINDS)}; empty: all that the experiment has.")
_FIRST = flags.DEFINE_integer("first_tokens", 0, "Activations of the first training; 0: the experiment's.")
_TOKENS = flags.DEFINE_integer("tokens", 204_800, "Activations of what goes on.")
_LR = flags.DEFINE_float(
    "lr", 3e-4, "Learning rate of what goes on; 0: the default, with which a finished one gets worse."
)
_ROWS = flags.DEFINE_integer("rows", 16, "train.through_rows.")
_PROBES = flags.DEFINE_string(
    "probes", "", "Data sets of `saejax evaluate --probes`; with first_letter or all the lines stand apart."
)
_WORDS = flags.DEFINE_integer("words", 1500, "Words of the vocabulary for first letters; 0: all.")
_LAYERS = flags.DEFINE_list("layers", [], "Blocks, each with an autoencoder of its residual stream.")
_GRAPHS = flags.DEFINE_integer("graphs", 0, "Prompts of the held-out text whose attribution graphs are scored.")
_EVAL = flags.DEFINE_integer("eval_tokens", 0, "Held-out tokens; 0: the experiment's.")
_MINUTES = flags.DEFINE_float("minutes", 0, "Begin no training after so long; 0: no limit.")

Row = dict[str, Any]


def trained() -> str:
    """What is trained, as the runs are called."""
    return f"{_CONFIG.value}, blocks {' '.join(_LAYERS.value)}" if _LAYERS.value else _CONFIG.value


def label() -> str:
    """What is trained and asked of it, as the lines call it."""
    letters = {"all", "first_letter"} & set(_PROBES.value.split(","))
    return trained() + (", first letters" if letters else "")


def finished(name: str, settings: dict[str, Any]) -> Workspace:
    """The run `name` of the experiment, trained and evaluated."""
    run = re.sub(r"\W+", "-", f"through-{trained()}-{name}")
    work = Workspace(with_settings(experiment(_CONFIG.value), settings | {"name": run}))
    if not work.experiment.run.evaluation.exists():
        if _LAYERS.value:
            run_capture(work)
        if run_train(work):
            raise SystemExit("stopped; the same command continues")
        run_evaluate(work)
    return work


def points() -> tuple[str, ...]:
    return tuple(f"blocks.{block}.resid_post" for block in _LAYERS.value)


def measured(kind: str, seed: int) -> Row:
    """A line: the first training of a seed, or what goes on from it."""
    e = experiment(_CONFIG.value)
    settings = {
        "seed": seed,
        "train.checkpoint_every": 10**6,
        "train.tokens": _FIRST.value or e.train.tokens,
        "eval.tokens": _EVAL.value or e.eval.tokens,
    }
    if _LAYERS.value:
        settings |= {"coder.topology": "per_layer_autoencoder", "capture.hook_points": points(), "store": "layers"}
    work = finished(str(seed), settings)
    row = {"config": label(), "kind": kind, "seed": seed, "date": time.strftime("%Y-%m-%d")}
    if kind in ("lora", "both"):
        return row | adapted(work, kind, seed)
    first = work.experiment.run.path
    more = {"train.tokens": _TOKENS.value, "train.lr": _LR.value}
    if kind not in ("first", "none"):
        more |= {"train.through": "ce" if kind == "ce" else "kl", "train.through_rows": _ROWS.value}
        more |= {"train.through_in_turn": True} if kind == "in_turn" else {}
    if kind == "alone":
        return row | each_alone(work, seed, settings | more)
    if kind != "first":
        work = finished(f"{seed}-{kind}", settings | more | {"train.init_from": str(first)})
    run = work.experiment.run
    row |= kept(read_json(run.evaluation)["metrics"])
    row["seconds"] = round(run.read_stages()["train"]["seconds"], 1)
    row |= probed(work) if _PROBES.value else {}
    return row | (graphed(work) if _GRAPHS.value else {})


def kept(metrics: Row) -> Row:
    return {name: metrics[name] for name in KEPT if name in metrics}


def adapted(work: Workspace, kind: str, seed: int) -> Row:
    """The model adapted to the dictionary, which stays (lora) or learns too (both)."""
    steps, rate = _TOKENS.value // work.experiment.train.batch_size, _LR.value if kind == "both" else 0.0
    started = time.monotonic()
    made = run_adapt(
        work, Adaptation(steps=steps, rows=_ROWS.value, dictionary_lr=rate, seed=seed), work.experiment.run.path / kind
    )
    row = kept(read_json(work.experiment.run.evaluation)["metrics"])
    row |= {"ce_sae": made["ce_sae_adapted"], "kl": None, "fve": made.get("fve_adapted", row["fve"])}
    return row | {"seconds": round(time.monotonic() - started, 1)}


def each_alone(work: Workspace, seed: int, settings: Row) -> Row:
    """Dictionaries that go on one by one, evaluated side by side."""
    folder, learned, seconds = work.experiment.run.path / "parts", [], 0.0
    for point, sae in zip(points(), saejax.layers(saejax.load(work.experiment.run.path)), strict=True):
        sae.save(folder / point)
        of_one = {"coder.topology": "autoencoder", "capture.hook_points": (point,), "store": f"layers-{point}"}
        one = finished(f"{seed}-alone-{point}", settings | of_one | {"train.init_from": str(folder / point)})
        learned.append(saejax.load(one.experiment.run.path))
        seconds += one.experiment.run.read_stages()["train"]["seconds"]
    e, whole = work.experiment, saejax.side_by_side(learned).at(work.lm)
    metrics = evaluate(whole, work.lm, work.packer, e.eval, e.capture.sinks).metrics
    return kept(metrics) | {"seconds": round(seconds, 1)}


def kinds() -> tuple[str, ...]:
    """Those of `KINDS` that this experiment has."""
    if _LAYERS.value:
        return ("first", "none", "in_turn", "alone")
    several = bool(experiment(_CONFIG.value).writes)
    return tuple(kind for kind in KINDS if kind not in (("alone", "lora", "both") if several else ("alone", "in_turn")))


def probed(work: Workspace) -> Row:
    """Mean AUC by k over the data sets, and absorption over the letters."""
    sae = saejax.load(work.experiment.run.path)
    found = saejax.probes(sae, work.lm, _PROBES.value, words=_WORDS.value, ks=(1, 5, 16))
    ks = found.ks if found.datasets else ()
    row: Row = {f"auc_{k}": float(np.mean([one["k"][k]["auc"] for one in found.datasets.values()])) for k in ks}
    return row | {name: found.first_letter[name]["mean"] for name in LETTERS if name in found.first_letter}


def graphed(work: Workspace) -> Row:
    """Means of `GRAPHED` over the graphs of the first tokens of so many rows of held-out text."""
    lm, config = work.lm, AttributionConfig()
    saes = at_model(lm, [saejax.load(work.experiment.run.path)])
    rows = next(iter(work.packer.batches("heldout", _GRAPHS.value)))
    found = []
    for tokens in np.asarray(rows.tokens)[:, :PROMPT]:
        of = attribute(lm, saes, tokens.tolist(), config)
        found.append(faithfulness(lm, saes, of, config)["rows"][0])
    return {f"graph_{name}": float(np.mean([one[name] for one in found])) for name in GRAPHED}


def closed(row: Row, control: Row, name: str) -> float:
    """The share of the control's excess of cross-entropy (`name`) that is gone."""
    return (control[name] - row[name]) / (control[name] - control["ce_clean"])


def table(rows: Sequence[Row]) -> str:
    """Per experiment: each kind's means over the seeds, and the difference to the control of the same seed."""
    lines = [HEAD]
    for config in dict.fromkeys(row["config"] for row in rows):
        of = {(row["kind"], row["seed"]): row for row in rows if row["config"] == config}
        extra = [name for name in next(iter(of.values())) if name.startswith(MORE) or name.endswith("_in_turn")]
        names = ["fve", "kl", "ce_sae", "dead_fraction", *extra]
        gaps = {"ce_sae": "CE gap closed", "ce_sae_in_turn": "in turn"}
        gaps = {name: title for name, title in gaps.items() if name in next(iter(of.values()))}
        lines += [f"## {config}", "", f"| training | {' | '.join([*names, *gaps.values()])} |"]
        lines += ["|" + "---|" * (len(names) + len(gaps) + 1)]
        for kind in KINDS:
            seeds = [seed for k, seed in of if k == kind]
            if not seeds:
                continue
            cells = [span([of[kind, seed].get(name) for seed in seeds]) for name in names]
            both = [seed for seed in seeds if ("none", seed) in of and kind not in ("first", "none")]
            cells += [span([closed(of[kind, s], of["none", s], gap) for s in both]) if both else "-" for gap in gaps]
            lines += [f"| {kind} | {' | '.join(cells)} |"]
        lines += [""]
    return "\n".join(lines)


def span(values: Sequence[float | None], digits: int = 4) -> str:
    """Mean, least and largest, where there are several; "-" where one was not measured."""
    if None in values:
        return "-"
    known = [value for value in values if value is not None]
    low, mean, high = min(known), float(np.mean(known)), max(known)
    if low == high:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def main(_: Sequence[str]) -> None:
    started = time.monotonic()
    rows = [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.exists() else []
    for seed in range(_SEEDS.value):
        for kind in KINDS:
            if any((row["config"], row["kind"], row["seed"]) == (label(), kind, seed) for row in rows):
                continue
            if kind not in kinds() or (_KINDS.value and kind not in _KINDS.value):
                continue
            if _MINUTES.value and time.monotonic() - started > 60 * _MINUTES.value:
                break
            rows.append(measured(kind, seed))
            print(json.dumps(rows[-1]), flush=True)
            with LINES.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    TABLE.write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
