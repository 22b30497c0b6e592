"""Probes by the peers' own code: fixtures of tests/evals/test_probing_peers.py.

    python benchmarks/peers/make_probe_fixtures.py [folder]

Runs in saejax's environment (with torch), with the packages of build/peers-venv behind its own.

sparse.npz     labels of three data sets that sae-probes ships; activations in their place, <name>/x [N, 8]: multiples
               of 1/8, as W_enc [8, 48] and b_enc are, so that latents relu(x W_enc + b_enc) are exact in float32
sparse.json    of sae-probes (run_sae_eval, run_baseline_dataset_layer) on them: rows of {"dataset", "penalty",
               "train_rows", "k", "auc", "accuracy", "f1", "val_auc", "latents"}; k 0 is the activations themselves
last_token.npz activations of the demo model at the last token of some texts, by sae-probes' own code: block 2 after
               its MLP, at most 48 tokens; texts in texts.json
absorption.npz z, x, W_dec (rows of length 1), p, main of each of several cases, and SAEBench's absorption fraction and
               full absorption of each word; F1 by k and SAEBench's number of split latents
"""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import run_sae_probes  # puts the peers on the path, and their stand-ins before them

# isort: split
import numpy as np
import pandas as pd
import torch
from sae_bench.evals.absorption import k_sparse_probing, vocab
from sae_bench.evals.absorption.feature_absorption_calculator import FeatureAbsorptionCalculator
from sae_probes import utils_data
from sae_probes.generate_model_activations import _process_activations
from sae_probes.run_baselines import run_baseline_dataset_layer
from sae_probes.run_sae_evals import run_sae_eval

FIXTURES = pathlib.Path(__file__).parents[2] / "tests" / "fixtures" / "peers" / "probes"
DATASETS = ("49_cm_isshort", "117_us_state_FL", "95_toxic_is")
D, F, HOOK, MODEL = 8, 48, "blocks.2.hook_resid_post", "made"
KS = (1, 2, 5, 16)
# (data set, penalty, training rows; 0: the normal setting, numbers of latents)
CASES = (
    *((name, "l1", 0, KS) for name in DATASETS),
    (DATASETS[1], "l2", 0, KS),
    (DATASETS[1], "l1", 10, (2,)),
    (DATASETS[1], "l1", 90, (2,)),
    (DATASETS[1], "l1", 3, KS),
)


def eighths(values: np.ndarray) -> np.ndarray:
    return (np.round(values * 8) / 8).astype(np.float32)


def sparse(folder: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    W, b = eighths(rng.normal(size=(D, F)) * 0.7), eighths(rng.normal(size=F) - 1.0)
    arrays: dict[str, np.ndarray] = {"W_enc": W, "b_enc": b}

    def encode(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ torch.tensor(W) + torch.tensor(b))

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        cache = pathlib.Path(place)
        (cache / f"model_activations_{MODEL}").mkdir()
        for name in DATASETS:
            y = utils_data.get_yvals(name)
            direction = rng.normal(size=D)
            x = eighths(rng.normal(size=(len(y), D)) + 0.6 * (y - 0.5)[:, None] * direction[None])
            arrays |= {f"{name}/y": y.astype(np.uint8), f"{name}/x": (8 * x).astype(np.int8)}
            torch.save(torch.tensor(x), cache / f"model_activations_{MODEL}" / f"{name}_{HOOK}.pt")
        for name, penalty, n_train, ks in CASES:
            setting = {"setting": "scarcity", "num_train": n_train} if n_train else {"setting": "normal"}
            sae: Any = SimpleNamespace(encode=encode)
            with contextlib.redirect_stdout(io.StringIO()):
                run_sae_eval(
                    sae, name, HOOK, penalty, model_name=MODEL, model_cache_path=cache, device="cpu", ks=list(ks),
                    results_path=cache / f"{penalty}-{n_train}", **setting,
                )  # fmt: skip
            (path,) = (cache / f"{penalty}-{n_train}").rglob(f"{name}_*.json")
            rows += [said(name, penalty, n_train, row["k"], row) for row in json.loads(path.read_text())]
            if penalty == "l1" and not n_train:
                run_baseline_dataset_layer(HOOK, name, "logreg", MODEL, cache, cache / "baseline")
                (path,) = (cache / "baseline").rglob(f"{name}_*logreg.json")
                rows.append(said(name, "l2", 0, 0, json.loads(path.read_text())[0]))
    np.savez_compressed(folder / "sparse.npz", **arrays)
    (folder / "sparse.json").write_text(json.dumps(rows, indent=1) + "\n")


def said(name: str, penalty: str, n_train: int, k: int, row: dict[str, Any]) -> dict[str, Any]:
    keys = {"auc": "test_auc", "accuracy": "test_acc", "f1": "test_f1", "val_auc": "val_auc"}
    known = {"dataset": name, "penalty": penalty, "train_rows": n_train, "k": k}
    return known | {ours: row[theirs] for ours, theirs in keys.items()} | {"latents": row.get("indices", [])}


def last_token(folder: pathlib.Path) -> None:
    texts = [
        "a",
        "def f(x):\n    return x + 1",
        "The capital of France is Paris.",
        " leading space",
        "import os, sys\n\n\nclass Thing:\n    pass\n",
        "for i in range(10): print(i) " * 9,
        "Ünïcödé and 日本",
        "x" * 60,
        "one two three four five six seven eight nine ten " * 6,
    ]
    package = pathlib.Path(run_sae_probes.saejax.__file__).parent
    model = run_sae_probes.hooked(package / "lm" / "demo")
    with contextlib.redirect_stderr(io.StringIO()):
        rows = _process_activations(model, texts, 4, 48, [HOOK], None, "cpu")[HOOK]
    ids = [model.tokenizer(text)["input_ids"] for text in texts]
    np.savez_compressed(folder / "last_token.npz", x=rows.numpy(), first=[own[0] for own in ids])
    (folder / "texts.json").write_text(json.dumps(texts, indent=1) + "\n")


def absorption(folder: pathlib.Path) -> None:
    arrays: dict[str, np.ndarray] = {}
    words, d, f = 40, 6, 14
    for case in range(4):
        rng = np.random.default_rng(case)
        W = rng.normal(size=(f, d))
        W /= np.linalg.norm(W, axis=1, keepdims=True)
        p, x = W[0] + 0.4 * rng.normal(size=d), rng.normal(size=(words, d))
        main = np.argsort(-(W @ p))[: 1 + case % 3]
        z = np.maximum(rng.normal(size=(words, f)), 0) * (rng.random((words, f)) < 0.5)
        x = z @ W + 0.3 * x
        one = {"z": z, "x": x, "W_dec": W, "p": p}
        one = {name: value.astype(np.float32) for name, value in one.items()} | {"main": main}
        found = theirs(one)
        one |= {"fraction": np.array([w.absorption_fraction for w in found])}
        one |= {"full": np.array([w.is_full_absorption for w in found])}
        arrays |= {f"{case}/{name}": value for name, value in one.items()}
    rng = np.random.default_rng(9)
    f1 = np.clip(np.sort(rng.random((26, 10)), axis=1) * 0.3 + 0.5 + rng.normal(size=(26, 10)) * 0.02, 0, 1)
    table = pd.DataFrame({"letter": list(vocab.LETTERS)})
    for k in range(1, 11):
        table[f"f1_sparse_sae_{k}"] = f1[:, k - 1]
        table[f"sparse_sae_k_{k}_feats"] = [np.arange(k)] * 26
    k_sparse_probing.add_feature_splits_to_metrics_df(table, 10, 0.03)
    arrays |= {"splits/f1": f1, "splits/n": np.array([len(own) for own in table["split_feats"]])}
    np.savez_compressed(folder / "absorption.npz", **arrays)


def theirs(one: dict[str, np.ndarray]) -> list[Any]:
    """SAEBench's calculator on one case: in place of a model and its prompts, the words' activations themselves."""
    x, z = torch.tensor(one["x"]), torch.tensor(one["z"])

    def run_with_cache(prompts: list[str], names_filter: list[str]) -> Any:
        return None, {names_filter[0]: x[[int(p.split("word")[-1].split(" ")[0]) for p in prompts]][:, None]}

    model: Any = SimpleNamespace(run_with_cache=run_with_cache, to_tokens=lambda text: [[0]])
    sae: Any = SimpleNamespace(
        W_dec=torch.tensor(one["W_dec"]),
        device="cpu",
        encode=lambda acts: z[[int((x == row).all(1).nonzero()[0, 0]) for row in acts]],
    )
    calculator = FeatureAbsorptionCalculator(
        model, [f"other{i}" for i in range(12)], 10, base_template="{word} has the first letter:", word_token_pos=-1
    )
    names = [f"word{i}" for i in range(len(x))]
    out = calculator.calculate_absorption(sae, names, torch.tensor(one["p"]), one["main"].tolist(), 0, False)
    return out.word_results


if __name__ == "__main__":
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FIXTURES
    out.mkdir(parents=True, exist_ok=True)
    for make in (sparse, last_token, absorption):
        make(out)
