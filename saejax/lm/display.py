"""A language model as a notebook shows it."""

import re
from typing import Any

from saejax.core.notebook import html_table

_MOST_KINDS = 24


def model_html(lm: Any) -> str:
    """The model's line, its context and its hook points, those of all layers as one."""
    points = lm.hook_points().items()
    kinds = dict.fromkeys(f"{re.sub(r'[.][0-9]+[.]', '.*.', name)} [{width:,}]" for name, width in points)
    shown = ", ".join(list(kinds)[:_MOST_KINDS]) + (", ..." if len(kinds) > _MOST_KINDS else "")
    rows = {"context": [f"{lm.config.context_length:,} tokens"], "hook points": [shown]}
    return html_table(repr(lm), rows)
