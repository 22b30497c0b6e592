"""`saejax.probes`, and `saejax evaluate --probes`: probes.json beside each eval.json, and a table of all.

runs/<name>/probes.json                        runs/<name>/probes.{md,png,html}
runs/<name>/evaluated/<dictionary>/probes.json runs/<name>/evaluated/probes.{md,png,html}
runs/.probes/                                  activations and baselines, for all runs of the folder
"""

import dataclasses
import functools
import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from saejax.app import console
from saejax.app.dictionaries import dictionaries
from saejax.app.run_coders import coder_at
from saejax.app.stages.evaluate import finished_run
from saejax.app.texts import at_model, has_bos
from saejax.app.workspace import Workspace
from saejax.core.config import from_config_dict
from saejax.core.errors import ConfigError, DataError, SaejaxError
from saejax.core.files import read_json, write_json
from saejax.core.notebook import html_table
from saejax.core.progress import Progress
from saejax.evals.probing.compare import difference, mean_over
from saejax.evals.probing.config import ProbesConfig
from saejax.evals.probing.datasets import LabelledTexts, chosen, data_folder, files, needed, read
from saejax.evals.probing.first_letter import Task, first_letters, refused_coder, task_of
from saejax.evals.probing.last_token import Reader
from saejax.evals.probing.sparse import Scores, probe_activations, probe_latents, split
from saejax.lm.forward import Model, apart
from saejax.reports.probes_page import render_probes
from saejax.runs import Run
from saejax.runs.made import differing, digest, refusal
from saejax.trained import TrainedCoder

FIRST_LETTER = "first_letter"


@dataclasses.dataclass(frozen=True, repr=False)
class Probes:
    """The scores of probes on k latents, and on all activations, of texts of two classes.

    Attributes:
        datasets: {data set: "rows" of training and test; "activations", the scores of a probe on all of them; "k", the
            scores by the number of latents; "latents" in the order in which they were chosen}.
        first_letter: figures of splitting and absorption, {"refused": why}, or {} where that was not asked.
    """

    datasets: Mapping[str, Mapping[str, Any]]
    first_letter: Mapping[str, Any]

    @property
    def ks(self) -> list[str]:
        """Numbers of latents."""
        return list(dict.fromkeys(k for scores in self.datasets.values() for k in scores["k"]))

    def __repr__(self) -> str:
        lines = [f"{name}: {', '.join(f'{k} {value}' for k, value in row)}" for name, row in self._rows().items()]
        return "\n".join(["AUC of probes on k latents, and on all activations", *lines, *self._letters()])

    def _repr_html_(self) -> str:
        rows = {name: [value for _, value in row] for name, row in self._rows().items()}
        table = html_table("AUC of probes on k latents", rows, (*(f"k {k}" for k in self.ks), "activations"))
        return table + "".join(f"<p>{html.escape(line)}</p>" for line in self._letters())

    def _rows(self) -> dict[str, list[tuple[str, str]]]:
        return {
            name: [
                *((f"k {k}", f"{scores['k'][k]['auc']:.3f}") for k in self.ks),
                ("activations", f"{scores['activations']['auc']:.3f}"),
            ]
            for name, scores in self.datasets.items()
        }

    def _letters(self) -> list[str]:
        known = self.first_letter
        if why := known.get("refused"):
            return [f"first letters: refused, {why}"]
        means = [
            f"{name} {value['mean']:.3f}"
            for name, value in known.items()
            if isinstance(value, Mapping) and "mean" in value
        ]
        return [f"first letters: {', '.join(means)}"] if means else []


def probes(
    sae: TrainedCoder, lm: Model, datasets: str = "all", *, cache: str | Path = "runs/.probes", **settings: Any
) -> Probes:
    """Probe texts of two classes with k latents: probes(sae, lm, "95_toxic_is,117_us_state_*", ks=(1, 5))

    It is what `saejax evaluate --probes` does of one dictionary, with the code that follows sae-probes.

    Args:
        sae: a dictionary of the model's hook points.
        lm: a model of `saejax.load_lm` that JAX runs.
        datasets: all; or names and patterns of data sets, and first_letter for splitting and absorption, with commas.
        cache: a folder for the model's activations and the probes on them, which other dictionaries share.
        settings: of the section `probes`: data, ks, penalty, seed, train_rows, ...

    Raises:
        ConfigError: no dictionary or no model, a package or the data is missing, no such data set or setting.
        DataError: a model of another width, or a damaged file.
    """
    named, config = at_model(sae, lm, "probes"), from_config_dict(ProbesConfig, settings)
    wanted, tasks = probed(config, datasets), dict[str, Task | str]()
    texts = ProbedTexts(lm, config, has_bos(lm), str(lm.identity.get("dtype", "float32")), Path(cache))
    scores = {}
    with Progress("probe", len(wanted.files), unit="data sets") as progress:
        for name, path in wanted.files.items():
            scores[name] = texts.scores(named, read(path))
            progress.advance(1)
    return Probes(scores, texts.first_letter(named, tasks, None) if wanted.first_letter else {})


@dataclasses.dataclass(frozen=True)
class Probed:
    """Files of data sets by name, and whether the first-letter task is done too."""

    files: dict[str, Path]
    first_letter: bool


def probed(config: ProbesConfig, words: str) -> Probed:
    """The meaning of --probes: all; or names and patterns of data sets and first_letter, with commas.

    Raises:
        ConfigError: a package or the data is missing (says how to install it), or there is no such data set.
    """
    needed("sklearn", "scikit-learn")
    named = [word.strip() for word in words.split(",") if word.strip()]
    if not named:
        raise ConfigError("--probes is empty; give all, names of data sets, or first_letter.")
    everything = "all" in named
    names = [word for word in named if word not in ("all", FIRST_LETTER)]
    data_sets = files(data_folder(config.data)) if everything or names else {}
    chosen_names = list(data_sets) if everything else chosen(names, [*data_sets, FIRST_LETTER])
    return Probed(
        {name: data_sets[name] for name in chosen_names if name in data_sets}, everything or FIRST_LETTER in named
    )


def run_probes(work: Workspace, wanted: Probed, words: list[str] | None = None, redo: bool = False) -> int:
    """Probe the config's own run, or the dictionaries that `words` mean, which were evaluated before.

    What probes.json has already is not done again, and it is written after each data set.

    Returns:
        0, or 1 where one of several dictionaries cannot be probed; the page says why.

    Raises:
        SaejaxError: of one dictionary alone: what is wrong with it.
    """
    e = work.experiment
    if words is None:
        folders, place = {e.name: e.run_dir}, e.run_dir
    else:
        place = e.run.evaluated
        folders = {name: place / name for name in dictionaries(words)}
    rows: list[dict[str, Any]] = []
    tasks: dict[str, Task | str] = {}
    contents = {name: read(path).sha256 for name, path in wanted.files.items()}
    for name, folder in folders.items():
        try:
            sae = finished_run(e).at(work.lm) if words is None else coder_at(folder)
            content = _probed(work, name, folder, sae, wanted, contents, tasks, redo)
        except SaejaxError as error:
            if len(folders) == 1:
                raise
            console.say(f"{name}: error: {error}")
            content = {"error": str(error)}
        rows.append({"name": name} | content)
    _show(e.probes, place, f"Probes on {work.lm.identity['model']}", rows, wanted)
    return int(any("error" in row for row in rows))


def _probed(
    work: Workspace,
    name: str,
    folder: Path,
    sae: TrainedCoder,
    wanted: Probed,
    contents: Mapping[str, str],
    tasks: dict[str, Task | str],
    redo: bool,
) -> dict[str, Any]:
    """The content of one dictionary's probes.json, brought up to what is wanted; `contents`: data set -> sha256."""
    texts, path = ProbedTexts.of(work), Run(folder).probes
    content = _before(path, {"sha256": sae.fingerprint(), "on": texts.decided_by()}, wanted, contents, redo)
    missing = [data_set for data_set in wanted.files if data_set not in content["datasets"]]
    with Progress(f"probe {name}", len(missing), unit="data sets") as progress:
        for data_set in missing:
            scores = texts.scores(sae, read(wanted.files[data_set]))
            content["datasets"][data_set] = {"sha256": contents[data_set]} | scores
            write_json(path, content)
            progress.advance(1)
    if wanted.first_letter:
        content[FIRST_LETTER] = texts.first_letter(sae, tasks, content.get(FIRST_LETTER))
        write_json(path, content)
    return content


@dataclasses.dataclass(frozen=True)
class ProbedTexts:
    """A language model that reads the texts of data sets, and what is asked of dictionaries there.

    Attributes:
        dtype: of the model, for the identity of what is kept in the folder.
    """

    lm: Model
    config: ProbesConfig
    prepend_bos: bool
    dtype: str
    folder: Path

    @classmethod
    def of(cls, work: Workspace) -> "ProbedTexts":
        e = work.experiment
        return cls(work.lm, e.probes, e.text.prepend_bos, e.lm.dtype, Path(e.runs_dir) / ".probes")

    def reader(self, names: tuple[str, ...], max_tokens: int = 0) -> Reader:
        c = self.config
        longest = max_tokens or c.max_tokens
        return Reader(self.lm, names, self.prepend_bos, longest, c.batch_tokens, self.dtype, self.folder)

    def decided_by(self) -> dict[str, Any]:
        """The settings that decide the figures of a dictionary, besides itself and the data set."""
        keys, reader = ("ks", "penalty", "seed", "train_rows", "test_rows"), self.reader(())
        read_by = {"lm": self.lm.identity, "dtype": self.dtype, "bos": self.prepend_bos, "max_tokens": reader.longest}
        read_by |= apart(self.lm, reader.longest)
        return json.loads(json.dumps(read_by | {key: getattr(self.config, key) for key in keys}))

    def scores(self, sae: TrainedCoder, data: LabelledTexts) -> dict[str, Any]:
        """The scores of one dictionary on one data set, as JSON."""
        c, reader = self.config, self.reader(sae.sites.reads)
        rows = split(data.name, data.labels, c.seed, c.train_rows, c.test_rows)
        used = np.union1d(*rows)
        places = type(rows)(*(np.searchsorted(used, part) for part in rows))
        labels, captured = data.labels[used], reader.of_texts(data.name, [data.texts[i] for i in used])
        parts = [captured[hook] for hook in sae.sites.reads]
        x = np.stack(parts, axis=1) if sae.sites.stacked else parts[0]

        def encode(block: np.ndarray) -> np.ndarray:
            return sae.encode(block).reshape(len(block), -1)

        scores, latents = probe_latents(encode, x, labels, places, c.ks, c.penalty, c.seed)
        baseline = self.folder / f"{data.name}-{digest(c.seed, x, labels, *places)[:16]}.json"
        if not baseline.is_file():
            write_json(baseline, dataclasses.asdict(probe_activations(x, labels, places, c.seed)))
        return {
            "rows": [len(part) for part in rows],
            "activations": dataclasses.asdict(Scores(**read_json(baseline))),
            "k": {str(k): dataclasses.asdict(score) for k, score in scores.items()},
            "latents": latents.tolist(),
        }

    def first_letter(
        self, sae: TrainedCoder, tasks: dict[str, Task | str], before: dict[str, Any] | None
    ) -> dict[str, Any]:
        """The first-letter task of one dictionary, as JSON: figures, or why it is refused."""
        config, hook = self.config, sae.hook_point
        keys = ("words", "most_latents", "split_gain", "least_f1", "least_letters")
        on = {key: getattr(config, key) for key in keys}
        if before is not None and before["on"] == on:
            return before
        if why := refused_coder(sae):
            return {"on": on, "refused": why}
        if hook not in tasks:
            tasks[hook] = self._task(hook)
        task = tasks[hook]
        if isinstance(task, str):
            return {"on": on, "refused": task}
        figures = {"refused": why} if (why := task.refusal(config)) else first_letters(sae, task, config)
        return {"on": on, "model_f1": list(task.f1)} | figures

    def _task(self, hook: str) -> Task | str:
        """The task on a hook point; or why there is none."""
        tokenizer, reader = self.lm.tokenizer, self.reader((hook,), self.lm.config.context_length)
        bos = tokenizer.bos if self.prepend_bos else []
        try:
            return task_of(tokenizer, bos, self.config, lambda name, ids: reader.of_ids(name, ids)[hook])
        except DataError as error:
            return str(error)


def _before(
    path: Path, decided: dict[str, Any], wanted: Probed, contents: Mapping[str, str], redo: bool
) -> dict[str, Any]:
    """The content that is there, with `redo` without what is wanted; else an empty one."""
    empty = decided | {"datasets": {}}
    content = read_json(path) if path.is_file() else empty
    if changed := differing(content, decided):
        if not redo:
            raise refusal(path, changed)
        return empty
    known = content["datasets"]
    if redo:
        known = {name: data for name, data in known.items() if name not in contents}
        content = {k: v for k, v in content.items() if k != FIRST_LETTER or not wanted.first_letter}
    there = {name: known[name]["sha256"] for name in contents if name in known}
    if changed := differing(there, {name: contents[name] for name in there}):
        raise refusal(path, [f"texts or labels of {line}" for line in changed])
    return content | {"datasets": known}


def _show(config: ProbesConfig, place: Path, title: str, rows: list[dict[str, Any]], wanted: Probed) -> None:
    """Say and write the table, the comparisons and the picture."""
    names = set(wanted.files)
    mean = functools.partial(mean_over, resamples=config.resamples, seed=config.seed)
    shown = []
    for row in rows:
        shared = {n: data for n, data in row.get("datasets", {}).items() if n in names}
        curve = {k: mean([data["k"][str(k)]["auc"] for data in shared.values()]) for k in config.ks} if shared else {}
        base = mean([data["activations"]["auc"] for data in shared.values()]) if shared else None
        letters = row.get(FIRST_LETTER, {}) if wanted.first_letter else {}
        shown.append(
            {"name": row["name"], "error": row.get("error"), "curve": curve, "activations": base, "letters": letters}
        )
    compared = [
        (row["name"], rows[0]["name"], k, compared_k)
        for row in rows[1:]
        for k in config.ks
        if (compared_k := difference(_aucs(row, k, names), _aucs(rows[0], k, names), config.resamples, config.seed))
    ]
    console.say(render_probes(place, title, shown, compared))
    console.say(f"probes: {Run(place).probes.with_suffix('.html')}")


def _aucs(row: dict[str, Any], k: int, names: set[str]) -> dict[str, float]:
    return {n: data["k"][str(k)]["auc"] for n, data in row.get("datasets", {}).items() if n in names}
