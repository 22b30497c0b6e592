"""Count-based baselines that a language model has to beat to deserve the name."""

import numpy as np


def ngram_losses(
    train: dict[str, np.ndarray], test: dict[str, np.ndarray], vocab_size: int, order: int = 3
) -> list[float]:
    """Mean loss in nats of the unigram, bigram ... `order`-gram models, with Witten-Bell smoothing.

    p_n(w | h) = (c(h w) + t(h) p_{n-1}(w | h')) / (c(h) + t(h)), where c counts, t(h) is the number of distinct
    words seen after h, h' drops the oldest word of h, and p_0 = 1 / vocab_size. (Witten and Bell 1991.)

    `train`, `test`: {tokens, segments}: int32 [N, S]; n-grams do not cross segments. A prediction is scored by
    every order where the segment has a token before it, as the language model's own loss is.
    """
    words, histories = _contexts(test, order)
    probability = np.full(len(words), 1.0 / vocab_size)
    losses = []
    train_words, train_histories = _contexts(train, order)
    for n in range(1, order + 1):
        key = _key(histories, n - 1, vocab_size)
        train_key = _key(train_histories, n - 1, vocab_size)
        ids, inverse = np.unique(train_key, return_inverse=True)
        totals = np.bincount(inverse)
        # (history, word) pairs as one number; history ids are dense, so this cannot overflow.
        pairs, pair_counts = np.unique(inverse.astype(np.int64) * vocab_size + train_words, return_counts=True)
        types = np.bincount(pairs // vocab_size, minlength=len(ids))

        at = np.minimum(np.searchsorted(ids, key), len(ids) - 1)
        known = ids[at] == key
        wanted = at.astype(np.int64) * vocab_size + words
        pair_at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
        count = np.where(known & (pairs[pair_at] == wanted), pair_counts[pair_at], 0)
        total, distinct = totals[at], types[at]
        smoothed = (count + distinct * probability) / (total + distinct)
        probability = np.where(known, smoothed, probability)
        losses.append(float(-np.log(probability).mean()))
    return losses


def _contexts(rows: dict[str, np.ndarray], order: int) -> tuple[np.ndarray, np.ndarray]:
    """(words [P], histories [P, order - 1], newest first; -1 before the start) of every predicted token."""
    tokens, segments = rows["tokens"].astype(np.int64), rows["segments"]
    history = np.full((*tokens.shape, order - 1), -1, np.int64)
    for back in range(1, order):
        same = (segments[:, back:] == segments[:, :-back]) & (segments[:, back:] >= 0)
        history[:, back:, back - 1] = np.where(same, tokens[:, :-back], -1)
    predicted = np.zeros(tokens.shape, bool)
    predicted[:, 1:] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
    return tokens[predicted], history[predicted]


def _key(histories: np.ndarray, length: int, vocab_size: int) -> np.ndarray:
    """One int64 a history of `length` words."""
    key = np.zeros(len(histories), np.int64)
    for i in range(length):
        key = key * (vocab_size + 1) + histories[:, i] + 1
    return key
