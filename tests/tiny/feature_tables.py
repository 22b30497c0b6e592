"""Made-up features.sqlite, and what a search should find in them, by a plain scan."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
import zlib
from pathlib import Path
from typing import Any

from saejax.reports import feature_table
from saejax.reports.feature_table import write_features

WORDS = ["a", "B", " the", "Straße", "\n", " ", "ÉTÉ", "</script>", "日本", "x1", "·", "\ud83d", "İ", ".", "self", "\0"]


def made_up(count: int, seed: int = 0, quantiles: bool = True) -> dict[str, Any]:
    """A table of `count` features with numbers that do not follow their order; a third is dead."""
    rng = random.Random(seed)
    vocab = [*WORDS, *(f"t{i}" for i in range(20))]

    def example() -> dict[str, Any]:
        n = rng.randrange(1, 9)
        peak = rng.randrange(n)
        values = [0.0 if rng.random() < 0.6 else round(rng.uniform(-1, 3), 3) for _ in range(n)]
        tokens = [rng.randrange(len(vocab)) for _ in range(n)]
        where = {"document": f"doc{rng.randrange(5)}", "index": rng.randrange(99), "position": rng.randrange(60)}
        return where | {"tokens": tokens, "activations": values, "peak": peak}

    def logits() -> list[list[Any]]:
        rows = [[rng.choice(vocab), round(rng.uniform(-3, 3), 3)] for _ in range(rng.randrange(4))]
        return [[vocab.index(t), v] if rng.random() < 0.2 else [t, v] for t, v in rows]

    features = []
    for number in rng.sample(range(3 * count), count):
        live = rng.random() < 0.7
        feature = {
            "id": number,
            "density": round(rng.random(), 2) if live else 0.0,
            "max": round(rng.uniform(0, 5), 1) if live else 0.0,
            "mean": 0.5,
            "histogram": {"edges": [0, 1, 2], "counts": [1, 2]},
            "top_logits": logits(),
            "bottom_logits": logits(),
            "examples": [example() for _ in range(rng.randrange(4))] if live else [],
        }
        if rng.random() < 0.2:
            feature["min"] = -round(rng.uniform(0, 9), 1)
        if quantiles:
            feature["quantiles"] = [{"low": 0.0, "high": 1.0, "fraction": 0.1, "examples": [example()]}] if live else []
        features.append(feature)
    head = {"hook_point": "blocks.0.resid_post", "model": "made up", "d_sae": 3 * count, "n_tokens": 100}
    return {**head, "features": features, "vocab": vocab, "step": 7}


def written(path: Path, table: dict[str, Any]) -> Path:
    """The table as a file, as a report writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_features(path, table, {})
    return path


def edited(path: Path, query: str, *values: Any) -> Path:
    """A features.sqlite after a statement of SQL."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(query, values)
    return path


def with_feature(path: Path, feature: dict[str, Any], number: int) -> Path:
    """A features.sqlite with another JSON of a feature, by someone who makes the file's own digest fit."""
    edited(path, "UPDATE pages SET feature = ? WHERE id = ?", zlib.compress(json.dumps(feature).encode()), number)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        digest = feature_table._digest(connection)
    return edited(path, "UPDATE about SET value = ? WHERE key = 'content'", json.dumps(digest))


def texts_of(table: dict[str, Any], feature: dict[str, Any]) -> dict[str, list[str]]:
    """For each scope the lower-case texts that a search looks through, as the report's page has them."""
    vocab = table["vocab"]

    def string(token: int | str) -> str:
        return (token if isinstance(token, str) else vocab[token]).encode(errors="replace").decode().lower()

    examples = feature["examples"]
    logits = [[string(token) for token, _ in feature[key]] for key in ("top_logits", "bottom_logits")]
    passages = ["".join(map(string, e["tokens"])) for e in examples]
    fires = [string(t) for e in examples for t, a in zip(e["tokens"], e["activations"], strict=True) if a != 0]
    return {"any": [*passages, *logits[0], *logits[1]], "fires": fires, "promotes": logits[0]}


def strongest(feature: dict[str, Any]) -> float:
    """The value of largest size."""
    return max(feature["max"], feature.get("min", 0.0), key=abs)


def scanned(table: dict[str, Any], text: str, scope: str, said: dict[int, list[str]] | None = None) -> list[int]:
    """The features in whose texts `text` is, in the table's order; `said` are more texts of features."""
    query = text.lower().replace("·", " ").replace("↵", "\n")
    if not query.strip() and "\n" not in query:
        return [f["id"] for f in table["features"]]
    found = []
    for feature in table["features"]:
        texts = texts_of(table, feature).get(scope, []) + [one.lower() for one in (said or {}).get(feature["id"], [])]
        if any(query in one for one in texts) or query.strip().removeprefix("#") == str(feature["id"]):
            found.append(feature["id"])
    return found
