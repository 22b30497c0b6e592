"""docs/reference.md and the tables of docs/coders.md and docs/formats.md are what the code says."""

import pytest
from tiny import ROOT

from saejax.coders import RECIPES
from saejax.commands._reference import COMMAND, TABLES, reference, with_table
from saejax.interop import FORMATS


def test_the_reference_is_fresh() -> None:
    there = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert there == reference() + "\n", f"docs/reference.md is stale: {COMMAND}"


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_are_fresh(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    start, table = TABLES[name]
    assert page == with_table(page, start, table()), f"The table in {name} is stale: {COMMAND}"
    named = RECIPES if name == "docs/coders.md" else FORMATS
    assert all(f"`{word}` |" in page for word in named)


def test_the_reference_says_what_decides_and_what_may_differ() -> None:
    rows = {line.split("`")[1]: line for line in reference().splitlines() if line.startswith("| `")}
    for key, end in {
        "name": "| no | no |",
        "seed": "| yes | no |",
        "lm.device": "| no | no |",
        "train.lr": "| yes | yes |",
        "train.validate_epochs": "| where early_stop_patience is set | no |",
        "coder.k": "| yes | yes |",
        "eval.tokens": "| no | no |",
    }.items():
        assert rows[key].endswith(end), rows[key]
    row = rows["coder.l1_coefficient"]
    assert "the preset's, else `0.0`" in row and r"\|\|W_dec\|\|" in row
