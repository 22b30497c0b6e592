"""Checks of a feature that comes from a file: the page draws it as it is."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from saejax.core.errors import DataError
from saejax.runs.shape import fault, histogram, is_number

REDO = "saejax report --config=... --redo"

_HISTOGRAM = histogram("edges")


def damaged_table(path: Path, what: str) -> DataError:
    """The error for a features.sqlite that cannot be used, with the way out."""
    return DataError(f"{path} is damaged: {what}; make it again with `{REDO}`")


def check_feature(path: Path, feature: Any, n_vocab: int) -> None:
    """Refuses a feature of `path` that the page could not show, or whose tokens are not of a table of `n_vocab`.

    Raises:
        DataError: says what is wrong with it.
    """
    if not isinstance(feature, dict) or not isinstance(feature.get("id"), int):
        raise damaged_table(path, f"a feature has no whole-number id: {str(feature)[:80]}")
    name = f"feature {feature['id']}"
    for key in ("density", "max"):
        if not is_number(feature.get(key)):
            raise damaged_table(path, f"{name} has no number {key!r}")
    if "min" in feature and not is_number(feature["min"]):
        raise damaged_table(path, f"{name} has the min {feature['min']!r}, which is not a number")
    if (bars := feature.get("histogram")) and (wrong := fault(bars, _HISTOGRAM, f"the {name} histogram")):
        raise damaged_table(path, wrong)
    for key in ("top_logits", "bottom_logits", "examples", "quantiles"):
        if not isinstance(feature.get(key) or [], list):
            raise damaged_table(path, f"{name} {key} is not a list")
    for key in ("top_logits", "bottom_logits"):
        for pair in feature.get(key) or []:
            if not isinstance(pair, list) or len(pair) != 2 or not is_number(pair[1]):
                raise damaged_table(path, f"{name} {key} holds {str(pair)[:40]}, not [token, value]")
            if not isinstance(pair[0], str):
                _check_tokens(path, name, pair[:1], n_vocab)
    for example in feature.get("examples") or []:
        _check_example(path, name, example, n_vocab)
    for part in feature.get("quantiles") or []:
        if not isinstance(part, dict) or not all(is_number(part.get(key)) for key in ("low", "high", "fraction")):
            what = f"{name} has a quantile without the numbers low, high and fraction: {str(part)[:80]}"
            raise damaged_table(path, what)
        if not isinstance(part.get("examples"), list):
            raise damaged_table(path, f"{name} has a quantile without a list of examples")
        for example in part["examples"]:
            _check_example(path, name, example, n_vocab)


def _check_example(path: Path, name: str, example: Any, n_vocab: int) -> None:
    tokens, activations = (example.get(k) if isinstance(example, dict) else None for k in ("tokens", "activations"))
    if not isinstance(tokens, list) or not isinstance(activations, list) or len(tokens) != len(activations):
        raise damaged_table(path, f"an example of {name} does not have as many activations as tokens")
    peak = example.get("peak")
    if not isinstance(peak, int) or not 0 <= peak < len(tokens):
        raise damaged_table(path, f"an example of {name} has the peak {peak!r} of {len(tokens)} tokens")
    if not all(map(is_number, activations)):
        raise damaged_table(path, f"an example of {name} has an activation that is not a number")
    _check_tokens(path, name, tokens, n_vocab)


def _check_tokens(path: Path, name: str, tokens: Iterable[Any], n_vocab: int) -> None:
    for token in tokens:
        if type(token) is not int or not 0 <= token < n_vocab:
            raise damaged_table(path, f"{name} uses the token {token!r}, outside the table of {n_vocab}")
