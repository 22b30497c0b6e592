"""Lists and pages of features, against a plain scan of the same table; damaged, hostile and large files of them."""

from __future__ import annotations

import copy
import json
import random
import shutil
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tiny.commands import on_page
from tiny.feature_tables import edited, made_up, scanned, strongest, written
from tiny.served import RUN, copied

from saejax.core.errors import ConfigError, DataError
from saejax.evals.attempts import Attempt, Attempts
from saejax.reports.explanations import EXPLANATIONS
from saejax.reports.feature_table import FeatureTable, Search, read_features, write_features
from saejax.runs import Run
from saejax.serve.application import application
from saejax.serve.caches import Caches
from saejax.serve.features.browser import Browser, Window
from saejax.serve.features.coders import Dictionaries, Place
from saejax.serve.features.notes import save_note
from saejax.serve.problems import Problem
from saejax.serve.site import Folders, Site
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


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "features.sqlite"


@pytest.mark.parametrize("seed", range(3))
def test_searches_find_what_a_scan_finds(seed: int, source: Path) -> None:
    table, rng = made_up(120, seed), random.Random(seed)
    by_id = {f["id"]: f for f in table["features"]}
    with FeatureTable(written(source, table)) as features:
        for query in (*QUERIES, *(str(f) for f in list(by_id)[:3])):
            for scope in ("any", "fires", "promotes"):
                want = sorted(scanned(table, query, scope)) if "\0" not in query else []
                assert features.matching(Search(query, scope)) == want, (query, scope)
        low, high = sorted((rng.random(), rng.random()))
        assert features.matching(Search("a", "any", low, high, True)) == sorted(
            f for f in scanned(table, "a", "any") if by_id[f]["density"] > 0 and low <= by_id[f]["density"] <= high
        )
        assert features.matching(Search("nowhere"), also=[next(iter(by_id)), 10**6]) == [next(iter(by_id))]
        assert features.dead == sum(not f["density"] > 0 for f in table["features"])


def test_every_order_is_that_of_the_page(source: Path) -> None:
    table = made_up(80, 4)

    def token(f: dict[str, Any]) -> str:
        if not f["top_logits"]:
            return "\uffff"
        top = f["top_logits"][0][0]
        text = top if isinstance(top, str) else table["vocab"][top]
        return text.encode(errors="replace").decode().strip().lower()

    keys = {
        "id": lambda f: f["id"],
        "density": lambda f: f["density"],
        "max": lambda f: abs(strongest(f)),
        "token": token,
    }
    with FeatureTable(written(source, table)) as features:
        for column, key in keys.items():
            for down in (False, True):
                rising = sorted(table["features"], key=lambda f: f["id"])
                want = [f["id"] for f in sorted(rising, key=key, reverse=down)]
                assert features.matching(Search(), (), column, down) == want, (column, down)


def test_a_feature_comes_back_with_a_vocabulary_of_its_own(source: Path) -> None:
    for quantiles in (True, False):
        table = made_up(40, 6, quantiles)
        with FeatureTable(written(source, table)) as features:
            for original in table["features"]:
                vocab, feature = features.feature(original["id"])
                assert len(set(vocab)) == len(vocab)
                assert spelled(feature, vocab) == spelled(original, table["vocab"])
                (row,) = features.rows([original["id"], 10**9]).values()
                assert (row["density"], row["max"]) == (original["density"], strongest(original))
            assert not any(map(features.has, (10**12, -1, 10**30))) and features.has(table["features"][0]["id"])
            assert features.head == {k: v for k, v in table.items() if k not in ("features", "vocab")}
            whole = features.content()
        originals = sorted(table["features"], key=lambda f: f["id"])
        for feature, original in zip(whole["features"], originals, strict=True):
            assert spelled(feature, whole["vocab"]) == spelled(original, table["vocab"])


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


def test_an_empty_table_can_be_read(source: Path) -> None:
    with FeatureTable(written(source, {"features": [], "vocab": []})) as features:
        assert features.count == features.dead == 0 and not features.has(0)
        assert features.matching(Search("a")) == features.content()["features"] == []


def test_equal_content_gives_equal_bytes_and_nothing_beside_them(source: Path) -> None:
    before = written(source, made_up(50, 1)).read_bytes()
    assert written(source, made_up(50, 1)).read_bytes() == before and list(source.parent.iterdir()) == [source]
    with pytest.raises(KeyError):
        write_features(source, {"features": [{"id": 1}], "vocab": []}, {})
    assert source.read_bytes() == before and list(source.parent.iterdir()) == [source]


def compressed(change: Any) -> tuple[str, bytes]:
    """A statement that gives feature 3 of a table other JSON."""
    feature = made_up(20, 1)["features"][3]
    change(feature)
    return "UPDATE pages SET feature = ?", zlib.compress(json.dumps(feature).encode())


@pytest.mark.parametrize(
    ("statement", "match"),
    [
        (compressed(lambda f: f.update(id="x")), "has the id 'x', which is not a whole number"),
        (compressed(lambda f: f.update(density=None)), "has the density 'None', which is not a number"),
        (compressed(lambda f: f.update(density=10**400)), "has the density 'None', which is not a number"),
        (compressed(lambda f: f.update(top_logits=[[99, 1.0]])), "outside the table of 36"),
        (("UPDATE pages SET feature = ?", zlib.compress(b"x" * (65 << 20))), "torn, or too large"),
        (("UPDATE pages SET feature = ?", zlib.compress(b"[1" * 99)[:-5]), "torn, or too large"),
        (("UPDATE pages SET feature = ?", b"x"), "is damaged"),
        (("UPDATE pages SET feature = 7",), "is damaged"),
        (("DELETE FROM pages",), "is damaged"),
        (("UPDATE about SET value = '[]' WHERE key = 'head'",), "does not say what it is of"),
        (("UPDATE about SET value = '{' WHERE key = 'head'",), "is damaged"),
        (("DELETE FROM about",), "is damaged"),
        (("PRAGMA user_version = 2",), "it is of version 2, and this saejax reads 1"),
        (("DROP TABLE vocab",), "not those of a report"),
        (("CREATE TABLE more (x)",), "not those of a report"),
        (("ALTER TABLE features RENAME TO other",), "not those of a report"),
        (("CREATE VIEW more AS SELECT 1",), "not those of a report"),
        (("CREATE TRIGGER more AFTER INSERT ON vocab BEGIN DELETE FROM vocab; END",), "not those of a report"),
    ],
)
def test_a_damaged_file_is_named_with_the_way_out(statement: Any, match: str, source: Path) -> None:
    table = made_up(20, 1)
    edited(written(source, table), *statement)
    with (
        pytest.raises(DataError, match=rf"features\.sqlite.*{match}.*saejax report .* --redo"),
        FeatureTable(source) as features,
    ):
        features.feature(table["features"][3]["id"])


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE features SET density = density / 2",
        "UPDATE features SET fires = fires || 'x'",
        "UPDATE vocab SET token = x'78' WHERE number = 3",
        "DELETE FROM features WHERE id = (SELECT max(id) FROM features)",
    ],
)
def test_content_that_is_not_what_was_written_is_damage(statement: str, source: Path) -> None:
    edited(written(source, made_up(20, 1)), statement)
    with pytest.raises(DataError, match="not what was written"), FeatureTable(source) as features:
        features.content()


def test_rows_that_are_no_numbers_are_damage(source: Path) -> None:
    table = made_up(20, 1)
    edited(written(source, table), "UPDATE features SET density = 'many', token = x'00'")
    with pytest.raises(DataError, match="the row of feature"), FeatureTable(source) as features:
        features.rows([table["features"][0]["id"]])


def test_torn_and_flipped_bytes_are_damage_or_change_nothing(source: Path) -> None:
    """Whatever is wrong with a file: its content, as exports and the report read it, is the right one or an error."""
    whole, rng = written(source, made_up(50, 2)).read_bytes(), random.Random(2)
    with FeatureTable(source) as features:
        content = features.content()
    errors = 0
    for _ in range(200):
        raw = bytearray(whole)
        if rng.random() < 0.3:
            raw = raw[: rng.randrange(len(raw))]
        else:
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        source.write_bytes(raw)
        try:
            with FeatureTable(source) as features:
                for query in ("self", "a", "t1"):
                    features.matching(Search(query))
                assert features.content() == content
        except DataError as error:
            errors += 1
            assert "features.sqlite is damaged" in str(error)
    assert errors > 80  # the other flips lie where nothing is


def test_a_query_that_takes_too_long_is_given_up(source: Path) -> None:
    written(source, made_up(3000, 1))
    with pytest.raises(DataError, match="interrupted"), FeatureTable(source, seconds=-1.0) as features:
        features.content()


def test_a_python_without_fts5_is_told_what_to_do(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare(sqlite3.Connection):
        def execute(self, query: str, *values: Any) -> sqlite3.Cursor:
            if "fts5" in query:
                raise sqlite3.OperationalError("no such module: fts5")
            return super().execute(query, *values)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *where, **how: connect(*where, **how, factory=Bare))
    with pytest.raises(ConfigError, match=r"cannot search text \(no such module: fts5\).*Use a Python that has it"):
        written(source, made_up(3))
    assert not source.exists()


# --- what is said of features -------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[Browser, Place, dict[str, Any]]]:
    """A run with a made-up table; what needs its coder would fail."""
    table = made_up(60, 3)
    written(tmp_path / "runs" / "r" / Run.features, table)
    caches, worker = Caches(), Worker()
    browser = Browser(caches.feature, Dictionaries(caches.inference, worker), tmp_path / "own")
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
        return sorted(row["id"] for row in browser.rows(place, Window(Search(q, scope)))["rows"])

    def label(feature: int) -> str | None:
        return next(r["label"] for r in browser.rows(place, Window(limit=1000))["rows"] if r["id"] == feature)

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
        browser.rows(place, Window())


def test_windows_of_a_list_are_its_parts(made: tuple[Browser, Place, dict[str, Any]]) -> None:
    browser, place, table = made
    for text in ("", "a"):
        whole = browser.rows(place, Window(Search(text), "density", True, 0, 1000))
        assert whole["total"] == len(whole["rows"]) and whole["all"] == len(table["features"])
        parts = [browser.rows(place, Window(Search(text), "density", True, at, 7))["rows"] for at in range(0, 70, 7)]
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
    written(run / "attempt-1" / Run.features, made_up(3))
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
    site = Site(Folders(folder / "runs", folder / "stores"), commands=on_page())
    with TestClient(application(site)) as one:
        one.folder = folder
        yield one


def test_lists_and_features_of_a_run(client: TestClient) -> None:
    table = read_features(client.folder / "runs" / RUN)
    list_ = client.get(f"/api/features/{RUN}", params={"q": "self", "scope": "any", "limit": 1000}).json()
    assert sorted(row["id"] for row in list_["rows"]) == scanned(table, "self", "any")
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
        *(
            ("POST", "/api/jobs", {"command": command, "run": RUN}, 400, "starts no command")
            for command in ("store", "push", "jobs", "python", "train; rm")
        ),
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
    (bare / Run.features).unlink()
    assert client.put("/api/notes/bare", json={"id": 256, "label": "x"}).status_code == 404
    assert client.put("/api/notes/bare", json={"id": 255, "label": "x"}).status_code == 200


def test_a_damaged_report_is_named(client: TestClient) -> None:
    runs = client.folder / "runs"
    shutil.copytree(runs / RUN, runs / "damaged")
    path = runs / "damaged" / Run.features
    path.write_bytes(path.read_bytes()[:-5])
    for _ in range(2):
        answer = client.get("/api/features/damaged")
        assert answer.status_code == 422 and "features.sqlite is damaged" in answer.json()["error"]


@pytest.mark.soak
def test_a_hundred_thousand_features_take_little_memory_and_time(source: Path) -> None:
    table = made_up(1000, 1)
    features = (table["features"][n % 1000] | {"id": n} for n in range(100_000))
    before = peak_memory()
    written(source, table | {"features": features})
    assert peak_memory() - before < 150 << 20
    for work in (
        lambda table: table.matching(Search("self")),
        lambda table: table.matching(Search("nowhere")),
        lambda table: table.matching(Search(), (), "token", True),
        lambda table: table.feature(99_999),
        lambda table: table.rows(range(1000)),
    ):
        # The best of three: what else the machine does is not the table's.
        assert min(_seconds(source, work) for _ in range(3)) < 1.0


def _seconds(source: Path, work: Callable[[FeatureTable], object]) -> float:
    begun = time.perf_counter()
    with FeatureTable(source) as table:
        work(table)
    return time.perf_counter() - begun


def peak_memory() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def test_a_note_of_one_process_is_seen_by_another(made: tuple[Browser, Place, dict[str, Any]]) -> None:
    browser, place, table = made
    feature = table["features"][0]["id"]
    assert browser.remarks(place).notes == {}
    save_note(place.path, feature, "by another server", "")
    assert browser.remarks(place).label(feature) == "by another server"
