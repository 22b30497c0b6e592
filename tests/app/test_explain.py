"""`saejax explain` on a tiny run and a stand-in endpoint: what is asked, written, shown, and asked again."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import ROOT, tiny_experiment
from tiny.commands import run_command
from tiny.endpoint import StandIn, completion, material, play, reply, stand_in

import saejax.app.explain
from saejax.analysis import Scan, scan_latents
from saejax.analysis.endpoint import Endpoint, EndpointError, EndpointRefusal
from saejax.app.explain import _numbers as numbers
from saejax.app.explain import run_explain
from saejax.app.run_coders import experiment_of
from saejax.app.stages import run_capture, run_report, run_train
from saejax.app.workspace import Workspace
from saejax.commands.explain import Explain
from saejax.core.errors import ConfigError, DataError
from saejax.reports.explanations import read_explanations
from saejax.reports.feature_table import read_features
from saejax.runs import Run

KEY = "sk-secret-0123456789"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    e = tiny_experiment(
        tmp_path_factory.mktemp("explain"),
        coder={"d_sae": 64},
        train={"tokens": 10 * 128},
        report={"tokens": 8000, "examples": 2, "quantiles": 0},
    )
    work = Workspace(e)
    run_capture(work)
    assert run_train(work) == 0
    run_report(work)
    return work


@pytest.fixture(scope="module")
def scans() -> dict[int, Scan]:
    return {}


@pytest.fixture(autouse=True)
def _scan_once(scans: dict[int, Scan], monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal arguments give equal scans: those of this process are made once."""

    def scanned(*given: Any) -> Scan:
        tokens = given[3]
        if tokens not in scans:
            scans[tokens] = scan_latents(*given)
        return scans[tokens]

    monkeypatch.setattr(saejax.app.explain, "scan_latents", scanned)


@pytest.fixture
def work(trained: Workspace, tmp_path: Path) -> Workspace:
    """The run in a folder of its own, and the same loaded model."""
    shutil.copytree(trained.experiment.run_dir, tmp_path / "runs" / "tiny")
    return dataclasses.replace(trained, experiment=experiment_of(str(tmp_path / "runs" / "tiny")))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with stand_in() as running:
        yield running


def explain(work: Workspace, server: StandIn, model: str = "m", **how: Any) -> int:
    usual: dict[str, Any] = {"features": "0:6", "examples": 4, "judged": 4, "parallel": 3}
    return run_explain(work, Endpoint(server.url, model, "", 100, 5.0), **usual | how)


def rows(work: Workspace) -> list[dict[str, Any]]:
    return read_explanations(work.experiment.run_dir)


def written(work: Workspace) -> list[int]:
    return sorted(row["feature"] for row in rows(work))


def test_features_are_explained_scored_written_and_shown(
    work: Workspace, server: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(work, server, dry_run=True) == 0
    assert server.requests == [] and rows(work) == []
    assert explain(work, server) == 0
    assert written(work) == list(range(6))
    said = capsys.readouterr().out
    # Of a feature: the explanation, and for either score 4 active and 4 random passages, 5 a request.
    assert len(server.requests) == 6 * 5 and said.count("6 features, about 30 requests and ") == 2
    assert "30 requests, 3,000 tokens read and 210 written" in said and "detection: mean 0." in said
    (row,) = [row for row in rows(work) if row["feature"] == 1]
    assert row["text"].startswith("the token ") and row["by"] == "m" and row["step"] == 10 and row["prompt"]
    detection = row["details"]["detection"]
    assert sum(v for k, v in detection.items() if k.startswith(("true", "false"))) == 8 and detection["failed"] == 0
    assert row["scores"]["detection"] == detection["balanced_accuracy"]
    features = read_features(work.experiment.run_dir)["features"]
    assert features[1]["explanations"] == [{"text": row["text"], "by": "m", "scores": row["scores"]}]
    assert "explanations" not in features[6]
    assert "explanations.jsonl" in (work.experiment.run_dir / "report.html").read_text(encoding="utf-8")


def test_the_judge_does_not_see_what_the_explainer_saw(work: Workspace, server: StandIn) -> None:
    assert explain(work, server, parallel=1, features="3") == 0
    shown, *judged = (text.replace("<<", "").replace(">>", "") for text in server.asked)
    passages = [part.partition("\nStrengths:")[0] for part in shown.split("Passage ")[1:]]
    assert len(passages) == 4 and not any(p.partition(": ")[2] in text for p in passages for text in judged)


def test_what_is_done_is_not_asked_again_and_other_questions_are(work: Workspace, server: StandIn) -> None:
    def requests(**how: Any) -> int:
        before = len(server.requests)
        assert explain(work, server, **how) == 0
        return len(server.requests) - before

    assert requests(features="0:3") == 15
    assert requests(features="0:3") == 0
    assert requests(features="1:5") == 10, "3 and 4"
    assert requests(features="0", redo=True) == 5
    assert requests(features="0", model="another") == 5
    assert requests(features="0", judged=0) == 1
    assert requests(features="0", judged=0) == 0
    (newest, other) = read_features(work.experiment.run_dir)["features"][0]["explanations"]
    assert (newest["by"], newest["scores"]) == ("m", {}) and other["by"] == "another" and len(other["scores"]) == 2


def test_a_feature_without_an_answer_is_left_for_another_time(
    work: Workspace, server: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    left = [1]

    def one_fails(handler: Any, body: Any) -> bool:
        fails = bool(left) and material(body["messages"]).startswith("Passage 1: ") and bool(left.pop() or True)
        if fails:
            reply(handler, completion(None))
        return fails

    server.before = one_fails
    assert explain(work, server) == 1
    assert len(rows(work)) == 5 and "is left for another time: " in capsys.readouterr().out
    before = len(server.requests)
    assert explain(work, server) == 0
    assert written(work) == list(range(6)) and len(server.requests) - before == 5


def test_an_endpoint_at_fault_ends_it_soon(work: Workspace, server: StandIn) -> None:
    server.before = lambda handler, body: reply(handler, b'{"error": "no such model"}', 404) is None
    with pytest.raises(EndpointRefusal, match="404: no such model"):
        explain(work, server, features="all")
    assert len(server.requests) <= 6
    server.before = lambda handler, body: reply(handler, b"<html>") is None
    with pytest.raises(EndpointError, match="10 features in a row"):
        explain(work, server, features="all")
    assert len(server.requests) <= 25 and not any(row["text"] for row in rows(work))


def test_features_with_too_few_passages_are_noted_once(
    work: Workspace, server: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    # A scan of one row of text, where most latents are silent.
    report = dataclasses.replace(work.experiment.report, tokens=30, batch_rows=1)
    short = dataclasses.replace(work, experiment=dataclasses.replace(work.experiment, report=report))
    (work.experiment.run_dir / Run.features).unlink()
    assert explain(short, server) == 0
    assert "6 features are active in fewer than 4 passages" in capsys.readouterr().out
    assert [row["text"] for row in rows(work)] == [None] * 6 and server.requests == []
    assert explain(short, server) == 0
    assert "6 of 6 features are already explained" in capsys.readouterr().out


def test_a_torn_last_line_is_mended_and_a_damaged_one_named(work: Workspace, server: StandIn) -> None:
    explain(work, server, features="0:2")
    path = work.experiment.run_dir / "explanations.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert explain(work, server, features="0:2") == 0
    assert written(work) == [0, 1]
    path.write_text("[]\n" + path.read_text())
    with pytest.raises(DataError, match="line 1 is damaged: it is no JSON object; remove"):
        explain(work, server)


def test_explanations_of_another_checkpoint_are_not_shown(work: Workspace, server: StandIn) -> None:
    explain(work, server, features="0", judged=0)
    path = work.experiment.run_dir / "explanations.jsonl"
    said = path.read_text()
    of = json.loads(said.splitlines()[0])["sha256"]
    path.write_text(said.replace(of, of[::-1]))  # other weights at the same step
    assert "explanations" not in read_features(work.experiment.run_dir)["features"][0]
    path.write_text(said.replace('"step": 10', '"step": 5'))
    assert "explanations" not in read_features(work.experiment.run_dir)["features"][0]


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text,found",
    [("7", [7]), ("0:3", [0, 1, 2]), (":2", [0, 1]), ("8:", [8, 9]), ("8:50", [8, 9]), ("3, 1,1:3", [3, 1, 2]),
     ("all", list(range(10)))],
)  # fmt: skip
def test_features_are_named_as_in_python(text: str, found: list[int]) -> None:
    assert numbers(text, 10) == found


@pytest.mark.parametrize("text", ["", "x", "1.5", "10", "-1", "3:3", "5:2", "20:30", "1,,2", "0:5:2"])
def test_features_that_are_not_there_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--features"):
        numbers(text, 10)


def test_the_usual_key_goes_to_https_alone_and_a_named_one_anywhere(
    server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert Explain(url=server.url).key == "" and Explain(url="https://api.example/v1").key == KEY
    monkeypatch.setenv("MINE", " other\n")
    assert Explain(url=server.url, key_env="MINE").key == "other"
    with pytest.raises(ConfigError, match="--key_env=NOT_THERE: the environment has no such"):
        _ = Explain(url=server.url, key_env="NOT_THERE").key
    for name in ("url", "model"):
        with pytest.raises(ConfigError, match=f"--{name} is missing, as in"):
            run_command("explain", ["runs/x"], **{"url": server.url, "model": "m"} | {name: ""})


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no run"):
        experiment_of(str(tmp_path))


# --- the command ------------------------------------------------------------------------------------------------------


def command(work: Workspace, server: StandIn) -> subprocess.Popen[str]:
    words = ["explain", str(work.experiment.run_dir), f"--url={server.url}", "--model=m", "--key_env=MY_KEY"]
    words += ["--features=0:12", "--examples=4", "--judged=4", "--parallel=2"]
    # A shell starts jobs in the background with Ctrl-C ignored, and a process begins as its parent is.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "saejax", *words],
            cwd=work.experiment.run_dir.parent.parent,
            env=os.environ | {"PYTHONPATH": str(ROOT), "MY_KEY": KEY},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.ci
def test_ctrl_c_keeps_what_is_done_and_the_key_is_nowhere(work: Workspace, server: StandIn) -> None:
    path = work.experiment.run_dir / "explanations.jsonl"

    def slow(handler: Any, body: Any) -> bool:
        if len(server.requests) > 20:  # after the first features: hang
            time.sleep(60)
        return False

    server.before = slow
    # A server that tells everybody the key.
    server.answer = lambda messages: re.sub(r'"$', f' {KEY}"', play(messages))
    process = command(work, server)
    deadline = time.monotonic() + 90
    while len(server.requests) <= 20 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.requests[0][1]["Authorization"] == f"Bearer {KEY}"
    process.send_signal(signal.SIGINT)
    try:
        said, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130 and "the same command continues where it was" in said, said
    done = written(work)
    assert 1 <= len(done) < 12

    server.before = lambda handler, body: False
    server.requests.clear()
    process = command(work, server)
    more, _ = process.communicate(timeout=90)
    assert process.returncode == 0, more
    assert f"{len(done)} of 12 features are already explained" in more
    assert written(work) == list(range(12))
    assert sum(text.startswith("Passage 1: ") for text in server.asked) == 12 - len(done)
    assert "[key]" in path.read_text()
    files = [f for f in work.experiment.run_dir.parent.parent.rglob("*") if f.is_file()]
    for text in (said.encode(), more.encode(), *(f.read_bytes() for f in files)):
        assert KEY.encode() not in text
    assert KEY not in json.dumps(read_features(work.experiment.run_dir))
