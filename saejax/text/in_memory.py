"""A tokenizer that a program holds, read by the rules for one on disk; and what stands for one that there is not."""

import dataclasses
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any, cast

import tokenizers

from saejax.core.errors import ConfigError
from saejax.core.files import rename_first, writing
from saejax.core.places import type_in_words, user_cache
from saejax.text.tokenizer import Tokenizer


def is_tokenizer(value: Any) -> bool:
    """True for what `tokenizer_in_memory` reads."""
    return isinstance(value, tokenizers.Tokenizer) or getattr(value, "is_fast", False) is True


def tokenizer_in_memory(tokenizer: Any, config_json: dict[str, Any]) -> Tokenizer:
    """A fast tokenizer of transformers, or one of `tokenizers`, with the model's config.json beside it.

    Its files are written once, to a folder of the user's cache that their content names, so that special tokens, bos
    and chat template follow from the same rules as those of a model on disk.

    Raises:
        ConfigError: it is of another kind.
        DataError: what it saves is not a readable tokenizer, or the folder cannot be written.
    """
    if not is_tokenizer(tokenizer):
        raise ConfigError(
            f"The tokenizer is {type_in_words(tokenizer)}. Give a fast tokenizer of transformers, one of the package "
            "tokenizers, or the folder or id of a model."
        )
    cache = user_cache() / "tokenizers"
    with writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
        begun = tempfile.TemporaryDirectory(prefix=".", dir=cache)
    with begun as name, writing(cache):
        folder = Path(name) / "files"
        folder.mkdir()
        if isinstance(tokenizer, tokenizers.Tokenizer):
            tokenizer.save(str(folder / "tokenizer.json"))
        else:
            tokenizer.save_pretrained(folder)
        _without_batches(folder / "tokenizer.json")
        if config_json:
            (folder / "config.json").write_text(json.dumps(config_json, sort_keys=True))
        digest = hashlib.sha256()
        for path in sorted(path for path in folder.iterdir() if path.is_file()):
            digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
        lasting = cache / digest.hexdigest()[:24]
        rename_first(folder, lasting)
    return Tokenizer.from_folder(lasting)


def _without_batches(path: Path) -> None:
    """Take the last call's padding and truncation out of a tokenizer.json: they are no part of the tokenizer."""
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.no_padding()
    backend.no_truncation()
    backend.save(str(path))


@dataclasses.dataclass(frozen=True)
class IdsAlone(Tokenizer):
    """Stands for the tokenizer of a model that was loaded without one: it knows the model's ids and no text.

    Raises:
        ConfigError: something needs text.
    """

    @classmethod
    def of(cls, rows: int) -> "IdsAlone":
        return cls(cast(tokenizers.Tokenizer, _NoBackend()), None, frozenset(), "", rows=rows)

    @property
    def vocab_size(self) -> int:
        return self.rows or 0

    @property
    def largest_id(self) -> int:
        return self.vocab_size - 1


class _NoBackend:
    """Refuses whatever a tokenizer does."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(
            "The model has no tokenizer, so it takes token ids and no text. Give one: load_lm(module, tokenizer)."
        )
