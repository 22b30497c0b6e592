"""The report in a real browser: headless Chromium opens it from disk and says what it drew.

Clicks and keys are played by a script appended to a copy of the page whose Content-Security-Policy was taken
out; that the policy itself holds is a test of its own.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from saejax.reports import render
from saejax.reports.feature_table import write_features
from saejax.runs import Run
from tests.tiny import browser
from tests.tiny.browser import visit, without_policy
from tests.tiny.phone import nothing_wrong

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(browser.CHROMIUM is None, reason="no chromium or google-chrome on the path"),
]

HOSTILE = "</script><img src=x onerror=console.error('owned')>"
VOCAB = [" the", "\n", HOSTILE, " cat", " sat", "zebra"]


def make_feature(index: int) -> dict[str, Any]:
    """Feature `index` of 300: every tenth is dead, 123 alone fires on "zebra", 7 is of a version without quantiles."""
    dead = index % 10 == 0
    tokens = [0, 5, 2, 1] if index == 123 else [0, 3, 2, 1]
    activations = [0, 8.0, 4.0, 0]
    example = {"document": HOSTILE, "position": 5, "tokens": tokens, "activations": activations, "peak": 1}
    part = {"low": 1.6, "high": 3.2, "fraction": 0.0125}
    return {
        "id": index,
        "density": 0.0 if dead else 0.001 * index,
        "max": 0.0 if dead else 8.0,
        "mean": 1.0,
        "histogram": {"edges": [0, 4, 8], "counts": [9, 1]},
        "top_logits": [[4, 0.5], [2, 0.25]],
        "bottom_logits": [[0, -0.75]],
        "examples": [] if dead else [example],
        **({} if index == 7 else {"quantiles": [] if dead else [part | {"examples": [example, example]}]}),
    }


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "quickstart"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"coder": {"preset": "topk", "k": 4}, "note": HOSTILE}))
    rows = [{"step": s, "train/loss": 1 / (s + 1), "train/fve": s / 40} for s in range(40)]
    rows.append({"step": 39, "val/fve": 0.9})
    rows += [{"step": s, "val/l0": 32.0 - 1e-4 * (s == 20)} for s in (10, 20, 30)]  # long labels beside its axis
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gate = {"name": "r2", "title": "R2", "value": 0.5, "bar": 0.7, "comparison": ">", "passed": False}
    density = {"log10_edges": [-3, -2, -1], "counts": [100, 170], "dead": 30, "n_tokens": 5000}
    gates = [{**gate, "advice": HOSTILE}]
    evaluation = {"step": 39, "metrics": {"r2": 0.5}, "gates": gates, "density": density}
    (run / "eval.json").write_text(json.dumps(evaluation))
    table = {"n_tokens": 5000, "vocab": VOCAB, "features": [make_feature(i) for i in range(300)]}
    write_features(run / Run.features, table, {})
    said = [
        {"feature": 123, "text": "first thoughts", "by": "small-model", "scores": {}},
        {"feature": 123, "text": "animals with stripes", "by": "small-model", "scores": {"detection": 0.925}},
        {"feature": 123, "text": f"{HOSTILE}\u202e in text", "by": HOSTILE, "scores": {"detection": 1, "fuzzing": 0.5}},
        {"feature": 124, "text": None, "by": "small-model", "scores": {}},
    ]
    (run / "explanations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said))
    parts = [("encode", 0.5), ("backward of encode", 0.2), ("optimizer", 0.1), (HOSTILE, 0.1), ("select", 0.0001)]
    rows = [{"name": name, "ms": 80 * share, "share": share} for name, share in parts]
    idle = [{"name": "wait for data", "ms": 8.0, "share": 0.1}]
    profile = {
        "step": {"flops": 5e9, "memory_bytes": 2e8},
        "trace": {"first_step": 4, "steps": 10, "step_ms": 80.0, "components": rows, "idle": idle},
        "session": {"steps": 40, "ms_per_step": 90.0, "phases": idle},
        "memory": [{"step": s, "host_bytes": 1e9 + s, "device_bytes": 2e9} for s in range(40)],
    }
    (run / "profile.json").write_text(json.dumps(profile))
    lengths = {"n": 900, "median": 17.5, "largest": 900.0, "long": 0.005, "share": 0.99, "mean_over_spread": 0.12}
    points = {
        HOSTILE: lengths | {"positions": {"1": 51.0, "2 to 3": 1.0, "4 to 7": 0.9}},
        "h": {**lengths, "positions": {}},
    }
    norms = {"rows": 5000, "beyond": 5.0, "left_out": {"first": 12, "massive": 3}, "hook_points": points}
    (run / "norms.json").write_text(json.dumps(norms | {"warnings": [f"Do better. {HOSTILE}"]}))
    return render(run)


def play(page: Path, actions: str) -> Any:
    """What `actions`, the body of an async function run once the features are there, returns."""
    helpers = """
      const name = () => find(".detail h3").textContent;
      const rows = () => [...document.querySelectorAll(".row .id")].map((node) => Number(node.textContent));
    """
    return browser.play(page, ".detail h3", helpers + actions)


def test_the_page_draws_itself_without_a_complaint(page: Path) -> None:
    dom, console = visit(page.as_uri())
    assert console == []
    body = dom[dom.index('<div id="page">') : dom.index('id="summary-data"')]
    for heading in (
        "Gates",
        "Training",
        "Feature density",
        "Norms of the activations",
        "Features",
        "Stages",
        "What took the time",
        "How it was made",
    ):
        assert re.search(rf"<h2[^>]*>{heading}</h2>", body)
    assert "1 of 1 gates failed" in body
    assert body.count('class="line series-0"') == 4 and body.count('class="line series-1"') == 2
    # Of five components one is too small to show; bar and table have the same parts, and the loop one more row.
    assert [body.count(f'class="part {part}"') for part in ("forward", "backward", "update", "idle")] == [4, 2, 2, 2]
    assert "device idle: wait for data" in body and "Steps 4 to 13" in body
    assert "the capture left out 12 tokens that stand first and 3 with a massive activation" in body
    assert "Do better." in body and body.count("Norm by position, ") == 2  # a title and the name of its picture
    assert "270 of 300 features" in body and "30 dead" in body
    assert 10 < body.count('role="option"') < 60  # of 270: only the rows in sight exist
    assert "<img" not in body and "&lt;/script&gt;&lt;img" in body


@pytest.mark.parametrize("width", [390, 900, 1280])
def test_letters_can_be_read_at_every_width(page: Path, width: int) -> None:
    nothing_wrong(page, width)


def test_an_evaluation_shows_its_intervals_its_breakdowns_and_latents_that_are_alike(tmp_path: Path) -> None:
    """Groups of a hostile name, a group without a figure, a figure without an interval."""
    histogram = {"edges": [0, 0.5, 1], "counts": [3, 4]}
    position = {
        "groups": ["1", "2-3", HOSTILE],
        "tokens": [5, 6, 7],
        "documents": [5, 6, 20],
        "fve": [None, 0.5, 0.75],
        "fve_interval": [None, None, [0.7, 0.8]],
        "l0": [8.0, 8.0, 8.0],
        "l0_interval": [None, None, [8.0, 8.0]],
    }
    evaluation = {
        "step": 39,
        "metrics": {"fve": 0.91234},
        "intervals": {"fve": [0.9, 0.92], HOSTILE: None},
        "documents": {"count": 20, "resamples": 1000, "note": HOSTILE},
        "breakdown": {"position": position, "source": position},
        "cosine": histogram,
        "coactivation": histogram | {"tokens": 100, "latents": 7, "rare": 1},
    }
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "eval.json").write_text(json.dumps(evaluation))
    dom, console = visit(render(tmp_path).as_uri())
    assert console == []
    body = dom[dom.index('<div id="page">') : dom.index('id="summary-data"')]
    for heading in ("Intervals", "For which tokens", "Latents that are alike"):
        assert re.search(rf"<h2[^>]*>{heading}</h2>", body)
    assert "0.9000 to 0.9200" in body and "1,000 resamples of the 20 documents" in body
    # FVE has two points and one interval, L0 three and one; by source it is a table.
    assert body.count("<circle") == 5 and body.count('<line class="line series-0"') == 2
    assert "0.7000 to 0.8000" in body and body.count("no interval") >= 4
    assert "7 latents on 100 tokens" in body
    assert "<img" not in body and "&lt;/script&gt;&lt;img" in body


def test_a_gate_that_was_not_measured_is_neither_passed_nor_failed(tmp_path: Path) -> None:
    gate = {
        "name": "r2",
        "title": "R2",
        "value": 0.9,
        "bar": 0.7,
        "comparison": ">",
        "advice": "Raise k.",
        "passed": True,
    }
    unmeasured = gate | {"value": None, "passed": False, "state": "not measured", "unmeasured": HOSTILE}
    slow = gate | {"name": "runtime", "title": "Slowed", "comparison": "<", "passed": False}
    (tmp_path / "config.json").write_text("{}")
    for asked, verdict, kind in (
        (False, "1 of 2 gates passed, 1 not measured", "none"),
        (True, "1 of 2 gates failed", "fail"),
    ):
        gates = [gate, unmeasured | {"ends_well": not asked}]
        (tmp_path / "eval.json").write_text(json.dumps({"step": 1, "metrics": {}, "gates": gates, "warnings": [slow]}))
        dom, console = visit(render(tmp_path).as_uri())
        body = dom[dom.index('<div id="page">') : dom.index('id="summary-data"')]
        assert console == [] and verdict in body and "<img" not in body
        assert f'<tr class="{kind}"><th scope="row">R2' in body and "not measured</span>" in body and "&lt;img" in body
        assert re.search(r"Warning: Slowed: 0\.9\d*, more than 0\.7\d*\. Raise k\.", body)


def test_an_address_opens_its_feature_with_coloured_tokens(page: Path) -> None:
    dom, console = visit(page.as_uri() + "#feature=123")
    assert console == []
    assert re.search(r"<h3[^>]*>Feature 123</h3>", dom)
    assert re.search(r'<div class="row"[^>]*id="row-123"[^>]*aria-selected="true"', dom)
    passage = re.search(r'<p class="passage">(.*?)</p>', dom, re.DOTALL)
    assert passage
    token = r'<(span|mark) class="(tok[^"]*)" data-activation="([^"]*)"([^>]*)>(.*?)</\1>'
    tokens = re.findall(token, passage[1])
    assert [(tag, kind, value) for tag, kind, value, _, _ in tokens] == [
        ("span", "tok", "0"),
        ("mark", "tok on peak", "8"),
        ("span", "tok on", "4"),
        ("span", "tok", "0"),
    ]
    heat = [re.search(r"--heat: ([\d.]+)", style) for *_, style, _ in tokens]
    assert [float(match[1]) if match else None for match in heat] == [None, 1.0, 0.55, None]
    signs = [re.sub(r"<[^>]+>", "", text) for *_, text in tokens]
    assert signs == ["·the", "zebra", html.escape(HOSTILE, quote=False).replace(" ", "·"), "↵"]


def test_explanations_head_their_feature_and_are_searched(page: Path) -> None:
    played = play(
        page,
        """
        const type = async (text) => {
          const search = find("input[type=search]");
          search.value = text; search.dispatchEvent(new Event("input")); await wait(200); return rows();
        };
        const seen = {without: document.querySelectorAll(".explanation").length};
        seen.found = await type("WITH stripes");
        seen.title = find("#row-123").title; seen.label = find("#row-123").getAttribute("aria-label");
        seen.overwritten = await type("first thoughts");
        location.hash = "#feature=123"; await wait(50);
        seen.said = [...document.querySelectorAll(".explanation")].map((node) => node.innerText.replace(/\\s+/g, " "));
        seen.first = find(".detail-body").firstChild.className;
        seen.markup = document.querySelectorAll(".explanation img, .explanation script").length;
        const scope = find("select"); scope.value = "explained"; scope.dispatchEvent(new Event("change"));
        seen.explained = await type("stripes"); seen.token = await type("zebra");
        return seen;
        """,
    )
    hostile = f"{HOSTILE}‹202e› in text"
    assert played["said"] == [
        f"{hostile} detection 1.00 fuzzing 0.50 by {HOSTILE}",
        "animals with stripes detection 0.93 by small-model",
    ]
    assert played["title"] == hostile and played["label"].startswith(f"feature 123, {hostile}, density")
    rest = {name: played[name] for name in ("without", "found", "overwritten", "first", "markup", "explained", "token")}
    assert rest == {
        "without": 0,
        "found": [123],
        "overwritten": [],
        "first": "explanation",
        "markup": 0,
        "explained": [123],
        "token": [],
    }


def test_search_sort_filter_and_keys(page: Path) -> None:
    played = play(
        page,
        """
        const seen = {start: rows().slice(0, 3), first: name()};
        press(document.body, "ArrowRight"); seen.right = [name(), location.hash];
        press(document.body, "ArrowLeft"); press(document.body, "ArrowLeft"); seen.wrapped = name();
        press(find(".rows"), "Home"); press(find(".rows"), "ArrowDown"); seen.down = name();
        press(find(".rows"), "j"); press(find(".rows"), "j"); press(find(".rows"), "k"); seen.letters = name();
        find(".head.density").click(); seen.densest = rows().slice(0, 2);
        find(".head.density").click(); seen.rarest = rows().slice(0, 2);
        const live = find(".check input"); live.click(); seen.dead = rows().slice(0, 2);
        const search = find("input[type=search]");
        const enter = (field, value, kind) => { field.value = value; field.dispatchEvent(new Event(kind)); };
        const type = async (text) => { enter(search, text, "input"); await wait(200); return rows(); };
        seen.text = await type("ZEBRA"); seen.id = await type("#77");
        seen.none = (await type("quagga")).length;
        const within = (value) => enter(find("select"), value, "change");
        await type(" the"); seen.anywhere = find(".count").textContent;
        press(search, "ArrowRight"); seen.typing = name();
        within("promotes"); seen.promotes = find(".count").textContent;
        location.hash = "#feature=10"; await wait(50);
        seen.deadFeature = find(".detail").textContent.includes("never fired");
        return seen;
        """,
    )
    assert played == {
        "start": [1, 2, 3],
        "first": "Feature 1",
        "right": ["Feature 2", "#feature=2"],
        "wrapped": "Feature 299",
        "down": "Feature 2",
        "letters": "Feature 3",
        "densest": [299, 298],
        "rarest": [1, 2],
        "dead": [0, 10],
        "text": [123],
        "id": [77],
        "none": 0,
        "anywhere": "300 of 300 features, 30 dead",
        "promotes": "0 of 300 features, 30 dead",
        "typing": "Feature 3",
        "deadFeature": True,
    }


def test_one_step_is_read_out_in_all_charts(page: Path) -> None:
    played = play(
        page,
        """
        const charts = [...document.querySelectorAll("#training svg")];
        press(charts[0], "Home"); press(charts[0], "ArrowRight");
        const read = () => charts.map((chart) => chart.getAttribute("aria-valuetext"));
        const pointed = read(); charts[0].dispatchEvent(new Event("blur"));
        return [pointed, read(), name()];
        """,
    )
    assert played == [
        ["step 1: 0.5000", "step 1: train 0.02500, val 0.9000", "step 10: 32"],
        ["step 39: 0.02500", "step 39: train 0.9750, val 0.9000", "step 30: 32"],
        "Feature 1",
    ]


def test_a_browser_that_cannot_inflate_says_so(page: Path) -> None:
    copy = page.with_name("old.html")
    old = "<head><script>delete window.DecompressionStream</script>"
    copy.write_text(without_policy(page).replace("<head>", old), encoding="utf-8")
    dom, _ = visit(copy.as_uri())
    drawn = dom[: dom.index('id="summary-data"')]
    assert re.search(r'role="alert">This browser cannot unpack the feature data', drawn)
    assert "Unpacking the features" not in drawn


def test_the_policy_runs_no_other_script_and_loads_nothing(page: Path) -> None:
    intruder = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
    copy = page.with_name("intruded.html")
    text = page.read_text(encoding="utf-8")
    copy.write_text(text.replace("</body>", intruder + "</body>"), encoding="utf-8")
    dom, console = visit(copy.as_uri())
    assert "<title>quickstart · saejax</title>" in dom and "270 of 300 features" in dom
    assert any("Content Security Policy" in line for line in console)


def test_passages_by_quantile_are_folded_away_under_the_strongest(page: Path) -> None:
    found = play(
        page,
        """
        location.hash = "#feature=123";
        await wait(50);
        const group = find(".detail .quantiles");
        const closed = [group.open, group.getBoundingClientRect().height];
        group.open = true;
        const seen = {
          closed, heads: [...group.querySelectorAll("h5")].map((node) => node.textContent),
          passages: group.querySelectorAll(".passage").length,
          all: document.querySelectorAll(".detail .passage").length,
          tall: group.getBoundingClientRect().height, summary: find(".quantiles summary").textContent,
        };
        location.hash = "#feature=7";
        await wait(50);
        seen.old = [find(".detail .quantiles"), find(".detail .note").textContent];
        location.hash = "#feature=10";
        await wait(50);
        seen.dead = find(".detail .quantiles");
        return seen;
        """,
    )
    assert found["closed"][0] is False and found["closed"][1] < 60 < found["tall"]
    assert found["heads"] == ["activation 1.60 to 3.201.25% of tokens"]
    assert (found["passages"], found["all"]) == (2, 3) and "2 passages drawn at random" in found["summary"]
    assert found["old"][0] is None and "saejax report --config=... --redo" in found["old"][1]
    assert found["dead"] is None
