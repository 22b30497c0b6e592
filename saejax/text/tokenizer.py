"""A Hugging Face `tokenizer.json` with the tokens beside it and what capture must know: special ids and a hash."""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

import tokenizers

from saejax.core.errors import DataError
from saejax.core.files import read_bounded
from saejax.text.added_tokens import properties, read_object, said_tokens, special_ids
from saejax.text.chat import ChatTemplate

_LARGEST_TOKENIZER = 256 << 20  # bytes, far more than any model comes with
# Tokens that one letter may have: an emoji of four bytes, with a space of its own.
_LETTER = 8

# How conversations begin behind the bos token.
_STARTS = "aAuUsS[<#|"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back.

    Attributes:
        backend: the `tokenizers.Tokenizer`.
        bos_id: id put in front of every piece of a document, or None when the model has none.
        bos_unknown: no file says which token is bos, nor that there is none.
        special_ids: ids of all special tokens; rows at these are never stored (id 0 is a token like any other).
        sha256: hash of what decides ids and special ids, part of a store's identity: that of tokenizer.json where the
            files beside it add nothing to it, else of both.
        folder: where it was read from, with its chat template; None for one that was made in memory.
        rows: how many ids the model has embeddings of, where it is known; the tokenizer may have more.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None
    special_ids: frozenset[int]
    sha256: str
    folder: Path | None = None
    bos_unknown: bool = False
    rows: int | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read `tokenizer.json` of a model folder, and from the files beside it further tokens and which one is bos.

        Where tokenizer_config.json says that there is no bos token (Qwen's does, beside a bos_token_id in config.json),
        there is none: the model never saw one in front of a text.

        Raises:
            DataError: when there is no readable tokenizer.json, or the bos token is not one of its tokens.
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
        folder, digest = Path(folder), hashlib.sha256(raw)
        alone = [properties(backend), sorted(special_ids(backend)), False]
        said = said_tokens(folder, backend)
        special = said.add_to(backend)
        whole = [properties(backend), sorted(special), said.split]
        if whole != alone:
            digest.update(json.dumps(whole).encode())
        named = said.named.get("bos_token")
        bos_id, known = _bos(folder, backend, None if named is None else named.content)
        return cls(backend, bos_id, special, digest.hexdigest(), folder, not known)

    def for_rows(self, rows: int) -> "Tokenizer":
        """This tokenizer for a model with embeddings of `rows` ids.

        Raises:
            DataError: the bos token is not one of them.
        """
        if self.bos_id is not None and self.bos_id >= rows:
            raise DataError(
                f"{self.folder}: the bos token has the id {self.bos_id}, and the model has only {rows} tokens (0 to "
                f"{rows - 1}); they do not belong together."
            )
        return dataclasses.replace(self, rows=rows)

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        """The template of this model's conversations.

        Raises:
            DataError: the tokenizer has no chat template, or it cannot be read.
        """
        if self.folder is None:
            raise DataError("This tokenizer was made in memory and has no chat template; read one by from_folder.")
        named = said_tokens(self.folder, self.backend).named
        chat = ChatTemplate.from_folder(self.folder, {name: token.content for name, token in named.items()})
        bos, starts = chat.tokens.get("bos_token", ""), list(_STARTS)
        begins = bool(bos) and self.encode(bos) == self.bos
        # Where words begin by a mark, many tokenizers put it at the start of a text and not behind a special token.
        others = begins and self.encode_behind_bos([bos + start for start in starts]) != self.encode_many(starts)
        return dataclasses.replace(chat, keeps_bos=others)

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    @property
    def largest_id(self) -> int:
        """The largest id it can give; ids need not be dense, so this can be more than `vocab_size - 1`."""
        return max(self.backend.get_vocab().values(), default=-1)

    @property
    def usable_ids(self) -> range:
        """The ids that it gives and the model has."""
        n_ids = self.largest_id + 1
        return range(n_ids if self.rows is None else min(n_ids, self.rows))

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without any special token added; a lone surrogate is read as `?`.

        Raises:
            DataError: a text has a token that the model does not have; names it.
        """
        # JSON can hold half of a surrogate pair, which is no Unicode text and which the tokenizer refuses.
        texts = [t if t.isascii() else t.encode(errors="replace").decode() for t in texts]
        ids = [e.ids for e in self.backend.encode_batch_fast(texts, add_special_tokens=False)]
        if self.rows is not None and self._has_more_than_the_model:
            for unknown in (i for of_text in ids for i in of_text if i >= self.rows):
                raise DataError(
                    f"A text holds the token {self.backend.id_to_token(unknown)!r}, whose id is {unknown}; the model "
                    f"has only {self.rows} tokens (0 to {self.rows - 1}). Take it out of the text, or choose that "
                    "token's model."
                )
        return ids

    @functools.cached_property
    def _has_more_than_the_model(self) -> bool:
        return self.rows is not None and self.largest_id >= self.rows

    @property
    def bos(self) -> list[int]:
        return [] if self.bos_id is None else [self.bos_id]

    def encode_behind_bos(self, texts: list[str]) -> list[list[int]]:
        """Ids of texts that are to stand behind the bos token: without the one that a text begins with itself.

        Where bos is an ordinary word of the tokenizer and no special token, it is one of the text's words.
        """
        bos = self.bos_id if self.bos_id in self.special_ids else None
        return [ids[1:] if ids and ids[0] == bos else ids for ids in self.encode_many(texts)]

    def has_bos(self, text: str) -> bool:
        return self.encode_behind_bos([text]) != self.encode_many([text])

    def encode(self, text: str) -> list[int]:
        return self.encode_many([text])[0]

    def decode(self, ids: list[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=False)

    def decode_inside(self, ids: list[int]) -> str:
        """The ids as they read inside a text: many decoders take the space away from a text's first token."""
        before = self._before
        alone, both = self.decode(before), self.decode(before + ids)
        return both.removeprefix(alone) if both.startswith(alone) else self.decode(ids)

    def token_strings(self, ids: list[int]) -> list[str]:
        """Each id as it reads inside a text, for display; a piece of a UTF-8 sequence shows as U+FFFD."""
        return [self.decode_inside([i]) for i in ids]

    def pieces(self, ids: list[int]) -> list[str]:
        """The part of the text that each id adds, in order: a letter of several tokens stands at the first of
        them, and "" at the others.
        """
        texts_of_ids: list[str] = []
        while len(texts_of_ids) < len(ids):
            left = ids[len(texts_of_ids) : len(texts_of_ids) + _LETTER]
            texts = (self.decode_inside(left[:count]) for count in range(1, len(left) + 1))
            whole = next(((n, text) for n, text in enumerate(texts) if "\ufffd" not in text), None)
            # A byte that is no part of a letter stays alone.
            more, text = whole or (0, self.decode_inside(left[:1]))
            texts_of_ids += [text, *[""] * more]
        return texts_of_ids

    @functools.cached_property
    def _before(self) -> list[int]:
        """Ids of an ordinary text; none where there is no decoder, which puts a space between any two tokens."""
        return [] if self.backend.decoder is None else self.encode("a")[-1:]


def _bos(folder: Path, backend: tokenizers.Tokenizer, named: str | None) -> tuple[int | None, bool]:
    """(id of the bos token or None, whether a file says which it is or that there is none).

    `named` is the bos token of the tokenizer's own files, if they name one. A bos_token of null in
    tokenizer_config.json means that there is none. Otherwise the first of these that names one decides: config.json,
    the tokenizer's own files, special_tokens_map.json, the text model's part of config.json, generation_config.json,
    what tokenizer.json puts in front of a text.
    """
    names = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
    config, own, special, generation = (read_object(folder / name) for name in names)
    if named is None and own.get("bos_token", "") is None:
        return None, True
    text_config = config.get("text_config")
    said = [
        ("config.json", "bos_token_id", config),
        ("tokenizer_config.json", "bos_token", {"bos_token": named}),
        ("special_tokens_map.json", "bos_token", special),
        ("config.json", "bos_token_id", text_config if isinstance(text_config, dict) else {}),
        ("generation_config.json", "bos_token_id", generation),
    ]
    for name, key, content in said:
        value = content.get(key)
        if isinstance(value, list):
            value = value[0] if value else None
        if value is None:
            continue
        token = value.get("content") if isinstance(value, dict) else value
        id_ = value if key == "bos_token_id" else backend.token_to_id(token) if isinstance(token, str) else None
        if type(id_) is not int or id_ not in backend.get_vocab().values():
            raise DataError(f"{folder / name}: {key} is {value!r}, which the tokenizer beside it does not have.")
        return id_, True
    marked, plain = (backend.encode("a", add_special_tokens=add) for add in (True, False))
    in_front = bool(plain.ids) and marked.special_tokens_mask[0] == 1
    return (marked.ids[0], True) if in_front else (None, False)
