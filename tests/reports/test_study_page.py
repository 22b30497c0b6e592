"""The page of a study: what it says, that its links lead to rows, and that hostile text stays text."""

import copy
import urllib.parse
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tiny.browser import CHROMIUM, play, visit
from tiny.phone import nothing_wrong

from saejax.reports.study_page import anchor, render_rows, render_study

HOSTILE = "<script>alert(1)</script>\"'&\u202e\x00 <b>"
INTERVAL = {"mean": -8.06, "low": -8.66, "high": -7.56}


def feature(latent: int, **parts: Any) -> dict[str, Any]:
    return {"layer": 0, "latent": latent, "fires_on": ["[", "    "], "explanation": "", "href": ""} | parts


def group(name: str, stands: bool, latents: tuple[int, ...] = (3, 5)) -> dict[str, Any]:
    mean = -8.06 if stands else 0.01
    return {
        "name": name,
        "layer": 0,
        "ablate": {"mean": mean, "low": mean - 0.6, "high": mean + 0.5},
        "control": {"mean": -0.143, "least": -0.5, "most": 0.4, "as_large": 0.0 if stands else 0.7}
        | {"draws": 10, "distinct": 10},
        "patch": [INTERVAL | {"share": 0.54, "pairs": 4}, INTERVAL | {"share": -0.001, "pairs": 4}, None],
        "resample": {"mean": 0.03, "low": -0.05, "high": 0.1},
        "stands": stands,
        "features": [feature(latent) for latent in latents],
    }


def behaviour(name: str = "bracket", **parts: Any) -> dict[str, Any]:
    split = {"accuracy": 1.0, "clean": 6.72, "corrupt": -8.08, "p_right": 0.59}
    return {
        "name": name,
        "about": "closes the bracket that was opened",
        "example": {"clean": "x = data[i", "corrupt": "x = data(i", "right": "]", "wrong": ")"},
        "baseline": {"train": split | {"pairs": 80}, "test": split | {"pairs": 20}},
        "graphs": [
            {"href": f"graphs/{name}-{i}.html", "prompt": "x = data[i\n", "features": 230, "replacement": 0.88,
             "completeness": 0.96, "errors_share": 0.1 + 0.2 * i}
            for i in range(2)
        ],
        "features": [
            feature(3, share=0.267, prompts=2, activation=4.03, href="../report.html#feature=3", explanation="opens"),
            feature(5, share=0.1, prompts=1, activation=1.0, fires_on=[]),
        ],
        "n_features": 415,
        "groups": [group("L0.1", True), group("L0.2", False)],
        "prediction": {"n": 2, "spearman": 0.83, "points": [[-5.0, -8.0, "L0 feature 3"], [0.1, 0.2, "L0 feature 5"]]},
    } | parts  # fmt: skip


def study(**parts: Any) -> dict[str, Any]:
    never = {"name": "never", "about": "never.jsonl", "baseline": {"train": {"accuracy": 0.1, "clean": -3.0}}}
    return {
        "name": "mine",
        "model": "demo",
        "dictionaries": ["runs/mine: CrossLayerTranscoder, 6 x 512 latents"],
        "graphs": 2,
        "group_size": 2,
        "least_accuracy": 0.8,
        "behaviours": [behaviour()],
        "refused": [never],
    } | parts


class Reader(HTMLParser):
    """Elements, links, and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.links, self.ids, self.text, self.cells = set[str](), list[str](), set[str](), "", list[str]()
        self.feed(page.replace("<br>", " "))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = dict(attrs)
        self.tags.add(tag)
        self.links += [own["href"]] if tag == "a" and own.get("href") else []  # type: ignore[list-item]
        assert own.get("id") not in self.ids, "an id twice"
        self.ids |= {own["id"]} if own.get("id") else set()  # type: ignore[arg-type]
        assert not any(name.startswith("on") for name in own), "a handler"
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.cells:
            self.cells[-1] += data


def rendered(folder: Path, content: dict[str, Any]) -> Reader:
    return Reader(render_study(folder / "study.html", content).read_text(encoding="utf-8"))


def test_what_it_says(tmp_path: Path) -> None:
    page = rendered(tmp_path, study())
    for said in (
        "1 of 2 groups of features do more than their controls. Without L0.1 the logit difference of 6.72 changes by "
        "−8.06 (95% interval −8.66 to −7.56); without random features it changes by −0.143.",
        "Rank correlation (Spearman) of what the graph says and what the model does: 0.83",
        "Errors of the dictionaries have 20% of the influence",
        "The mean replacement score is 0.88, the completeness score 0.96",
        "1 of 2 groups that the graphs name cannot be told from their controls: L0.2.",
        "right in less than 80% of the training pairs",
        "Attention patterns",
        "x = data[i⏎",
        "opens",
        "All 415 features",
    ):
        assert said in " ".join(page.text.split()), said
    cells = [cell.strip() for cell in page.cells]
    assert {"54%", "0%", "no token", "␣×4", "10%", "70%", "1 of 2"} <= {*cells, *(c.split(" ")[-1] for c in cells)}
    assert page.tags.isdisjoint({"script", "img", "iframe", "object", "form", "link"})


def test_a_group_with_too_few_different_controls_gets_no_verdict(tmp_path: Path) -> None:
    same = group("L0.2", True) | {"stands": None}
    same["control"] = same["control"] | {"distinct": 1}
    page = rendered(tmp_path, study(behaviours=[behaviour(groups=[group("L0.1", True), same])]))
    text = " ".join(page.text.split())
    assert "1 of 1 groups of features do more than their controls. Of 1 more it is not known" in text
    assert "the range of 10 controls, of which at least 1 are different" in text
    assert "not known: 1 different controls" in [cell.strip() for cell in page.cells]
    assert "cannot be told from their controls" not in text


def test_what_is_weak_is_called_so(tmp_path: Path) -> None:
    """No group that stands, no rank correlation, numbers that are not finite."""
    none = {"mean": None, "low": None, "high": None}
    b = behaviour(groups=[group("L0.2", False), group("L0.3", False) | {"ablate": none}])
    b["prediction"] = {"n": 1, "spearman": None, "points": [[None, 1.0, ""]]}
    page = rendered(tmp_path, study(behaviours=[b], refused=[]))
    assert "None of 2 groups of features does more than its controls." in page.text
    assert "the rank correlation is none, so these graphs are a weak guide" in page.text
    assert "refused" not in page.text


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    """In names, prompts, answers, tokens, explanations and rows."""
    b = behaviour(name=HOSTILE, about=HOSTILE, example=dict.fromkeys(("clean", "corrupt", "right", "wrong"), HOSTILE))
    b["graphs"][0] |= {"prompt": HOSTILE, "href": "graphs/%3Cb%3E.html"}
    b["features"] = [feature(1, fires_on=[HOSTILE], explanation=HOSTILE, share=1.0, prompts=1, activation=1.0)]
    b["groups"][0] |= {"name": HOSTILE, "features": [feature(1, fires_on=[HOSTILE])]}
    b["prediction"]["points"][0][2] = HOSTILE
    content = study(behaviours=[b], name=HOSTILE, model=HOSTILE, dictionaries=[HOSTILE])
    content["refused"][0] |= {"name": HOSTILE + "2", "about": HOSTILE}
    page = rendered(tmp_path, content)
    rows = tmp_path / "r.html"
    render_rows(rows, HOSTILE, "a.csv", "b.html", (HOSTILE,), [((HOSTILE,), [(2, (HOSTILE,))])])
    for read in (page, Reader(rows.read_text(encoding="utf-8"))):
        assert read.tags.isdisjoint({"script", "b" if read is not page else "script"})
        assert "<script>alert(1)</script>" in read.text
        assert "\u202e" not in read.text and "\x00" not in read.text
    assert all(":" not in link.partition("#")[0] and not link.startswith("//") for link in page.links)


def test_names_that_differ_have_anchors_that_differ() -> None:
    one = ["a b", "a_b", "a-b", "a.b", "a:b", "a_20_b", "ä", "a", "A", "", "_", "__"]
    names = [(name,) for name in one] + [("a", "b"), ("a", "", "b"), ("a.b", "c"), ("a", "b.c"), ("a", "b", "c")]
    assert len({anchor(*name) for name in names}) == len(names)
    assert all(c.isascii() and (c.isalnum() or c in "._-:") for name in names for c in anchor(*name))


def write_all(folder: Path) -> dict[str, Any]:
    """The page with the rows and the graphs that it leads to."""
    content = study()
    parts: dict[str, list[tuple[str, ...]]] = {
        "baseline": [("bracket", "train"), ("bracket", "test"), ("never", "train")],
        "features.bracket": [()],
        "singles.bracket": [()],
        "effects.bracket": [(f"L0.{i}", kind) for i in (1, 2) for kind in ("ablate", "control", "patch", "resample")],
    }
    (folder / "rows").mkdir()
    (folder / "graphs").mkdir()
    for name, own in parts.items():
        (folder / f"{name}.csv").write_text("a\n")
        found = [(part, [(2 + i, (f"value of {part}",)) for i in range(60)]) for part in own]
        render_rows(folder / "rows" / f"{name}.html", f"{name}.csv", f"../{name}.csv", "../study.html", ("a",), found)
    for i in range(2):
        (folder / "graphs" / f"bracket-{i}.html").write_text("<!doctype html><p>graph")
    content = copy.deepcopy(content)
    content["behaviours"][0]["features"][0]["href"] = ""
    return content


def test_every_link_leads_to_rows_that_are_there(tmp_path: Path) -> None:
    page = rendered(tmp_path, write_all(tmp_path))
    read = {"": page.ids}
    assert len(page.links) == 20
    for link in page.links:
        file, _, fragment = link.partition("#")
        path = tmp_path / urllib.parse.unquote(file)
        if file not in read:
            assert path.is_file(), link
            own = Reader(path.read_text())
            read[file] = own.ids
            for back in own.links:
                assert (path.parent / back).is_file(), back
        assert not fragment or fragment in read[file], link


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser(tmp_path: Path) -> None:
    """It is drawn without a word of the console, and a claim's link shows its rows in another colour."""
    path = render_study(tmp_path / "study.html", write_all(tmp_path))
    dom, console = visit(path.as_uri())
    assert console == [] and dom.count("<circle") == 4 and "L0.1" in dom
    found = play(
        path,
        "svg.study circle.stands",
        """
        const narrow = [...document.querySelectorAll("p, h1, h2, h3, svg, .scroll, dl")];
        const box = document.querySelector("svg.study").getBoundingClientRect();
        return {
          width: document.documentElement.scrollWidth <= innerWidth,
          inside: narrow.every((node) => node.getBoundingClientRect().right <= innerWidth + 1),
          high: box.height, links: [...document.links].every((link) => link.protocol === "file:"),
        };
        """,
    )
    assert found["width"] and found["inside"] and found["links"] and found["high"] > 40
    rows, part = tmp_path / "rows" / "effects.bracket.html", anchor("L0.2", "patch")
    shown, console = visit(f"{rows.as_uri()}#{part}")
    assert console == [] and f'id="{part}"' in shown
    style = (
        "const colour = (id) => getComputedStyle(document.querySelector('#' + CSS.escape(id) + ' td')).backgroundColor;"
    )
    drawn = play(
        rows,
        "tbody",
        f"""
        {style}
        location.hash = "{part}";
        await wait(200);
        return [colour("{part}") === colour("{anchor("L0.1", "patch")}"), scrollY > 500];
        """,
    )
    assert drawn == [False, True]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on the path")
def test_a_phone_shows_letters_that_can_be_read(tmp_path: Path) -> None:
    nothing_wrong(render_study(tmp_path / "study.html", study()))
