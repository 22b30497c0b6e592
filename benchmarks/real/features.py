"""Ten features that nobody chose: one from the middle of each tenth, in the order of how often they fire."""

import dataclasses
from pathlib import Path
from typing import Any

from saejax.reports.feature_table import FeatureTable, Search
from saejax.runs.folder import Run

_COUNT, _PASSAGES, _AROUND = 10, 3, 8


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A feature of a report: its density, largest activation, the tokens that it promotes most, and passages."""

    id: int
    density: float
    max: float
    promoted: tuple[str, ...]
    passages: tuple[str, ...]


def drawn(folder: Path) -> list[Drawn]:
    """Of a run's report; the loudest passages of each, the loudest token between ** **."""
    with FeatureTable(Run(folder).features) as table:
        live = table.matching(Search(live=True), sort="density")
        middles = [live[(2 * i + 1) * len(live) // (2 * _COUNT)] for i in range(_COUNT)]
        return [_read(*table.feature(feature)) for feature in middles]


def section(features: list[Drawn]) -> str:
    """A table in Markdown."""
    lines = [
        "## Ten features of block 14\n",
        "All live features, in the order of how often they fire, are cut into tenths. These stand in the middles. The "
        "token on which a feature fires most is bold; the promoted tokens come from its decoder row.\n",
        "| feature | fires on | promotes | passages |",
        "|---|---|---|---|",
    ]
    for one in features:
        promoted, passages = " ".join(one.promoted), "<br>".join(one.passages)
        lines.append(f"| {one.id} | {one.density:.2%} of tokens | {promoted} | {passages} |")
    return "\n".join(lines) + "\n"


def _read(vocab: list[str], row: dict[str, Any]) -> Drawn:
    examples = row.get("examples") or [one for part in row.get("quantiles") or [] for one in part["examples"]]
    loudest = sorted(examples, key=lambda one: -max(one["activations"]))[:_PASSAGES]
    return Drawn(
        row["id"],
        row["density"],
        row["max"],
        tuple(f"`{_cell(vocab[t] if isinstance(t, int) else t)}`" for t, _ in (row.get("top_logits") or [])[:4]),
        tuple(_passage(vocab, one) for one in loudest),
    )


def _passage(vocab: list[str], example: dict[str, Any]) -> str:
    tokens = [_cell(vocab[token]) for token in example["tokens"]]
    peak = max(range(len(tokens)), key=lambda i: example["activations"][i])
    before, after = "".join(tokens[max(peak - _AROUND, 0) : peak]), "".join(tokens[peak + 1 : peak + 4])
    space = " " if tokens[peak].startswith(" ") else ""
    return f"{before}{space}**{tokens[peak].strip()}**{after}".strip()


def _cell(text: str) -> str:
    """Text that stays text in a cell of a table."""
    text = text.replace("\n", " ")
    return "".join(f"\\{letter}" if letter in "|*_`<>[]\\" else letter for letter in text)
