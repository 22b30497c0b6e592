"""The configuration boundary: ml_collections ConfigDicts outside, frozen dataclasses inside.

The dataclasses own every key, type and default; `to_config_dict` turns them into what `--config` files
start from, `from_config_dict` turns the overridden result back, refusing what does not fit.
"""

import dataclasses
import difflib
import html
import math
import os
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
from ml_collections import config_dict

from saejax.core.errors import ConfigError

Section = TypeVar("Section")
# Of what two words have in common, from here on one is taken for the other: plan is not what load was to be.
_CLOSE = 0.6


def nearest(name: str, names: Iterable[str], listed: bool = False) -> str:
    """`" Did you mean 'x'?"` for the closest of `names`; where none is close, or all are to be `listed`, their list."""
    names = list(names)
    # Spelt out where the key is short: learning_rate is lr.
    initials = "".join(word[:1] for word in name.split("_"))
    close = [initials] if initials in names else difflib.get_close_matches(name, names, n=1, cutoff=_CLOSE)
    close = close or [known for known in names if sorted(known) == sorted(name)]  # two letters in the other order
    suggestion = f" Did you mean {close[0]!r}?" if close else ""
    return suggestion if close and not listed else f"{suggestion} There are: {', '.join(names)}."


def plain(value: Any) -> Any:
    """A setting as plain Python: numbers for a scalar or array of NumPy, JAX or PyTorch, text for a Path."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    is_array = hasattr(value, "dtype") and hasattr(value, "tolist") and not isinstance(value, type)
    return value.tolist() if is_array else value


class OpenConfig(config_dict.ConfigDict):
    """A ConfigDict that takes `plain` values: by itself it refuses np.int64 for an int and a Path for a str.

    A notebook shows it as a list of sections that open.
    """

    if typing.TYPE_CHECKING:  # a section is read like a value, and its settings are set

        def __getattr__(self, name: str) -> Any: ...

    def _repr_html_(self) -> str:
        parts = {True: "", False: ""}
        for key, value in self.items():
            inner = value._repr_html_() if isinstance(value, OpenConfig) else ""
            line = f"<code>{html.escape(key)} = {html.escape(repr(value))}</code><br>"
            parts[bool(inner)] += f"<details><summary><b>{key}</b></summary>{inner}</details>" if inner else line
        return f'<div style="margin-left: 1em">{parts[False]}{parts[True]}</div>'

    def __setitem__(self, key: str, value: Any) -> None:
        try:
            super().__setitem__(key, plain(value))
        except TypeError:
            kind, remedy = self.get_type(key), ""
            if kind is tuple and isinstance(value, str):
                remedy = f"; a tuple of one element has a comma, as in ({value!r},)"
            raise ConfigError(f"{key} is {value!r}; it must be {kind.__name__}{remedy}.") from None


def to_config_dict(value: Any) -> OpenConfig:
    """A (nested) dataclass instance as a ConfigDict; None becomes a placeholder of the annotated type."""
    out = OpenConfig()
    hints = typing.get_type_hints(type(value))
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if dataclasses.is_dataclass(item):
            out[field.name] = to_config_dict(item)
        elif item is None:
            kind = _without_none(hints[field.name])
            out[field.name] = config_dict.placeholder(typing.get_origin(kind) or kind)
        elif isinstance(item, tuple) and any(dataclasses.is_dataclass(i) for i in item):
            out[field.name] = tuple(to_json(i) for i in item)
        else:
            out[field.name] = item
    return out


def from_config_dict(cls: type[Section], config: Mapping[str, Any], where: str = "config") -> Section:
    """The dataclass `cls` filled from `config`, checked field by field.

    Raises:
        ConfigError: a key that `cls` does not have (with the nearest that it has), a value of another type, or a number
            that is not finite: NaN is no setting, and config.json has no word for either.
    """
    hints, keys = typing.get_type_hints(cls), [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    values = {}
    for key in config:
        if key not in keys:
            raise ConfigError(f"Unknown key {where}.{key}.{nearest(key, keys)}")
        values[key] = typed(hints[key], config[key], f"{where}.{key}")
        _check_finite(values[key], f"{where}.{key}")
    return cls(**values)


def in_float32(value: Any) -> Any:
    """A float as training computes with it: below what float32 holds it is 0, above it infinite. All else as it is."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value)) if isinstance(value, float) else value


def to_json(value: Any) -> Any:
    """A (nested) dataclass as plain dicts, lists and scalars, as config.json holds it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """`key: old -> new` for every leaf in which two JSON trees differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(k for k in new if k not in old)]
        return [line for k in keys for line in differences(old.get(k), new.get(k), f"{where}.{k}" if where else str(k))]
    return [] if old == new else [f"{where}: {old!r} -> {new!r}"]


def _without_none(hint: Any) -> Any:
    arms = [a for a in typing.get_args(hint) if a is not types.NoneType]
    return arms[0] if arms else hint


def typed(hint: Any, value: Any, where: str) -> Any:
    """`value` as a setting that is annotated with `hint`: `plain`, an int as a float and a list as a tuple where they
    must be.

    Raises:
        ConfigError: a value of another type; it is called `where`.
    """
    value = plain(value)
    if hint is Any:
        return value
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        # The flag parser hands over the word None for string keys.
        if value is None or value == "None":
            return None
        hint = _without_none(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if isinstance(value, hint):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is {shortened(value)}; it must be a section with keys.")
        return from_config_dict(hint, value, where)
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise ConfigError(f"{where} is {shortened(value)}; it must be a list of {inner.__name__}.")
        return tuple(typed(inner, item, f"{where}[{i}]") for i, item in enumerate(value))
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, int) and abs(value) > sys.float_info.max:
            raise ConfigError(f"{where} is too large; it must be a finite number.")
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where} is {shortened(value)} ({type(value).__name__}); it must be {hint.__name__}.")
    return value


def _check_finite(value: Any, where: str) -> None:
    if isinstance(value, tuple):
        for i, item in enumerate(value):
            _check_finite(item, f"{where}[{i}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where} is {value}; it must be a finite number.")


def shortened(value: Any, most: int = 200) -> str:
    """Its repr in one line, cut where it is long: a whole model may have been given."""
    text = " ".join(repr(value).split())
    return text if len(text) <= most else f"{text[:most]}..."
