"""A page in a narrow window: letters that are unreadable or cut off, tables out of reach, cells that overlap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny.cdp import chromium

_LOW = 8.5
_SCRIPT = Path(__file__).with_name("phone.js")


def nothing_wrong(page: Path, width: int = 390) -> dict[str, Any]:
    """Asserts that a page of `width` pixels can be read, and returns what was measured."""
    with chromium() as tab:
        tab.size(width, 844, phone=width < 500)
        tab.open(page.as_uri())
        found: dict[str, Any] = tab.run(f"const LOW = {_LOW};\n{_SCRIPT.read_text()}")
    wrong = {key: value for key, value in found.items() if key != "images" and value}
    assert not wrong, wrong
    return found
