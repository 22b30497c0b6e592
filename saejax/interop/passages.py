"""The passages of features.sqlite as other tools take them: strings, values, and which list they are from."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Entry = Mapping[str, Any]


def clean(token: str) -> str:
    """A token as databases and JSON readers take it: no NUL, no half of a surrogate pair, not empty."""
    return token.encode("utf-8", "replace").decode().replace("\0", " ") or "\ufffd"


def token_strings(vocab: Sequence[str]) -> list[str]:
    return [clean(token) for token in vocab]


def group_of(content: Mapping[str, Any], group: int, groups: int) -> list[Entry]:
    """The entries of one group (layer) of latents, in order."""
    width = content["d_sae"] // groups
    return [feature for feature in content["features"] if feature["id"] // width == group]


def lists_of(feature: Entry) -> Iterator[tuple[dict[str, float], Sequence[Entry]]]:
    """({low, high, fraction}, passages): the strongest, whose low and fraction are -1, then each part of the range."""
    yield (
        {"low": -1, "high": max(feature["max"], -feature.get("min", 0)), "fraction": -1},
        feature.get("examples") or [],
    )
    for part in feature.get("quantiles") or []:
        yield {key: part[key] for key in ("low", "high", "fraction")}, part["examples"]


def centred_passage(example: Entry, strings: Sequence[str], most: int) -> tuple[list[str], list[float], int]:
    """(tokens, values, place of the peak) of at most `most` tokens around the peak."""
    start = min(max(0, example["peak"] - most // 2), max(0, len(example["tokens"]) - most))
    window = slice(start, start + most)
    tokens = [strings[token] for token in example["tokens"][window]]
    return tokens, [float(value) for value in example["activations"][window]], example["peak"] - start


def logits_of(entry: Entry, key: str, strings: Sequence[str]) -> list[tuple[str, float]]:
    """(token, value) of the entry's top_logits or bottom_logits."""
    pairs = entry.get(key) or []
    return [(clean(token) if isinstance(token, str) else strings[token], float(value)) for token, value in pairs]
