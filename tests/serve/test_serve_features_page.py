"""The features' side of the live page: a real browser at a real server.

The run is the tiny one with strangers' text put into its tokens, documents and explanations; a copy without
examples stands beside it, in a folder of its own.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from tiny.browser import CHROMIUM
from tiny.cdp import Tab, chromium
from tiny.served import RUN, Served, copied, served

from saejax.reports.feature_table import read_features, write_features
from saejax.runs import Run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on the path")

HOSTILE = "</script><img src=x onerror=window.owned=1>\u202e\x00"
SHOWN = "</script><img src=x onerror=window.owned=1>‹202e›‹00›"
BARE = "group/bare"
TYPED = "def main(self):\n    return the\n"


def spoilt(run: Path) -> int:
    """Puts strangers' text into every kind of string of features.sqlite; returns the feature that has it all."""
    table = read_features(run)
    feature = max(table["features"], key=lambda one: len(one["examples"]))
    example = feature["examples"][0]
    table["vocab"][example["tokens"][example["peak"]]] = HOSTILE
    example["document"] = HOSTILE
    feature["top_logits"][0][0] = HOSTILE
    write_features(run / Run.features, table, {})
    said = {
        "feature": feature["id"],
        "text": HOSTILE,
        "by": HOSTILE,
        "scores": {"detection": 0.5},
        "step": table["step"],
        "sha256": table["sha256"],
    }
    (run / "explanations.jsonl").write_text(json.dumps(said) + "\n")
    return int(feature["id"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, int]]:
    """(the server, the feature that has strangers' text in all its strings)."""
    folder = copied(tmp_path_factory)
    shutil.copytree(folder / "runs" / RUN, folder / "runs" / BARE)
    (folder / "runs" / BARE / Run.features).unlink()
    feature = spoilt(folder / "runs" / RUN)
    with served(folder) as server:
        yield server, feature


@pytest.fixture(scope="module")
def browser() -> Iterator[Tab]:
    with chromium() as tab:
        yield tab


@pytest.fixture
def tab(browser: Tab, site: tuple[Served, int]) -> Iterator[Tab]:
    """The view of the tiny run, 1,000 px wide; whatever a test did, nobody complained and nothing moved by itself."""
    browser.console.clear()
    browser.size(1000, 900)
    browser.prefer()
    opened(browser, site[0])
    yield browser
    assert [line for line in browser.console if "/api/" not in line] == []
    assert browser.evaluate("window.owned") is None
    assert browser.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert browser.layout_shift() < 0.02, browser.shifts()


def opened(tab: Tab, server: Served, dictionary: str = RUN, feature: int | None = None) -> None:
    query = "" if feature is None else f"?id={feature}"
    tab.open(f"{server.url.rstrip('/')}/#/features/{dictionary}{query}")
    tab.until("document.querySelector('.row .id') && !document.querySelector('.detail.empty, .detail[aria-busy]')")


def chosen(tab: Tab, feature: int) -> None:
    name = json.dumps(f"Feature {feature}")
    tab.until(
        f"document.querySelector('.detail h3').textContent === {name} && !document.querySelector('.detail[aria-busy]')"
    )


def search(tab: Tab, text: str) -> None:
    tab.run("const field = find('input[type=search]'); field.focus(); field.select();")
    tab.write(text)


def rows(tab: Tab) -> list[int]:
    found: list[int] = tab.run("return all('.row .id').map((node) => Number(node.textContent));")
    return found


def no_complaint(tab: Tab) -> None:
    assert tab.console == []


def test_search_order_and_keys_choose_features(tab: Tab, site: tuple[Served, int]) -> None:
    server, _ = site
    by_density = server.get(f"/api/features/{RUN}?sort=density&down=1&live=1")
    live = [row["id"] for row in server.get(f"/api/features/{RUN}?live=1&limit=1000")["rows"]]
    assert tab.text(".count").startswith(f"{len(live)} of {by_density['all']} features")
    chosen(tab, live[0])
    tab.run("find('.rows').focus()")
    tab.press("j", "ArrowDown", "k")
    chosen(tab, live[1])
    tab.press("End")
    chosen(tab, live[-1])
    assert len(rows(tab)) < 60
    tab.press("Home")
    chosen(tab, live[0])
    tab.click(".head.density")
    first = by_density["rows"][0]["id"]
    tab.until(f"Number(document.querySelector('.row .id').textContent) === {first}")
    tab.click(".row[data-place='0']")
    chosen(tab, first)
    assert tab.evaluate("location.hash") == f"#/features/{RUN}?id={first}"
    search(tab, f"#{live[5]}")
    tab.until(f"document.querySelectorAll('.row').length === 1 && document.querySelector('#row-{live[5]}')")
    search(tab, "no such text anywhere")
    tab.until("document.querySelectorAll('.row').length === 0")
    chosen(tab, first)
    no_complaint(tab)


@pytest.mark.ci
def test_the_answer_to_an_older_search_is_dropped(tab: Tab) -> None:
    tab.run("""
        const real = window.fetch;
        window.__late = 0;
        window.fetch = async (path, ...rest) => {
          const answer = await real(path, rest[0] && {...rest[0], signal: undefined});
          if (!String(path).includes("q=re")) return answer;
          await wait(500);
          window.__late++;
          return answer;
        };
    """)
    search(tab, "re")
    tab.until("performance.getEntriesByType('resource').some(({name}) => name.includes('q=re'))")
    search(tab, "#5")
    tab.until("document.querySelectorAll('.row').length === 1")
    tab.until("window.__late === 1")
    tab.run("await wait(50)")
    assert rows(tab) == [5]
    no_complaint(tab)


@pytest.mark.ci
def test_a_range_of_densities_bounds_the_list(tab: Tab, site: tuple[Served, int]) -> None:
    server, _ = site
    everything = server.get(f"/api/features/{RUN}?live=1&limit=1000")["rows"]
    middle = sorted(row["density"] for row in everything)[len(everything) // 2]
    tab.click("[aria-label^='Lowest density']")
    tab.write(f"{100 * middle}")
    expected = server.get(f"/api/features/{RUN}?live=1&low={middle}")["total"]
    assert 0 < expected < len(everything)
    tab.until(f"document.querySelector('.count').textContent.startsWith('{expected} of')")
    tab.write(" much")
    tab.until("document.querySelector('[aria-label^=\"Lowest density\"]').getAttribute('aria-invalid') === 'true'")
    no_complaint(tab)


@pytest.mark.ci
def test_the_arrow_keys_step_and_the_next_feature_is_there_before(tab: Tab, site: tuple[Served, int]) -> None:
    live = [row["id"] for row in site[0].get(f"/api/features/{RUN}?live=1&limit=5")["rows"]]
    chosen(tab, live[0])
    asked = "performance.getEntriesByType('resource').filter(({name}) => name.includes('/api/feature/')).length"
    tab.until(f"{asked} >= 2")
    tab.press("ArrowRight")
    chosen(tab, live[1])
    tab.press("ArrowLeft")
    chosen(tab, live[0])
    no_complaint(tab)


@pytest.mark.ci
def test_a_label_is_saved_and_there_after_a_reload(tab: Tab, site: tuple[Served, int]) -> None:
    server, feature = site
    opened(tab, server, RUN, feature)
    tab.click(".label-field")
    tab.write(HOSTILE.replace("\x00", ""))
    tab.press("Enter")
    tab.until("document.querySelector('.note-status').textContent === 'saved'")
    tab.until(f"document.querySelector('#row-{feature} .label').textContent.includes('<img')")
    tab.click(".note-field")
    tab.write("a second look")
    tab.press("Escape")
    assert tab.evaluate("document.querySelector('.note-field').value") == ""
    opened(tab, server, RUN, feature)
    assert tab.evaluate("document.querySelector('.label-field').value") == HOSTILE.replace("\x00", "")
    tab.run("find('.label-field').focus(); find('.label-field').select();")
    tab.write("x" * 10_000)
    tab.press("Enter")
    tab.until("document.querySelector('.note-status.warn')")
    assert "200" in tab.text(".note-status")
    tab.press("ArrowRight", "Tab")
    tab.run("find('[aria-label=\"Next feature\"]').click()")
    tab.until(f"document.querySelector('.detail h3').textContent !== 'Feature {feature}'")
    tab.run("find('[aria-label=\"Previous feature\"]').click()")
    chosen(tab, feature)
    assert len(tab.evaluate("document.querySelector('.label-field').value")) == 10_000
    tab.run("find('.label-field').focus()")
    tab.press("Escape")
    assert [note["label"] for note in server.get(f"/api/notes/{RUN}")["notes"]] == [HOSTILE.replace("\x00", "")]


def test_a_text_is_coloured_as_one_types(tab: Tab, site: tuple[Served, int]) -> None:
    server, _ = site
    tab.click(".try textarea")
    tab.write(TYPED)
    tab.until("document.querySelectorAll('.try-top li').length > 0")
    truth = server.ask("/api/encode", {"dictionary": RUN, "text": TYPED, "count": 20})[1]
    top = truth["top"][0]
    assert tab.evaluate("document.querySelectorAll('.try-tokens .tok').length") == len(truth["tokens"])
    tab.hover(f".try-top button[data-id='{top['id']}']")
    fires = sum(value != 0 for value in truth["activations"][str(top["id"])])
    tab.until(f"document.querySelectorAll('.try-tokens .on').length === {fires}")
    tab.click(f".try-top button[data-id='{top['id']}']")
    chosen(tab, top["id"])
    assert tab.text(".try-status").startswith(f"#{top['id']} on {fires} of {len(truth['tokens'])}")
    opened(tab, server)
    tab.until("document.querySelectorAll('.try-top li').length > 0")
    assert tab.evaluate("document.querySelector('.try textarea').value") == TYPED
    tab.run("find('.try textarea').focus(); find('.try textarea').select();")
    tab.press("Backspace")
    tab.until("document.querySelectorAll('.try-tokens .tok').length === 0")
    no_complaint(tab)


@pytest.mark.ci
def test_neighbours_of_this_and_of_another_dictionary(tab: Tab, site: tuple[Served, int]) -> None:
    server, feature = site
    opened(tab, server, RUN, feature)
    tab.click("#tab-similar")
    tab.until("document.querySelectorAll('.similar-rows li').length === 20")
    near = server.get(f"/api/similar/{RUN}?id={feature}&count=20")["rows"]
    shown = tab.run("return all('.similar-rows .id').map((node) => Number(node.textContent));")
    assert shown == [row["id"] for row in near]
    tab.run("const list = find('.similar select'); list.value = 'group/bare'; list.dispatchEvent(new Event('change'));")
    # The other dictionary is a copy, so that the feature's own row is the nearest.
    tab.until(f"document.querySelector('.similar-rows a').hash === '#/features/group/bare?id={feature}'")
    assert tab.text(".similar-rows .num") == "1.000"
    tab.click(".similar-rows a")
    tab.until("document.querySelector('.features-head select').value === 'group/bare'")
    chosen(tab, feature)
    tab.evaluate("history.back()")
    tab.until(f"document.querySelector('.features-head select').value === {json.dumps(RUN)}")
    no_complaint(tab)


@pytest.mark.ci
def test_steering_shows_both_texts_and_marks_what_changed(tab: Tab, site: tuple[Served, int]) -> None:
    server, feature = site
    opened(tab, server, RUN, feature)
    tab.click("#tab-steer")
    assert tab.evaluate("document.querySelector('[name=features]').value") == str(feature)
    tab.run("find('[name=prompt]').focus()")
    tab.write("def main")
    tab.run(f"find('[name=features]').value = '{feature}, 5';")
    tab.run("find('[name=tokens]').value = 8; find('[name=scale]').value = 60;")
    tab.click(".steer-form .primary")
    tab.until("document.querySelectorAll('.steer-text').length === 2", 60)
    asked = {
        "dictionary": RUN,
        "features": [feature, 5],
        "operation": "add",
        "scale": 60,
        "prompt": "def main",
        "tokens": 8,
    }
    truth = server.ask("/api/steer", asked | {"temperature": 0, "top_p": 1, "seed": 0})[1]
    counts = tab.run("return all('.steer-text').map((node) => node.querySelectorAll('.tok').length);")
    assert counts == [len(truth["tokens_without"]), len(truth["tokens_with"])]
    changed = tab.evaluate("document.querySelectorAll('.tok.changed').length")
    assert (changed > 0) == (truth["tokens_without"] != truth["tokens_with"])
    said = tab.text(".steer-result")
    assert truth["about"] in said and f"features {feature}, 5: f + 60" in said
    no_complaint(tab)
    tab.run("find('[name=features]').value = '999999'")
    tab.click(".steer-form .primary")
    tab.until("document.querySelector('.steer-result .warn')", 60)
    assert tab.evaluate("document.querySelector('[name=prompt]').value") == "def main"


@pytest.mark.ci
def test_a_passage_leads_back_to_its_document_and_shard(tab: Tab, site: tuple[Served, int]) -> None:
    server, feature = site
    opened(tab, server, RUN, feature)
    truth = server.get(f"/api/provenance/{RUN}?feature={feature}&example=1")
    tab.click(".examples li:nth-child(2) .origin-button")
    tab.until("document.querySelector('.chain')")
    assert tab.evaluate("document.querySelector('#tab-origin').getAttribute('aria-selected')") == "true"
    assert tab.evaluate("document.querySelector('.origin select').value") == "1"
    text = tab.text(".origin")
    for known in ("document", "store", "shard_sha256", "model"):
        if truth["example"][known]:
            assert str(truth["example"][known]) in text
    for sentence in truth["why"]:
        assert sentence in text
    assert "Command" in text and "Configuration" in text
    no_complaint(tab)


def test_strangers_text_stays_text(tab: Tab, site: tuple[Served, int]) -> None:
    server, feature = site
    opened(tab, server, RUN, feature)
    shown = tab.text(".detail-body")
    assert shown.count(SHOWN.replace(" ", "·")) >= 2  # a token of the passages, and one that it promotes
    assert shown.count(SHOWN) >= 2  # explanation and who said it
    tab.click(".try textarea")
    tab.write("</script><img src=x onerror=window.owned=1>\u202e")
    tab.until("document.querySelector('.try-tokens').innerText.includes('onerror=window.owned=1>')")
    tab.click("#tab-origin")
    tab.until("document.querySelector('.chain')")
    for other in ("#tab-similar", "#tab-steer", "#tab-examples"):
        tab.click(other)
    no_complaint(tab)


@pytest.mark.ci
def test_a_dictionary_without_examples_says_how_to_get_them(tab: Tab, site: tuple[Served, int]) -> None:
    opened(tab, site[0], BARE, 3)
    assert "saejax report --config=..." in tab.text(".detail-body")
    tab.until("document.querySelectorAll('.row').length > 5")
    assert tab.evaluate("document.querySelector('.check input').disabled")
    no_complaint(tab)
    tab.go("#/features/no/such")
    tab.until("document.querySelector('.detail-body .warn')")


def test_a_phone_shows_the_list_then_the_feature_and_comes_back(tab: Tab, site: tuple[Served, int]) -> None:
    server, feature = site
    tab.size(390, 844, phone=True)
    opened(tab, server)
    width = "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
    seen = "[document.querySelector('.side').offsetHeight > 0, document.querySelector('.detail').offsetHeight > 0]"
    assert tab.evaluate(seen) == [True, False] and tab.evaluate(width) <= 390
    tab.click(".row[data-place='2']")
    tab.until("document.querySelector('.features-view').dataset.showing === 'detail'")
    assert tab.evaluate(seen) == [False, True] and tab.evaluate(width) <= 390
    for name in ("similar", "steer", "origin", "examples"):
        tab.click(f"#tab-{name}")
        assert tab.evaluate(width) <= 390
    tab.evaluate("history.back()")
    tab.until("document.querySelector('.features-view').dataset.showing === 'list'")
    tab.click(".row[data-place='4']")
    tab.until("document.querySelector('.features-view').dataset.showing === 'detail'")
    tab.click(".back")
    assert tab.evaluate(seen) == [True, False]
    opened(tab, server, RUN, feature)
    assert tab.evaluate(seen) == [False, True]
    no_complaint(tab)


def test_no_script_of_the_page_takes_a_name_of_another() -> None:
    """They share one scope: a second `const` stops a script, a second `function` replaces the first in silence."""
    folders = [resources.files("saejax.serve.page"), resources.files("saejax.reports")]
    scripts = re.findall(r'src="/static/([\w.]+)"', folders[0].joinpath("index.html").read_text())
    taken: dict[str, str] = {}
    for script in scripts:
        file = next(one.joinpath(script) for one in folders if one.joinpath(script).is_file())
        names = re.findall(r"^(?:async )?(?:const|let|class|function) (\w+)", file.read_text(), re.MULTILINE)
        for name in names:
            assert name not in taken, f"{script} and {taken[name]} both name {name}"
            taken[name] = script
    assert len(scripts) > 10 and "FeatureView" in taken and "api" in taken


MANY = 100_000
# What a reader waits for: from a click or key to the frame that shows the feature.
_TIMED = """
  const shown = () => !find('.detail').hasAttribute('aria-busy') && find('.detail h3').textContent;
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
  const timed = async (act) => {
    const before = shown(), begun = performance.now();
    act();
    while (!shown() || shown() === before) await new Promise((done) => setTimeout(done, 0));
    await frame();
    return performance.now() - begun;
  };
"""


def many_features(path: Path) -> None:
    """A table of MANY features with 6 passages of 24 tokens each, every tenth dead."""
    bodies = []
    for kind in range(64):
        acts = [0.0] * 16 + [4.0 + kind % 7] + [0.0] * 7
        tokens = [(kind * 5 + i) % 50 for i in range(24)]
        example = {"document": f"file{kind}.py", "position": 7, "tokens": tokens, "activations": acts, "peak": 16}
        logits = [[f"tok{(kind + i) % 50}", 1.5 - i / 10] for i in range(10)]
        histogram = {"edges": [float(i) for i in range(21)], "counts": list(range(20, 0, -1))}
        body = {"mean": 1.5, "histogram": histogram, "top_logits": logits, "bottom_logits": logits}
        bodies.append(body | {"examples": [example] * 6, "quantiles": []})

    def feature(number: int) -> dict[str, Any]:
        dead = number % 10 == 0
        activity = {"density": 0.0 if dead else (1 + number % 977) * 1e-5, "max": 0.0 if dead else 10.5}
        return {"id": number} | activity | bodies[number % 64]

    head = {"hook_point": "blocks.1.resid_post", "model": "demo", "d_sae": MANY, "n_tokens": 10**8, "step": 40}
    write_features(path, {**head, "features": map(feature, range(MANY)), "vocab": [f"tok{i}" for i in range(50)]}, {})


@pytest.mark.soak
def test_a_hundred_thousand_features_stay_fluid(tmp_path_factory: pytest.TempPathFactory, browser: Tab) -> None:
    """First paint under 1 s, a feature under 100 ms, a list that is dragged about loses no frame worth seeing."""
    folder = copied(tmp_path_factory, "many")
    many_features(folder / "runs" / RUN / Run.features)
    browser.size(1280, 900)
    with served(folder) as server:
        begun = time.monotonic()
        browser.open(f"{server.url.rstrip('/')}/#/features/{RUN}")
        browser.until("document.querySelector('.row .id')", 600)
        shown = time.monotonic() - begun
        opened(browser, server)
        painted, listed = browser.run(
            "return [performance.getEntriesByName('first-contentful-paint')[0].startTime, performance.now()];"
        )
        anew = browser.run(_TIMED + "const times = []; for (let i = 0; i < 30; i++) {"
            "times.push(await timed(() => find('.controls button').click())); await wait(50); }"
            "return times.sort((a, b) => a - b);")  # fmt: skip
        steps = browser.run(_TIMED + "const times = []; find('.rows').focus(); for (let i = 0; i < 30; i++) {"
            "times.push(await timed(() => find('[aria-label=\"Next feature\"]').click())); await wait(200); }"
            "return times.sort((a, b) => a - b);")  # fmt: skip
        frames = browser.run("""
            const rows = find('.rows'), frames = [];
            let last = performance.now(), going = true;
            const tick = (now) => { frames.push(now - last); last = now; if (going) requestAnimationFrame(tick); };
            requestAnimationFrame(tick);
            for (let i = 0; i < 200; i++) { rows.scrollTop = rows.scrollHeight * (i * 37 % 200) / 200; await wait(16); }
            going = false;
            return frames.sort((a, b) => a - b);
        """)
        begun = time.monotonic()
        browser.until("document.querySelectorAll('.row.waiting').length === 0")
        filled = time.monotonic() - begun
        search(browser, "tok31")
        browser.until("document.querySelector('.count').textContent.includes(' of 100,000') && "
                      "!document.querySelector('.count').textContent.startsWith('90,000 of')")  # fmt: skip
    middle, slow = [len(anew) // 2, round(0.95 * (len(anew) - 1))]
    print(
        f"rows after {shown:.1f} s; first paint {painted:.0f} ms, list and feature {listed:.0f} ms; a feature out of "
        f"{MANY:,}: median {anew[middle]:.0f} ms, p95 {anew[slow]:.0f} ms; the next: median {steps[middle]:.0f} ms, "
        f"p95 {steps[slow]:.0f} ms; dragged list: frames of {frames[len(frames) // 2]:.1f} ms, worst {frames[-1]:.0f} "
        f"ms, rows {filled:.2f} s after it stops"
    )
    assert painted < 1000
    # The quicker half: others may use the cores meanwhile.
    assert anew[len(anew) // 4] < 100 and steps[len(steps) // 4] < 100
    assert frames[len(frames) // 2] < 34
    assert browser.layout_shift() < 0.02
