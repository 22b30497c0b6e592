"""A tokenizer's own chat template: messages -> the text that the model was trained to read.

Templates are Jinja programs that come with a downloaded model, so they run in Jinja's sandbox, which lets them neither
reach Python's internals nor change what they are given.
"""

import dataclasses
import datetime
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saejax.core.errors import ConfigError, DataError
from saejax.core.extras import installing
from saejax.core.files import read_bounded
from saejax.text.added_tokens import NAMES

_TEMPLATE_BYTES = 64 << 20  # bytes of a file
_NOW = "strftime_now"
_JSON_OPTIONS = re.compile(r"tojson\s*\(\s*[^)\s]")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """messages -> text.

    Attributes:
        template: the Jinja source.
        tokens: what the template may name: {"bos_token": "<s>", "eos_token": ...}.
        where: the file it came from, for messages.
        date: what a template takes for the present (strftime_now).
        keeps_bos: a bos token at the front of a text stays, because the tokens behind it are others without it.
    """

    template: str
    tokens: dict[str, str]
    where: str
    date: datetime.datetime | None = None
    keeps_bos: bool = False

    @classmethod
    def from_folder(cls, folder: Path, named: Mapping[str, str]) -> "ChatTemplate":
        """Read chat_template.jinja, or `chat_template` of tokenizer_config.json (the one named default, of several).

        Args:
            named: {bos_token, image_token, ...: its text}, all that the folder's files name.

        Raises:
            DataError: there is none, or the file is not readable.
        """
        path, file = Path(folder) / "tokenizer_config.json", Path(folder) / "chat_template.jinja"
        try:
            settings = dict(json.loads(read_bounded(path, _TEMPLATE_BYTES))) if path.is_file() else {}
            template = read_bounded(file, _TEMPLATE_BYTES).decode() if file.is_file() else settings.get("chat_template")
            if isinstance(template, list):
                template = {row["name"]: row["template"] for row in template}.get("default")
        except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
            raise DataError(f"{path} is not a readable tokenizer configuration: {error!r}") from None
        if not isinstance(template, str) or not template.strip():
            raise DataError(
                f"There is no chat template in {folder} (chat_template in tokenizer_config.json, or "
                "chat_template.jinja). Copy one there, or describe the text by text.template in place of text.chat."
            )
        # What a template does not name decides no text. (The usual ones of tokenizer_config.json always counted.)
        usual = set(NAMES) & set(settings)
        tokens = {name: text for name, text in named.items() if name in template or name in usual}
        return cls(template, tokens, str(file if file.is_file() else path))

    @property
    def identity(self) -> str:
        """sha256 of all that decides the text of given messages."""
        decides: list[Any] = [self.template, self.tokens]
        if self.date:
            decides.append({"date": self.date.isoformat()})
        if self.keeps_bos:
            decides.append("keeps bos")
        if _JSON_OPTIONS.search(self.template):
            decides.append("options of tojson")
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()

    def on(self, date: str) -> "ChatTemplate":
        """The template on a day, as ISO 8601 writes it; as it is where none is given.

        Raises:
            ConfigError: a date for a template that asks for none.
        """
        if not date:
            return self
        if _NOW not in self.template:
            raise ConfigError(f"text.chat_date is {date}, and the chat template of {self.where} asks for no date.")
        return dataclasses.replace(self, date=datetime.datetime.fromisoformat(date))

    def render(self, messages: list[dict[str, str]]) -> str:
        """The conversation as text; if its last message is not the assistant's, up to where the answer would begin.

        A bos token at the front is taken away, unless `keeps_bos`: `text.prepend_bos` puts it in front of every piece.

        Raises:
            DataError: messages that the template does not take, or a template that cannot be read or wants a date.
        """
        compiled = self._compiled
        import jinja2

        answer_next = not messages or messages[-1].get("role") != "assistant"
        try:
            text = compiled.render(
                messages=messages, add_generation_prompt=answer_next, tools=None, documents=None, **self.tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            if isinstance(error, jinja2.UndefinedError) and _NOW in str(error):
                raise DataError(
                    f"The chat template of {self.where} writes the date of today ({_NOW}), and a text must not depend "
                    "on the day that it is read: give a date, as in text.chat_date=2026-01-31."
                ) from None
            raise DataError(f"The chat template of {self.where} does not take these messages: {error}") from None
        if self.keeps_bos:
            return text
        return text.removeprefix(self.tokens.get("bos_token", ""))

    @functools.cached_property
    def _compiled(self) -> Any:
        try:
            import jinja2
        except ImportError:
            raise DataError(f"text.chat needs the jinja2 package: {installing('chat')}") from None
        try:
            return _environment(self.date).from_string(self.template)
        except jinja2.TemplateError as error:
            raise DataError(f"The chat template of {self.where} cannot be read: {error}") from None


def _environment(now: datetime.datetime | None) -> Any:
    """The Jinja of chat templates, as transformers extends it. Without a time there is no strftime_now."""
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """{% generation %} ... {% endgeneration %}: its body. The tags say what a model was trained to write."""

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # A block of its own, so that what is set inside is not seen outside.
            return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> str:
            return str(caller())

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    Generation.tags = {"generation"}
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    made.filters["tojson"] = to_json  # Jinja's own escapes for HTML
    made.globals["raise_exception"] = refuse
    if now is not None:
        made.globals["strftime_now"] = now.strftime
    return made
