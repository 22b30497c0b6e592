"""Putting the page together: one HTML file that holds its data, its style and its script.

Escaping happens in two places and nowhere else: JSON that goes into a `<script>` has every `<`, `>` and `&`
written as an escape, and the scripts put strings into the document as text, never as markup. Should either
ever fail, the page's own Content-Security-Policy runs no script but the one whose hash it carries and allows
no request at all.
"""

import base64
import gzip
import hashlib
import html
import json
import math
import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from saejax.core.files import write_bytes
from saejax.reports.read import read_run
from saejax.reports.summary import summarise
from saejax.reports.table_page import asset
from saejax.runs import Run

_SCRIPTS = (
    *("dom.js", "scales.js", "charts.js", "tokens.js", "unpack.js"),
    *("list.js", "detail.js", "browser.js", "sections.js"),
)


def section_scripts() -> list[str]:
    """Names of the scripts that each add sections to the page of a run."""
    names = [path.name for path in resources.files("saejax.reports").iterdir()]
    return sorted(name for name in names if name.startswith("section_") and name.endswith(".js"))


def render(run_dir: str | os.PathLike[str]) -> Path:
    """Writes `<run_dir>/report.html` from the files of the run's folder and returns its path.

    The page is a pure function of those files and of this package: the same files give the same bytes. It is
    written beside itself and moved into place, so a reader never meets half a page. Numbers of features are
    embedded with 4 significant digits.

    Raises:
      DataError: `run_dir` is not a run's folder, a file in it is damaged, or the page cannot be written.
    """
    run_dir = Path(run_dir)
    run = read_run(run_dir)
    summary = summarise(run)
    features = pack(run.features) if run.features is not None else ""
    title = f"{summary['run']['name']} · saejax"
    scripts = (*_SCRIPTS, *section_scripts(), "page.js")
    path = Run(run_dir).page
    write_bytes(path, document("page.html", title, ("page.css",), scripts, summary, features).encode())
    return path


def document(
    template: str, title: str, styles: Sequence[str], scripts: Sequence[str], summary: dict[str, Any], features: str
) -> str:
    """One HTML file of a template, of style sheets and scripts that stand beside this file, and of its data.

    Args:
      summary: what the scripts draw, as JSON.
      features: `pack`ed, or empty.
    """
    style = "".join(map(asset, styles))
    script = '"use strict";\n' + "\n".join(map(asset, scripts))
    values = {
        "title": html.escape(title),
        "script_hash": _csp_hash(script),
        "style_hash": _csp_hash(style),
        "style": style,
        "script": script,
        "summary": embed_json(summary),
        "features": features,
    }
    # One pass, so that a placeholder's name inside the data stays what it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], asset(template))


def embed_json(value: Any) -> str:
    """`value` as ASCII JSON that can stand inside a `<script>` element whatever its strings say."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def pack(features: dict[str, Any]) -> str:
    """The feature table as base64 of gzip of JSON, numbers at 4 significant digits, without a time stamp."""
    text = json.dumps(_four_digits(features), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode("ascii"), compresslevel=9, mtime=0)).decode("ascii")


def _four_digits(value: Any) -> Any:
    """Numbers at 4 significant digits, NaN and infinities as None; one pass, for there are millions."""
    kind = type(value)
    if kind is float:
        if not value:
            return 0
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if kind is list:
        return [_four_digits(item) for item in value]
    if kind is dict:
        return {key: _four_digits(item) for key, item in value.items()}
    return value


def _csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
