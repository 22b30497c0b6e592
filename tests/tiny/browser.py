"""Pages in a real browser: headless Chromium opens a file and says what it drew."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --enable-logging=stderr "
    "--virtual-time-budget=15000 --window-size=1280,900 --dump-dom"
)


def visit(address: str) -> tuple[str, list[str]]:
    """(the document after its scripts ran, what the console said)."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={profile}", address]
        done = subprocess.run(command, capture_output=True, timeout=90, check=True)
    console = [line for line in done.stderr.decode(errors="replace").splitlines() if "CONSOLE" in line]
    return done.stdout.decode(), console


def without_policy(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)


def play(page: Path, ready: str, actions: str) -> Any:
    """What `actions`, the body of an async function run once the page has the element `ready`, returns.

    Played on a copy of the page without its Content-Security-Policy.
    """
    script = """
      const find = (selector) => document.querySelector(selector);
      const wait = (ms) => new Promise((done) => setTimeout(done, ms));
      const press = (node, key) =>
        node.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
      (async () => {
        while (!find("%s")) await wait(20);
        const result = await (async () => { %s })();
        const played = document.createElement("pre");
        document.body.append(Object.assign(played, {id: "played", textContent: JSON.stringify(result)}));
      })();
    """
    copy = page.with_name("played.html")
    played = f"<script>{script % (ready, actions)}</script></body>"
    copy.write_text(without_policy(page).replace("</body>", played), encoding="utf-8")
    dom, console = visit(copy.as_uri())
    assert console == []
    match = re.search(r'<pre id="played">(.*?)</pre>', dom, re.DOTALL)
    assert match, "the actions did not finish"
    return json.loads(html.unescape(match[1]))
