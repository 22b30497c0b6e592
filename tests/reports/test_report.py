"""The report of a run: what it embeds, what it refuses, and that it asks nothing of anybody."""

from __future__ import annotations

import base64
import gzip
import json
import math
import os
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tiny.feature_tables import with_feature

from saejax.core.errors import DataError
from saejax.reports import feature_table, render
from saejax.reports.curves import CURVE_POINTS
from saejax.reports.evaluation import counted, failed_of
from saejax.reports.page import embed_json
from saejax.runs import Run

HOSTILE = "</script><img src=x onerror=document.title='owned'>"
VOCAB = [" the", "\n", HOSTILE, "", " cat", "\u202e", "\ud800", "{{script}}"]


def feature(index: int, examples: int = 2, length: int = 6) -> dict[str, Any]:
    rng = random.Random(index)
    activations = [[round(rng.random() * 9, 3) for _ in range(length)] for _ in range(examples)]
    return {
        "id": index,
        "density": 0.01 * (index % 7),
        "max": 9.123456,
        "mean": 2.5,
        "histogram": {"edges": [0.0, 4.5, 9.0], "counts": [40, 3]},
        "top_logits": [[4, 1.5], [2, 1.25]],
        "bottom_logits": [[0, -1.0]],
        "examples": [
            {
                "document": f"module{HOSTILE}",
                "position": 17,
                "tokens": [rng.randrange(len(VOCAB)) for _ in range(length)],
                "activations": row,
                "peak": row.index(max(row)),
            }
            for row in activations
        ],
    }


def features(n: int, **kwargs: int) -> dict[str, Any]:
    return {
        "hook_point": "blocks.3.resid_post",
        "model": "tiny",
        "d_sae": n,
        "n_tokens": 10_000,
        "vocab": VOCAB,
        "features": [feature(i, **kwargs) for i in range(n)],
    }


EVALUATION: dict[str, Any] = {
    "step": 30,
    "model": "tiny",
    "hook_point": "blocks.3.resid_post",
    "k": 4,
    "metrics": {"l0": 8.0, "fve": 0.91, "r2": 0.9, "loss_recovered": 0.97, "relative_error": 0.08},
    "gates": [
        {
            "name": "r2",
            "title": "R²",
            "value": 0.9,
            "bar": 0.7,
            "comparison": ">",
            "passed": True,
            "unit": "",
            "advice": "Train on more tokens.",
        }
    ],
    "density": {"log10_edges": [-3.0, -2.0, -1.0], "counts": [3, 4], "dead": 1, "n_tokens": 10_000},
    "d_in": 32,
    "d_sae": 8,
}
STAGES = {"train": {"tokens": 7680, "seconds": 2.0, "tokens_per_second": 3840.0}}


PROFILE: dict[str, Any] = {
    "step": {"flops": 5e9, "bytes": 1e9, "memory_bytes": 2e8},
    "trace": {
        "first_step": 4,
        "steps": 10,
        "step_ms": 100.0,
        "components": [{"name": "encode", "ms": 60.0, "share": 0.6}, {"name": HOSTILE, "ms": 30.0, "share": 0.3}],
        "idle": [{"name": "wait for data", "ms": 10.0, "share": 0.1}],
    },
    "session": {"steps": 30, "ms_per_step": 110.0, "phases": [{"name": "wait for data", "ms": 11.0, "share": 0.1}]},
    "memory": [{"step": 0, "host_bytes": 1e9}, {"step": 10, "host_bytes": 2e9, "device_bytes": None}],
}


NORMS: dict[str, Any] = {
    "rows": 2000,
    "beyond": 5.0,
    "left_out": {"first": 12, "massive": 3},
    "hook_points": {
        HOSTILE: {
            **{"n": 2000, "median": 17.5, "largest": 900.0, "long": 0.005, "share": 0.99, "mean_over_spread": 0.12},
            "positions": {"1": 51.0, "2 to 3": 1.0, "4 to 7": 0.9},
        }
    },
    "warnings": ["Set capture.max_norm_ratio below 51.4 and capture again."],
}


def broken_profile(*path: Any, to: Any) -> bytes:
    """The profile with another value at a path."""
    value = json.loads(json.dumps(PROFILE))
    node = value
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = to
    return json.dumps(value).encode()


def write_features(run: Path, table: dict[str, Any]) -> None:
    feature_table.write_features(run / Run.features, table, {})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A complete run of 31 logged steps and 8 features, with hostile strings wherever a string can stand."""
    run = tmp_path / "run-a"
    run.mkdir()
    coder = {"preset": "topk", "d_sae": 8, "k": 4}
    config = {"lm": {"name": "tiny"}, "coder": coder, "note": HOSTILE}
    (run / "config.json").write_text(json.dumps(config))
    environment = {"python": "3.11", "command": ["python", "-m", "launch.train", HOSTILE]}
    (run / "environment.json").write_text(json.dumps(environment))
    lines: list[dict[str, float]] = [
        {"step": s, "tokens": 256 * s, "train/loss": 1 / (s + 1), "train/fve": s / 40} for s in range(31)
    ]
    lines.append({"step": 30, "val/fve": 0.7})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "eval.json").write_text(json.dumps(EVALUATION))
    (run / "stages.json").write_text(json.dumps(STAGES))
    write_features(run, features(8))
    return run


def block(page: str, name: str) -> str:
    match = re.search(rf'<script type="[^"]+" id="{name}">(.*?)</script>', page, re.DOTALL)
    assert match, f"the page has no {name}"
    return match[1]


def summary_of(run: Path) -> dict[str, Any]:
    return json.loads(block(render(run).read_text(encoding="utf-8"), "summary-data"))


def test_the_feature_table_comes_back_to_four_digits(run: Path) -> None:
    page = render(run).read_text(encoding="utf-8")
    table = json.loads(gzip.decompress(base64.b64decode(block(page, "feature-data"))))
    expected = features(8)
    assert table["vocab"] == VOCAB
    assert table["features"][0]["max"] == 9.123
    for got, want in zip(table["features"], expected["features"], strict=True):
        assert got.keys() == want.keys()
        assert got["density"] == pytest.approx(want["density"], rel=1e-3)
        assert got["top_logits"] == want["top_logits"]
        for example, original in zip(got["examples"], want["examples"], strict=True):
            assert example["tokens"] == original["tokens"]
            assert example["document"] == original["document"]
            assert example["activations"] == pytest.approx(original["activations"], rel=1e-3)


def test_gates_are_counted_as_passed_failed_and_not_measured() -> None:
    """Of an earlier version what was not measured had failed, and a gate has no state."""
    old = [{"name": "a", "passed": True}, {"name": "b", "passed": False, "value": None}]
    assert (counted(old), failed_of(old)) == ("fails b", ["b"])
    unmeasured = {"name": "c", "passed": False, "state": "not measured"}
    assert counted([old[0], unmeasured | {"ends_well": True}]) == "1 of 2, 1 not measured"
    assert counted([old[0], unmeasured | {"ends_well": False}]) == "fails c", "it was asked for"
    assert (counted([old[0]]), failed_of([])) == ("1 of 1", [])


@pytest.mark.parametrize(
    ("reads", "writes", "shown"),
    [(["a"], ["a"], "a"), (["a", "b"], ["a", "b"], "a, b"), (["a", "b"], ["c", "d"], "a, b -> c, d")],
)
def test_the_summary_names_every_hook_point(run: Path, reads: list[str], writes: list[str], shown: str) -> None:
    content = EVALUATION | {"hook_point": reads[0], "reads": reads, "writes": writes}
    (run / "eval.json").write_text(json.dumps(content))
    assert summary_of(run)["run"]["hook_point"] == shown


def test_the_summary_says_what_the_files_say(run: Path) -> None:
    summary = summary_of(run)
    header = summary["run"]
    shape = header["preset"], header["d_in"], header["d_sae"], header["k"]
    assert (header["name"], header["model"], header["hook_point"]) == ("run-a", "tiny", "blocks.3.resid_post")
    assert shape == ("topk", 32, 8, 4)
    assert (header["tokens"], header["step"]) == (7680, 30)
    assert (header["gates_passed"], header["gates_total"]) == (1, 1)
    assert header["gates_failed"] == 0
    tiles = {tile["label"]: tile for tile in summary["tiles"]}
    assert tiles["L0"]["value"] == 8.0
    assert (tiles["Dead features"]["value"], tiles["Dead features"]["of"]) == (1, 8)
    assert tiles["Loss recovered"]["value"] == 0.97
    assert summary["curves"]["train/loss"]["values"][1] == 0.5
    assert summary["curves"]["val/fve"] == {"steps": [30], "values": [0.7], "logged": 1}
    assert {file["name"] for file in summary["files"]} == {
        "config.json",
        "environment.json",
        "metrics.jsonl",
        "eval.json",
        Run.features,
        "stages.json",
    }


def test_an_l0_that_is_not_the_trainings_is_noted(run: Path) -> None:
    """From the evaluation, and from the end of the training where there is none; it is a figure and no curve."""
    assert summary_of(run)["note"] == ""
    (run / "eval.json").write_text(json.dumps(EVALUATION | {"l0_in_training": 7.0}))
    assert summary_of(run)["note"] == ""
    (run / "eval.json").write_text(json.dumps(EVALUATION | {"l0_in_training": 4.0}))
    assert summary_of(run)["note"].startswith("The coder keeps 8 latents for a token and kept 4 in training.")
    (run / "eval.json").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 30, "after/l0": 1.0, "after/l0_in_training": 4.0}) + "\n")
    summary = summary_of(run)
    assert summary["note"].startswith("The coder keeps 1 latents") and "after/l0" not in summary["curves"]


def test_without_an_evaluation_the_tiles_fall_back_to_what_was_logged(run: Path) -> None:
    (run / "eval.json").unlink()
    tiles = {tile["label"]: tile for tile in summary_of(run)["tiles"]}
    assert (tiles["FVE"]["value"], tiles["FVE"]["source"]) == (0.7, "validation, step 30")
    assert tiles["R²"]["value"] is None and tiles["R²"]["source"] == "not measured yet"


def test_a_tile_s_hint_gives_the_figure_with_the_sinks(run: Path) -> None:
    metrics = EVALUATION["metrics"] | {"sinks": 0.0049, "fve_with_sinks": 0.98765, "loss_recovered_with_sinks": 0.5}
    (run / "eval.json").write_text(json.dumps(EVALUATION | {"metrics": metrics}))
    hints = {tile["label"]: tile["hint"] for tile in summary_of(run)["tiles"]}
    assert hints["FVE"] == ("fraction of variance explained, centred; 0.9877 with the sinks, 0.49% of the tokens")
    assert hints["Loss recovered"].endswith("leaving it alone; 50.00% with the sinks, 0.49% of the tokens")
    assert hints["L0"] == "latents active per token, mean"


def test_a_tile_s_hint_gives_the_loss_in_turn(run: Path) -> None:
    metrics = EVALUATION["metrics"] | {"loss_recovered_in_turn": 0.91234}
    (run / "eval.json").write_text(json.dumps(EVALUATION | {"metrics": metrics}))
    hints = {tile["label"]: tile["hint"] for tile in summary_of(run)["tiles"]}
    assert hints["Loss recovered"].endswith("; 91.23% with each place rebuilt behind the replaced ones")


def test_what_an_evaluation_left_out_is_not_said_to_come(run: Path) -> None:
    (run / "eval.json").write_text(json.dumps(EVALUATION | {"metrics": {"r2": 0.9}}))
    tiles = {tile["label"]: tile for tile in summary_of(run)["tiles"]}
    assert (tiles["Loss recovered"]["value"], tiles["Loss recovered"]["source"]) == (None, "not in this evaluation")


@pytest.mark.parametrize(
    ("metrics", "row", "tile"),
    [
        ({"dead_fraction": 1.0}, {"dead": 3}, (1.0, "percent")),
        ({}, {"dead": 5}, (5, "count")),
        ({}, {"dead": 0}, (0, "count")),
    ],
    ids=["evaluated, all of them", "training", "none"],
)
def test_a_share_and_a_count_are_never_mistaken(run: Path, metrics: Any, row: Any, tile: tuple[float, str]) -> None:
    """The name of a metric decides how its value is written, and not its size."""
    (run / "eval.json").write_text(json.dumps({"metrics": metrics}))
    with (run / "metrics.jsonl").open("a") as rows:
        rows.write(json.dumps({"step": 31} | {f"train/{key}": value for key, value in row.items()}) + "\n")
    tiles = {tile["label"]: tile for tile in summary_of(run)["tiles"]}
    assert (tiles["Dead features"]["value"], tiles["Dead features"]["kind"]) == tile


def test_hostile_strings_do_not_leave_their_place(run: Path) -> None:
    page = render(run).read_text(encoding="utf-8")
    assert "<img" not in page
    assert page.count("</script>") == 3  # the summary, the features, the script
    assert json.loads(block(page, "summary-data"))["config"]["note"] == HOSTILE
    nasty = ["<!--", "<script", "&lt;", "\u2028", HOSTILE]
    assert json.loads(embed_json(nasty)) == nasty
    assert not set(embed_json(nasty)) & set("<>&\u2028")


def test_a_hostile_folder_name_is_escaped_in_the_title(run: Path) -> None:
    page = render(run.rename(run.parent / "<b>&run")).read_text(encoding="utf-8")
    assert "<title>&lt;b&gt;&amp;run · saejax</title>" in page


def test_the_page_refers_to_nothing_outside_itself(run: Path) -> None:
    page = render(run).read_text(encoding="utf-8")
    page = page.replace(block(page, "feature-data"), "")
    assert not re.findall(r"""(?:\b(?:src|srcset|action|poster)|xlink:href)\s*=\s*["'{]""", page)
    assert set(re.findall(r"""href\s*[=:]\s*["'`](.)""", page)) == {"#"}
    assert set(re.findall(r"url\((.)", page)) <= {"#"}
    calls = r"@import|\bfetch\(|XMLHttpRequest|WebSocket|sendBeacon|EventSource|\bimport\b|eval\("
    assert not re.findall(calls, page)
    assert not re.findall(r"<(link|iframe|object|embed|base|img)\b", page)
    # The one address in the page is the name of the SVG namespace, which nothing loads.
    assert set(re.findall(r"\w+://[^\s\"'`)]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page


def test_the_same_files_give_the_same_bytes(run: Path) -> None:
    first = render(run).read_bytes()
    os.utime(run / "eval.json", (1, 1))
    assert render(str(run)).read_bytes() == first
    assert sorted(path.name for path in run.iterdir() if "report" in path.name) == ["report.html"]


def test_a_failed_write_keeps_the_old_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = render(run).read_bytes()

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DataError, match=r"report\.html cannot be written"):
        render(run)
    assert (run / "report.html").read_bytes() == first
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


def test_missing_pieces_are_left_out(run: Path) -> None:
    for name in ("eval.json", Run.features, "environment.json", "metrics.jsonl", "stages.json"):
        (run / name).unlink()
    summary = summary_of(run)
    assert summary["gates"] is summary["density"] is summary["stages"] is summary["environment"] is None
    assert (summary["has_features"], summary["has_validation"], summary["curves"]) == (False, False, {})
    assert summary["commands"]["evaluate"] == "saejax evaluate --config=..."


@pytest.mark.parametrize("trace", [PROFILE["trace"], None])
def test_a_profile_is_on_the_page_and_among_its_sources(run: Path, trace: Any) -> None:
    (run / "profile.json").write_text(json.dumps(PROFILE | {"trace": trace}))
    summary = json.loads(block(render(run).read_text(encoding="utf-8"), "summary-data"))
    assert summary["profile"] == PROFILE | {"trace": trace}
    assert "profile.json" in [file["name"] for file in summary["files"]]


def test_norms_of_the_store_are_on_the_page_and_among_its_sources(run: Path) -> None:
    assert summary_of(run)["norms"] is None
    (run / "norms.json").write_text(json.dumps(NORMS))
    summary = summary_of(run)
    assert summary["norms"] == NORMS and "norms.json" in [file["name"] for file in summary["files"]]


def test_a_repeated_step_counts_once_and_a_torn_last_line_is_ignored(run: Path) -> None:
    data = b'{"step":1,"train/loss":3}\n{"step":2,"train/loss":2}\n{"step":2,"val/fve":0.5}\n'
    data += b'{"step":1,"train/loss":4}\n{"step":3,"train'
    (run / "metrics.jsonl").write_bytes(data)
    assert summary_of(run)["curves"] == {
        "train/loss": {"steps": [1, 2], "values": [4.0, 2.0], "logged": 2},
        "val/fve": {"steps": [2], "values": [0.5], "logged": 1},
    }


def test_a_diverged_run_still_has_a_page(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "train/loss": NaN}\n{"step": 32, "train/loss": Infinity}\n')
        file.write('{"step": 33, "train/loss": null}\n')
    write_features(run, {**features(1), "features": [{**feature(0), "mean": math.nan}]})
    assert summary_of(run)["curves"]["train/loss"]["values"][-3:] == [None] * 3
    page = (run / "report.html").read_text(encoding="utf-8")
    table = json.loads(gzip.decompress(base64.b64decode(block(page, "feature-data"))))
    assert table["features"][0]["mean"] is None


def test_long_curves_keep_their_spikes(run: Path) -> None:
    spikes = {40_001: 1e6, 77_777: -5.0}
    lines = (json.dumps({"step": s, "train/loss": spikes.get(s, math.sin(s))}) for s in range(100_000))
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    curve = summary_of(run)["curves"]["train/loss"]
    assert len(curve["steps"]) <= CURVE_POINTS + 2 and curve["logged"] == 100_000
    assert (curve["steps"][0], curve["steps"][-1]) == (0, 99_999)
    points = dict(zip(curve["steps"], curve["values"], strict=True))
    assert {step: points.get(step) for step in spikes} == spikes


def broken_gate(**changes: Any) -> bytes:
    return json.dumps({"gates": [{**EVALUATION["gates"][0], **changes}]}).encode()


def broken_features(**changes: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path, table = Path(folder) / Run.features, features(2)
        feature_table.write_features(path, table, {})
        return with_feature(path, table["features"][1] | changes, 1).read_bytes()


def broken_breakdown(**changes: Any) -> bytes:
    part = {
        "groups": ["1", "2-3"],
        "tokens": [4, 5],
        "documents": [1, 2],
        "fve": [0.5, None],
        "fve_interval": [None] * 2,
    }
    return json.dumps({"breakdown": {"position": part | changes}}).encode()


def broken_example(**changes: Any) -> bytes:
    return broken_features(examples=[{**feature(0)["examples"][0], **changes}])


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("config.json", b"{", "not JSON"),
        ("environment.json", b"[1]", "holds a list"),
        ("metrics.jsonl", b'{"step": 1}\n{"st\n{"step": 2}\n', "line 2"),
        ("metrics.jsonl", b'{"loss": 1}\n{"step": 2}\n', "line 1"),
        ("metrics.jsonl", b'{"step": "2"}\n', "line 1"),
        ("eval.json", b'{"gates": [{"name": "r2"}]}', "gate"),
        ("eval.json", broken_gate(value="9%"), "not a number"),
        ("stages.json", b'{"train": {"tokens": "many"}}', "not a number"),
        ("eval.json", b'{"density": {"log10_edges": [1, 2], "counts": [1, 2]}}', "one edge more"),
        ("eval.json", b'{"cosine": {"edges": [1], "counts": [1]}}', "one edge more"),
        ("eval.json", b'{"intervals": {"fve": [1, 2, 3]}}', "'fve' is not [low, high]"),
        ("eval.json", b'{"documents": {"count": "3"}}', "'documents' has the count '3', which is not a number"),
        ("eval.json", b'{"breakdown": ["position"]}', "is not an object"),
        ("eval.json", broken_breakdown(fve=[1]), "'position' does not have a value for each group"),
        ("eval.json", broken_breakdown(tokens=None), "'position' does not have a value for each group"),
        ("eval.json", broken_breakdown(fve_interval=[[1], None]), "'position' does not have a value for each group"),
        ("profile.json", b"{}", "it has no session"),
        ("profile.json", broken_profile("trace", to=[]), "'trace' is not an object"),
        ("profile.json", broken_profile("trace", "step_ms", to="1"), "the step_ms '1', which is not a number"),
        ("profile.json", broken_profile("trace", "idle", to=None), "'idle' is not a list"),
        ("profile.json", broken_profile("trace", "components", 0, "ms", to=None), "the ms 'None'"),
        ("profile.json", broken_profile("trace", "components", 0, "name", to=5), "the name '5', which is not text"),
        ("profile.json", broken_profile("session", "phases", to={}), "'phases' is not a list"),
        ("profile.json", broken_profile("memory", 0, "host_bytes", to=True), "the host_bytes 'True'"),
        ("norms.json", b"{}", "it has no rows; delete it, and run `saejax report"),
        ("norms.json", json.dumps(NORMS | {"left_out": {"first": 1}}).encode(), "'left_out' has no massive"),
        (Run.features, b"not SQLite", "no SQLite file"),
        (Run.features, broken_features()[:-20], "not what it should have"),
        (Run.features, broken_features(max=None), "feature 1 has the max 'None', which is not a number"),
        (Run.features, broken_features(histogram=[1]), "'histogram' is not an object"),
        (Run.features, broken_features(examples=7), "'examples' is not a list"),
        (Run.features, broken_features(top_logits=[[99, 1.0]]), "token 99"),
        (Run.features, broken_example(tokens=[0, 1]), "as many activations as tokens"),
        (Run.features, broken_example(tokens=[0, 1, 2, 3, 4, -1]), "token -1"),
        (Run.features, broken_example(peak=6), "peak 6 of 6"),
    ],
)
def test_a_damaged_file_is_named(run: Path, name: str, data: bytes, says: str) -> None:
    (run / name).write_bytes(data)
    with pytest.raises(DataError) as error:
        render(run)
    assert name in str(error.value) and says in str(error.value)
    assert not (run / "report.html").exists()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no config\.json"):
        render(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        render(tmp_path / "nowhere")


def test_a_thousand_features_stay_small(run: Path) -> None:
    write_features(run, features(1000, examples=10, length=24))
    size = render(run).stat().st_size
    print(f"1,000 features x 10 examples x 24 tokens, every activation random: {size / 1e6:.2f} MB")
    assert size < 2.5e6


def say(run: Path, **changed: Any) -> None:
    row = {"feature": 1, "text": "red things", "by": "m", "scores": {"detection": 0.75, "fuzzing": None}} | changed
    (run / "explanations.jsonl").write_text(json.dumps(row) + "\n")


def test_explanations_are_on_the_page_and_among_its_sources(run: Path) -> None:
    say(run)
    page = render(run).read_text(encoding="utf-8")
    table = json.loads(gzip.decompress(base64.b64decode(block(page, "feature-data"))))
    assert table["features"][1]["explanations"] == [{"text": "red things", "by": "m", "scores": {"detection": 0.75}}]
    assert [f["id"] for f in table["features"] if "explanations" in f] == [1]
    assert "explanations.jsonl" in block(page, "summary-data")


@pytest.mark.parametrize(
    "changed,fault",
    [
        ({"feature": "1"}, "the feature is '1', not a number"),
        ({"feature": True}, "the feature is 'True'"),
        ({"text": "x" * 5000}, "the text is not one of at most 2,000 letters"),
        ({"text": 5}, "the text is not one"),
        ({"by": None}, "does not say which model"),
        ({"scores": [1]}, "the scores are"),
        ({"scores": {"detection": 1.5}}, "between 0 and 1"),
        ({"scores": {"detection": math.nan}}, "between 0 and 1"),
        ({"scores": {"__proto__": 0.5}}, "not detection and fuzzing"),
    ],
)
def test_a_damaged_explanation_is_named(run: Path, changed: dict[str, Any], fault: str) -> None:
    say(run, **changed)
    with pytest.raises(DataError, match=r"explanations\.jsonl, line 1 is damaged: .*" + re.escape(fault)):
        render(run)
