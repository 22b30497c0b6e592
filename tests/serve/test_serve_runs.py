"""What the server says of runs, sweeps and stores, from files alone, whoever wrote them."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import planted_experiment
from tiny.served import RUN, Served, copied, served

from saejax.app.experiment import RESERVED, default_config, experiment
from saejax.app.stages import run_train
from saejax.app.workspace import Workspace
from saejax.core.errors import ConfigError
from saejax.core.lease import LOCK, lease
from saejax.core.metrics import JsonlWriter, last_rows, read_metrics
from saejax.serve.descriptions import Descriptions, pages, whole_rows
from saejax.serve.problems import Problem
from saejax.serve.runs import Runs
from saejax.serve.site import Folders
from saejax.serve.stores import Stores

STEPS = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(copied(tmp_path_factory, "runs")) as one:
        yield one


def a_run(root: Path, name: str, step: int = 0, **files: Any) -> Path:
    """A run of STEPS steps whose training is at `step`; `files` are more JSON files of its folder."""
    folder = root / name
    folder.mkdir(parents=True)
    config = {"name": folder.name, "runs_dir": "runs", "coder": {"preset": "topk", "d_sae": 64, "k": 4}}
    config |= {"train": {"batch_size": 8, "tokens": 8 * STEPS}, "lm": {"model": "demo"}}
    (folder / "config.json").write_text(json.dumps(config))
    if step:
        writer = JsonlWriter(folder / "metrics.jsonl")
        for at in range(2, step + 1, 2):
            writer.write(
                at, {"train/fve": at / 100, "train/l0": 4.0, "tokens": 8 * at, "train/tokens_per_second": 16.0}
            )
        writer.close()
    for file, content in files.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    return folder


def gates(*passed: bool) -> dict[str, Any]:
    return {
        "step": STEPS,
        "metrics": {"l0": 3.5, "fve": 0.75, "dead_fraction": 0.25},
        "gates": [
            {"name": f"g{i}", "value": 1.0, "bar": 0.5, "comparison": ">", "passed": ok} for i, ok in enumerate(passed)
        ],
    }


def test_states(tmp_path: Path) -> None:
    a_run(tmp_path, "waiting")
    a_run(tmp_path, "stopped", 10)
    a_run(tmp_path, "trained", STEPS)
    a_run(tmp_path, "good", STEPS, eval=gates(True, True))
    a_run(tmp_path, "bad", STEPS, eval=gates(True, False))
    running = a_run(tmp_path, "running", 10)
    away = a_run(tmp_path, "away", 10)
    (away / LOCK).write_text("pid 7 on another-machine\n")
    quiet = a_run(tmp_path, "quiet", 10)
    (quiet / LOCK).write_text("pid 7 on another-machine\n")
    for file in quiet.iterdir():
        os.utime(file, (time.time() - 3600,) * 2)
    runs = Runs(tmp_path)
    with lease(running):
        found = {row["name"]: row["state"] for row in runs.rows()}
    assert found == {
        "waiting": "waiting", "stopped": "stopped", "trained": "trained", "good": "evaluated", "bad": "failed",
        "running": "running", "away": "running", "quiet": "stopped",
    }  # fmt: skip
    # The lease has gone with its holder; no file has changed.
    assert runs.state("running") == "stopped"


def test_the_figures_are_those_of_the_files(tmp_path: Path) -> None:
    a_run(tmp_path, "half", 20)
    a_run(tmp_path, "done", STEPS, eval=gates(True, False))
    runs = Runs(tmp_path)
    half, done = runs.row("half"), runs.row("done")
    assert (half["step"], half["steps"], half["tokens"], half["tokens_total"]) == (20, STEPS, 160, 8 * STEPS)
    assert (half["fve"], half["l0"], half["gates_total"]) == (0.2, 4.0, None)
    assert half["seconds_left"] == (8 * STEPS - 160) / 16
    assert (done["fve"], done["l0"], done["dead_fraction"]) == (0.75, 3.5, 0.25)
    assert (done["gates_passed"], done["gates_total"], done["failed_gates"]) == (1, 2, ["g1"])
    short = gates(True, False)
    short["gates"][1] |= {"state": "not measured", "ends_well": True}
    a_run(tmp_path, "short", STEPS, eval=short)
    row = runs.row("short")
    assert (row["state"], row["gates_passed"], row["failed_gates"]) == ("evaluated", 1, []), (
        "not measured is not failed"
    )
    with (tmp_path / "half" / "metrics.jsonl").open("a") as torn:
        torn.write('{"step": 30, "train/fve": 0.3}\n{"step": 32, "tra')
    assert (runs.row("half")["step"], runs.row("half")["fve"]) == (30, 0.3)


@pytest.mark.parametrize(
    ("coder", "reads", "logged", "share"),
    [
        ({"preset": "topk", "d_sae": 64}, [], {"train/dead": 16}, 0.25),
        ({"preset": "topk", "d_sae": 64}, [], {"train/dead": 16, "val/dead": 32}, 0.5),
        ({"preset": "topk", "d_sae": 64}, [], {"train/loss": 1.0}, None),
        ({"preset": "topk"}, [], {"train/dead": 16}, None),  # d_sae is expansion x d_in of a store that is not here
        ({"preset": "clt", "d_sae": 64}, ["blocks.0.mlp_in", "blocks.1.mlp_in"], {"train/dead": 32}, 0.25),
        ({"preset": "clt", "d_sae": 64}, ["blocks.{0..1}.mlp_in"], {"train/dead": 32}, None),
    ],
    ids=["training", "validation", "nothing", "width unknown", "clt", "clt by a pattern"],
)
def test_what_is_dead_is_a_share(tmp_path: Path, coder: Any, reads: Any, logged: Any, share: float | None) -> None:
    """A training counts the latents that are dead; a page that says percent is given the share of all latents."""
    folder = a_run(tmp_path, "r")
    config = json.loads((folder / "config.json").read_text()) | {"coder": {"k": 4} | coder, "reads": reads}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 2} | logged) + "\n")
    row = Runs(tmp_path).row("r")
    assert row["error"] is None
    assert "dead" not in row and row["dead_fraction"] == share
    # The evaluation says the share itself, of as many latents as the training's configuration has.
    (folder / "eval.json").write_text(json.dumps({"metrics": {"dead_fraction": 0.125}, "d_sae": row["d_sae"] or 128}))
    assert Runs(tmp_path).row("r")["dead_fraction"] == 0.125


def test_a_prefix_is_no_dictionary(tmp_path: Path) -> None:
    """Its models are shown, no coder's preset, hook point or k, and no features are offered."""
    for name in ("coder", "prefix"):
        folder = a_run(tmp_path, name, 10)
        (folder / "checkpoints" / "10").mkdir(parents=True)
    config = json.loads((folder / "config.json").read_text())
    config["prefix"] = {"source": "recall", "second": "recall"}
    (folder / "config.json").write_text(json.dumps(config))
    row, coder = Runs(tmp_path).row("prefix"), Runs(tmp_path).row("coder")
    assert (row["preset"], row["model"], row["hook_point"], row["k"]) == ("prefix", "demo, recall", None, None)
    assert row["has_checkpoint"] and not row["has_coder"] and coder["has_coder"]
    assert (row["steps"], row["tokens_total"]) == (STEPS, 8 * STEPS)


def test_a_training_that_stopped_by_its_own_rule_is_done(tmp_path: Path) -> None:
    e = planted_experiment(tmp_path, "early", early_stop_patience=1, validate_every=2, lr=1e-9)
    assert run_train(Workspace(e)) == 0
    row = Runs(Path(e.runs_dir)).row("early")
    assert row["step"] < row["steps"] and row["state"] == "trained" and row["seconds_left"] is None


def test_last_rows_are_the_newest_values(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_rows(path) == {}
    writer = JsonlWriter(path)
    for step in range(3000):  # more than is looked at
        writer.write(
            step, {"train/fve": step / 3000, "padding": 1.0} | ({"val/fve": step / 2} if step % 50 == 0 else {})
        )
    writer.close()
    rows = read_metrics(path)
    expected: dict[str, Any] = {}
    for row in rows[-200:]:
        expected |= row
    assert last_rows(path) == expected


def test_one_damaged_run_hides_no_other(tmp_path: Path) -> None:
    a_run(tmp_path, "fine", 10)
    (a_run(tmp_path, "torn", 10) / "config.json").write_text('{"name": "to')
    (a_run(tmp_path, "later", 10) / "config.json").write_text('{"key_of_a_later_version": 1}')
    (a_run(tmp_path, "odd", 10) / "eval.json").write_text("[]")
    rows = {row["name"]: row for row in Runs(tmp_path).rows()}
    assert set(rows) == {"fine", "torn", "later", "odd"}
    assert rows["fine"]["error"] is None and "key_of_a_later_version" in rows["later"]["error"]
    assert "damaged" in rows["torn"]["error"]


def test_sweeps_attempts_and_what_is_none(tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "sweep_config.json").write_text("{}")
    a_run(tmp_path, "wide/k4", 10)
    a_run(tmp_path, "wide/k8", STEPS)
    (tmp_path / "wide" / "groups").mkdir()
    (tmp_path / ".serve" / "jobs").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    a_run(tmp_path, "deep/er/run")
    runs = Runs(tmp_path)
    rows = runs.rows()
    assert {row["name"]: row["sweep"] for row in rows} == {"wide/k4": "wide", "wide/k8": "wide", "deep/er/run": None}
    (sweep,) = runs.sweeps(rows)
    assert (sweep["name"], sweep["state"]) == ("wide", "stopped")
    assert [member["label"] for member in sorted(sweep["members"], key=lambda m: m["name"])] == ["k4", "k8"]
    assert {member["fve_with_sinks"] for member in sweep["members"]} == {None}
    evaluation = {"metrics": {"fve": 0.75, "fve_with_sinks": 0.875, "sinks": 0.01}}
    (tmp_path / "wide" / "k8" / "eval.json").write_text(json.dumps(evaluation))
    (sweep,) = runs.sweeps(runs.rows())
    assert {member["label"]: member["fve_with_sinks"] for member in sweep["members"]} == {"k4": None, "k8": 0.875}
    with lease(tmp_path / "wide"):
        assert {row["name"]: row["state"] for row in runs.rows()}["wide/k4"] == "running"


@pytest.mark.parametrize(
    "name",
    [*RESERVED, ".hidden", "@label", "attempt-1", "scored", "probes", "stores", "evaluated-2", "groups.", "a b", "-x"],
)
def test_a_name_is_listed_or_refused(tmp_path: Path, name: str) -> None:
    """No run can be made that no list shows and no address has."""
    config = default_config()
    config.name = name
    try:
        made = experiment(config).name
    except ConfigError as error:
        assert "another name" in str(error)
        assert name in RESERVED or name[0] in ".@"
    else:
        a_run(tmp_path, made)
        assert [row["name"] for row in Runs(tmp_path).rows()] == [name]
        assert Folders(tmp_path, tmp_path).dictionary(name).name == name


def test_many_runs_are_listed_at_once(tmp_path: Path) -> None:
    for i in range(200):
        a_run(tmp_path, f"run{i}", 4)
    runs = Runs(tmp_path)
    runs.rows()
    started = time.thread_time()
    assert len(runs.rows()) == 200
    # As a page asks every two seconds: 200 runs that have not changed.
    assert time.thread_time() - started < 0.5


def test_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "m"
    for content, whole in ((b"", 0), (b"abc", 0), (b"a\n", 2), (b"a\nb", 2), (b"a\n" + b"x" * 9000, 2)):
        path.write_bytes(content)
        assert whole_rows(path) == whole
    assert whole_rows(tmp_path / "none") == 0


def test_curves_and_the_offset_to_follow_from_belong_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However old a description is, the rows behind its offset are those that its curves do not have."""
    run = a_run(tmp_path, "r", 10)
    descriptions = Descriptions()
    seen = []
    for step in range(12, 40, 2):
        monkeypatch.setattr("saejax.serve.descriptions._PAUSE", 0 if step % 6 == 0 else 1e9)
        with (run / "metrics.jsonl").open("a") as rows:
            rows.write(json.dumps({"step": step, "train/fve": 0.5}) + "\n" + '{"step": ')
        found = descriptions.of(run)
        lines = (run / "metrics.jsonl").read_bytes()[: found["at"]].splitlines()
        assert found["summary"]["curves"]["train/fve"]["steps"][-1] == json.loads(lines[-1])["step"]
        seen.append(found["at"])
        (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes().removesuffix(b'{"step": '))
    assert 1 < len(set(seen)) < len(seen)
    # What is new in any other file is seen at once.
    (run / "eval.json").write_text(json.dumps(gates(True)))
    assert descriptions.of(run)["summary"]["gates"]


def test_names_stay_below_their_folder(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    folders = Folders(tmp_path / "runs", tmp_path / "stores", (tmp_path / "data",))
    assert folders.run("a") == tmp_path / "runs" / "a"
    for name in ("", ".", "..", "a/..", "../runs/a", "/a", "a/", ".serve", "a\0", "b"):
        with pytest.raises(Problem):
            folders.run(name)
    assert folders.allowed(str(tmp_path / "data" / "x.npy")) == tmp_path / "data" / "x.npy"
    (tmp_path / "data" / "out").symlink_to(tmp_path)
    for path in (str(tmp_path), str(tmp_path / "data" / ".." / "y"), str(tmp_path / "data" / "out" / "z"), "~", ""):
        with pytest.raises(ConfigError, match=r"below none|no path"):
            folders.allowed(path)


def test_stores(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    folder = copied(tmp_path_factory, "stores-of")
    stores = Stores(folder / "stores")
    (row,) = stores.rows()
    split = row["splits"]["train"]
    assert (row["name"], split["rows"], split["state"]) == (RUN, 3000, "complete")
    assert set(split["hook_points"]) == {"blocks.1.resid_post", "blocks.0.mlp_out"}
    assert any("3,000 rows" in line for line in stores.lines(RUN))
    manifest = folder / "stores" / RUN / "train" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"rows"', '"sows"', 1))
    (row,) = stores.rows()
    assert "damaged" in row["splits"]["train"]["error"] and row["splits"]["heldout"]["state"] == "complete"


def test_answers_of_the_server(server: Served) -> None:
    overview = server.get("/api/overview")
    (run,) = [row for row in overview["runs"] if row["name"] == RUN]
    assert run["state"] in ("evaluated", "failed") and run["has_report"] and run["d_sae"] == 256
    assert [row["name"] for row in overview["stores"]] == [RUN]
    detail = server.get(f"/api/runs/{RUN}")
    assert detail["summary"]["curves"]["train/fve"]["steps"][-1] == STEPS
    assert detail["at"] == (server.runs / RUN / "metrics.jsonl").stat().st_size
    assert [page["name"] for page in detail["pages"]] == [f"{RUN}/report.html"]
    assert detail["summary"]["has_features"]
    status, error = server.ask("/api/runs/nothing")
    assert status == 404 and "nothing" in error["error"]
    assert server.ask("/api/nothing")[0] == 404


def test_an_overview_that_has_not_changed_is_not_sent_again(server: Served) -> None:
    with urllib.request.urlopen(server.url + "api/overview") as answer:
        tag = answer.headers["ETag"]
    assert server.ask("/api/overview", **{"If-None-Match": tag})[0] == 304
    a_run(server.runs, "newer", 4)
    status, content = server.ask("/api/overview", **{"If-None-Match": tag})
    assert status == 200 and "newer" in [row["name"] for row in content["runs"]]


def test_compare(server: Served) -> None:
    for name, lr in (("one", 0.25), ("two", 0.5)):
        folder = a_run(server.runs, name, 10)
        config = json.loads((folder / "config.json").read_text())
        config["train"]["lr"] = lr
        (folder / "config.json").write_text(json.dumps(config))
    found = server.get("/api/compare?run=one&run=two")
    assert {row["key"]: row["values"] for row in found["rows"]} == {"name": ["one", "two"], "train.lr": [0.25, 0.5]}
    assert [curve["name"] for curve in found["curves"]["train/fve"]] == ["one", "two"]


def test_pages_of_a_run(tmp_path: Path) -> None:
    run = a_run(tmp_path, "r")
    for name in ("report.html", "study/study.html", "study/graphs/a b.html", ".hidden.html", "checkpoints/1/x.html"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
    titles = [page["title"] for page in pages(tmp_path, run)]
    assert titles == ["report", "study/study", "study/graphs/a b"]


def test_a_damaged_file_is_named(server: Served) -> None:
    folder = a_run(server.runs, "broken", 4, eval={"metrics": []})
    status, answer = server.ask("/api/runs/broken")
    assert status == 422 and str(folder / "eval.json") in answer["error"]
