"""The tokens that the files beside a `tokenizer.json` add to it or call special, read as transformers reads them.

There are many ways to say a token, and they grew over the years: `added_tokens` in tokenizer.json, added_tokens.json,
special_tokens_map.json, and in tokenizer_config.json `added_tokens_decoder`, eos_token and its like, and lists of
further special tokens. A token that is said in none of them but one is a token all the same, with an id of its own.

The rules are those of transformers' AutoTokenizer (5.23) for a folder with a tokenizer.json. Where
tokenizer_config.json has `added_tokens_decoder`, special_tokens_map.json and added_tokens.json are not read. Where it
has none they are, and special_tokens_map.json has the last word on what a token is called.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from saejax.core.errors import DataError
from saejax.core.files import read_bounded

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PROPERTIES = ("single_word", "lstrip", "rstrip", "normalized", "special")
_LARGEST_CONFIG = 16 << 20  # bytes, far more than any model comes with
_SETTINGS, _MAP, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"


@dataclasses.dataclass(frozen=True)
class SaidTokens:
    """Tokens that a folder's files declare beside tokenizer.json.

    Attributes:
        added: tokens to add, in order.
        named: {bos_token, eos_token, image_token, ...: token}, all of them special.
        further: more special tokens, without a name.
        split: special tokens that stand in a text are read as text.
    """

    added: tuple[AddedToken, ...]
    named: Mapping[str, AddedToken]
    further: tuple[AddedToken, ...]
    split: bool

    def add_to(self, backend: tokenizers.Tokenizer) -> frozenset[int]:
        """Make `backend` know these tokens, and give the ids of all special ones."""
        called = (*self.named.values(), *self.further)
        names = {token.content for token in self.named.values()}
        new = {token.content: token for token in self.added}
        known = {token.content for token in backend.get_added_tokens_decoder().values()} | set(new)
        new |= {token.content: token for token in called if token.content not in known}
        for token in new.values():
            token.special = token.special or token.content in names
        backend.add_tokens(list(new.values()))
        backend.encode_special_tokens = self.split
        ids = (backend.token_to_id(token.content) for token in called)
        return special_ids(backend).union(i for i in ids if i is not None)


def special_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """The ids of the tokens that the backend itself calls special."""
    return frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)


def properties(backend: tokenizers.Tokenizer) -> dict[str, list[Any]]:
    """{id: content and properties} of all added tokens, as JSON."""
    return {
        str(i): [t.content, *(getattr(t, name) for name in _PROPERTIES)]
        for i, t in sorted(backend.get_added_tokens_decoder().items())
    }


def said_tokens(folder: Path, backend: tokenizers.Tokenizer) -> SaidTokens:
    """Read tokenizer_config.json, special_tokens_map.json and added_tokens.json; `backend` is tokenizer.json's.

    Raises:
        DataError: one of them is damaged, or says a token in a way that cannot be read.
    """
    settings = read_object(folder / _SETTINGS)
    with _reading(folder / _SETTINGS):
        named = _named(settings)
        # Of the names that the model gives itself, those that are said by text or in a list come last.
        last = {key: named.pop(key) for key in list(named) if key not in NAMES and isinstance(settings[key], str)}
        extra, further = _extra(settings.get("extra_special_tokens") or settings.get("additional_special_tokens"))
        last |= extra
        if "added_tokens_decoder" in settings:
            added = {int(i): _as_token(token, special=False) for i, token in settings["added_tokens_decoder"].items()}
    if "added_tokens_decoder" not in settings:
        words = read_object(folder / _MAP)
        with _reading(folder / _MAP):
            named |= _named(words)
            named = {name: token for name, token in named.items() if name not in words or words[name] is not None}
            extra, more = _extra(words.get("extra_special_tokens"))
            last |= extra
            further += more
            final = further or [_as_token(token) for token in words.get("additional_special_tokens") or []]
        ids = read_object(folder / _ADDED)
        with _reading(folder / _ADDED):
            called = {token.content for token in (*further, *(named[name] for name in NAMES if name in named))}
            # The file says no more of a token than its id.
            added = {int(i): AddedToken(t, normalized=t not in called, special=t in called) for t, i in ids.items()}
            added |= backend.get_added_tokens_decoder()
        further = final
    by_content = {token.content: token for token in added.values()}
    order = [*NAMES, *(name for name in named if name not in NAMES), *last]
    tokens = {name: (named | last)[name] for name in order if name in named or name in last}
    return SaidTokens(
        tuple(added[i] for i in sorted(added)),
        {name: by_content.get(token.content, token) for name, token in tokens.items()},
        tuple(further),
        settings.get("split_special_tokens") is True,
    )


def read_object(path: Path) -> dict[str, Any]:
    """The file's JSON object, {} where there is no file.

    Raises:
        DataError: it is no object.
    """
    try:
        value = json.loads(read_bounded(path, _LARGEST_CONFIG)) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a JSON object: it holds {type(value).__name__}.")
    return value


def _named(said: Mapping[str, Any]) -> dict[str, AddedToken]:
    """{name: token} of the keys that name one: bos_token and its like."""
    return {
        key: _as_token(value)
        for key, value in said.items()
        if key.endswith("_token") and (isinstance(value, str) or (isinstance(value, Mapping) and "content" in value))
    }


def _extra(said: Any) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """(those with a name, those without) of further special tokens, which are a mapping or a list."""
    if isinstance(said, Mapping):
        return {key: _as_token(value) for key, value in said.items()}, []
    return {}, [_as_token(value) for value in said or []]


def _as_token(said: Any, special: bool = True) -> AddedToken:
    """A token as it is said: by its text alone, or by an object with its properties."""
    if isinstance(said, str):
        return AddedToken(said, special=True)
    return AddedToken(
        said["content"], **({"special": special} | {key: said[key] for key in _PROPERTIES if key in said})
    )


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise DataError(f"{path} says a token in a way that cannot be read: {type(error).__name__} {error}.") from None
