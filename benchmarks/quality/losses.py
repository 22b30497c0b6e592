"""What the language model loses when a trained dictionary writes in place of its activations, by document.

Each dictionary that the table of a data set shows is a line of losses.jsonl beside this file; what is there already is
not measured again. saejax's own evaluation measures all of them alike: the peers' dictionaries are read from the files
that their own projects wrote. The model's pass without a dictionary is made once and kept, so that each dictionary
costs one forward pass of the text.
"""

import importlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.quality.runs import HERE, TRAINERS, Row, dictionary_of, read
from benchmarks.quality.sets import DataSet
from benchmarks.quality.table import Cell, cells, loss_table, rows_of
from saejax.app.workspace import Workspace
from saejax.coders import Coder, Sites
from saejax.evals import Reconstruction
from saejax.evals.evaluate import clean_run, spliced_run
from saejax.experiment import experiment
from saejax.interop.search import load_dictionary
from saejax.lm.forward import compiled
from saejax.text import PackedRows
from saejax.trained import TrainedCoder

LOSSES = HERE / "losses.jsonl"
Losses = dict[str, jax.Array]
Splice = Callable[..., Any]


class Text:
    """The held-out text of an experiment and the model's own pass over it.

    Attributes:
        numbers: [G], of the documents.
    """

    def __init__(self, data: DataSet, tokens: int = 0):
        e = experiment(importlib.import_module(f"configs.{data.experiment}").get_config())
        self.work = Workspace(e)
        self._rows, self.sites = e.eval.batch_rows, Sites((data.hook_point,), (data.hook_point,), (1.0,), (1.0,))
        lm, blank = self.work.lm, _arrays(self.work.packer.blank(self._rows))
        run = compiled(lm, clean_run(lm, self.sites, e.capture.sinks), lm.params, blank)
        self.parts = [(packed, run(lm.params, _arrays(packed))[1]) for packed in self._packed(tokens or e.eval.tokens)]
        documents = np.concatenate([packed.documents.ravel() for packed, _ in self.parts])
        self.numbers, self._splices = np.unique(documents[documents >= 0]), dict[Coder, Splice]()
        self._clean = self._by_document([(packed, clean["losses"]) for packed, clean in self.parts])

    def _packed(self, tokens: int) -> Iterator[PackedRows]:
        """Batches of the held-out text until there are so many tokens."""
        seen = 0
        for packed in self.work.packer.batches("heldout", self._rows):
            yield packed
            seen += int(packed.keep.sum())
            if seen >= tokens:
                return

    def _by_document(self, losses: Sequence[tuple[PackedRows, Losses]]) -> dict[str, np.ndarray]:
        """{loss: float64 [G]}: sums over each document's predicted tokens."""
        sums = {name: np.zeros(len(self.numbers)) for name in losses[0][1]}
        for packed, values in losses:
            at = np.searchsorted(self.numbers, packed.documents[:, :-1].ravel())
            for name, value in values.items():
                sums[name] += np.bincount(at, np.asarray(value, np.float64).ravel(), len(self.numbers))
        return sums

    def line(self, sae: TrainedCoder) -> Row:
        """What a dictionary costs: sums by document of `lost` (its cross-entropy less the model's), `zeroed` (that of
        zeros less the model's), `kl`, and the number of `predicted` tokens; FVE and L0 of the text's tokens."""
        run, lm, params = self._splice(sae.coder), self.work.lm, dict(sae.params)
        seen, losses = Reconstruction(), []
        for packed, clean in self.parts:
            sums, _, _, of_batch, _ = run(params, lm.params, clean, _arrays(packed))
            seen.add(sums["all"])
            losses.append((packed, of_batch))
        found = self._by_document(losses) | self._clean
        found |= {"lost": found["ce_sae"] - found["ce_clean"], "zeroed": found["ce_zero"] - found["ce_clean"]}
        row: Row = {name: round(float(seen.metrics()[name]), 6) for name in ("fve", "l0")}
        return row | {name: [float(f"{v:.7g}") for v in found[name]] for name in ("lost", "zeroed", "kl", "predicted")}

    def _splice(self, coder: Coder) -> Splice:
        """Compiled once for all dictionaries that differ in their parameters alone."""
        if coder not in self._splices:
            self._splices[coder] = jax.jit(spliced_run(self.work.lm, coder, self.sites))
        return self._splices[coder]


def _arrays(packed: PackedRows) -> Losses:
    return {name: jax.numpy.asarray(getattr(packed, name)) for name in ("tokens", "positions", "segments", "keep")}


def measure_losses(data: DataSet, results: Sequence[Row], ends: float) -> None:
    """A line for each dictionary that the table shows and that has none yet, until the time is over."""
    lines = read(LOSSES)
    known = [line["key"] for line in lines]
    missing = [row for row in shown(data, results) if row["key"] not in known]
    text = Text(data) if missing else None
    for row in missing:
        if text is None or time.monotonic() > ends:
            return
        folder, started = dictionary_of(data, row), time.perf_counter()
        found = text.line(load_dictionary(folder, (data.hook_point,)))
        line = {name: row[name] for name in ("key", "set", "family", "trainer", "target", "seed", "lr", "dead_share")}
        line |= {"l0": row["l0"], "fve": found.pop("fve"), "l0_of_text": found.pop("l0")}
        line |= {"date": time.strftime("%Y-%m-%d"), "seconds": round(time.perf_counter() - started, 1)} | found
        with LOSSES.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        recovered = 1 - sum(line["lost"]) / sum(line["zeroed"])
        print(*line["key"], f"loss_recovered={recovered:.4f} fve={line['fve']:.4f} of {row['fve']:.4f}", flush=True)


def shown(data: DataSet, results: Sequence[Row]) -> list[Row]:
    """The trainings of a data set that its table shows."""
    mine = [row for row in results if row["set"] == data.name]
    kinds = [(family, trainer) for family in data.families for trainer in TRAINERS]
    of_kind = [[row for row in mine if row["family"] == kind[0]] for kind in kinds]
    return [row for some, kind in zip(of_kind, kinds, strict=True) for row in rows_of(some, kind[1])]


HEAD = """
{title}.
The reconstruction takes the activation's place in {predicted:,} predicted held-out tokens of {documents} documents, but
for tokens that the capture leaves out. saejax's own evaluation; the peers' dictionaries are read from their own files.
Differences are saejax less the peer, their intervals over seeds and these documents.

"""


def loss_tables(data: DataSet) -> str:
    """Markdown: loss recovered and KL divergence at equal L0; "" where nothing was measured."""
    lines = [line for line in read(LOSSES) if line["set"] == data.name]
    if not lines:
        return ""
    (documents,) = {len(line["predicted"]) for line in lines}
    told = {"predicted": round(sum(lines[0]["predicted"])), "documents": documents}
    text = HEAD.format(title="Loss recovered (1: as the model by itself, 0: as with zeros)", **told)
    text += "\n".join(loss_table(_cells(data, lines, "lost", "zeroed"), recovered=True)) + "\n"
    text += "\nKL divergence of the next token's distribution, nats, of the same tokens:\n\n"
    return text + "\n".join(loss_table(_cells(data, lines, "kl", "predicted"), recovered=False)) + "\n"


def _cells(data: DataSet, lines: Sequence[Row], error: str, of: str) -> list[Cell]:
    """At equal L0, with one kind of sums in place of the squared error, and another in place of the variance."""
    rows = [line | {"error": line[error]} for line in lines]
    return list(cells(data, rows, np.array(lines[0][of])))
