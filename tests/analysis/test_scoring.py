"""Passages dealt out of a scan, what the models are told, how answers are read; scores against delphi's own."""

import json
import random
from typing import Any

import numpy as np
import pytest
from tiny import ROOT
from tiny.endpoint import material, play

from saejax.analysis import Scan
from saejax.analysis.endpoint import EndpointError
from saejax.analysis.explaining import LONGEST, explain, explanation_in, explanation_request
from saejax.analysis.passages import FeaturePassages, Passage, feature_passages
from saejax.analysis.scoring import (
    PER_REQUEST,
    Score,
    batches,
    judge_request,
    marked_wrongly,
    n_marked_wrongly,
    score,
    verdicts_in,
)

DELPHI = json.loads((ROOT / "tests" / "fixtures" / "peers" / "delphi.json").read_text(encoding="utf-8"))
ROWS, LENGTH, LATENTS, SILENT, ALWAYS = 40, 30, 6, 4, 5


def scan() -> Scan:
    """Latent f is active on the tokens of value f, with a strength drawn; `SILENT` never, `ALWAYS` on every token."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 12, (ROWS, LENGTH)).astype(np.int32)
    segments = np.repeat(np.array([[0] * 13 + [1] * 17], np.int32), ROWS, 0)
    dense = np.where(tokens[..., None] == np.arange(LATENTS), rng.uniform(1, 9, (ROWS, LENGTH, LATENTS)), 0)
    dense[..., SILENT], dense[..., ALWAYS] = 0, 1.0
    row, position, latent = np.nonzero(dense)
    value = dense[row, position, latent].astype(np.float32)
    order = np.lexsort((-value, latent))
    found = (a[order].astype(np.int32) for a in (latent, row, position))
    return Scan(tokens, segments, segments, segments, *found, value[order], tokens.size, 1.0)


def strings(ids: list[int]) -> list[str]:
    return [f" w{i}" for i in ids]


def passages(feature: int, shown: int = 6, judged: int = 6) -> FeaturePassages:
    return feature_passages(scan(), feature, strings, shown, judged, before=5, after=3)


def test_no_passage_serves_both_and_all_quantiles_serve_each() -> None:
    s, p = scan(), passages(2)
    assert len(p.shown) == len(p.active) == len(p.random) == 6
    assert not {q.tokens for q in p.shown} & {q.tokens for q in p.active}
    peaks = s.value[s.peaks(2)]
    for group in (p.shown, p.active):
        strongest = [q.activations[q.peak] for q in group]
        assert strongest == sorted(strongest, reverse=True)
        assert strongest[0] > np.quantile(peaks, 0.75) and strongest[-1] < np.quantile(peaks, 0.25)
    assert p.shown[0].activations[p.shown[0].peak] == p.largest == peaks.max()


def test_passages_hold_the_latent_and_random_ones_do_not() -> None:
    p = passages(2)
    for q in (*p.shown, *p.active):
        assert [token == " w2" for token in q.tokens] == [a > 0 for a in q.activations]
        assert q.tokens[q.peak] == " w2" and max(q.activations) == q.activations[q.peak] and len(q.tokens) <= 9
    for q in p.random:
        assert " w2" not in q.tokens and not any(q.activations)
    assert passages(2) == p, "the same scan gives the same passages"


@pytest.mark.parametrize("feature,active,silent", [(SILENT, 0, 0), (ALWAYS, 6, 0)])
def test_a_latent_without_one_kind_of_passage_has_none_of_it(feature: int, active: int, silent: int) -> None:
    p = passages(feature)
    assert (len(p.shown), len(p.active), len(p.random)) == (active, active, silent)


def test_few_passages_are_shared_and_none_is_lost() -> None:
    for rows in range(1, 13):
        s = scan()
        keep = (s.latent != 2) | (s.row < rows)
        cut = Scan(s.tokens, s.positions, s.segments, s.documents, *(a[keep] for a in (s.latent, s.row, s.position)),
                   s.value[keep], s.n_tokens, 1.0)  # fmt: skip
        p = feature_passages(cut, 2, strings, 6, 6, 5, 3)
        there = len(set(cut.row[cut.latent == 2].tolist()))
        assert len(p.shown) + len(p.active) == there and 0 <= len(p.shown) - len(p.active) <= 1


def test_the_explainer_is_told_tokens_marks_and_strengths() -> None:
    p = Passage((" a", " b", " c", " d"), (0.0, 8.0, 1.0, 4.0), 1)
    text = material(explanation_request(FeaturePassages(0, 16.0, (p,), (), ())))
    assert text == "Passage 1:  a<< b>> c<< d>>\nStrengths: ' b' 5, ' d' 3"
    negative = Passage((" a", " b"), (-8.0, 1.0), 0)
    assert negative.text(negative.strong) == "<< a>> b"


@pytest.mark.parametrize(
    "answer,phrase",
    [
        ("Explanation: red things", "red things"),
        ("I think: explanation: no.\n\n**Explanation:** red\tthings\nBye.", "red things"),
        ("[EXPLANATION]: red things", "red things"),
        ("<think>Explanation: blue</think>\nred things\n\n", "red things"),
        ("Explanation:\n\nred things", "red things"),
        ("Explanation: a\x1b[31m\u202eb", "a[31mb"),
    ],
)
def test_an_explanation_is_found_in_an_answer(answer: str, phrase: str) -> None:
    assert explanation_in(answer) == phrase


def test_a_long_explanation_is_cut_and_an_empty_one_refused() -> None:
    assert len(explanation_in("Explanation: " + "very " * 2_000_000)) <= LONGEST
    with pytest.raises(EndpointError, match="holds no explanation"):
        explanation_in("Explanation: \n ** \n")


@pytest.mark.parametrize(
    "answer,verdicts",
    [
        ("[1, 0, 1]", [True, False, True]),
        ("Passage [2] fits: [true,False, 1] ", [True, False, True]),
        ("<think>[0,0,0]</think>Answer: [1,0,1]", [True, False, True]),
        ("[1, 0]", [None] * 3),
        ("[1, 0, 2]", [None] * 3),
        ('["1", null, {}]', [None] * 3),
        ("[" * 100_000, [None] * 3),
        ("", [None] * 3),
    ],
)
def test_verdicts_are_read_or_count_as_failed(answer: str, verdicts: list[Any]) -> None:
    assert verdicts_in(answer, 3) == verdicts


def test_an_honest_judge_scores_a_clean_latent_at_one_and_a_wrong_explanation_at_half() -> None:
    p = passages(2)
    assert explain(p, play) == 'the token " w2"'
    for kind in ("detection", "fuzzing"):
        assert score(kind, 'the token " w2"', p, play).balanced_accuracy == 1
        wrong = score(kind, 'the token " w99"', p, play)
        assert wrong.balanced_accuracy == 0.5 and wrong.recall == 0
    everything = score("detection", "x", passages(ALWAYS), lambda _: "[1,1,1,1,1]")
    assert everything.balanced_accuracy is None and everything.true_positives == 5 and everything.failed == 1


def test_the_judge_sees_no_marks_in_detection_and_as_many_marks_of_both_kinds_in_fuzzing() -> None:
    p = passages(2, judged=10)
    detection = [text for batch in batches("detection", p) for text, _ in batch]
    assert len(detection) == 20 and not any("<<" in text for text in detection)
    fuzzing = [case for batch in batches("fuzzing", p) for case in batch]
    assert all("<<" in text for text, _ in fuzzing) and sum(truth for _, truth in fuzzing) == 10
    assert all("<< w2>>" in text for text, truth in fuzzing if truth)
    assert [truth for _, truth in fuzzing] != sorted((truth for _, truth in fuzzing), reverse=True), "shuffled"
    request = material(judge_request("fuzzing", "red", ["a", "b"]))
    assert request == "Explanation: red\n\nPassage 1: a\nPassage 2: b\n\nAnswer:"


# --- delphi's own scorers on the same passages and answers (benchmarks/peers/make_delphi_scores.py) -------------------


def passage(tokens: list[str], activations: list[float]) -> Passage:
    return Passage(tuple(tokens), tuple(activations), len(tokens) - len(tokens) // 4)


@pytest.mark.parametrize("case", DELPHI["cases"])
def test_passages_are_marked_as_delphi_marks_them(case: dict[str, Any]) -> None:
    active = [passage(p["tokens"], p["activations"]) for p in case["active"]]
    silent = [passage(tokens, [0.0] * len(tokens)) for tokens in case["random"]]
    sent = {kind: [t for r in s["requests"] for t in r["texts"]] for kind, s in case["scorers"].items()}
    assert sorted(sent["detection"]) == sorted(p.text() for p in active + silent)
    theirs = set(sent["fuzzing"])
    assert {p.text(p.strong) for p in active} <= theirs
    count = n_marked_wrongly(active)
    for p in silent:
        (text,) = [t for t in theirs if t.replace("<<", "").replace(">>", "") == p.text()]
        marked = marked_wrongly(p, count, random.Random(0))
        assert len(marked) == marked_of(text, p) and p.peak in marked
        assert p.tokens[p.peak] in "".join(text.split("<<")[1:]), "they mark that place too"


def marked_of(text: str, p: Passage) -> int:
    """How many tokens are marked in a text of theirs."""
    return sum(token in part.partition(">>")[0] for part in text.split("<<")[1:] for token in p.tokens)


@pytest.mark.parametrize("kind", ["detection", "fuzzing"])
@pytest.mark.parametrize("case", DELPHI["cases"])
def test_answers_and_scores_are_delphis(case: dict[str, Any], kind: str) -> None:
    theirs = case["scorers"][kind]
    verdicts = [v for r in theirs["requests"] for v in verdicts_in(r["answer"], PER_REQUEST)]
    assert verdicts == theirs["prediction"]
    ours, metrics = Score.of(theirs["activating"], verdicts), theirs["metrics"]
    assert ours.balanced_accuracy == pytest.approx(metrics["accuracy"], abs=1e-12)
    assert ours.precision == pytest.approx(metrics["precision"], abs=1e-12)
    assert ours.recall == pytest.approx(metrics["recall"], abs=1e-12)
    assert ours.f1 == pytest.approx(metrics["f1_score"], abs=1e-12)
    assert ours.failed + metrics["total_examples"] == len(verdicts)
    assert ours.true_positives + ours.false_negatives == metrics["total_positives"]
