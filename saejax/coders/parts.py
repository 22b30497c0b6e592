"""Sparsities and loss terms by name: those of this package, and those that anybody's own module registers.

    @saejax.register_sparsity
    @dataclasses.dataclass(frozen=True)
    class Shrink(Sparsity[ShrinkSettings]): ...

makes `coder.sparsity=shrink` and every field of `ShrinkSettings` keys of the configuration, from then on. A file of
`coders/sparsity` or `coders/terms` is imported with the package; a module of another package by whoever uses it, or as
an entry point of the group `saejax.parts`.
"""

import importlib
import importlib.metadata
import pkgutil
from typing import TYPE_CHECKING, Any, TypeVar

from saejax.core.errors import ConfigError
from saejax.core.settings import Settings, extend, settings_of

if TYPE_CHECKING:
    from saejax.coders.sparsity.base import Sparsity
    from saejax.coders.term import Term

SparsityType = TypeVar("SparsityType", bound="type[Sparsity[Any]]")
TermType = TypeVar("TermType", bound="type[Term[Any]]")

GROUP = "saejax.parts"

SPARSITIES: "dict[str, type[Sparsity[Any]]]" = {}
# The loss adds them up in this order, after the reconstruction: those of these files, then as they are registered.
_ORDER = ("penalties", "second_reconstructions", "auxk", "lift", "ghost", "contrastive", "decorrelation")
TERMS: "dict[str, type[Term[Any]]]" = {}
# The dataclass whose keys they have, once there is one (`with_parts`).
_CONFIGS: list[type[Settings]] = []


def register_sparsity(kind: SparsityType) -> SparsityType:
    """Class decorator: `coder.sparsity` may be `kind.name`, and its settings are keys of `coder`.

    Raises:
        ConfigError: the name, or a key, is that of another part.
    """
    return _register(SPARSITIES, kind)


def register_term(kind: TermType) -> TermType:
    """Class decorator: the loss has the term where its weight is not 0, and its settings are keys of `coder`.

    Raises:
        ConfigError: the name, or a key, is that of another part.
    """
    return _register(TERMS, kind)


def _register(table: dict[str, Any], kind: Any) -> Any:
    if kind.name in table and not _same(table[kind.name], kind):
        other = _path(table[kind.name])
        raise ConfigError(f"{_path(kind)}: the name {kind.name!r} is that of {other}; choose another.")
    for config in _CONFIGS:
        for key in settings_of(kind.settings).keys() & settings_of(config).keys():
            owner = next(base for base in config.__mro__ if key in _own_keys(base))
            if not issubclass(kind.settings, owner) and not _same(owner, kind.settings):
                raise ConfigError(f"{_path(kind)}: the key coder.{key} is that of {_path(owner)}; choose another.")
        extend(config, [kind.settings])
    table[kind.name] = kind
    return kind


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _same(kind: type, other: type) -> bool:
    """One class, or the same line of a module or notebook that runs again."""
    return _path(kind) == _path(other)


def _own_keys(settings: type) -> dict[str, Any]:
    return vars(settings).get("__annotations__", {})


def with_parts(config: Any) -> Any:
    """Class decorator of the dataclass of all keys of `coder`: adds those of the parts, now and whenever one comes."""
    _import_files("saejax.coders.sparsity", ("relu", "gated", "topk", "abs_topk"))
    _import_files("saejax.coders.terms", _ORDER)
    kinds: list[Any] = [*(SPARSITIES[name] for name in sorted(SPARSITIES)), *TERMS.values()]
    extend(config, [kind.settings for kind in kinds])
    _CONFIGS.append(config)
    return config


def _import_files(package: str, first: tuple[str, ...]) -> None:
    """The files of a package, which register themselves: `first` in this order, then the others by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__))
    for name in dict.fromkeys([*first, *names]):
        importlib.import_module(f"{package}.{name}")


def import_entry_points() -> None:
    """Import what installed packages name in the group `saejax.parts`.

    Raises:
        ConfigError: one that cannot be imported.
    """
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:
            raise ConfigError(
                f"The entry point {entry.name} = {entry.value} of the group {GROUP} cannot be imported "
                f"({type(error).__name__}: {error}). Repair or uninstall its package."
            ) from error


def is_outside(kind: type) -> bool:
    """Another package's, or a script's."""
    return not kind.__module__.startswith("saejax.")


def to_record(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(a coder's JSON without the keys of outside parts that it does not use, {outside part that it uses: its module}).

    So a run can be read wherever the parts that it uses are.
    """
    used: list[Any] = [SPARSITIES[values["sparsity"]], *(kind for kind in TERMS.values() if values[kind.key()])]
    outside = {kind.name: kind.__module__ for kind in used if is_outside(kind)}
    keys = {key for config in _CONFIGS for base in config.__mro__ if is_outside(base) for key in _own_keys(base)}
    unused = keys.difference(*(settings_of(kind.settings) for kind in used))
    return {key: value for key, value in values.items() if key not in unused}, outside


def unregistered(parts: Any) -> str:
    """Why a configuration with these parts, as `to_record` gave them, cannot be used here; "" where it can."""
    for name, module in parts.items() if isinstance(parts, dict) else ():
        if name not in SPARSITIES and name not in TERMS:
            return (
                f"The coder's part {name!r} is registered by the module {module}: import that first, or install it "
                f"with an entry point of the group {GROUP}."
            )
    return ""
