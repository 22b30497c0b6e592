"""A Hugging Face `tokenizer.json` with what capture has to know about it: its special ids and its hash."""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import tokenizers

from saejax.core.errors import DataError
from saejax.core.files import read_bounded
from saejax.text.chat import ChatTemplate

# Bytes, far more than any model comes with.
_LARGEST_TOKENIZER, _LARGEST_CONFIG = 256 << 20, 16 << 20


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back.

    Attributes:
        backend: the `tokenizers.Tokenizer`.
        bos_id: id put in front of every piece of a document, or None when the model has none.
        special_ids: ids of all special tokens; rows at these are never stored (id 0 is a token like any other).
        sha256: hash of tokenizer.json, part of a store's identity.
        folder: where it was read from, with its chat template; None for one that was made in memory.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None
    special_ids: frozenset[int]
    sha256: str
    folder: Path | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read `tokenizer.json`, and the bos id from `config.json`, of a model folder.

        Where tokenizer_config.json says that there is no bos token (Qwen's does, beside a bos_token_id in config.json),
        there is none: the model never saw one in front of a text.

        Raises:
            DataError: when there is no readable tokenizer.json, or the bos id is not one of its ids.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise DataError(
                f"No tokenizer.json in {folder}. Save one with "
                "`AutoTokenizer.from_pretrained(...).save_pretrained(folder)`."
            )
        raw = read_bounded(path, _LARGEST_TOKENIZER)
        try:
            backend = tokenizers.Tokenizer.from_str(raw.decode())
        except Exception as error:  # the Rust library raises bare Exception
            raise DataError(f"{path} is not a readable tokenizer: {error}") from None
        backend.no_padding()
        backend.no_truncation()
        special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        bos_id = _bos_id(Path(folder))
        if bos_id is not None and (type(bos_id) is not int or bos_id not in backend.get_vocab().values()):
            named = f"{Path(folder) / 'config.json'}: bos_token_id is {bos_id!r}"
            raise DataError(f"{named}, which is no id of the tokenizer beside it.")
        return cls(backend, bos_id, special, hashlib.sha256(raw).hexdigest(), Path(folder))

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        """How this model's conversations are written.

        Raises:
            DataError: the tokenizer has no chat template, or it cannot be read.
        """
        if self.folder is None:
            raise DataError("This tokenizer was made in memory and has no chat template; read one by from_folder.")
        return ChatTemplate.from_folder(self.folder)

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    @property
    def largest_id(self) -> int:
        """The largest id it can give; ids need not be dense, so this can be more than `vocab_size - 1`."""
        return max(self.backend.get_vocab().values(), default=-1)

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without any special token added; a lone surrogate is read as `?`."""
        # JSON can hold half of a surrogate pair, which is no Unicode text and which the tokenizer refuses.
        texts = [t if t.isascii() else t.encode(errors="replace").decode() for t in texts]
        return [e.ids for e in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode(self, text: str) -> list[int]:
        return self.encode_many([text])[0]

    def decode(self, ids: list[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=False)

    def token_strings(self, ids: list[int]) -> list[str]:
        """Each id decoded on its own, for display; a piece of a UTF-8 sequence shows as U+FFFD."""
        return [self.backend.decode([i], skip_special_tokens=False) for i in ids]


def _bos_id(folder: Path) -> Any:
    """`bos_token_id` of config.json, unless tokenizer_config.json has a `bos_token` of null."""
    if _json_object(folder / "tokenizer_config.json").get("bos_token", "") is None:
        return None
    bos_id = _json_object(folder / "config.json").get("bos_token_id")
    if isinstance(bos_id, list):
        return bos_id[0] if bos_id else None
    return bos_id


def _json_object(path: Path) -> dict[str, Any]:
    """The file's content, {} where there is none; DataError where it is no object."""
    try:
        value = json.loads(read_bounded(path, _LARGEST_CONFIG)) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a JSON object: it holds {type(value).__name__}.")
    return value
