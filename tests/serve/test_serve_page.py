"""The runs' side of the live page: a real browser at a real server."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from tiny import one_device
from tiny.browser import CHROMIUM
from tiny.cdp import Tab, chromium
from tiny.covering import rest_in
from tiny.served import RUN, Served, copied, served

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on the path")

HOSTILE = "<img src=x onerror=window.owned=1>"
MARKUP = "<script>window.owned=1</script>"
MOVING, SWEEP, WIDER = "moving", "grid", "wider"
MOST_SHIFT = 0.02
VIEWS = {
    "#/": "Runs",
    f"#/run/{RUN}": RUN,
    f"#/run/{MOVING}": MOVING,
    f"#/compare?run={RUN}&run={WIDER}": "Compare",
    f"#/sweep/{SWEEP}": SWEEP,
    f"#/store/{RUN}": RUN,
    "#/start": "Start",
    "#/jobs": "Jobs",
    "#/api": "API",
}


def rewritten(path: Path, change: dict[str, object]) -> None:
    """Sets keys such as "coder.k" in a run's config.json."""
    config = json.loads(path.read_text())
    for key, value in change.items():
        section, _, name = key.rpartition(".")
        (config[section] if section else config)[name] = value
    path.write_text(json.dumps(config))


def without_evaluation(run: Path) -> None:
    for name in ("eval.json", "features.sqlite", "report.html", "report.json"):
        (run / name).unlink(missing_ok=True)


def rows(first: int, last: int) -> str:
    steps = range(first, last, 2)
    return "".join(
        json.dumps({"step": s, "train/loss": 1 / s, "train/fve": s / 100, "tokens": 128 * s, "train/l0": 8}) + "\n"
        for s in steps
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Beside the tiny run: one that moves, one with other settings, a sweep of two, one with strangers' names."""
    folder = copied(tmp_path_factory)
    runs = folder / "runs"
    for name in (MOVING, WIDER, f"{SWEEP}/k4", f"{SWEEP}/k8", HOSTILE):
        shutil.copytree(runs / RUN, runs / name)
    for name, k in ((f"{SWEEP}/k4", 4), (f"{SWEEP}/k8", 8), (WIDER, 16)):
        rewritten(runs / name / "config.json", {"name": name, "coder.k": k})
    shutil.copy(runs / RUN / "config.json", runs / SWEEP / "sweep_config.json")
    without_evaluation(runs / MOVING)
    (runs / MOVING / "metrics.jsonl").write_text(rows(1, 11))
    evaluation = json.loads((runs / HOSTILE / "eval.json").read_text())
    evaluation["gates"][0] |= {"title": MARKUP, "advice": HOSTILE, "passed": False}
    (runs / HOSTILE / "eval.json").write_text(json.dumps(evaluation))
    rewritten(runs / HOSTILE / "config.json", {"name": MARKUP})
    with served(folder) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Tab]:
    with chromium() as tab:
        yield tab


@pytest.fixture
def tab(browser: Tab) -> Iterator[Tab]:
    """1,000 px, light; whatever a test did, the page had nothing to complain of."""
    browser.console.clear()
    browser.size(1000, 800)
    browser.prefer()
    yield browser
    assert browser.console == []
    assert browser.evaluate("window.owned") is None


def visit(tab: Tab, site: Served, fragment: str) -> None:
    tab.open(f"{site.url}{fragment}")
    tab.until("document.querySelector('#view h1')")


@pytest.mark.parametrize(
    ("width", "dark"),
    rest_in("ci", [(1000, False), (1000, True), (390, False)], [(1000, False)]),
    ids=["light", "dark", "phone"],
)
def test_every_view_draws_itself_and_nothing_moves(tab: Tab, site: Served, width: int, dark: bool) -> None:
    tab.size(width, 844, phone=width < 500)
    tab.prefer(dark=dark)
    for fragment, title in VIEWS.items():
        visit(tab, site, fragment)
        # Everything that is asked for has come, and has been drawn.
        tab.run("while (find('.reserve .empty')) await wait(20); await wait(400);")
        assert tab.text("#view h1") == title
        assert tab.layout_shift() < MOST_SHIFT, (fragment, tab.shifts())
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), fragment
        assert tab.console == [], fragment
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 26)" if dark else "rgb(246, 246, 243)")


def test_curves_take_the_rows_that_a_training_writes(tab: Tab, site: Served) -> None:
    path = site.runs / MOVING / "metrics.jsonl"
    visit(tab, site, f"#/run/{MOVING}")
    tab.until("document.querySelectorAll('.curves svg').length === 3")
    last = "document.querySelector('.curves svg').getAttribute('aria-valuemax')"
    assert tab.evaluate(last) == "9"
    tab.run("window.chart = find('.curves svg'); chart.focus(); await wait(20);")
    tab.press("Home")
    assert tab.evaluate("chart.getAttribute('aria-valuetext')") == "step 1: 1"
    before = tab.evaluate("chart.querySelector('.line').getAttribute('d')")
    with path.open("a") as log:
        log.write(rows(11, 31))
    tab.until(f"{last} === '29'")
    # The same node: who reads a step with the keyboard goes on reading it.
    assert tab.evaluate("document.activeElement === chart && chart === document.querySelector('.curves svg')")
    assert tab.evaluate("chart.getAttribute('aria-valuetext')") == "step 1: 1"
    assert tab.evaluate("chart.querySelector('.line').getAttribute('d')") != before
    with path.open("a") as log:
        log.write(json.dumps({"step": 29, "val/fve": 0.25}) + "\n")
    tab.until("document.querySelectorAll('.curves svg')[1].querySelectorAll('.line').length === 2")
    path.write_text(rows(1, 7))
    tab.until(f"{last} === '5'")
    path.write_text(rows(1, 11))


def test_the_overview_changes_in_place(tab: Tab, site: Served) -> None:
    visit(tab, site, "#/")
    tab.until("document.querySelectorAll('.listing tbody tr').length > 4")
    assert tab.text("[id=sweeps] tbody tr").startswith(SWEEP)
    assert tab.text("[id=stores] tbody tr").startswith(RUN)
    tab.click(f"input[value={RUN}]")
    tab.click(f"input[value={WIDER}]")
    assert tab.evaluate("document.activeElement.value") == WIDER
    tab.run(f"window.row = find('input[value={RUN}]').closest('tr');")
    shutil.copytree(site.runs / WIDER, site.runs / "newer")
    try:
        tab.until("document.querySelector('input[value=newer]')")
        assert tab.evaluate(f"row === document.querySelector('input[value={RUN}]').closest('tr')")
        assert tab.evaluate("document.activeElement.value") == WIDER
        assert tab.text(".toolbar .button") == "Compare 2"
    finally:
        shutil.rmtree(site.runs / "newer")
    tab.press("/")
    tab.write("other words")
    tab.until("document.querySelectorAll('.reserve tr, .listing .pick input').length === 0")
    tab.run("find('.toolbar input').value = ''; find('.toolbar input').dispatchEvent(new Event('input'));")
    tab.click(".toolbar .button")
    tab.until("document.querySelectorAll('.compared svg').length > 2")
    assert tab.evaluate("location.hash") == f"#/compare?run={RUN}&run={WIDER}"
    # The page shows nothing before all its answers are there; hidden rows have no text between their cells.
    tab.until("document.querySelector('.differs').checkVisibility()")
    keys = tab.run("return all('.differs tbody tr').map((row) => row.innerText.split(/\\s+/));")
    assert ["coder.k", "8", "16"] in keys and "seed" not in [key for key, *_ in keys]
    tab.click("[id=settings] input")
    tab.until("document.querySelectorAll('.differs tbody tr.quiet').length > 50")


def test_names_and_texts_of_others_stay_text(tab: Tab, site: Served) -> None:
    visit(tab, site, "#/")
    tab.until("document.querySelectorAll('.listing tbody tr').length > 4")
    links = tab.run("return all('.named a').map((link) => link.textContent);")
    assert HOSTILE in links
    tab.click(f"a[href='#/run/{quote(HOSTILE)}']")
    tab.until("document.querySelector('.gates tr.fail')")
    assert tab.text("#view h1") == HOSTILE
    assert MARKUP in tab.text(".gates tr.fail") and HOSTILE in tab.text(".gates tr.fail")
    assert tab.evaluate("document.querySelectorAll('#view img, #view script').length") == 0
    visit(tab, site, f"#/compare?run={RUN}&run={quote(HOSTILE)}")
    tab.until("document.querySelectorAll('.compared svg').length > 2")
    tab.until(f"document.querySelector('.figures')?.innerText.includes({json.dumps(HOSTILE)})")  # asked for apart


def test_a_wrong_value_is_told_at_its_key(tab: Tab, site: Served) -> None:
    visit(tab, site, f"#/start?run={RUN}")
    tab.until("document.querySelector('.command').textContent.includes('curl')")
    tab.click("#view input[type=search]")
    tab.write("learning rate")
    tab.until("document.getElementById('setting-train.lr')")
    tab.click("[id='setting-train.lr']")
    tab.run("find('[id=\"setting-train.lr\"]').select();")
    tab.write("-3")
    assert tab.text(".changed-list").startswith("train.lr 0.001 → -3")
    assert '"train.lr":-3' in tab.text(".command")
    tab.click("button.first")
    tab.until("document.querySelector('.setting.wrong')")
    assert "train.lr" in tab.text(".setting.wrong .error")
    assert tab.evaluate("document.activeElement.id") == "setting-train.lr"
    assert tab.evaluate("document.activeElement.getAttribute('aria-invalid')") == "true"
    tab.click(".changed-list button")
    assert tab.evaluate("document.querySelectorAll('.changed, .wrong').length") == 0
    assert tab.evaluate("document.getElementById('setting-train.lr').value") == "0.001"
    # The server's refusal, which the browser notes.
    assert [line for line in tab.console if "400" not in line] == []
    tab.console.clear()


def test_a_command_is_started_and_its_log_followed(tab: Tab, site: Served) -> None:
    visit(tab, site, f"#/start?run={RUN}&command=train")
    tab.until("document.querySelector('.command').textContent.includes('curl')")
    tab.click("button.first")
    tab.until("location.hash.startsWith('#/job/')")
    tab.until("document.querySelector('.state').textContent === 'done'", 60)
    tab.until("document.querySelector('.log').textContent.length > 20")
    assert tab.text("#view h1") == f"train {RUN}"
    assert "saejax train --config=" in tab.text(".command")
    tab.go("#/jobs")
    tab.until("document.querySelectorAll('.listing tbody tr').length === 1")
    assert "done" in tab.text(".listing tbody tr")


def test_stop_reaches_the_process_that_trains(tab: Tab, site: Served) -> None:
    """One that the server did not start: it holds the run's lease, and SIGTERM is what it is told."""
    code = "import sys, time, saejax.core.lease as l\nwith l.lease(sys.argv[1]): print(1, flush=True); time.sleep(99)"
    command = [sys.executable, "-c", code, str(site.runs / WIDER)]
    with subprocess.Popen(command, env=one_device(), stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == b"1\n"
        visit(tab, site, f"#/run/{WIDER}")
        tab.until("document.querySelector('.state').textContent === 'running'", 20)
        tab.run("all('main button').find((button) => button.textContent === 'Stop').click();")
        assert trainer.wait(20) == -signal.SIGTERM
    tab.until("document.querySelector('.state').textContent !== 'running'", 20)


def test_keys(tab: Tab, site: Served) -> None:
    visit(tab, site, "#/")
    tab.press("?")
    assert tab.text("#help-title") == "Keys"
    tab.press("Escape")
    assert tab.evaluate("document.querySelector('dialog').open") is False
    for key, fragment in (("s", "#/start"), ("j", "#/jobs"), ("a", "#/api"), ("o", "#/")):
        tab.press("g", key)
        tab.until(f"location.hash === '{fragment}'")
    tab.until("document.querySelector('#view .listing tbody tr') && document.querySelector('#view input[type=search]')")
    tab.press("/", "g", "s")
    assert tab.evaluate("document.activeElement.value") == "gs"
    assert tab.evaluate("location.hash") == "#/"
    tab.press("Escape")
    assert tab.evaluate("document.activeElement === document.body")


@pytest.mark.parametrize(
    ("fragment", "shown"),
    [("#/", ".listing:not(.plain) tbody tr"), (f"#/start?run={RUN}", "#view summary"), ("#/api", ".operation")],
    ids=["overview", "start", "api"],
)
def test_escape_empties_a_search_field_and_its_filter(tab: Tab, site: Served, fragment: str, shown: str) -> None:
    visit(tab, site, fragment)
    shown = f"[...document.querySelectorAll({json.dumps(shown)})].filter((one) => one.checkVisibility()).length"
    tab.until(f"document.querySelector('#view input[type=search]') && {shown} > 1")
    before = tab.evaluate(shown)
    tab.click("#view input[type=search]")
    tab.write("no such thing")
    tab.until(f"{shown} !== {before}")
    tab.press("Escape")
    assert tab.evaluate("document.querySelector('#view input[type=search]').value") == ""
    tab.until(f"{shown} === {before}")


@pytest.mark.ci
def test_a_server_that_went_away_is_waited_for(tab: Tab, site: Served) -> None:
    visit(tab, site, "#/")
    tab.until("document.querySelectorAll('.listing tbody tr').length > 4")
    tab.offline(True)
    tab.until("!document.getElementById('banner').hidden")
    assert "does not answer" in tab.text("#banner")
    assert tab.evaluate("document.querySelectorAll('.listing tbody tr').length") > 4
    tab.offline(False)
    tab.until("document.getElementById('banner').hidden")
    assert tab.layout_shift() < MOST_SHIFT, tab.shifts()
    tab.call("Page.navigate", url="about:blank")
    assert [line for line in tab.console if "ERR_INTERNET_DISCONNECTED" not in line] == []
    tab.console.clear()
