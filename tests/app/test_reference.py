"""docs/reference.md and the table of docs/coders.md are what the code's fields say."""

from tiny import ROOT

from saejax.app.reference import COMMAND, reference, with_table
from saejax.coders import RECIPES


def test_the_reference_is_fresh() -> None:
    there = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert there == reference() + "\n", f"docs/reference.md is stale: {COMMAND}"


def test_the_table_of_coders_is_fresh() -> None:
    page = (ROOT / "docs" / "coders.md").read_text(encoding="utf-8")
    assert page == with_table(page), f"The table in docs/coders.md is stale: {COMMAND}"
    assert all(f"| `{name}` |" in page for name in RECIPES)


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
