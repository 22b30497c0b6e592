"""A tokenizer's own chat template: messages -> the text that the model was trained to read.

Templates are Jinja programs that come with a downloaded model, so they run in Jinja's sandbox, which lets them neither
reach Python's internals nor change what they are given.
"""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from saejax.core.errors import DataError
from saejax.core.files import read_bounded

_LARGEST = 64 << 20  # bytes of a file
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """messages -> text.

    Attributes:
        template: the Jinja source.
        tokens: what the template may name: {"bos_token": "<s>", "eos_token": ...}.
        where: the file it came from, for messages.
    """

    template: str
    tokens: dict[str, str]
    where: str

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatTemplate":
        """Read chat_template.jinja, or `chat_template` of tokenizer_config.json (the one named default, of several).

        Raises:
            DataError: there is none, or the file is not readable.
        """
        path, own = Path(folder) / "tokenizer_config.json", Path(folder) / "chat_template.jinja"
        try:
            settings = json.loads(read_bounded(path, _LARGEST)) if path.is_file() else {}
            template = read_bounded(own, _LARGEST).decode() if own.is_file() else settings.get("chat_template")
            if isinstance(template, list):
                template = {row["name"]: row["template"] for row in template}.get("default")
            named = {name: settings.get(name) for name in _TOKENS}
        except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
            raise DataError(f"{path} is not a readable tokenizer configuration: {error!r}") from None
        if not isinstance(template, str) or not template.strip():
            raise DataError(
                f"There is no chat template in {folder} (chat_template in tokenizer_config.json, or "
                "chat_template.jinja). Copy one there, or describe the text by text.template in place of text.chat."
            )
        # An added token may be written as an object with its properties.
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
        tokens = {name: value for name, value in texts.items() if isinstance(value, str)}
        return cls(template, tokens, str(own if own.is_file() else path))

    @property
    def identity(self) -> str:
        """sha256 of all that decides the text of given messages."""
        return hashlib.sha256(json.dumps([self.template, self.tokens], sort_keys=True).encode()).hexdigest()

    def render(self, messages: list[dict[str, str]]) -> str:
        """The conversation as text; if its last message is not the assistant's, up to where the answer would begin.

        A bos token at the front is taken away: `text.prepend_bos` puts it there, once in every row.

        Raises:
            DataError: messages that the template does not take, or a template that cannot be read.
        """
        compiled = self._compiled
        import jinja2

        answer_next = not messages or messages[-1].get("role") != "assistant"
        try:
            text = compiled.render(
                messages=messages, add_generation_prompt=answer_next, tools=None, documents=None, **self.tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise DataError(f"The chat template of {self.where} does not take these messages: {error}") from None
        return text.removeprefix(self.tokens.get("bos_token", ""))

    @functools.cached_property
    def _compiled(self) -> Any:
        try:
            import jinja2
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise DataError("text.chat needs the jinja2 package: pip install 'saejax[chat]'.") from None

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        # Jinja's own tojson escapes for HTML. No strftime_now: a text must not depend on the day it is read.
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        try:
            return environment.from_string(self.template)
        except jinja2.TemplateError as error:
            raise DataError(f"The chat template of {self.where} cannot be read: {error}") from None


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
