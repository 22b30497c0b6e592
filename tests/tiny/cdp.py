"""A headless Chromium that a test talks to: it opens addresses, types, clicks, measures and takes pictures.

`with chromium() as tab:` starts one browser with one tab and ends it. The browser speaks the Chrome DevTools
Protocol, which is JSON over a WebSocket. `tests/tiny/browser.py` is for pages that lie on the disk; this one is
for pages of a server, which never fall silent.
"""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tiny.browser import CHROMIUM

_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --disable-extensions --hide-scrollbars "
    "--window-size=1280,900 --remote-debugging-port=0"
)
_KEYS = {
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Tab": (9, ""),
    "Backspace": (8, ""),
    "Home": (36, ""),
    "End": (35, ""),
    "ArrowLeft": (37, ""),
    "ArrowUp": (38, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
    "PageUp": (33, ""),
    "PageDown": (34, ""),
    " ": (32, " "),
}
# Sums every shift of the layout that no key, click or change of the window's size came before.
_WATCH_SHIFTS = """
  window.__shifts = [];
  const namedNode = ({node}) => node && (node.outerHTML || node.data || "").slice(0, 120);
  new PerformanceObserver((list) => {
    for (const {value, startTime, hadRecentInput, sources} of list.getEntries()) {
      if (!hadRecentInput) window.__shifts.push({value, time: startTime, nodes: sources.map(namedNode)});
    }
  }).observe({type: "layout-shift", buffered: true});
"""


class PageError(AssertionError):
    """A script of the test threw inside the page, or what the test waited for did not come."""


class Tab:
    """One tab. `console` holds what it complained of: errors, warnings, exceptions, refused or failed requests."""

    def __init__(self, socket: ClientConnection) -> None:
        self.console: list[str] = []
        self._socket = socket
        self._count = 0
        self._session: str | None = None
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=_WATCH_SHIFTS)

    def call(self, method: str, timeout: float = 30.0, **parameters: Any) -> dict[str, Any]:
        """The result of one command of the protocol; events that come meanwhile are noted."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        until = time.monotonic() + timeout
        while True:
            answer = json.loads(self._socket.recv(timeout=max(0.0, until - time.monotonic())))
            if answer.get("id") == self._count:
                break
            self._note(answer)
        if "error" in answer:
            raise PageError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.console.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            said = (str(one.get("value", one.get("description", ""))) for one in parameters["args"])
            self.console.append(" ".join(said))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            entry = parameters["entry"]
            self.console.append(f"{entry['text']} {entry.get('url', '')}".strip())

    def open(self, address: str, timeout: float = 30.0) -> None:
        """Loads the address anew (also where only its #fragment differs) and returns after the `load` event."""
        self.call("Page.navigate", url="about:blank")
        self.until("location.href === 'about:blank' && document.readyState === 'complete'", timeout)
        self._loaded = False
        self.call("Page.navigate", url=address)
        until = time.monotonic() + timeout
        while not self._loaded:
            with contextlib.suppress(TimeoutError):
                self._note(json.loads(self._socket.recv(timeout=0.2)))
            if time.monotonic() > until:
                raise PageError(f"{address} did not load within {timeout:g} s")

    def go(self, fragment: str) -> None:
        """Changes the address's #fragment, as a click on a link of the page does."""
        self.evaluate(f"location.hash = {json.dumps(fragment)}")

    def evaluate(self, expression: str, timeout: float = 30.0) -> Any:
        """What a JavaScript expression gives, awaited where it is a promise; JSON-ready values only."""
        answer = self.call(
            "Runtime.evaluate", timeout, expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise PageError(f"{details.get('exception', {}).get('description') or details['text']}\nin: {expression}")
        return answer["result"].get("value")

    def run(self, body: str, timeout: float = 30.0) -> Any:
        """What the body of an async function returns. It may say `await wait(ms)` and `find(selector)`."""
        helpers = (
            "const find = (selector) => document.querySelector(selector);"
            "const all = (selector) => [...document.querySelectorAll(selector)];"
            "const wait = (ms) => new Promise((done) => setTimeout(done, ms));"
        )
        return self.evaluate(f"(async () => {{ {helpers} {body} }})()", timeout)

    def until(self, expression: str, timeout: float = 10.0) -> None:
        """Waits until a JavaScript expression is true; one that throws is not true yet.

        Raises:
            PageError: with the page's text, where it stays false.
        """
        end = time.monotonic() + timeout
        while not self.evaluate(f"(async () => Boolean(await ({expression})))().catch(() => false)"):
            if time.monotonic() > end:
                text = self.evaluate("document.body ? document.body.innerText.slice(0, 3000) : ''")
                raise PageError(f"not within {timeout:g} s: {expression}\nconsole: {self.console}\nthe page:\n{text}")
            time.sleep(0.03)

    def text(self, selector: str = "body") -> str:
        """The text that a reader sees in the first element of a selector, once it is there and shown."""
        self.until(f"document.querySelector({json.dumps(selector)}).checkVisibility()")
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def press(self, *keys: str) -> None:
        """Real key presses, one after another: a character each, or a name such as "Enter", "Tab", "ArrowDown"."""
        for key in keys:
            code, text = _KEYS.get(key, (ord(key.upper()[0]), key))
            down = {"key": key, "windowsVirtualKeyCode": code, "text": text} if text else {
                "key": key, "windowsVirtualKeyCode": code
            }  # fmt: skip
            self.call("Input.dispatchKeyEvent", type="keyDown", **down)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def write(self, text: str) -> None:
        """Types a text into whatever has the focus, as one insertion."""
        self.call("Input.insertText", text=text)

    def place(self, selector: str) -> tuple[float, float]:
        """The middle of an element's first line, after the first element of a selector was scrolled into view."""
        x, y = self.run(
            f"const node = find({json.dumps(selector)});"
            "if (!node) throw new Error('no such element');"
            "node.scrollIntoView({block: 'center', behavior: 'instant'}); const [box] = node.getClientRects();"
            "return [box.left + box.width / 2, box.top + box.height / 2];"
        )
        return x, y

    def click(self, selector: str) -> None:
        """A real click of the left button on the middle of an element."""
        x, y = self.place(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def hover(self, selector: str) -> None:
        x, y = self.place(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def size(self, width: int, height: int, phone: bool = False) -> None:
        """The size of the window in CSS pixels; `phone` lays the page out as a phone's browser does."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def prefer(self, dark: bool = False, still: bool = False) -> None:
        """What the reader's system asks for: dark or light, and (`still`) no motion."""
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def offline(self, off: bool) -> None:
        """Cuts the tab off from every server, or joins it again."""
        self.call("Network.enable")
        self.call(
            "Network.emulateNetworkConditions", offline=off, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )

    def shifts(self) -> list[dict[str, Any]]:
        """Shifts of the layout since the address was opened: {"value", "time" in ms, "nodes"}."""
        found: list[dict[str, Any]] = self.run("await wait(50); return window.__shifts;")
        return found

    def layout_shift(self) -> float:
        """The sum of all of them, which is never below the Cumulative Layout Shift of the field."""
        return float(sum(shift["value"] for shift in self.shifts()))

    def picture(self, path: Path, whole: bool = False) -> Path:
        """Writes a PNG of the window, or (`whole`) of the page down to its end."""
        clip: dict[str, Any] = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            box = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 8000), "scale": 1}
            clip = {"captureBeyondViewport": True, "clip": box}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **clip)["data"]))
        return path


@contextlib.contextmanager
def chromium() -> Iterator[Tab]:
    """A browser with one tab, 1280 x 900, light; it ends with the block."""
    assert CHROMIUM is not None, "no chromium or google-chrome on the path"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *_FLAGS.split(), f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            address = _address(Path(profile) / "DevToolsActivePort", process)
            with connect(address, max_size=None, open_timeout=30) as socket:
                tab = Tab(socket)
                tab.prefer()
                yield tab
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(file: Path, process: subprocess.Popen[bytes]) -> str:
    """The browser's WebSocket, from the file that it writes once it listens."""
    for _ in range(1200):
        lines = file.read_text().splitlines() if file.is_file() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise PageError(f"chromium does not listen (exit code {process.poll()})")
