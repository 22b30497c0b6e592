"""The first-letter task: does the model know first letters, and which latents stand for them?

A linear probe on the model's activations comes first. Where the model does not know the letters by it, nothing can be
said about a dictionary, and the task is refused with the probe's figures.
"""

import dataclasses
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from saejax.coders import LayerNormAutoencoder
from saejax.core.errors import DataError
from saejax.evals.probing.compare import mean_over
from saejax.evals.probing.config import ProbesConfig
from saejax.evals.probing.linear import ON_ACTIVATIONS, ON_LATENTS, Probe, train_probe
from saejax.evals.probing.sparse import columns
from saejax.text import Tokenizer
from saejax.trained import TrainedCoder

_FIRES = 1e-8
_LEAST_COS_FULL, _LEAST_COS, _LEAST_SHARE = 0.025, 0.1, 0.4
_ABSORBERS = 3


class Absorbed(NamedTuple):
    """Of each word: `fraction` [B], between 0 and 1, and `full` bool [B]."""

    fraction: np.ndarray
    full: np.ndarray


def absorbed(
    z_BF: np.ndarray, x_BD: np.ndarray, W_dec_FD: np.ndarray, p_D: np.ndarray, main: Sequence[int]
) -> Absorbed:
    """The share of the probe's projection that other latents carry in place of the main ones.

    With a the sum of the (at most 3) largest proj_f > 0 of latents that are not main and have cos_f >= 0.1, and m the
    sum of proj_f of the main ones:

        fraction = 0                      if m >= act or a / act < 0.4
                 = 1                      else if m <= 0
                 = c / (c + m)            else, with c = min(a, act - m)

    full: no main latent fires (z_f < 1e-8), and the latent with the largest proj_f has cos_f >= 0.025 and proj_f / act
    >= 0.4, act not negative.
    """
    p_D = p_D.astype(np.float64) / np.linalg.norm(p_D)
    onto_F = W_dec_FD.astype(np.float64) @ p_D
    cos_F = onto_F / np.maximum(np.linalg.norm(W_dec_FD.astype(np.float64), axis=1), 1e-12)
    proj_BF, act_B = z_BF * onto_F[None], x_BD.astype(np.float64) @ p_D
    chosen = np.zeros(len(onto_F), bool)
    chosen[list(main)] = True
    main_B = proj_BF[:, chosen].sum(1)
    candidates_BF = np.where(((cos_F >= _LEAST_COS) & ~chosen)[None], np.maximum(proj_BF, 0), 0)
    others_B = np.sort(candidates_BF, axis=1)[:, -_ABSORBERS:].sum(1)
    safe_B = np.where(act_B == 0, np.finfo(np.float64).tiny, act_B)
    with np.errstate(over="ignore"):  # of an act of 0, whose fraction is 0 or 1
        none_B = (main_B >= act_B) | (others_B / safe_B < _LEAST_SHARE)
    carried_B = np.minimum(others_B, act_B - main_B)
    whole_B = np.where(carried_B + main_B == 0, 1.0, carried_B + main_B)
    part_B = np.where(main_B <= 0, 1.0, np.clip(carried_B / whole_B, 0, 1))
    top_B = proj_BF.argmax(1)
    top_proj_B = proj_BF[np.arange(len(top_B)), top_B]
    silent_B = (z_BF[:, chosen] < _FIRES).all(1)
    aligned_B = (cos_F[top_B] >= _LEAST_COS_FULL) & (act_B >= 0) & (top_proj_B >= _LEAST_SHARE * act_B)
    return Absorbed(np.where(none_B, 0.0, part_B), silent_B & aligned_B)


def splits(f1_K: Sequence[float], gain: float) -> int:
    """Latents that share a property: the last k in 1, 2, ... before F1 rises by no more than `gain` over k - 1."""
    best, k = -np.inf, 0
    for score in f1_K:
        if not score > best + gain:
            break
        best, k = score, k + 1
    return k


LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WORD = re.compile(" ?[A-Za-z]+")
_ASKS = " has the first letter:"
_EXAMPLES = 10
_TRAIN_SHARE = 0.8


class Words(NamedTuple):
    """Words of one token each: `ids` int64 [N], `letters` int64 [N], 0 for a."""

    ids: np.ndarray
    letters: np.ndarray


def vocabulary(tokenizer: Tokenizer) -> Words:
    """All tokens that are ASCII letters, with at most one space in front."""
    ids = [i for i in tokenizer.usable_ids if i not in tokenizer.special_ids]
    words = [(i, s) for i, s in zip(ids, tokenizer.token_strings(ids), strict=True) if _WORD.fullmatch(s)]
    letters = [LETTERS.index(s.lstrip(" ")[0].lower()) for _, s in words]
    return Words(np.array([i for i, _ in words], np.int64), np.array(letters, np.int64))


def divided(words: Words, seed: int, most: int = 0) -> tuple[Words, Words]:
    """(training words, held-out words): four fifths and one fifth, in random order; of at most `most` words, 0 all."""
    order = _rng(seed, "divide").permutation(len(words.ids))[: most or None]
    cut = int(len(order) * _TRAIN_SHARE)
    first, second = (Words(words.ids[part], words.letters[part]) for part in (order[:cut], order[cut:]))
    return first, second


def prompts(tokenizer: Tokenizer, words: Words, bos: Sequence[int], seed: int, name: str) -> list[list[int]]:
    """The tokens of one prompt for each word, whose examples are other ones of these words, drawn by (seed, name)."""
    rng, n = _rng(seed, name), len(words.ids)
    newline, asks = _inside(tokenizer, "\n"), _inside(tokenizer, _ASKS)
    answers = [_inside(tokenizer, f" {letter.upper()}") for letter in LETTERS]
    made = []
    for i in range(n):
        tokens = list(bos)
        # Of n - 1 others: those from i on stand for the ones behind it.
        for other in rng.choice(n - 1, size=min(_EXAMPLES, n - 1), replace=False):
            j = int(other) + (other >= i)
            tokens += [*newline, int(words.ids[j]), *asks, *answers[words.letters[j]]]
        made.append([*tokens, *newline, int(words.ids[i])])
    return made


def _inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a piece within a text: many tokenizers put a space in front of the first one."""
    before, both = tokenizer.encode_many(["a", f"a{text}"])
    return both[len(before) :] if both[: len(before)] == before else tokenizer.encode(text)


def _rng(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(f"first_letter/{name}".encode())])


_BLOCK_WORDS = 512
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
        """The reason why nothing can be said of dictionaries of this model; empty where it can."""
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
    probe = train_probe(x_train, parts[0].letters, len(LETTERS), ON_ACTIVATIONS, config.seed)
    score_NC = probe.scores(x_test)
    f1 = [_f1(parts[1].letters == c, score_NC[:, c] > 0) for c in range(len(LETTERS))]
    count_C = [np.bincount(words.letters, minlength=len(LETTERS)) for words in parts]
    enough = np.minimum(*count_C) >= _FEWEST
    return Task(*parts, x_train, x_test, probe, tuple(np.where(enough, f1, 0.0).tolist()))


def refused_coder(sae: TrainedCoder) -> str:
    """The reason why a dictionary's rows are no directions at the one hook point it reads; empty where they are."""
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
    chosen_CK = _latents_of_letters(sae, task, config)
    used, at = np.unique(chosen_CK, return_inverse=True)
    at_CK = at.reshape(chosen_CK.shape)
    z_train, z_test = (columns(sae.encode, x, used) for x in (task.x_train, task.x_test))
    rows_FD = np.asarray(sae.coder.topology.decoder_rows(dict(sae.params))[0])
    letters = {}
    for c in task.known(config.least_f1):
        y_train, y_test = task.train.letters == c, task.test.letters == c
        f1_K = _k_sparse(z_train[:, at_CK[c]], y_train, z_test[:, at_CK[c]], y_test)
        n = splits(f1_K, config.split_gain)
        hit_N = y_test & (task.probe.scores(task.x_test)[:, c] > 0)
        x_hit, p_D, main = task.x_test[hit_N], task.probe.weights[:, c], chosen_CK[c, :n].tolist()
        blocks = [x_hit[start : start + _BLOCK_WORDS] for start in range(0, len(x_hit), _BLOCK_WORDS)]
        parts = [absorbed(sae.encode(block), block, rows_FD, p_D, main) for block in blocks]
        letters[LETTERS[c]] = {
            "model_f1": task.f1[c],
            "f1": f1_K,
            "latents": chosen_CK[c].tolist(),
            "splits": n,
            "words": int(hit_N.sum()),
            "absorption_fraction": float(np.concatenate([part.fraction for part in parts]).mean()),
            "full_absorption": float(np.concatenate([part.full for part in parts]).mean()),
        }
    means = {
        key: dataclasses.asdict(mean_over([letter[key] for letter in letters.values()], config.resamples, config.seed))
        for key in ("splits", "absorption_fraction", "full_absorption")
    }
    return means | {"letters": letters}


def _latents_of_letters(sae: TrainedCoder, task: Task, config: ProbesConfig) -> np.ndarray:
    """int64 [26, K]: the latents with the largest weights for each letter, falling; no absolute values."""

    def latents(params: Any, x: Any) -> Any:
        return sae.coder.encode(params, x).dense()

    on_latents = train_probe(
        task.x_train, task.train.letters, len(LETTERS), ON_LATENTS, config.seed, latents, dict(sae.params)
    )
    return np.argsort(-on_latents.weights.T, axis=1, kind="stable")[:, : config.most_latents]


def _k_sparse(z_train: np.ndarray, y_train: np.ndarray, z_test: np.ndarray, y_test: np.ndarray) -> list[float]:
    """F1 on held-out words of balanced logistic regressions on the first 1, 2, ... latents."""
    from sklearn.linear_model import LogisticRegression

    f1_K = []
    for k in range(1, z_train.shape[1] + 1):
        model = LogisticRegression(max_iter=500, class_weight="balanced").fit(z_train[:, :k], y_train)
        f1_K.append(_f1(y_test, model.decision_function(z_test[:, :k]) > 0))
    return f1_K


def _f1(true_N: np.ndarray, said_N: np.ndarray) -> float:
    """2 tp / (2 tp + fp + fn); 0 where nothing is right."""
    right, others = int((true_N & said_N).sum()), int((true_N ^ said_N).sum())
    return 2 * right / (2 * right + others) if right else 0.0
