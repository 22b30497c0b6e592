"""The shape of a feature that comes from a file: the page draws it as it is."""

from typing import Any

from saejax.runs.shape import Maybe, fault, histogram

_LOGITS = Maybe([[object]])
_EXAMPLE = {"tokens": [int], "activations": [float], "peak": int}
_FEATURE = {
    "id": int,
    "density": float,
    "max": float,
    "min": Maybe(float, null=False),
    "histogram": Maybe(histogram("edges")),
    "top_logits": _LOGITS,
    "bottom_logits": _LOGITS,
    "examples": Maybe([_EXAMPLE]),
    "quantiles": Maybe([{"low": float, "high": float, "fraction": float, "examples": [_EXAMPLE]}]),
}


def check_feature(feature: Any, n_vocab: int) -> None:
    """Raises ValueError, saying why, for a feature that the page could not show: of another shape, with a passage whose
    numbers do not fit each other, or with a token outside a table of `n_vocab`."""
    number = feature.get("id") if isinstance(feature, dict) else None
    if wrong := fault(feature, _FEATURE, f"feature {number}"):
        raise ValueError(wrong)
    pairs = [pair for key in ("top_logits", "bottom_logits") for pair in feature.get(key) or []]
    for pair in pairs:
        if len(pair) != 2 or type(pair[0]) not in (int, str) or type(pair[1]) not in (int, float):
            raise ValueError(f"feature {number} promotes {str(pair)[:40]}, which is not [token, value]")
    examples = [*(feature.get("examples") or []), *(e for q in feature.get("quantiles") or [] for e in q["examples"])]
    for example in examples:
        if len(example["tokens"]) != len(example["activations"]):
            raise ValueError(f"an example of feature {number} does not have as many activations as tokens")
        if not 0 <= example["peak"] < len(example["tokens"]):
            peak, count = example["peak"], len(example["tokens"])
            raise ValueError(f"an example of feature {number} has the peak {peak} of {count} tokens")
    numbers = [token for token, _ in pairs if not isinstance(token, str)]
    for token in [*numbers, *(token for example in examples for token in example["tokens"])]:
        if not 0 <= token < n_vocab:
            raise ValueError(f"feature {number} uses the token {token}, outside the table of {n_vocab}")
