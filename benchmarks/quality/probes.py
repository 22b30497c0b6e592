"""sae-probes on the dictionaries that a table shows, at its middle L0: how well few latents tell two classes apart.

    python -m benchmarks.quality.run --sets=smollm2            trains them
    python -m benchmarks.quality.probes --set=smollm2          build/probes/smollm2, then the table

sae-probes' own code chooses latents, fits the probes and scores them (benchmarks/peers/run_sae_probes.py). What it
reads is made by saejax: the language model's activations at each text's last token, and every trainer's latents. A data
set of a dictionary is a file; what is there already is not done again. Of the data sets that sae-probes ships, those
are taken whose texts together are short, since a language model reads slowly here.
"""

import importlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks.quality.losses import shown
from benchmarks.quality.runs import HERE, TRAINERS, Row, dictionary_of, read
from benchmarks.quality.sets import SETS, DataSet
from benchmarks.quality.table import NAMES, RESAMPLES
from saejax.app.workspace import Workspace
from saejax.evals.probing import datasets
from saejax.evals.probing.last_token import Reader
from saejax.experiment import experiment
from saejax.interop.hooks import to_transformer_lens
from saejax.interop.search import load_dictionary

PEERS = HERE.parent / "peers"
SHIPPED = Path("build/peers-venv/lib/python3.11/site-packages/sae_probes/data")
# The score of one dictionary on one data set with k latents.
Scores = dict[tuple[str, str, int, int], dict[str, float]]

_SET = flags.DEFINE_string("set", "smollm2", "The data set, one with a language model.")
_OUT = flags.DEFINE_string("out", "build/probes/smollm2", "The folder of activations and scores.")
_KS = flags.DEFINE_list("ks", ["1", "2", "5", "16"], "Latents that a probe sees.")
_L0S = flags.DEFINE_list("l0s", [], "Asked-for L0s; the middle one by default.")
_SEEDS = flags.DEFINE_list("seeds", [], "Seeds; all by default.")
_DATASETS = flags.DEFINE_list("datasets", [], "Data sets of sae-probes; by default the short ones.")
_CHARACTERS = flags.DEFINE_integer("characters", 110_000, "Characters of all texts of a data set that is short.")
_RESULTS = flags.DEFINE_string("results", str(HERE / "results.jsonl"), "The lines of the trainings.")


def main(_: list[str]) -> None:
    import torch  # the peers' environment has it; the table needs none

    data, out = SETS[_SET.value], Path(_OUT.value)
    sys.path.append(str(PEERS))
    probed = importlib.import_module("run_sae_probes").probed
    hook, ks = to_transformer_lens(data.hook_point), [int(k) for k in _KS.value]
    texts = _texts()
    _write_activations(data, texts, hook, out)
    scores: Scores = {}
    for row in _chosen(data):
        folder = dictionary_of(data, row)
        started, sae = time.perf_counter(), load_dictionary(folder, (data.hook_point,))
        encoder = SimpleNamespace(encode=lambda x, sae=sae: torch.tensor(sae.encode(x.numpy())))
        for (dataset, k), auc in probed(encoder, folder.name, hook, out, list(texts), ks).items():
            scores.setdefault((row["family"], row["trainer"], row["seed"], k), {})[dataset] = auc
        print(folder.name, f"{time.perf_counter() - started:.0f} s", flush=True)
    print("\n".join(table(data, scores, ks)))


def _texts() -> dict[str, list[str]]:
    """{data set: its texts}."""
    files = datasets.files(datasets.data_folder(str(SHIPPED)))
    read_all = {name: list(datasets.read(files[name]).texts) for name in _DATASETS.value or files}
    if _DATASETS.value:
        return read_all
    most = _CHARACTERS.value
    return {name: texts for name, texts in read_all.items() if sum(map(len, texts)) <= most}


def _chosen(data: DataSet) -> list[Row]:
    l0s = [int(l0) for l0 in _L0S.value] or [data.l0s[1]]
    seeds = [int(seed) for seed in _SEEDS.value] or list(data.seeds)
    rows = shown(data, read(Path(_RESULTS.value)))
    return [row for row in rows if row["target"] in l0s and row["seed"] in seeds]


def _write_activations(data: DataSet, texts: dict[str, list[str]], hook: str, out: Path) -> None:
    """The language model at each text's last token, where sae-probes looks for its own cache of them."""
    e = experiment(importlib.import_module(f"configs.{data.experiment}").get_config())
    folder = out / "activations" / f"model_activations_{importlib.import_module('run_sae_probes').MODEL}"
    missing = {name: folder / f"{name}_{hook}.pt" for name in texts if not (folder / f"{name}_{hook}.pt").exists()}
    if not missing:
        return
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    lm = Workspace(e).lm
    settings = (e.text.prepend_bos, e.probes.max_tokens, e.probes.batch_tokens // 4, e.lm.dtype, out / "rows")
    reader = Reader(lm, (data.hook_point,), *settings)
    for name, path in missing.items():
        torch.save(torch.from_numpy(reader.of_texts(name, texts[name])[data.hook_point]), path)


def table(data: DataSet, scores: Scores, ks: Sequence[int]) -> Iterator[str]:
    """Markdown: mean AUC over data sets and seeds, and saejax less each peer with its 95 % interval."""
    columns = ("family", "k", *NAMES, "- SAELens", "- dictionary_learning")
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for family in data.families:
        for k in ks:
            of = [_array(scores, family, trainer, k) for trainer in TRAINERS]
            means = [f"{array.mean():.4f}" if array.size else "-" for array in of]
            yield f"| {' | '.join([family, str(k), *means, *(_difference(of[0], peer) for peer in of[1:])])} |"


def _array(scores: Scores, family: str, trainer: str, k: int) -> np.ndarray:
    """AUC [seeds, data sets]."""
    found = [of for key, of in sorted(scores.items()) if (key[0], key[1], key[3]) == (family, trainer, k)]
    return np.array([[of[name] for name in sorted(of)] for of in found])


def _difference(a: np.ndarray, b: np.ndarray) -> str:
    """The mean of a - b with its 95 % interval over seeds and data sets, drawn alike; bold where 0 is outside."""
    if a.shape != b.shape or not a.size:
        return "-"
    each, random = a - b, np.random.default_rng(0)
    drawn = np.array([_resampled(each, random).mean() for _ in range(RESAMPLES)])
    low, high = np.quantile(drawn, [0.025, 0.975])
    shown_as = f"{each.mean():+.4f} [{low:+.4f}, {high:+.4f}]"
    return f"**{shown_as}**" if low > 0 or high < 0 else shown_as


def _resampled(each: np.ndarray, random: np.random.Generator) -> Any:
    seeds, sets = (random.integers(size, size=size) for size in each.shape)
    return each[seeds][:, sets]


if __name__ == "__main__":
    app.run(main)
