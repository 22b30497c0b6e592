"""The places that a request may name: files below the server's folders, and ids of the hub; nothing else here."""

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from saejax.app.hub import hub_place
from saejax.core.errors import ConfigError
from saejax.core.settings import Setting

Allowed = Callable[[str], Path]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def with_allowed_places(old: Any, new: Any, allowed: Allowed, where: str = "") -> Any:
    """`new` with each place that `old` does not name resolved by `allowed`.

    What the experiment's own file or the run's own record names stays as it is.

    Args:
        old, new: settings of one kind, before and after a request; None for what was not there.
        allowed: the path with its links resolved; raises ConfigError where it may not be read.
        where: the section, for messages.

    Raises:
        ConfigError: a place that may not be named; says which key and why.
    """
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(new):
        known: Setting = field.metadata["setting"]
        before, now = getattr(old, field.name, None), getattr(new, field.name)
        key = f"{where}.{field.name}".lstrip(".")
        if isinstance(now, tuple):
            there = before or ()
            changed[field.name] = tuple(
                item if item in there else _allowed_value(None, item, known, key, allowed) for item in now
            )
        elif now != before:
            changed[field.name] = _allowed_value(before, now, known, key, allowed)
    return dataclasses.replace(new, **changed)


def _allowed_value(before: Any, value: Any, known: Setting, key: str, allowed: Allowed) -> Any:
    if dataclasses.is_dataclass(value):  # a section, or an item of a list of sections
        return with_allowed_places(before, value, allowed, key)
    if not known.place or not value or not isinstance(value, str):
        return value
    try:
        if known.place == "named path":
            word, equals, path = value.partition("=")
            return f"{word}={allowed_path(path, allowed)}" if equals else value
        if known.place != "path" and _is_of_hub(value, known.place):
            return value
        if known.place == "id":
            raise ConfigError("It must be an id of the hub, as owner/name.")
        return str(allowed_path(value, allowed))
    except ConfigError as error:
        raise ConfigError(f"{key} is {value[:200]!r}. {error}") from None


def allowed_path(text: str, allowed: Allowed) -> Path:
    """The path that a request names, resolved.

    Raises:
        ConfigError: a URL, a path with ~, .. or a pattern, or one that lies outside.
    """
    if "://" in text or text.startswith("hf:"):
        raise ConfigError("A request may name files below the server's folders, and ids of the hub; no other URL.")
    if text.startswith("~") or ".." in Path(text).parts:
        raise ConfigError("Name the path in full, without ~ and without '..'.")
    if re.search(r"[*?\[\]]", text):
        raise ConfigError("A request may not hold a pattern (* ? [ ]); name the files, or their folder.")
    return allowed(text)


def _is_of_hub(text: str, place: str) -> bool:
    """True for what means something on the hub, and nothing of this machine.

    Raises:
        ConfigError: hf:// and then no id.
    """
    if place == "hub" and text.startswith("hf:/"):
        return hub_place(text) is not None
    if os.path.exists(text) or os.path.exists(text.partition("/")[0]):
        return text in ("demo", "recall")  # an embedded model comes before a folder of that name
    return _HUB_ID.fullmatch(text) is not None or (place == "hub" and hub_place(text) is not None)
