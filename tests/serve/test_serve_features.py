"""Lists and pages of features, against a plain scan of the same table; indexes, also of damaged and of large files."""

from __future__ import annotations

import copy
import gzip
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from tiny import one_device
from tiny.feature_tables import made_up, scanned, strongest, written
from tiny.served import RUN, copied

from saejax.core.errors import DataError
from saejax.evals.attempts import Attempt, Attempts
from saejax.report.explanations import EXPLANATIONS
from saejax.runs import Run
from saejax.serve.application import application
from saejax.serve.caches import Cache, Caches
from saejax.serve.features.browser import Asked, Browser
from saejax.serve.features.building import Indexes, Preparing
from saejax.serve.features.coders import Dictionaries, Place
from saejax.serve.features.index import build
from saejax.serve.features.notes import save_note
from saejax.serve.features.table import FeatureTable, Wanted
from saejax.serve.folders import Folders
from saejax.serve.problems import Problem
from saejax.serve.site import Site
from saejax.serve.worker import Worker

QUERIES = (
    "a",
    "THE",
    "straße",
    " ",
    "\n",
    "↵",
    "·x1",
    "self",
    "nowhere",
    "</script>",
    "t1",
    "日",
    "#12",
    "12",
    "\0",
    "?",
)


def opened(tmp_path: Path, table: dict[str, Any], **how: Any) -> FeatureTable:
    source = written(tmp_path / "features.json.gz", table, **how)
    shutil.rmtree(tmp_path / "index", ignore_errors=True)
    build(source, tmp_path / "index")
    return FeatureTable(source, tmp_path / "index")


@pytest.mark.parametrize("seed", range(3))
def test_searches_find_what_a_scan_finds(seed: int, tmp_path: Path) -> None:
    table, rng = made_up(120, seed), random.Random(seed)
    index = opened(tmp_path, table)
    nothing = np.zeros(0, np.int64)
    by_id = {f["id"]: f for f in table["features"]}
    for query in (*QUERIES, *(str(f) for f in list(by_id)[:3])):
        for scope in ("any", "fires", "promotes"):
            found = index.ids[index.matching(Wanted(query, scope), nothing)].tolist()
            want = scanned(table, query, scope) if "\0" not in query else []
            assert found == want, (query, scope)
    low, high = sorted((rng.random(), rng.random()))
    found = index.ids[index.matching(Wanted("a", "any", low, high, True), nothing)].tolist()
    assert found == [
        f for f in scanned(table, "a", "any") if by_id[f]["density"] > 0 and low <= by_id[f]["density"] <= high
    ]
    assert index.dead == sum(not f["density"] > 0 for f in table["features"])


def test_words_that_lie_across_windows_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = made_up(60, 5)
    index = opened(tmp_path, table)
    for window in (1, 7, 64, 1000):
        monkeypatch.setattr("saejax.serve.features.table._WINDOW", window)
        for query in ("a", "self", "t1"):
            found = index.ids[index.matching(Wanted(query), np.zeros(0, np.int64))].tolist()
            assert found == scanned(table, query, "any")


def test_every_order_is_that_of_the_page(tmp_path: Path) -> None:
    table = made_up(80, 4)
    index = opened(tmp_path, table)

    def token(f: dict[str, Any]) -> str:
        if not f["top_logits"]:
            return "\uffff"
        top = f["top_logits"][0][0]
        return (top if isinstance(top, str) else table["vocab"][top]).strip().lower()

    keys = {
        "id": lambda f: f["id"],
        "density": lambda f: f["density"],
        "max": lambda f: abs(strongest(f)),
        "token": token,
    }
    for column, key in keys.items():
        for down in (False, True):
            rising = sorted(table["features"], key=lambda f: f["id"])
            want = [f["id"] for f in sorted(rising, key=key, reverse=down)]
            assert index.ids[index.order(column, down)].tolist() == want, (column, down)


def test_a_feature_comes_back_with_a_vocabulary_of_its_own(tmp_path: Path) -> None:
    for how in ({}, {"separators": None, "indent": 1}):
        table = made_up(40, 6, quantiles=not how)
        index = opened(tmp_path, table, **how)
        for row, original in enumerate(table["features"]):
            vocab, feature = index.feature(row)
            assert len(set(vocab)) == len(vocab)
            assert spelled(feature, vocab) == spelled(original, table["vocab"])
            assert index.row_of(original["id"]) == row and index.density[row] == original["density"]
            assert index.strongest[row] == strongest(original)
        assert index.row_of(10**12) is None and index.row_of(-1) is None
        assert {k: index.head[k] for k in ("hook_point", "model", "step")} == {
            k: table[k] for k in ("hook_point", "model", "step")
        }


def spelled(feature: dict[str, Any], vocab: list[str]) -> dict[str, Any]:
    """A feature with strings in place of the numbers of its tokens."""
    own = copy.deepcopy(feature)

    def string(token: int | str) -> str:
        return (token if isinstance(token, str) else vocab[token]).encode(errors="replace").decode()

    for example in (*own["examples"], *(e for part in own.get("quantiles", []) for e in part["examples"])):
        example["tokens"] = [string(t) for t in example["tokens"]]
    for key in ("top_logits", "bottom_logits"):
        own[key] = [[string(token), value] for token, value in own[key]]
    return own


def test_pieces_of_any_size_are_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = made_up(30, 8)

    def told(index: FeatureTable) -> list[dict[str, Any]]:
        pairs = [index.feature(row) for row in range(30)]
        return [spelled(feature, vocab) for vocab, feature in pairs]

    want = told(opened(tmp_path, table))
    monkeypatch.setattr("saejax.serve.features.index._AHEAD", 1)
    for piece in (1, 17, 1000):
        monkeypatch.setattr("saejax.serve.features.index._PIECE", piece)
        for how in ({}, {"ensure_ascii": False}):
            if how:  # half of a surrogate pair is no UTF-8
                table = json.loads(json.dumps(table).replace("\\ud83d", "?"))
            assert told(opened(tmp_path, table, **how)) == want


def test_an_empty_table_has_an_index(tmp_path: Path) -> None:
    index = opened(tmp_path, {"features": [], "vocab": []})
    assert len(index) == index.dead == 0 and index.row_of(0) is None
    assert index.matching(Wanted("a"), np.zeros(0, np.int64)).tolist() == []


def damaged(table: dict[str, Any], change: Any) -> bytes:
    own = copy.deepcopy(table)
    own = change(own) or own
    return gzip.compress(json.dumps(own).encode())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t["features"][3].update(id="x"), "whole-number id"),
        (lambda t: t["features"][3].update(id=t["features"][2]["id"]), "same id"),
        (lambda t: t["features"][3].update(density=None), "no number 'density'"),
        (lambda t: t["features"][3].update(density=10**400), "too large"),
        (lambda t: t["features"][3].update(id=10**30), "too big"),
        (lambda t: t.update(vocab=t["vocab"][:1]), "outside the table of 1"),
        (lambda t: t.update(vocab=[1, 2]), "not a list of token strings"),
        (lambda t: t.pop("vocab") and None, "not a list of token strings"),
        (lambda t: t.pop("features") and None, "no 'features'"),
        (lambda t: t.update(features={"id": 1}), "not one list"),
        (lambda t: [t], "does not begin with {"),
    ],
)
def test_a_damaged_file_is_named_and_leaves_no_index(change: Any, match: str, tmp_path: Path) -> None:
    source = tmp_path / "features.json.gz"
    source.write_bytes(damaged(made_up(20, 1), change))
    with pytest.raises(DataError, match=rf"features\.json\.gz.*{match}"):
        build(source, tmp_path / "index")
    assert list(tmp_path.iterdir()) == [source]


def test_torn_and_flipped_bytes_are_damage(tmp_path: Path) -> None:
    source = written(tmp_path / "features.json.gz", made_up(50, 2))
    whole, rng = source.read_bytes(), random.Random(2)
    for _ in range(40):
        raw = bytearray(whole)
        if rng.random() < 0.3:
            raw = raw[: rng.randrange(len(raw))]
        else:
            raw[rng.randrange(20, len(raw))] ^= 1 << rng.randrange(8)
        source.write_bytes(raw)
        with pytest.raises(DataError, match=r"features\.json\.gz is damaged"):
            build(source, tmp_path / "index")
    for text in (
        b'{"features":[1 2],"vocab":[]}',
        b'{"features":[],"vocab":[]} x',
        b'{"features":[]',
        b"",
        b"[" * 10**5,
    ):
        source.write_bytes(gzip.compress(text))
        with pytest.raises(DataError, match="damaged"):
            build(source, tmp_path / "index")


# --- indexes of several files -------------------------------------------------------------------------------------


@pytest.fixture
def indexes(tmp_path: Path) -> Iterator[Indexes]:
    one = Indexes(Cache(1 << 20), tmp_path / "cache")
    yield one
    one.close()


def ready(indexes: Indexes, source: Path) -> FeatureTable:
    deadline = time.monotonic() + 30
    while isinstance(table := indexes.table(source), Preparing):
        assert 0 <= table.done <= table.total == source.stat().st_size and time.monotonic() < deadline
        time.sleep(0.01)
    return table


def test_an_index_is_made_once_for_each_state_of_a_file(indexes: Indexes, tmp_path: Path) -> None:
    source = written(tmp_path / "run" / "features.json.gz", made_up(20, 1))
    first = indexes.table(source)  # a small one is waited for
    assert isinstance(first, FeatureTable) and indexes.table(source) is first
    made = {path: path.stat().st_ctime_ns for path in (tmp_path / "cache").rglob("features")}
    again = Indexes(Cache(1 << 20), tmp_path / "cache")
    assert len(ready(again, source)) == 20
    assert made == {path: path.stat().st_ctime_ns for path in (tmp_path / "cache").rglob("features")}
    written(source, made_up(21, 1))
    assert len(ready(indexes, source)) == 21
    again.close()


def test_a_process_makes_the_index_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", one_device()["PYTHONPATH"])
    indexes = Indexes(Cache(1 << 20), tmp_path / "cache", small=0)
    source = written(tmp_path / "features.json.gz", made_up(200, 1))
    assert isinstance(indexes.table(source), Preparing)
    assert len(ready(indexes, source)) == 200
    source.write_bytes(source.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"features\.json\.gz is damaged"):
        ready(indexes, source)
    indexes.close()
    assert not indexes._processes


def test_a_killed_maker_leaves_no_half_index(tmp_path: Path) -> None:
    source = written(tmp_path / "features.json.gz", made_up(3000, 1))
    words = [sys.executable, "-P", "-m", "saejax.serve.features.index", str(source)]
    rng = random.Random(0)
    for _ in range(4):
        index = tmp_path / "cache" / "made"
        process = subprocess.Popen([*words, str(index)], env=one_device())
        while process.poll() is None and not (tmp_path / "cache" / ".made.saving" / "features").is_file():
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        process.wait()
        if index.exists():
            assert len(FeatureTable(source, index)) == 3000
            shutil.rmtree(index)
    assert subprocess.run([*words, str(index)], env=one_device(), check=False).returncode == 0
    assert len(FeatureTable(source, index)) == 3000


def test_the_longest_unused_index_goes_first(tmp_path: Path) -> None:
    sources = [written(tmp_path / str(n) / "features.json.gz", made_up(30, n)) for n in range(4)]
    whole = Indexes(Cache(1 << 20), tmp_path / "whole")
    ready(whole, sources[0])
    one = sum(path.stat().st_size for path in (tmp_path / "whole").rglob("*") if path.is_file())
    whole.close()
    (tmp_path / "cache" / ".killed.saving").mkdir(parents=True)
    indexes = Indexes(Cache(1 << 20), tmp_path / "cache", largest=int(2.5 * one))
    for n in (0, 1, 0, 2, 0, 3):
        ready(Indexes(Cache(0), tmp_path / "cache", largest=int(2.5 * one)), sources[n])
        time.sleep(0.02)
    kept = {path.parent.name for path in (tmp_path / "cache").rglob("index.json")}
    assert len(kept) == 2
    before = set(kept)
    for n in (0, 3):
        ready(indexes, sources[n])
    assert {path.parent.name for path in (tmp_path / "cache").rglob("index.json")} == before
    indexes.close()
    assert not list((tmp_path / "cache").glob(".*"))


def test_a_damaged_index_is_made_again(indexes: Indexes, tmp_path: Path) -> None:
    source = written(tmp_path / "features.json.gz", made_up(20, 1))
    ready(indexes, source)
    (index,) = (path.parent for path in (tmp_path / "cache").rglob("index.json"))
    with (index / "any").open("ab") as handle:
        handle.write(b"x")
    again = Indexes(Cache(1 << 20), tmp_path / "cache")
    assert len(ready(again, source)) == 20
    again.close()


# --- what is said of features -------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path, indexes: Indexes) -> Iterator[tuple[Browser, Place, dict[str, Any]]]:
    """A run with a made-up table; what needs its coder would fail."""
    table = made_up(60, 3)
    written(tmp_path / "runs" / "r" / "features.json.gz", table)
    caches, worker = Caches(), Worker()
    browser = Browser(caches.feature, indexes, Dictionaries(caches.inference, worker), tmp_path / "own")
    yield browser, Place("r", tmp_path / "runs" / "r"), table
    worker.close()


def explain(folder: Path, feature: int, text: str | None, by: str = "m", **more: Any) -> None:
    row = {"feature": feature, "text": text, "by": by, "scores": {}, "step": 7} | more
    with (folder / EXPLANATIONS).open("a") as handle:
        handle.write(json.dumps(row) + "\n")


def test_explanations_and_notes_are_read_as_they_come(made: tuple[Browser, Place, dict[str, Any]]) -> None:
    browser, place, table = made
    ids = [f["id"] for f in table["features"]]

    def found(q: str, scope: str) -> list[int]:
        return sorted(row["id"] for row in browser.rows(place, Asked(Wanted(q, scope)))["rows"])

    def label(feature: int) -> str | None:
        return next(r["label"] for r in browser.rows(place, Asked(limit=1000))["rows"] if r["id"] == feature)

    assert found("opens", "explained") == found("opens", "any") == [] and label(ids[0]) is None
    explain(place.path, ids[0], "Opens a list")
    explain(place.path, ids[1], "opens a dict", step=6)  # of another checkpoint
    explain(place.path, ids[2], "opens", by="a")
    explain(place.path, ids[2], None, by="b")
    assert found("opens", "explained") == found("opens", "any") == sorted([ids[0], ids[2]])
    assert found("opens", "fires") == found("opens", "label") == [] and label(ids[0]) == "Opens a list"
    browser.note(place, ids[3], "OPENS all", "")
    browser.note(place, ids[4], "", "it opens too")
    assert found("opens", "explained") == found("opens", "any") == sorted([ids[0], ids[2], ids[3], ids[4]])
    assert found("opens", "label") == [ids[3]] and label(ids[3]) == "OPENS all" and label(ids[4]) is None
    browser.note(place, ids[0], "mine", "")
    assert label(ids[0]) == "mine"
    told = browser.feature(place, ids[0])
    assert told is not None and told["note"]["label"] == "mine"
    assert [one["text"] for one in told["feature"]["explanations"]] == ["Opens a list"]
    browser.note(place, ids[0], "", "")
    assert label(ids[0]) == "Opens a list"
    with pytest.raises(Problem, match="no feature 99999"):
        browser.note(place, 99999, "x", "")
    with (place.path / EXPLANATIONS).open("a") as handle:
        handle.write("damaged\n\n")
    with pytest.raises(DataError, match=rf"{EXPLANATIONS}, line 5"):
        browser.rows(place, Asked())


def test_windows_of_a_list_are_its_parts(made: tuple[Browser, Place, dict[str, Any]]) -> None:
    browser, place, table = made
    for text in ("", "a"):
        whole = browser.rows(place, Asked(Wanted(text), "density", True, 0, 1000))
        assert whole["total"] == len(whole["rows"]) and whole["all"] == len(table["features"])
        parts = [browser.rows(place, Asked(Wanted(text), "density", True, at, 7))["rows"] for at in range(0, 70, 7)]
        assert [row for part in parts for row in part] == whole["rows"]
    by_id = {f["id"]: f for f in table["features"]}
    for row in whole["rows"]:
        assert row["density"] == by_id[row["id"]]["density"] and row["max"] == strongest(by_id[row["id"]])


def test_of_a_run_that_was_tried_again_the_kept_attempt_is_shown(tmp_path: Path) -> None:
    run = tmp_path / "r"
    for folder in (run, run / "attempt-1"):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    Attempts(tuple(Attempt(f"attempt-{i}", "attempt-0" * i) for i in range(2)), "attempt-1").write(Run(run))
    assert Place("r", run).folder == run / "attempt-1" and Place("r", run).features is None
    written(run / "attempt-1" / "features.json.gz", made_up(3))
    assert Place("r", run).features == Place("r/attempt-1", run / "attempt-1").features is not None
    assert Place("@r", run, True).folder is None


def test_a_run_that_is_trained_anew_is_another_dictionary(tmp_path: Path) -> None:
    """What a server keeps is of the checkpoints that lie there, and not of their names."""
    step = tmp_path / "r" / "checkpoints" / "10"
    step.mkdir(parents=True)
    (tmp_path / "r" / "config.json").write_text("{}")
    before = Place("r", tmp_path / "r").state()
    assert Place("r", tmp_path / "r").state() == before
    step.rename(step.with_name("gone"))
    step.mkdir()
    shutil.rmtree(step.with_name("gone"))
    assert Place("r", tmp_path / "r").state() != before


# --- over HTTP ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = copied(tmp_path_factory, "features")
    site = Site(Folders(folder / "runs", folder / "stores"))
    with TestClient(application(site)) as one:
        one.folder = folder
        yield one


def test_lists_and_features_of_a_run(client: TestClient) -> None:
    table = json.loads(gzip.decompress((client.folder / "runs" / RUN / "features.json.gz").read_bytes()))
    list_ = client.get(f"/api/features/{RUN}", params={"q": "self", "scope": "any", "limit": 1000}).json()
    assert sorted(row["id"] for row in list_["rows"]) == scanned(table, "self", "any") and list_["preparing"] is None
    assert list_["total"] == len(list_["rows"]) > 0 and list_["all"] == 256 and list_["has_examples"]
    some = list_["rows"][0]["id"]
    told = client.get(f"/api/feature/{RUN}", params={"id": some}).json()
    assert spelled(told["feature"], told["vocab"]) == spelled(table["features"][some], table["vocab"])
    assert (told["hook_point"], told["model"], told["layer"]) == ("blocks.1.resid_post", "demo", None)
    rates = client.get("/api/cache/stats").json()
    assert rates["feature"]["hits"] > 0 and 0 < rates["feature_cache_hit_rate"] < 1


def test_notes_over_http(client: TestClient) -> None:
    hostile = "<img src=x onerror=alert(1)>\u202e"
    sent = client.put(f"/api/notes/{RUN}", json={"id": 3, "label": hostile, "note": "n"}).json()
    assert sent["label"] == hostile and client.get(f"/api/notes/{RUN}").json() == {"notes": [sent]}
    found = client.get(f"/api/features/{RUN}", params={"q": "onerror", "scope": "label"}).json()["rows"]
    assert [(row["id"], row["label"]) for row in found] == [(3, hostile)]
    assert client.put(f"/api/notes/{RUN}", json={"id": 3}).status_code == 200
    assert client.get(f"/api/notes/{RUN}").json() == {"notes": []}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("GET", "/api/features/none", None, 404, "no run 'none'"),
        ("GET", "/api/features/../../etc", None, 404, ""),
        ("GET", "/api/features/@none", None, 404, "no dictionary"),
        ("GET", f"/api/features/{RUN}?limit=1001", None, 400, "limit"),
        ("GET", f"/api/features/{RUN}?low=nan", None, 400, "low"),
        ("GET", f"/api/features/{RUN}?sort=odd", None, 400, "sort"),
        ("GET", f"/api/features/{RUN}?q={'x' * 501}", None, 400, "q"),
        ("GET", f"/api/feature/{RUN}?id=256", None, 404, "no feature 256"),
        ("GET", f"/api/feature/{RUN}?id=99999999999999999999", None, 400, "id"),
        ("GET", f"/api/similar/{RUN}?id=256", None, 404, "no feature 256"),
        ("PUT", f"/api/notes/{RUN}", {"id": 256, "label": "x"}, 404, "no feature 256"),
        ("PUT", f"/api/notes/{RUN}/checkpoints", {"id": 1, "label": "x"}, 404, "no dictionary"),
        ("PUT", f"/api/notes/{RUN}/report.html", {"id": 1, "label": "x"}, 404, "no dictionary"),
        ("GET", f"/api/notes/{RUN}/checkpoints", None, 404, "no dictionary"),
        ("POST", "/api/stop", {"run": f"{RUN}/checkpoints"}, 404, "neither a run nor a sweep"),
        ("POST", "/api/jobs", {"command": "train", "run": f"{RUN}/checkpoints"}, 404, "no run"),
        ("POST", "/api/plan", {"run": f"{RUN}/checkpoints"}, 404, "no run"),
        ("POST", "/api/jobs", {"command": "train", "run": RUN, "config": {"name": "groups"}}, 400, "another name"),
        ("POST", "/api/steer", {"dictionary": RUN, "features": [1], "prompt": "a", "scale": 1e39}, 400, "float32"),
        ("PUT", f"/api/notes/{RUN}", {"id": 1, "label": "x" * 201}, 400, "201 characters"),
        ("PUT", f"/api/notes/{RUN}", {"id": 1, "labels": "x"}, 400, "labels"),
        ("POST", "/api/encode", {"dictionary": RUN, "text": "x" * 10**6}, 413, "1,000,000 characters"),
        ("POST", "/api/encode", {"dictionary": RUN, "text": ""}, 400, "empty"),
        ("POST", "/api/encode", {"dictionary": RUN, "text": "x", "count": 201}, 400, "count"),
        ("POST", "/api/encode", {"dictionary": RUN, "text": "x", "feature": 256}, 404, "no feature 256"),
        ("POST", "/api/steer", {"dictionary": RUN, "features": [1], "prompt": "x" * 20_001}, 413, "prompt"),
        ("POST", "/api/steer", {"dictionary": RUN, "features": [1] * 33, "prompt": "x"}, 400, "features"),
        ("POST", "/api/steer", {"dictionary": RUN, "features": [], "prompt": "x"}, 400, "features"),
        ("POST", "/api/steer", {"dictionary": RUN, "features": [1], "prompt": "x", "tokens": 201}, 400, "tokens"),
        ("POST", "/api/steer", {"dictionary": RUN, "features": ["a:b"], "prompt": "x"}, 400, "give numbers"),
        ("POST", "/api/steer", {"dictionary": RUN, "features": [1], "prompt": "x", "operation": "zer"}, 400, "zero"),
        ("POST", "/api/steer", {"dictionary": RUN, "features": [1], "prompt": "x" * 9000}, 422, "the model reads"),
    ],
)
def test_what_cannot_be_answered_says_why(
    method: str, path: str, body: Any, status: int, said: str, client: TestClient
) -> None:
    answer = client.request(method, path, json=body)
    assert (answer.status_code, said in answer.json().get("error", answer.text)) == (status, True), answer.text


def test_no_note_is_written_where_no_feature_is(client: TestClient) -> None:
    """Whatever folder a name leads to: what a run has saved stays as it was, and can be restored."""
    run = client.folder / "runs" / RUN
    folders = [path for path in (run, *run.rglob("*")) if path.is_dir()]
    assert any(path.name == "params" for path in folders)
    for path in folders[1:]:
        name = path.relative_to(client.folder / "runs").as_posix()
        assert client.put(f"/api/notes/{name}", json={"id": 1, "label": "x"}).status_code == 404, name
    assert list(run.rglob("*notes*")) == [path for path in run.rglob("*notes*") if path.parent == run]
    bare = Path(shutil.copytree(run, run.with_name("bare")))
    (bare / "features.json.gz").unlink()
    assert client.put("/api/notes/bare", json={"id": 256, "label": "x"}).status_code == 404
    assert client.put("/api/notes/bare", json={"id": 255, "label": "x"}).status_code == 200


def test_a_damaged_report_is_named(client: TestClient) -> None:
    runs = client.folder / "runs"
    shutil.copytree(runs / RUN, runs / "damaged")
    path = runs / "damaged" / "features.json.gz"
    path.write_bytes(path.read_bytes()[:-5])
    for _ in range(2):
        answer = client.get("/api/features/damaged")
        assert answer.status_code == 422 and "features.json.gz is damaged" in answer.json()["error"]


@pytest.mark.soak
def test_a_hundred_thousand_features_take_little_memory_and_time(tmp_path: Path) -> None:
    table = made_up(1000, 1)
    source = tmp_path / "features.json.gz"
    with gzip.open(source, "wt", compresslevel=1) as out:
        out.write('{"features":[')
        for n in range(100_000):
            out.write(("," if n else "") + json.dumps(table["features"][n % 1000] | {"id": n}))
        out.write('],"vocab":' + json.dumps(table["vocab"]) + "}")
    # Its own memory: what a child's resources say counts this process, of which it was a fork.
    program = (
        "import sys; from saejax.serve.features.index import main; main(sys.argv[1:]); "
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    words = [sys.executable, "-c", program, str(source), str(tmp_path / "index")]
    said = subprocess.run(words, env=one_device(), check=True, capture_output=True, text=True).stdout
    assert int(said) < 150 * 1024  # KB
    index = FeatureTable(source, tmp_path / "index")
    for work in (
        lambda: index.matching(Wanted("self"), np.zeros(0, np.int64)),
        lambda: index.matching(Wanted("nowhere"), np.zeros(0, np.int64)),
        lambda: index.order("token", True),
        lambda: index.feature(99_999),
    ):
        work()
        begun = time.perf_counter()
        work()
        assert time.perf_counter() - begun < 0.1


def test_a_note_of_one_process_is_seen_by_another(made: tuple[Browser, Place, dict[str, Any]]) -> None:
    browser, place, table = made
    feature = table["features"][0]["id"]
    assert browser.said(place, None).notes == {}
    save_note(place.path, feature, "by another server", "")
    assert browser.said(place, None).label(feature) == "by another server"
