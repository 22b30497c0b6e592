"""What delphi's own scorers and metrics say of the same passages and the same judge: tests/fixtures/peers/delphi.json.

    build/peers-venv/bin/python benchmarks/peers/make_delphi_scores.py          (eai-delphi 0.1.3; 5 s)

Each case: passages (tokens, activations), and for each scorer what it sent to the judge, what the judge answered (some
answers cannot be read), what the scorer understood, and delphi's metrics of that. tests/analysis/test_scoring.py
compares ours. The passages have 16 tokens, because delphi marks the place 16 - 16 // 4 = 12 of silent ones first.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import stand_ins
import torch
from delphi.clients.client import Client, Response
from delphi.latents.latents import ActivatingExample, Latent, LatentRecord, NonActivatingExample
from delphi.log.result_analysis import compute_classification_metrics, compute_confusion
from delphi.scorers import DetectionScorer, FuzzingScorer

OUT = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "peers" / "delphi.json"
LENGTH, SHOWN, COUNT = 16, 5, 20
METRICS = ("accuracy", "precision", "recall", "f1_score", "total_examples", "total_positives", "total_negatives")


class Judge(Client):
    """Answers by chance, right in `skill` of the passages, and in a form that nobody can read in `broken` requests."""

    def __init__(self, rng: np.random.Generator, active: set[str], skill: float, broken: float):
        self.rng, self.active, self.skill, self.broken = rng, active, skill, broken
        self.said: list[dict[str, Any]] = []

    async def generate(self, prompt: Any, **_: Any) -> Response:
        texts = re.findall(r"^Example \d+: (.*)$", prompt[-1]["content"], re.MULTILINE)
        truths = [text.replace("<<", "").replace(">>", "") in self.active for text in texts]
        answers = [int(truth == (self.rng.random() < self.skill)) for truth in truths]
        broken = ("I cannot tell.", json.dumps(answers[:-1]), "[1, maybe]")
        text = str(self.rng.choice(broken)) if self.rng.random() < self.broken else json.dumps(answers)
        self.said.append({"texts": texts, "answer": text})
        return Response(text)


def case(seed: int, mean_active: float, skill: float, broken: float) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = [[" " + "".join(rng.choice(letters, 6)) for _ in range(LENGTH)] for _ in range(2 * COUNT)]
    values = rng.exponential(2.0, (COUNT, LENGTH)) * (rng.random((COUNT, LENGTH)) < mean_active)
    values[:, LENGTH - LENGTH // 4] = rng.exponential(2.0, COUNT) + 0.1
    values = values.astype(np.float32)
    tokens = torch.zeros(LENGTH, dtype=torch.long)
    record = LatentRecord(Latent("h", 0))
    record.explanation = "anything"
    record.test = [
        ActivatingExample(tokens=tokens, activations=torch.tensor(row), str_tokens=text)
        for row, text in zip(values, words[:COUNT], strict=True)
    ]
    record.not_active = [
        NonActivatingExample(tokens=tokens, activations=torch.zeros(LENGTH), str_tokens=text) for text in words[COUNT:]
    ]
    scorers = {}
    for kind, scorer in (("detection", DetectionScorer), ("fuzzing", FuzzingScorer)):
        judge = Judge(rng, {"".join(text) for text in words[:COUNT]}, skill, broken)
        outputs = asyncio.run(scorer(client=judge, n_examples_shown=SHOWN)(record)).score
        frame = pd.DataFrame([{"activating": o.activating, "prediction": o.prediction} for o in outputs])
        metrics = compute_classification_metrics(compute_confusion(frame))
        scorers[kind] = {
            "requests": judge.said,
            "activating": [bool(o.activating) for o in outputs],
            "prediction": [o.prediction for o in outputs],
            "metrics": {name: float(metrics[name]) for name in METRICS},
        }
    active = [{"tokens": t, "activations": v} for t, v in zip(words[:COUNT], values.tolist(), strict=True)]
    return {"active": active, "random": words[COUNT:], "scorers": scorers}


def main() -> None:
    cases = [case(0, 0.05, 0.9, 0.0), case(1, 0.3, 0.7, 0.2), case(2, 0.6, 0.5, 0.1), case(3, 0.0, 0.0, 0.0)]
    made_by = f"eai-delphi {stand_ins.version('eai-delphi')}"
    OUT.write_text(json.dumps({"made_by": made_by, "cases": cases}) + "\n", encoding="utf-8")
    for i, one in enumerate(cases):
        print(i, {kind: round(s["metrics"]["accuracy"], 4) for kind, s in one["scorers"].items()})


if __name__ == "__main__":
    main()
