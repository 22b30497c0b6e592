"""The Jinja that chat templates are written in, as transformers extends it, in Jinja's sandbox."""

import datetime
import json
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment


def environment(now: datetime.datetime | None) -> jinja2.Environment:
    """Names that a chat template may use. Without a time there is no strftime_now: no text depends on the day."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    made.filters["tojson"] = _to_json  # Jinja's own escapes for HTML
    made.globals["raise_exception"] = _refuse
    if now is not None:
        made.globals["strftime_now"] = now.strftime
    return made


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: its body. The tags say which tokens a model was trained to write."""

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A block of its own, so that what is set inside is not seen outside.
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


_Generation.tags = {"generation"}


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
