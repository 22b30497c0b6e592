"""A setting is declared once, as a field of the part that uses it: default, range, meaning, and what it decides.

    tanh_scale: float = setting(4.0, "Slope of the tanh at 0.", above=0)

Flags, refusals, the comparison of runs, sweeps and the reference of all keys follow from these fields.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, get_type_hints

from saejax.core.config import in_float32, nearest, typed
from saejax.core.errors import ConfigError

_LARGEST_INT = 2**31 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """Metadata of a key besides its name, type and default.

    Attributes:
        doc: what it means, in a sentence or more.
        low, high, above, below: bounds of a number, or of each of a list; the last two are outside of the range.
            Floats are judged as float32 has them. Integers end at 2**31 - 1, unless `high` is given.
        choices: the words that it may be, as a table or list, which may grow later. An empty word is one where it is
            the default.
        base: the value where neither the user nor the preset gives one; the default is then None, "" or ().
        decides: whether it decides a run's numbers, so that a run cannot go on with another value; or the name of a key
            of its section, where it decides them exactly when that one is set.
        per_member: whether the members of a sweep may differ in it.
        sparsity_weight: whether a sweep over sparsity weights multiplies it.
        place: where it names something to read: "path", a file or folder of this machine; "hub", that or an id of the
            Hugging Face hub, which counts where nothing is at that path; "id", an id of the hub; "named path", a word
            or word=path. What comes over a network may name places below some folders alone.
        words: of a command's flag, the first words of the command with which it does something; empty for all.
        needs: what a training must have for the key to do anything. "order": activations that can be read in any
            order; "rows": a fixed number of them; "epoch": passes over them that can be counted; "heldout",
            "validations": others, to decide by or to look at; "run": a folder; "text": the language model and its text.
        section: the dataclass of its keys, where it is a section.
    """

    doc: str
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    choices: Iterable[str] | None = None
    base: Any = None
    decides: bool | str = True
    per_member: bool = False
    sparsity_weight: bool = False
    place: Literal["", "path", "hub", "id", "named path"] = ""
    needs: tuple[Literal["order", "rows", "epoch", "heldout", "validations", "run", "text"], ...] = ()
    words: tuple[str, ...] = ()
    section: type | None = None

    def fault(self, value: float) -> str:
        """The bound that the number breaks, as "at least 1"; empty where it is in the range."""
        if not self._holds(in_float32(value)):
            return self.range(isinstance(value, float)) + (" in float32" if self._holds(value) else "")
        over = isinstance(value, int) and self.high is None and value > _LARGEST_INT
        return f"at most {_LARGEST_INT}" if over else ""

    def range(self, finite: bool = False) -> str:
        """The bounds in words, with the one that floats have besides where `finite`."""
        if self.low is not None and self.high is not None and self.high < math.inf:
            return f"between {self.low:g} and {self.high:.10g}"
        upper = "finite" if finite else ""
        if self.high not in (None, math.inf):
            upper = f"at most {self.high:g}"
        elif self.below is not None:
            upper = f"below {self.below:g}"
        if self.low == 0:
            return f"{upper}, not negative" if upper else "0 or more"
        lower = "" if self.low is None else f"at least {self.low:g}"
        if self.above is not None:
            lower = "positive" if not self.above and upper in ("", "finite") else f"above {self.above:g}"
        return " and ".join(words for words in (lower, upper) if words)

    def _holds(self, value: float) -> bool:
        # So that NaN fails.
        return (
            (isinstance(value, int) or abs(value) < math.inf)
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


def setting(default: Any, doc: str, **known: Any) -> Any:
    """A field of a `Settings` dataclass; `known` are attributes of `Setting`."""
    return dataclasses.field(default=default, metadata={"setting": Setting(doc, **known)})


def section(kind: type, doc: str, **known: Any) -> Any:
    """A field that holds a section of keys of its own, by default as `kind()` has them."""
    return dataclasses.field(default_factory=kind, metadata={"setting": Setting(doc, section=kind, **known)})


def settings_of(cls: type) -> dict[str, Setting]:
    return {field.name: field.metadata["setting"] for field in dataclasses.fields(cls)}


@dataclasses.dataclass(frozen=True)
class Settings:
    """A section of the configuration, or what one part adds to a section. Every field is a `setting`.

    `__post_init__` refuses a value of another type than the field's, or outside of its range. A part that refuses more
    extends it, and calls this one first. `section` is the section's name in messages.

    Raises:
        ConfigError: names the key, its value and what it must be.
    """

    section: ClassVar[str] = ""

    def __init_subclass__(cls, section: str | None = None) -> None:
        super().__init_subclass__()
        if section is not None:
            cls.section = section

    @classmethod
    def called(cls, name: str) -> str:
        """A field's name in messages."""
        return f"{cls.section}.{name}".lstrip(".")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            known: Setting = field.metadata["setting"]
            where = self.called(field.name)
            value = typed(_hints(type(self))[field.name], getattr(self, field.name), where)
            object.__setattr__(self, field.name, value)
            if known.choices is not None and value not in known.choices and (value or field.default):
                raise ConfigError(f"{where} is {value!r}.{nearest(value, known.choices, listed=True)}")
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, int | float) and (must := known.fault(item)):
                    one = f"holds {item}; each" if isinstance(value, tuple) else f"is {item}; it"
                    raise ConfigError(f"{where} {one} must be {must}.")


# What the decorator `dataclass` makes, and makes again for a class that has more fields now.
_MADE = ("__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__", "__match_args__", "__replace__")


def extend(cls: type[Settings], parts: Iterable[type[Settings]]) -> None:
    """Make each of `parts` a base of the frozen dataclass `cls`: their fields come after those that it has.

    What was made of `cls` before has their defaults.
    """
    new = [part for part in dict.fromkeys(parts) if not issubclass(cls, part)]
    new = [part for part in new if not any(issubclass(other, part) for other in new if other is not part)]
    cls.__bases__ = (*reversed(new), *cls.__bases__)
    for name in _MADE:
        if name in vars(cls):
            delattr(cls, name)
    dataclasses.dataclass(frozen=True)(cls)
    _HINTS.pop(cls, None)


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(cls: type) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = get_type_hints(cls)
    return _HINTS[cls]


def deciding(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a section's JSON that decides a run's numbers."""
    return _cut(cls, values, lambda s: values.get(s.decides) if isinstance(s.decides, str) else s.decides, deciding)


def shared(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a section's JSON that all members of a sweep have in common."""
    return _cut(cls, values, lambda s: not s.per_member, shared)


def _cut(
    cls: type, values: Mapping[str, Any], keep: Callable[[Setting], Any], within: Callable[..., Any]
) -> dict[str, Any]:
    fields = {name: known for name, known in settings_of(cls).items() if name in values and keep(known)}
    return {name: within(k.section, values[name]) if k.section else values[name] for name, k in fields.items()}
