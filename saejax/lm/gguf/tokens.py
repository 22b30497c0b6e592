"""tokenizer.json and tokenizer_config.json of a model in a GGUF file.

Kinds: "gpt2", byte-level BPE with its merges; "llama", SentencePiece's BPE, whose merges follow from the scores: two
tokens that together are a third one are merged, that of the highest score first.
"""

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from saejax.core.errors import DataError
from saejax.lm.gguf.header import Header

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS % r"\p{N}{1,3}"
_SPLITS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "smaug-bpe": _LLAMA3, "qwen2": _WORDS % r"\p{N}"}


def tokenizer_json(header: Header) -> tuple[str, dict[str, Any]]:
    """(tokenizer.json, tokenizer_config.json).

    Raises:
        DataError: no tokenizer in the file, a kind that is not read, or one that does not fit together.
    """
    kind = header.text("tokenizer.ggml.model")
    tokens, types = _list(header, "tokens", str), _list(header, "token_type", int)
    if kind not in ("gpt2", "llama") or not tokens or len(types) not in (0, len(tokens)):
        raise DataError(
            f"{header.path}: a tokenizer of kind {kind[:80]!r} with {len(tokens):,} tokens and {len(types):,} types is "
            "not read; gpt2 and llama are. Give the model as a Hugging Face folder."
        )
    try:
        backend = (_byte_level if kind == "gpt2" else _sentence_piece)(header, tokens)
        _add_special(backend, tokens, types)
    except DataError:
        raise
    except Exception as error:  # the Rust library raises bare Exception
        raise DataError(f"{header.path}: its tokens and merges make no tokenizer: {str(error)[:300]}") from None
    return backend.to_str(), _beside(header, tokens)


def _list(header: Header, key: str, kind: type) -> list[Any]:
    found = header.fields.get(f"tokenizer.ggml.{key}", [])
    if not isinstance(found, list) or not all(type(one) is kind for one in found):
        raise DataError(f"{header.path}: tokenizer.ggml.{key} must be a list of {kind.__name__}.")
    return found


def _byte_level(header: Header, tokens: list[str]) -> tokenizers.Tokenizer:
    merges = [tuple(line.split(" ", 1)) for line in _list(header, "merges", str)]
    if any(len(pair) != 2 for pair in merges):
        raise DataError(f"{header.path}: a line of tokenizer.ggml.merges is not two tokens with a space between.")
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=_ignores(header)))
    backend.pre_tokenizer = _pre_tokenizer(header)
    if header.fields["tokenizer.ggml.pre"] == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _ignores(header: Header) -> bool:
    """Llama 3 takes a word that is a token as it is, whatever its merges say."""
    return header.fields.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3")


def _pre_tokenizer(header: Header) -> pre_tokenizers.PreTokenizer:
    pre = header.text("tokenizer.ggml.pre")
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if pre not in _SPLITS:
        raise DataError(
            f"{header.path}: how tokenizer.ggml.pre {pre[:80]!r} splits words is not known; gpt-2, smollm, "
            f"{', '.join(_SPLITS)} are. Give the model as a Hugging Face folder."
        )
    split = pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentence_piece(header: Header, tokens: list[str]) -> tokenizers.Tokenizer:
    scores = _list(header, "scores", float)
    if len(scores) != len(tokens):
        raise DataError(f"{header.path}: {len(scores):,} scores for {len(tokens):,} tokens.")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = header.fields.get("tokenizer.ggml.unknown_token_id", 0)
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        raise DataError(f"{header.path}: tokenizer.ggml.unknown_token_id is {unknown!r}, of {len(tokens):,} tokens.")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab, merges=_merges(vocab, scores), unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True
        )
    )
    in_front = header.fields.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if in_front else spaces
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*back, decoders.Strip(content=" ", left=1)] if in_front else back)
    return backend


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Pairs of tokens that together are a token, the one with the highest score first; of one token in their order."""
    found = []
    for token, number in vocab.items():
        pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab]
        found += [(-scores[number], number, vocab[left], vocab[right], left, right) for left, right in pairs]
    return [(left, right) for *_, left, right in sorted(found)]


def _add_special(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    own = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in own])
    control = [token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])


def _beside(header: Header, tokens: list[str]) -> dict[str, Any]:
    """Named tokens and the chat template; no bos token where the file says that none stands in front of a text."""
    config: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = header.fields.get(f"tokenizer.ggml.{key}_token_id")
        if type(number) is int and 0 <= number < len(tokens):
            config[f"{name}_token"] = tokens[number]
    usual = header.text("tokenizer.ggml.model") == "llama" or _ignores(header)
    added = header.fields.get("tokenizer.ggml.add_bos_token", usual)
    if not isinstance(added, bool):
        raise DataError(
            f"{header.path}: tokenizer.ggml.add_bos_token is {str(added)[:80]!r}; it must be true or false."
        )
    if not added:
        config["bos_token"] = None
    if template := header.text("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
