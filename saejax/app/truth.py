"""`saejax truth`: a training on planted features and its scores, or the scores of dictionaries that are there."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jax.sharding import Mesh
from ml_collections.config_dict import ConfigDict

from saejax.app.console import say
from saejax.app.dictionaries import dictionaries
from saejax.app.experiment import Experiment, experiment
from saejax.app.load import load
from saejax.app.training_folders import RunFolder
from saejax.coders import TOPOLOGIES, Coder, Sites
from saejax.core.errors import EXIT_PREEMPTED, ConfigError, SaejaxError
from saejax.core.files import write_bytes, write_json
from saejax.evals.truth import NAME, Planted, PlantedBatches, Scores, heldout, plant, score
from saejax.fit.coders import Coders
from saejax.fit.learner import Data, Sides, Tell
from saejax.fit.train import train
from saejax.fit.trainable import coder_of, refuse_unused
from saejax.parallel import joined, own_rows, refuse_many
from saejax.reports.truth_page import truth_picture, truth_table, truth_table_of_many
from saejax.runs import Run
from saejax.runs.provenance import Provenance, verify_provenance
from saejax.trained import TrainedCoder
from saejax.training import TrainConfig

# What of `Setting.needs` planted activations have not.
_LACKS = {
    "order": "needs a store, and planted activations lie in none: ",
    "rows": "limits stored activations, and of planted ones no row comes twice: ",
    "text": "needs a language model, and planted activations are of none: ",
}
_SLOW = "Samples are drawn more slowly than a step takes them: more CPU cores or a GPU help."


def truth(config: ConfigDict | str | Experiment = "truth", sae: TrainedCoder | None = None) -> Scores:
    """Score a dictionary where the features are known: truth("truth").figures["f1"], or truth("truth", sae)

    It is what `saejax truth` does: trains on planted features and scores the result, in the folder of the experiment's
    run, where the same call continues. Of a given dictionary nothing is trained and nothing is written.

    Args:
        config: settings that begin as `shipped("truth")`, or what --config takes.
        sae: a dictionary to score, of one hook point and of the width `truth.d_in`.

    Raises:
        ConfigError: settings that cannot be trained on planted features, or would do nothing there.
        DataError: a run of something else, or a dictionary of another width.
        KeyboardInterrupt: a signal stopped the training; the same call continues.
    """
    e = experiment(config)
    if sae is not None:
        return score(sae, plant(e.truth), e.truth.score_samples, shown=True)
    refuse_many(e.parallel, "saejax.truth")
    _, scores = _train_and_score(e)
    if scores is None:
        raise KeyboardInterrupt("stopped; the same call continues where it was")
    return scores


def run_truth(e: Experiment, words: Sequence[str] | None = None) -> int:
    """Train on the world of an experiment and score the result; with `words` score the dictionaries that they mean.

    Returns:
        0; EXIT_PREEMPTED where a signal stopped the training (all is saved); 1 where one of several dictionaries cannot
        be scored.

    Raises:
        SaejaxError: as `fit.train`; of one dictionary alone, what is wrong with it.
    """
    if words is not None:
        return _score_all(e, plant(e.truth), words)
    finished, scores = _train_and_score(e)
    if scores is not None:
        say(f"truth: {scores.n_samples:,} fresh samples; {e.run.truth.with_suffix('.png')}")
        say(truth_table(scores))
    return 0 if finished else EXIT_PREEMPTED


def _train_and_score(e: Experiment) -> tuple[bool, Scores | None]:
    """(whether the training ended, the scores in the first process of those that did)."""
    _refuse_settings(e)
    planted = plant(e.truth)
    materials = PlantedMaterials(e, planted)
    with joined(e.parallel) as process:
        outcome = train(Coders.alone(materials), RunFolder(e, materials.made_from), process, say)
        if outcome is not None and outcome.stopped:
            return False, None
        return True, _score_and_write(e, planted, load(e.run_dir), e.run_dir) if process.first else None


def _refuse_settings(e: Experiment) -> None:
    """Raise ConfigError for what cannot be trained on planted activations, or would do nothing."""
    refuse_unused(e, _LACKS)
    for key in ("hook_point", "reads", "writes"):
        if value := getattr(e, key):
            raise ConfigError(
                f"{key} is {value!r}, and planted activations have the one hook point {NAME}. Leave it empty."
            )
    topology = TOPOLOGIES[e.coder.resolved().topology]
    if topology.stacked or not topology.tied:
        raise ConfigError(
            f"coder.preset is {e.coder.preset!r}; planted activations are of one hook point, which a coder must "
            "reconstruct. Choose an autoencoder, such as topk or batchtopk."
        )


@dataclasses.dataclass(frozen=True)
class PlantedMaterials:
    """A world that coders learn from: `fit.Materials`."""

    experiment: Experiment
    planted: Planted
    sites: Sides = ((NAME,), (NAME,))

    def with_train(self, train: TrainConfig) -> "PlantedMaterials":
        return dataclasses.replace(self, experiment=dataclasses.replace(self.experiment, train=train))

    def rows(self) -> int:
        return self.experiment.train.tokens

    def made_from(self) -> Provenance:
        world = {"store": "truth", "rows": self.rows(), "fingerprint": self.planted.fingerprint}
        return verify_provenance(self.experiment.run, {"train": world, "heldout": {}, "lm": {}, "text": {}})

    def beside(self, coder: Coder, sites: Sites, mesh: Mesh) -> None:
        """Without a language model there is none."""

    def build(self) -> Coder:
        width = self.planted.world.d_in
        return coder_of(self.experiment, [width], [width])

    def data(self, hook_points: Sequence[str], mesh: Mesh | None, tell: Tell) -> Data:
        t, seed = self.experiment.train, self.experiment.seed
        rows = own_rows(mesh, t.batch_size, t.accumulate) if mesh else None
        batches = PlantedBatches(self.planted, t.batch_size, seed, rows, epoch_rows=t.tokens)
        return Data(batches, heldout(self.planted, seed), slow=_SLOW)

    def source_coder(self) -> TrainedCoder:
        return load(self.experiment.train.init_from)


def _score_and_write(e: Experiment, planted: Planted, sae: TrainedCoder, folder: Path) -> Scores:
    """Score a dictionary and write truth.json and truth.png."""
    scores = score(sae, planted, e.truth.score_samples, shown=True)
    about = {"step": sae.step, "sha256": sae.fingerprint(), "world": planted.described()}
    write_json(Run(folder).truth, about | scores.to_json())
    title = f"{folder.name}: the {planted.world.n_features:,} features"
    write_bytes(Run(folder).truth.with_suffix(".png"), truth_picture(scores, title))
    return scores


def _score_all(e: Experiment, planted: Planted, words: Sequence[str]) -> int:
    """Score each dictionary into a folder of its own, and write the table of all."""
    named, folder = dictionaries(words), e.run.scored
    rows: dict[str, Scores | str] = {}
    for name, source in named.items():
        say(f"{name}: {source}")
        try:
            (folder / name).mkdir(parents=True, exist_ok=True)
            rows[name] = _score_and_write(e, planted, load(source, hook_points=(NAME,)), folder / name)
        except SaejaxError as error:
            if len(named) == 1:
                raise
            say(f"{name}: error: {error}")
            rows[name] = str(error)
    first = next(iter(rows.values()))
    shown = truth_table(first) if len(rows) == 1 and isinstance(first, Scores) else truth_table_of_many(rows)
    write_bytes(Run(folder).table, (shown + "\n").encode())
    say(shown)
    say(f"truth: {Run(folder).table}")
    return 1 if any(isinstance(row, str) for row in rows.values()) else 0
