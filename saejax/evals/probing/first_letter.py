"""The first-letter task: does the model know first letters, and which latents stand for them?

A linear probe on the model's activations comes first. Where the model does not know the letters by it, nothing can be
said about a dictionary, and the task is refused with the probe's figures.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from saejax.coders import LayerNormAutoencoder
from saejax.core.errors import DataError
from saejax.evals.probing.absorption import absorbed, splits
from saejax.evals.probing.compare import mean_over
from saejax.evals.probing.config import ProbesConfig
from saejax.evals.probing.linear import ON_ACTIVATIONS, ON_LATENTS, Probe, train
from saejax.evals.probing.sparse import columns
from saejax.evals.probing.words import LETTERS, Words, divided, prompts, vocabulary
from saejax.text import Tokenizer
from saejax.trained import TrainedCoder

_BLOCK = 512
# A letter has at least so many training and held-out words.
_FEWEST = 2

# (name, tokens) -> activations [N, D] at the last token of each.
Read = Callable[[str, list[list[int]]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Task:
    """Words with the activations of one hook point at them, and the model's probe.

    Attributes:
        train, test: words.
        x_train, x_test: float32 [N, D].
        probe: on activations.
        f1: of the probe on held-out words, one for each letter; 0 of a letter with too few words.
    """

    train: Words
    test: Words
    x_train: np.ndarray
    x_test: np.ndarray
    probe: Probe
    f1: tuple[float, ...]

    def known(self, least: float) -> list[int]:
        """The letters that the model knows."""
        return [letter for letter, f1 in enumerate(self.f1) if f1 > least]

    def refusal(self, config: ProbesConfig) -> str:
        """Why nothing can be said of dictionaries of this model; empty where it can."""
        known = len(self.known(config.least_f1))
        if known >= config.least_letters:
            return ""
        return (
            f"the model does not know first letters here: its own probe reaches F1 {config.least_f1:g} on held-out "
            f"words for {known} of 26 letters (mean F1 {np.mean(self.f1):.2f}, {len(self.train.ids):,} words), and "
            f"{config.least_letters} are needed"
        )


def task_of(tokenizer: Tokenizer, bos: Sequence[int], config: ProbesConfig, read: Read) -> Task:
    """The task on one hook point of a model: words, activations at them, and the probe."""
    parts = divided(vocabulary(tokenizer), config.seed, config.words)
    if min(len(words.ids) for words in parts) < 2 * len(LETTERS):
        n = sum(len(words.ids) for words in parts)
        raise DataError(f"The vocabulary has {n} words of letters alone; the first-letter task needs {10 * 26}.")
    names = ("first_letter-train", "first_letter-test")
    made = [prompts(tokenizer, words, bos, config.seed, name) for words, name in zip(parts, names, strict=True)]
    x_train, x_test = (read(name, ids) for name, ids in zip(names, made, strict=True))
    probe = train(x_train, parts[0].letters, len(LETTERS), ON_ACTIVATIONS, config.seed)
    score_NC = probe.scores(x_test)
    f1 = [_f1(parts[1].letters == c, score_NC[:, c] > 0) for c in range(len(LETTERS))]
    count_C = [np.bincount(words.letters, minlength=len(LETTERS)) for words in parts]
    enough = np.minimum(*count_C) >= _FEWEST
    return Task(*parts, x_train, x_test, probe, tuple(np.where(enough, f1, 0.0).tolist()))


def refused_coder(sae: TrainedCoder) -> str:
    """Why a dictionary cannot take part; empty where it can: its rows are directions at the one hook point it reads."""
    topology = sae.coder.topology
    if sae.sites.reads != sae.sites.writes or len(sae.sites.reads) > 1:
        return "it does not write the one hook point that it reads, so its decoder rows are no directions there"
    if isinstance(topology, LayerNormAutoencoder):
        return "its decoder rows change their length with the token (layer normalisation)"
    return "" if len(topology.latent_shape) == 1 else "it has several groups of latents"


def first_letters(sae: TrainedCoder, task: Task, config: ProbesConfig) -> dict[str, Any]:
    """Splitting and absorption of a dictionary, as JSON: means over the letters that the model knows, and each of them.

    The latents of a letter are those with the largest weights in a probe with an l1 penalty on all latents; k of them
    are probed again, k = 1 ... most_latents. `splits` says how many stand for the letter. Absorption is measured on the
    held-out words of the letter that the model's probe recognises.
    """
    chosen_CK = _chosen(sae, task, config)
    used, at = np.unique(chosen_CK, return_inverse=True)
    at_CK = at.reshape(chosen_CK.shape)
    z_train, z_test = (columns(sae.encode, x, used) for x in (task.x_train, task.x_test))
    letters = {}
    for c in task.known(config.least_f1):
        y_train, y_test = task.train.letters == c, task.test.letters == c
        f1_K = _k_sparse(z_train[:, at_CK[c]], y_train, z_test[:, at_CK[c]], y_test)
        n = splits(f1_K, config.split_gain)
        hit_N = y_test & (task.probe.scores(task.x_test)[:, c] > 0)
        fraction, full = _absorption(sae, task.x_test[hit_N], task.probe.weights[:, c], chosen_CK[c, :n].tolist())
        letters[LETTERS[c]] = {
            "model_f1": task.f1[c],
            "f1": f1_K,
            "latents": chosen_CK[c].tolist(),
            "splits": n,
            "words": int(hit_N.sum()),
            "absorption_fraction": float(fraction.mean()),
            "full_absorption": float(full.mean()),
        }
    means = {
        key: dataclasses.asdict(mean_over([one[key] for one in letters.values()], config.resamples, config.seed))
        for key in ("splits", "absorption_fraction", "full_absorption")
    }
    return means | {"letters": letters}


def _chosen(sae: TrainedCoder, task: Task, config: ProbesConfig) -> np.ndarray:
    """int64 [26, K]: the latents with the largest weights for each letter, falling; no absolute values."""

    def latents(params: Any, x: Any) -> Any:
        return sae.coder.encode(params, x).dense()

    on_latents = train(
        task.x_train, task.train.letters, len(LETTERS), ON_LATENTS, config.seed, latents, dict(sae.params)
    )
    return np.argsort(-on_latents.weights.T, axis=1, kind="stable")[:, : config.most_latents]


def _k_sparse(z_train: np.ndarray, y_train: np.ndarray, z_test: np.ndarray, y_test: np.ndarray) -> list[float]:
    """F1 on held-out words of balanced logistic regressions on the first 1, 2, ... latents."""
    from sklearn.linear_model import LogisticRegression

    said = []
    for k in range(1, z_train.shape[1] + 1):
        model = LogisticRegression(max_iter=500, class_weight="balanced").fit(z_train[:, :k], y_train)
        said.append(_f1(y_test, model.decision_function(z_test[:, :k]) > 0))
    return said


def _absorption(sae: TrainedCoder, x: np.ndarray, p_D: np.ndarray, main: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(fraction, full) of each word, in blocks of words."""
    rows = np.asarray(sae.coder.topology.decoder_rows(dict(sae.params))[0])
    blocks = [x[start : start + _BLOCK] for start in range(0, len(x), _BLOCK)]
    parts = [absorbed(sae.encode(block), block, rows, p_D, main) for block in blocks]
    return np.concatenate([part.fraction for part in parts]), np.concatenate([part.full for part in parts])


def _f1(true_N: np.ndarray, said_N: np.ndarray) -> float:
    """2 tp / (2 tp + fp + fn); 0 where nothing is right."""
    right, others = int((true_N & said_N).sum()), int((true_N ^ said_N).sum())
    return 2 * right / (2 * right + others) if right else 0.0
