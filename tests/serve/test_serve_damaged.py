"""One damaged file says so where it lies, and hides nothing else: every file of a run, damaged in every way."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from saejax.evals import Gate
from saejax.reports.feature_table import write_features
from saejax.runs import Run
from saejax.serve.application import application
from saejax.serve.site import Folders, Site

FINE = "fine"
CONFIG = {
    "name": "r",
    "coder": {"preset": "topk", "d_sae": 8, "k": 4},
    "train": {"batch_size": 8, "tokens": 320, "lr": 1e-3},
    "lm": {"model": "demo"},
    "text": {"source": "stdlib", "sources": []},
    "gates": {"r2": 0.5},
    "capture": {"hook_points": ["blocks.3.resid_post"]},
}
GATE = Gate("r2", "R\u00b2", 0.9, 0.7, ">", "Train longer.").to_json()
EVALUATION = {
    "step": 10,
    "d_in": 4,
    "d_sae": 8,
    "k": 4,
    "model": "demo",
    "metrics": {"l0": 4.0, "fve": 0.75, "dead_fraction": 0.25},
    "gates": [GATE],
    "density": {"log10_edges": [-3.0, -2.0], "counts": [6], "dead": 2, "n_tokens": 100},
    "intervals": {"fve": [0.7, 0.8]},
    "documents": {"count": 3, "resamples": 10, "note": ""},
}
CHANGE = {"key": "coder.k", "before": 4.0, "after": 8.0, "gates": ["fve"]}
ATTEMPT = {"begins_from": "", "changes": [], "gates": [GATE], "metrics": {"fve": 0.75}}
ATTEMPTS = {
    "kept": "attempt-0",
    "why": "best",
    "attempts": [
        ATTEMPT | {"name": "attempt-0"},
        ATTEMPT | {"name": "attempt-1", "begins_from": "attempt-0", "changes": [CHANGE]},
    ],
}
PHASE = {"name": "wait for data", "ms": 1.0, "share": 0.1}
PROFILE = {
    "step": {"flops": 5e9, "bytes": 1e9, "memory_bytes": 2e8},
    "trace": {"first_step": 4, "steps": 10, "step_ms": 1.0, "components": [PHASE], "idle": [PHASE]},
    "session": {"steps": 3, "ms_per_step": 1.0, "phases": [PHASE]},
    "memory": [{"step": 0, "host_bytes": 1e9}],
}
EXAMPLE = {"document": "d", "position": 1, "index": 0, "tokens": [0, 1], "activations": [0.5, 1.0], "peak": 1}
FEATURE = {"id": 0, "density": 0.5, "max": 1.0, "mean": 0.5, "examples": [EXAMPLE], "top_logits": [[0, 1.0]]}
TABLE = {"hook_point": "blocks.3.resid_post", "model": "demo", "d_sae": 8, "n_tokens": 9, "vocab": ["a", "b"]}
EXPLANATION = {"feature": 0, "text": "a", "by": "m", "scores": {"detection": 0.5}, "step": 10}
ROW = {"step": 10, "tokens": 80, "time": 1.0, "time/seconds": 1.0, "train/fve": 0.5, "train/dead": 2.0, "train/l0": 4.0}
ROW |= {"train/tokens_per_second": 8.0, "host/cpu": 0.5}


JOB = "20260101-000000-000000-abcdef"
STAGE = {"name": "0-train", "tasks": [["train"]], "after": [], "each": False}
SENT = {"command": "train", "name": "r", "stages": [STAGE], "here": "/", "created": 1.0, "python": ["python"]}
SENT |= {"requeues": 0, "settings": {}}
BEGUN = {"number": 1, "host": "elsewhere", "pid": 1, "started": 1.0, "ended": None, "code": None}


def _lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _features() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write_features(Path(folder) / Run.features, TABLE | {"features": [FEATURE]}, {})
        return (Path(folder) / Run.features).read_bytes()


# What each file of a run holds. A damage is written in the place of one of them.
INTACT: dict[str, bytes] = {
    "config.json": json.dumps(CONFIG).encode(),
    "environment.json": json.dumps({"command": ["saejax"], "sessions": [{"command": ["x"]}], "packages": {}}).encode(),
    "provenance.json": json.dumps({"lm": {"model": "demo"}, "text": {}, "heldout": {"fingerprint": "0"}}).encode(),
    "metrics.jsonl": _lines(ROW | {"step": 8}, ROW),
    "eval.json": json.dumps(EVALUATION).encode(),
    "stages.json": json.dumps({"train": {"tokens": 80, "seconds": 1.0, "tokens_per_second": 80.0}}).encode(),
    "profile.json": json.dumps(PROFILE).encode(),
    "attempts.json": json.dumps(ATTEMPTS).encode(),
    Run.features: _features(),
    "explanations.jsonl": _lines(EXPLANATION, EXPLANATION),
    "notes.jsonl": _lines(*[{"id": 0, "label": "a", "note": "", "time": 1.0}] * 2),
    "report.html": b"<!doctype html>",
    "report.json": json.dumps({"shown": ""}).encode(),
    ".lock": b"pid 1 on elsewhere\n",
    "checkpoints/000000010/integrity.json": json.dumps({"body": {"format": 1}, "sha256": ""}).encode(),
}
# The files that a row of the overview is made of; the others are read for the run's own addresses.
OF_ROWS = ("config.json", "metrics.jsonl", "eval.json", "attempts.json", ".lock")
FIGURES = ("step", "steps", "tokens", "tokens_total", "tokens_per_second", "l0", "fve", "loss", "dead_fraction")
RUN, NOTES, TEXTS = "/api/runs/{0}", "/api/notes/{0}", "/api/features/{0}"
COMPARED, SIMILAR, MADE = "/api/compare?run=fine&run={0}", "/api/similar/{0}?id=0", "/api/provenance/{0}"
EXAMPLE_OF, ONE, FORM = "/api/provenance/{0}?feature=0", "/api/feature/{0}?id=0", "/api/experiments?run={0}"
# Whoever reads a file.
READERS = {
    "config.json": (RUN, COMPARED, SIMILAR, MADE, FORM),
    "environment.json": (RUN, MADE),
    "provenance.json": (MADE, SIMILAR),
    "metrics.jsonl": (RUN, COMPARED),
    "eval.json": (RUN, SIMILAR, MADE),
    "attempts.json": (RUN, TEXTS),
    Run.features: (TEXTS, ONE, EXAMPLE_OF, RUN),
    "explanations.jsonl": (TEXTS, ONE),
    "notes.jsonl": (NOTES, TEXTS),
    "report.html": ("/files/{0}/report.html", RUN),
    "checkpoints/000000010/integrity.json": (SIMILAR,),
}

HUGE = int("9" * 400)


def _leaves(value: Any, other: Any) -> Any:
    if isinstance(value, dict):
        return {key: _leaves(item, other) for key, item in value.items()}
    return [_leaves(item, other) for item in value] or other if isinstance(value, list) else other


def _each(raw: bytes, change: Callable[[Any], Any]) -> bytes:
    """The JSON of a file, or of each of its lines, changed; with 1e999 where an infinity stands."""
    if raw.startswith(b"SQLite"):
        return _each_in_sqlite(raw, change)
    try:
        lines = [json.loads(line) for line in raw.splitlines()]
    except ValueError:
        lines = [{}]
    return b"".join(map(_json, map(change, lines)))


def _json(value: Any) -> bytes:
    return json.dumps(value).replace("Infinity", "1e999").encode() + b"\n"


def _each_in_sqlite(raw: bytes, change: Callable[[Any], Any]) -> bytes:
    """A features.sqlite with every JSON in it changed."""
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder) / Run.features).write_bytes(raw)
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            for key, value in connection.execute("SELECT key, value FROM about").fetchall():
                changed = _json(change(json.loads(value))).decode()
                connection.execute("UPDATE about SET value = ? WHERE key = ?", (changed, key))
            for number, page in connection.execute("SELECT id, feature FROM pages").fetchall():
                changed = zlib.compress(_json(change(json.loads(zlib.decompress(page)))))
                connection.execute("UPDATE pages SET feature = ? WHERE id = ?", (changed, number))
        return path.read_bytes()


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path, to: str) -> None:
    path.unlink()
    path.symlink_to(to)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _sparse(path: Path) -> None:
    os.truncate(path, (1 << 30) + 1)


def _top(other: Any) -> Callable[[Any], Any]:
    return lambda value: dict.fromkeys(value, other) if isinstance(value, dict) else other


# A damage: bytes, bytes of the intact ones, or something done to the path.
BYTES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "null": lambda raw: b"null",
    "list": lambda raw: b"[]",
    "number": lambda raw: b"5",
    "object": lambda raw: b"{}",
    "truncated": lambda raw: raw[: len(raw) // 2],
    "binary": lambda raw: bytes(range(256)) * 4 + b"\n",
    "1e999": lambda raw: b"1e999\n",
    "nested": lambda raw: b"[" * 200_000 + b"\n",
    "deep": lambda raw: b'{"a":' * 700 + b"1" + b"}" * 700 + b"\n",
    "deep inside": lambda raw: _each(raw, lambda value: {"a": json.loads("[" * 700 + "]" * 700), "b": value}),
    "BOM": lambda raw: b"\xef\xbb\xbf" + raw,
    "UTF-16": lambda raw: raw.decode("latin-1").encode("utf-16"),
    **{
        f"every {what} a {name}": lambda raw, change=change: _each(raw, change)
        for name, other in {
            "null": None, "number": 7, "text": "x", "list": [], "object": {}, "list of lists": [[None]],
            "infinity": float("inf"), "huge number": HUGE,
        }.items()
        for what, change in {"key": _top(other), "leaf": lambda value, other=other: _leaves(value, other)}.items()
        if what == "key" or name in ("text", "null", "huge number")
    },
}  # fmt: skip
PATHS: dict[str, Callable[[Path], None]] = {
    "folder": _folder,
    "dangling link": lambda path: _link(path, "nowhere"),
    "link to itself": lambda path: _link(path, path.name),
    "pipe": _pipe,
    "larger than memory": _sparse,
}
if os.geteuid():  # root may read all
    PATHS["unreadable"] = lambda path: path.chmod(0)
# An object that says nothing is no damage, nor is a last row that is torn. A lease's text only serves a message.
HARMLESS = {
    "config.json": {"object"},
    "eval.json": {"object"},
    "metrics.jsonl": {
        *("empty", "null", "list", "number", "object", "truncated", "nested", "larger-than-memory"),
        "every-key-a-number",
    },
    ".lock": {name.replace(" ", "-") for name in (*BYTES, "dangling link", "larger than memory")},
}


def a_run(folder: Path, features: bool = False) -> Path:
    """The run, with its `features` where they are what is damaged."""
    for name, raw in INTACT.items():
        if name == Run.features and not features:
            continue
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    return folder


def damaged(runs: Path, file: str) -> list[str]:
    """A run for each damage of one file, and their names."""
    names = []
    for damage in (*BYTES, *PATHS):
        name = damage.replace(" ", "-")
        path = a_run(runs / name, features=file == Run.features) / file
        if damage in PATHS:
            PATHS[damage](path)
        else:
            path.write_bytes(BYTES[damage](INTACT[file]))
        names.append(name)
    return names


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("damaged")
    a_run(root / "runs" / FINE)
    return root


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    site = Site(Folders(folder / "runs", folder / "stores"))
    with TestClient(application(site), raise_server_exceptions=False) as one:
        yield one


def rows(client: TestClient, address: str = "/api/overview") -> dict[str, Any]:
    answer = client.get(address)
    assert answer.status_code == 200, answer.text
    return {row["name"]: row for row in answer.json()["runs"]}


@pytest.mark.parametrize("file", INTACT)
def test_a_damaged_file_says_so_and_hides_nothing_else(file: str, client: TestClient, folder: Path) -> None:
    before = rows(client)[FINE]
    assert before["error"] is None and before["state"] == "evaluated"
    names = damaged(folder / "runs", file)
    try:
        for address in ("/api/overview", "/api/runs"):
            found = rows(client, address)
            assert set(found) == {FINE, *names}
            assert found[FINE] == before
        wrong = {name: own for name in names if (own := own_answers(client, name, file))}
        assert not wrong
        for name in names if file in OF_ROWS else ():
            row = found[name]
            assert (row["error"] is None) == (name in HARMLESS.get(file, ())), (name, row["error"])
            assert row["error"] is None or file in row["error"], row["error"]
            assert all(type(row[key]) in (int, float, type(None)) for key in FIGURES), row
    finally:
        for name in names:
            shutil.rmtree(folder / "runs" / name)


def own_answers(client: TestClient, name: str, file: str) -> list[Any]:
    """What a damaged run's own addresses say, where that is neither an answer nor an error that names the file."""
    wrong = []
    for address in READERS.get(file, (RUN,)):
        answer = client.get(address.format(name))
        named = answer.status_code != 422 or Path(file).name in answer.text or address != RUN
        if not named or answer.status_code not in (200, 404, 422):
            wrong.append((address, answer.status_code, answer.text[:200]))
    return wrong


OTHERS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "runs/grid/sweep.json": (json.dumps({"members": [{"member": "k4", "l0": 4.0}]}).encode(), ("/api/sweeps/grid",)),
    "runs/grid/sweep_config.json": (b"{}", ("/api/sweeps/grid",)),
    "runs/grid/sweep_experiment.json": (json.dumps(CONFIG).encode(), ("/api/experiments?run=grid",)),
    f"runs/.serve/jobs/{JOB}/job.json": (json.dumps(SENT).encode(), (f"/api/jobs/{JOB}",)),
    f"runs/.serve/jobs/{JOB}/asked.json": (b'{"number": 1, "cancelled": false}', (f"/api/jobs/{JOB}",)),
    f"runs/.serve/jobs/{JOB}/starts.json": (json.dumps([BEGUN]).encode(), (f"/api/jobs/{JOB}",)),
    f"runs/.serve/jobs/{JOB}/.lock": (b"pid 1 on elsewhere\n", (f"/api/jobs/{JOB}",)),
    f"runs/.serve/jobs/{JOB}/log.txt": (b"step 1\n", (f"/api/jobs/{JOB}", f"/api/jobs/{JOB}/logs")),
    "stores/s/train/manifest.json": (b"{}", ("/api/stores/s",)),
    "stores/s/train/.lock": (b"pid 1 on elsewhere\n", ("/api/stores/s",)),
}


@pytest.mark.parametrize("file", OTHERS)
def test_damaged_files_of_sweeps_jobs_and_stores(file: str, client: TestClient, folder: Path) -> None:
    """The overview and the list of jobs answer as before, and the thing itself answers or says why it cannot."""
    before, (intact, addresses) = rows(client)[FINE], OTHERS[file]
    for damage in (*BYTES, *PATHS):
        for name, (raw, _) in OTHERS.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
        path = folder / file
        if damage in PATHS:
            PATHS[damage](path)
        else:
            path.write_bytes(BYTES[damage](intact))
        try:
            assert rows(client)[FINE] == before, damage
            for address in ("/api/jobs", "/api/stores", *addresses):
                answer = client.get(address)
                expected = (200,) if address in ("/api/jobs", "/api/stores") else (200, 400, 404, 409, 422)
                assert answer.status_code in expected, (damage, address, answer.text)
        finally:
            for top in ("runs/grid", "runs/.serve", "stores"):
                shutil.rmtree(folder / top)
