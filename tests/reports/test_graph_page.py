"""The page of an attribution graph in a real browser: hover, pins, supernodes and their file, keys, effects."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from saejax.attribution.export import feature_number
from saejax.reports.graph_page import render_graph, spearman
from saejax.reports.page import embed_json
from tests.tiny import browser
from tests.tiny.browser import visit
from tests.tiny.graphs import KNOWN, PROMPT, VOCAB, made_up_feature, made_up_json

pytestmark = pytest.mark.skipif(browser.CHROMIUM is None, reason="no chromium or google-chrome on the path")
HOSTILE = "</script><img src=x onerror=console.error('owned')>"
STRANGE = ("<bos>", HOSTILE, ":", "\u202e", " \x00", *PROMPT[5:])
LABELS = {key: text for key, (text, _) in KNOWN.items()} | {(3, 300): HOSTILE, (1, 33): "\u202etexas"}
TABLES = {3: {"vocab": VOCAB, "features": [made_up_feature(3, latent) for latent in (55, 300)]}}
# Texas and its places: the members of the supernode.
TEXAS = ["2_8_9", "1_33_9"]


GRAPH = made_up_json(STRANGE, LABELS)
EFFECTS = [
    {"nodes": TEXAS, "what": "set to zero", "predicted": -1.0, "measured": -0.8, "interval": [-1.0, -0.5]},
    {"nodes": ["3_300_10"], "what": HOSTILE, "predicted": 0.5, "measured": 0.25, "interval": None},
    {"nodes": ["3_511_2"], "what": "scaled by 2", "predicted": 0.1, "measured": 0.75, "interval": None},
]

_EDGE = GRAPH["links"][2]
HEADS = {
    "edges": [
        {
            **{key: _EDGE[key] for key in ("source", "target", "weight")},
            "parts": [{"block": 4, "head": 2, "query": 4, "key": 1, "weight": _EDGE["weight"] / 2}],
        }
    ],
    "scores": [
        {
            **{"block": 4, "head": 2, "query": 4, "key": 1, "score": 3.0, "mean": 1.0, "pattern": 0.6, "bias": 0.5},
            "queries": [{"node": "0_17_4", "value": 1.5}, {"node": "bias", "value": -0.5}],
            "keys": [{"node": "E_101_1", "value": 2.0}],
            "pairs": [
                {"query": "0_17_4", "key": "E_101_1", "value": -0.75},
                {"query": "7_9_3", "key": "bias", "value": 0.25},
            ],
        }
    ],
}

FAITHFUL = {
    "layers": ["blocks.0.mlp_out", "blocks.1.mlp_out"],
    "rows": [
        {"name": name, "skipped_by_layer": [0.0, share], "errors": [0.0, 0.5]}
        | {"replacement": 0.6, "completeness": 0.8, "path": 2.5, "skipped": share, "error": 0.5}
        for name, share in (("clt " + HOSTILE, 0.25), ("each", 0.0))
    ],
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "graph.html"
    given = {
        "effects": EFFECTS,
        "effects_of": "Change of a logit",
        "figures": {"replacement score": 0.61},
        "heads": HEADS,
        "faithful": FAITHFUL,
    }
    return render_graph(path, GRAPH, tables=TABLES, **given)


def play(page: Path, actions: str) -> Any:
    helpers = (
        f"const TEXAS = {embed_json(TEXAS)}, HOSTILE = {embed_json(HOSTILE)};"
        + """
      const shape = (id) => find(`[data-key="${id}"]`);
      const at = (id) => {
        const box = shape(id).getBoundingClientRect();
        return {clientX: box.left + box.width / 2, clientY: box.top + box.height / 2, bubbles: true};
      };
      const hover = (id) => find(".graph").dispatchEvent(new PointerEvent("pointermove", at(id)));
      const click = (id) => find(".graph").dispatchEvent(new MouseEvent("click", at(id)));
      const texts = (selector) => [...document.querySelectorAll(selector)].map((node) => node.textContent);
      const write = (text) => {
        const field = find(".grouping input"); field.value = text; field.dispatchEvent(new Event("input"));
      };
      // The browser's clock does not wait for a file to be read.
      const load = async (text) => {
        File.prototype.text = async () => text;
        const list = new DataTransfer(); list.items.add(new File([text], "pins.json"));
        const input = find("input[type=file]"); input.files = list.files;
        input.dispatchEvent(new Event("change")); await wait(50);
      };
      // The text of the file that a click on Save hands over.
      const save = () => {
        let text = null; const real = window.Blob;
        window.Blob = class extends real { constructor(parts, kind) { super(parts, kind); text = parts.join(""); } };
        find(".save").click(); window.Blob = real; return text;
      };
      const units = () => [...document.querySelectorAll(".graph .unit")];
    """
    )
    return browser.play(page, ".unit", helpers + actions)


def weights(graph: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {(link["source"], link["target"]): link["weight"] for link in graph["links"]}


def test_the_page_draws_every_node_without_a_complaint(page: Path) -> None:
    dom, console = visit(page.as_uri())
    assert console == []
    body = dom[dom.index('<div id="page">') : dom.index('id="summary-data"')]
    assert body.count('role="option"') == len(GRAPH["nodes"])
    for kind, said in (("feature", "cross"), ("error", "mlp"), ("token", "emb"), ("logit", "logit")):
        many = sum(node["feature_type"].startswith(said) for node in GRAPH["nodes"])
        assert len(re.findall(rf'role="option" class="unit {kind}[ "]', body)) == many > 0
    assert re.search(r"<dt>replacement score</dt><dd>0.610</dd>", body)
    assert "<img" not in body and "&lt;/script&gt;&lt;img" in body
    assert "\u202e" not in body and "‹202e›" in body and "‹00›" in body
    # Rows stand above one another, columns beside one another.
    played = play(page, "return ['E_109_9', '1_33_9', '2_8_9', '2_8_10', '5_310_10'].map((id) => at(id));")
    token, lower, upper, right, out = ((p["clientX"], p["clientY"]) for p in played)
    assert token[1] > lower[1] > upper[1] > out[1] and right[0] > upper[0]


@pytest.mark.ci
def test_hover_shows_the_edges_of_a_node_and_their_weights(page: Path) -> None:
    seen = play(
        page,
        """
        const before = document.querySelectorAll(".focus-edges path").length;
        hover("2_8_10");
        const seen = {before, edges: document.querySelectorAll(".focus-edges path").length,
          minus: document.querySelectorAll(".focus-edges .minus").length, written: texts(".written text"),
          card: texts(".card li .num"), name: find(".card b").textContent, hidden: find(".card").hidden,
          dim: units().filter((unit) => unit.classList.contains("dim")).length, all: units().length};
        find(".check input").click(); hover("5_310_10"); seen.lone = find(".card").textContent;
        find(".graph").dispatchEvent(new PointerEvent("pointerleave"));
        seen.after = [document.querySelectorAll(".focus-edges path").length, find(".card").hidden];
        return seen;
        """,
    )
    mine = {pair: weight for pair, weight in weights(GRAPH).items() if "2_8_10" in pair}
    assert seen["before"] == 0 and seen["edges"] == len(mine) > 5 and seen["after"] == [0, True]
    assert seen["minus"] == sum(weight < 0 for weight in mine.values())
    assert seen["all"] - seen["dim"] == len({name for pair in mine for name in pair})

    def written(pairs: list[float], count: int) -> list[float]:
        return sorted(map(abs, pairs), reverse=True)[:count]

    def read(texts: list[str]) -> list[float]:
        return [abs(float(text.replace("\u2212", "-"))) for text in texts]

    # Beside the nodes stand the strongest, where there is room.
    strongest = written(list(mine.values()), 8)
    assert read(seen["written"])[0] == pytest.approx(strongest[0], abs=0.006) and len(seen["written"]) > 3
    assert all(min(abs(value - other) for other in strongest) < 0.006 for value in read(seen["written"]))
    into = written([weight for (_, target), weight in mine.items() if target == "2_8_10"], 4)
    out_of = written([weight for (source, _), weight in mine.items() if source == "2_8_10"], 4)
    np.testing.assert_allclose(read(seen["card"]), into + out_of, atol=0.006)
    assert (seen["name"], seen["hidden"], seen["lone"]) == ("Texas", False, "output ·Austinp 0.410")


@pytest.mark.ci
def test_a_click_pins_and_shows_what_the_feature_fires_on(page: Path) -> None:
    seen = play(
        page,
        """
        const state = () => ({pinned: texts(".pin .look"), title: find(".unit-detail h3")?.textContent ?? null,
          passages: document.querySelectorAll(".unit-detail .passage").length, hash: location.hash,
          marked: document.querySelectorAll(".unit.pinned").length});
        const seen = [];
        click("3_55_10"); while (!find(".passage")) await wait(20); seen.push(state());
        click("2_8_10"); seen.push({...state(), note: texts(".unit-detail > .note")});
        find(".edge-row").click(); const looked = state(); seen.push(looked.pinned);
        click("2_8_10"); click("2_8_10"); seen.push(state().pinned);
        const last = find(".pin .remove"); last.focus(); last.click();
        seen.push(state().pinned, document.activeElement === find(".grouping input"));
        return seen;
        """,
    )
    first, second, *rest = seen
    # Five strongest and one of a quantile.
    assert first == {
        "pinned": ["say Austin"],
        "title": "say Austin",
        "passages": 6,
        "hash": "#node=3_55_10",
        "marked": 1,
    }
    assert second["pinned"] == ["say Austin", "Texas"] and second["passages"] == 0
    assert second["note"] == ["This page was made without passages of this feature."]
    # An edge's row looks only; two clicks leave the node unpinned; then the last pin goes.
    assert rest == [["say Austin", "Texas"], ["say Austin"], [], True]


@pytest.mark.ci
def test_supernodes_sum_their_edges_and_are_saved_and_loaded(page: Path, tmp_path: Path) -> None:
    seen = play(
        page,
        """
        for (const id of TEXAS) click(id);
        write(HOSTILE); find(".make").click();
        click("3_55_10");
        const seen = {saved: save(), gone: shape("2_8_9") === null};
        find(".pin.group .look").click();
        const row = (node) => [".to", ".num"].map((part) => node.querySelector(part).textContent);
        seen.rows = [...document.querySelectorAll(".unit-detail .edge-row")].map(row);
        seen.members = texts(".members bdi");
        find(".clear").click(); seen.cleared = texts(".pin");
        await load(seen.saved);
        seen.loaded = texts(".pin .look"); seen.again = save();
        await load(seen.saved.replaceAll("2_8_9", "7_7_7")); seen.lost = find(".said-now").textContent;
        await load("[1]"); seen.refused = find(".said-now").textContent; seen.kept = texts(".pin .look").length;
        find(".pin.group .remove").click(); seen.ungrouped = texts(".pin .look");
        return seen;
        """,
    )
    params = json.loads(seen["saved"])["qParams"]
    assert params["supernodes"] == [[HOSTILE, *TEXAS]] and params["pinnedIds"] == [*TEXAS, "3_55_10"]
    assert set(params) == {"pinnedIds", "supernodes", "linkType", "clickedId", "sg_pos"}
    assert seen["gone"] and seen["members"] == ["Texas", "‹202e›texas"] and seen["cleared"] == []
    assert seen["loaded"][1:] == ["say Austin"] and seen["again"] == seen["saved"] and seen["kept"] == 2
    assert (
        "Of the file, 1 node is not in this graph" in seen["lost"]
        and "pins.json is not a file of pins" in seen["refused"]
    )
    assert seen["ungrouped"] == ["‹202e›texas", "say Austin"]
    # To say Austin: the sum over both members.
    total = sum(weights(GRAPH).get((source, "3_55_10"), 0.0) for source in TEXAS)
    (shown,) = {value for name, value in seen["rows"] if name.startswith("say Austin")}
    assert float(shown.replace("\u2212", "-")) == pytest.approx(total, abs=0.006)
    # The file is an argument of the Python function, and draws the same.
    again = render_graph(tmp_path / "again.html", GRAPH, supernodes=json.loads(seen["saved"]))
    drawn = play(again, "return [texts('.pin .look'), texts('.unit.group text'), save()];")
    assert drawn[0] == seen["loaded"] and drawn[2] == seen["saved"] and len(drawn[1]) == 1


@pytest.mark.ci
def test_keys_reach_every_part(page: Path) -> None:
    seen = play(
        page,
        """
        const graph = find(".graph"), active = () => graph.getAttribute("aria-activedescendant");
        const here = () => document.getElementById(active())?.dataset.key ?? null;
        graph.focus(); press(graph, "ArrowDown");
        const seen = [here()];
        for (const key of ["ArrowLeft", "ArrowRight", "ArrowDown", "ArrowUp", "Enter"]) {
          press(graph, key); seen.push(here());
        }
        seen.push(texts(".pin .look").length); press(graph, "Enter"); seen.push(texts(".pin .look").length);
        press(graph, "Escape"); seen.push(here());
        const named = (node) => node.textContent.trim() || node.getAttribute("aria-label") || node.closest("label");
        const controls = [...document.querySelectorAll("button, input, [tabindex]")];
        const mute = controls.filter((node) => !named(node) && !node.hidden);
        return [seen, mute.length];
        """,
    )
    (start, left, right, down, up, enter, pinned, unpinned, none), mute = seen
    layer = {node["node_id"]: node["layer"] for node in GRAPH["nodes"]}
    # From an output down to layer 3, along it and back, down to layer 2 and up again.
    assert [layer[name] for name in (start, left, right, down, up)] == ["3", "3", "3", "2", "3"]
    assert start == right != left and enter == up
    assert (pinned, unpinned, none, mute) == (1, 0, None, 0)


@pytest.mark.ci
def test_an_edge_says_its_heads_and_a_head_why_it_attends(page: Path) -> None:
    source, target = _EDGE["source"], _EDGE["target"]
    seen = play(
        page,
        f"""
        click("{target}"); const into = texts(".edge-heads");
        click("{source}"); const from = texts(".edge-heads");
        const rows = [...document.querySelectorAll("#heads .scroll tbody tr")];
        rows[0].dispatchEvent(new PointerEvent("pointerenter"));
        const ringed = [...document.querySelectorAll(".unit.ringed")].map((node) => node.dataset.key).sort();
        const cells = rows.map((row) => [...row.children].map((cell) => cell.textContent));
        const sides = [...document.querySelectorAll("#heads .sides tr")].map((row) => row.lastChild.textContent);
        find("#heads .node-link").click();
        return {{into, from, ringed, cells, sides, title: find("#heads summary").textContent,
          looked: find(".unit-detail h3").textContent}};
        """,
    )
    assert seen["into"] == seen["from"] == ["heads 4.2 from 1 to 4: 50%"]
    assert seen["ringed"] == sorted({"0_17_4", "E_101_1"})
    assert seen["looked"] == LABELS.get((0, 17), "feature 17, layer 0")
    assert [row[2] for row in seen["cells"]] == ["\u22120.750", "+0.250"]
    assert seen["cells"][1][:2] == ["feature 9, layer 7, at 3", "biases, positions"]
    assert seen["sides"] == ["+1.50", "\u22120.500", "+2"]
    assert seen["title"].startswith("Block 4, head 2: ") and "attention 60%; score +3, +2 to the mean" in seen["title"]


@pytest.mark.ci
def test_what_is_skipped_stands_beside_the_others(page: Path) -> None:
    seen = play(
        page,
        """
        const cells = (row) => [...row.children].map((cell) => cell.textContent);
        const rows = (table) => [...table.querySelectorAll("tbody tr")].map(cells);
        return [...document.querySelectorAll("#faithful table")].map(rows);
        """,
    )
    whole, each = seen
    assert [row[1:] for row in whole] == [
        ["25%", "0.500", "2.50", "0.600", "0.800"],
        ["0%", "0.500", "2.50", "0.600", "0.800"],
    ]
    assert whole[1][0] == "each" and each[1] == ["blocks.1.mlp_out", "25%", "0.500", "0%", "0.500"]


@pytest.mark.ci
def test_effects_stand_beside_the_graphs_prediction(page: Path) -> None:
    seen = play(
        page,
        """
        const rows = [...document.querySelectorAll("#interventions tbody tr")];
        rows[0].dispatchEvent(new PointerEvent("pointerenter"));
        const all = (selector) => [...document.querySelectorAll(selector)];
        const ringed = all(".unit.ringed").map((node) => node.dataset.key).sort();
        const pointed = all(".effect").map((node) => node.classList.contains("pointed"));
        rows[0].dispatchEvent(new PointerEvent("pointerleave"));
        const dots = all(".effect-dot").map((dot) => ["cx", "cy"].map((name) => Number(dot.getAttribute(name))));
        const cells = rows.map((row) => [...row.children].map((cell) => cell.textContent));
        find("#interventions .node-link").click();
        return {ringed, pointed, dots, cells, lead: find("#interventions .lead").textContent,
          bars: all(".interval").length, left: all(".unit.ringed").length, title: find(".unit-detail h3").textContent};
        """,
    )
    assert seen["ringed"] == sorted(TEXAS) and seen["left"] == 0 and seen["pointed"] == [True, False, False]
    assert seen["cells"] == [
        ["Texas‹202e›texas", "set to zero", "\u22121", "\u22120.800", "\u22121 to \u22120.500"],
        [HOSTILE, HOSTILE, "+0.500", "+0.250", "–"],
        ["3_511_2, not in this graph", "scaled by 2", "+0.100", "+0.750", "–"],
    ]
    # Ranks 1 3 2 and 1 2 3: 1 - 6 (0 + 1 + 1) / (3 (9 - 1)).
    assert seen["lead"].startswith("Change of a logit.") and seen["lead"].endswith("measurement: 0.50.")
    (x0, y0), (x1, y1), (x2, y2) = seen["dots"]
    assert x0 < x2 < x1 and y0 > y1 > y2 and seen["bars"] == 1 and seen["title"] == "Texas"


@pytest.mark.ci
def test_influence_and_pins_decide_what_is_in_sight(page: Path) -> None:
    seen = play(
        page,
        """
        click("0_17_4");
        const slider = find("input[type=range]"), drawn = () => units().map((node) => node.dataset.key);
        const seen = {};
        slider.value = 40; slider.dispatchEvent(new Event("input")); seen.some = drawn();
        find(".check input").click(); seen.pinned = drawn(); seen.pill = find(".unit.pill text").textContent;
        return seen;
        """,
    )
    least, most = (pick(node["influence"] for node in GRAPH["nodes"] if node["influence"]) for pick in (min, max))
    bar = least + (most - least) * 0.4
    always = ("embedding", "logit")
    ids = {n["node_id"] for n in GRAPH["nodes"] if n["feature_type"] in always or n["influence"] <= bar} | {"0_17_4"}
    assert set(seen["some"]) == ids and len(ids) < len(GRAPH["nodes"])
    logits = {node["node_id"] for node in GRAPH["nodes"] if node["feature_type"] == "logit"}
    assert set(seen["pinned"]) == logits | {"0_17_4"} and seen["pill"] == "“capital” as a word"


@pytest.mark.ci
def test_an_address_opens_its_node_and_names_a_strange_one(page: Path) -> None:
    dom, console = visit(page.as_uri() + "#node=2_8_10")
    assert console == [] and re.search(r"<h3[^>]*><bdi[^>]*>Texas</bdi></h3>", dom)
    dom, _ = visit(page.as_uri() + "#node=9_9_9")
    assert "names the node 9_9_9, which is not in this graph" in dom


def big_graph(n_nodes: int, n_links: int) -> dict[str, Any]:
    """26 layers, 40 tokens; most nodes at the last tokens, as graphs have them."""
    rng = np.random.default_rng(0)
    template, nodes = next(node for node in GRAPH["nodes"] if node["activation"]), []
    layers, latents = np.sort(rng.integers(0, 26, n_nodes)).tolist(), rng.permutation(1 << 14)[:n_nodes].tolist()
    places = (39 - rng.exponential(6, n_nodes).clip(0, 39).astype(int)).tolist()
    for layer, place, latent, share in zip(layers, places, latents, rng.random(n_nodes).tolist(), strict=True):
        name = {"node_id": f"{layer}_{latent}_{place}", "feature": feature_number(layer, latent), "clerp": ""}
        nodes.append({**template, **name, "layer": str(layer), "ctx_idx": place, "influence": share})
    ends = np.sort(rng.integers(0, n_nodes, (n_links, 2)), axis=1).tolist()
    ids = [node["node_id"] for node in nodes]
    links = [{"source": ids[a], "target": ids[b], "weight": 1 / (1 + i)} for i, (a, b) in enumerate(ends)]
    metadata = GRAPH["metadata"] | {"prompt_tokens": [f" {i}" for i in range(40)]}
    return GRAPH | {"metadata": metadata, "nodes": nodes, "links": links}


@pytest.mark.ci
def test_two_thousand_nodes_open_soon(tmp_path: Path, page: Path) -> None:
    big = big_graph(2000, 40_000)
    path = render_graph(tmp_path / "big.html", big)
    start = time.monotonic()
    visit(page.as_uri())
    small, start = time.monotonic() - start, time.monotonic()
    dom, console = visit(path.as_uri())
    # It takes a second or two more than the small one; the machine may be busy.
    assert time.monotonic() - start < small + 15
    assert console == [] and dom.count('role="option"') == len(big["nodes"])


def test_equal_values_have_their_mean_rank() -> None:
    some, others = [3.0, 1.0, 1.0, 1.0, 2.0, 5.0, 5.0], [1.0, 2.0, 2.0, 0.0, 7.0, 7.0, 7.0]
    assert spearman(some, others) == pytest.approx(scipy.stats.spearmanr(some, others).statistic, rel=1e-12)
