"""The embedded model `recall`: it reads records, in whatever order and notation, and can be made again."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.recall_lm.make import RecallConfig, make_recall, notations
from saejax.core.errors import DataError
from saejax.lm import LanguageModel, checkpoint, load_lm
from saejax.prefix.recall import NAMES, recall_records

FOLDER = Path(checkpoint.__file__).parent / "recall"


@pytest.fixture(scope="module")
def recall() -> LanguageModel:
    return load_lm("recall")


def test_its_names_and_numbers_are_one_token_each(recall: LanguageModel) -> None:
    assert all(len(recall.tokenizer.encode(text)) == 1 for text in (*NAMES, *(f" {n}" for n in range(10, 100))))
    record = recall_records("heldout", 1)[0]
    assert len(recall.tokenizer.encode(record.context)) == 27, "docs/latentwire.md says it"
    assert len(load_lm("demo").tokenizer.encode(record.context)) >= 40, "another tokenizer"


@pytest.mark.parametrize("notation", range(3))
def test_it_reads_records_in_any_order_and_notation(notation: int, recall: LanguageModel) -> None:
    """And not places: three to six names in random order, each of them asked for."""
    random, rows, right = np.random.default_rng(notation), [], []
    for _ in range(30):
        names = [str(name) for name in random.permutation(NAMES)[: random.integers(3, 7)]]
        pairs = [(name, int(number)) for name, number in zip(names, random.integers(10, 100, len(names)), strict=True)]
        context = recall.tokenizer.encode(notations(pairs)[notation])
        for name, number in pairs:
            rows.append([recall.tokenizer.bos_id, *context, *recall.tokenizer.encode(name)])
            right.append(recall.tokenizer.encode(f" {number}")[0])
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for at, row in zip(tokens, rows, strict=True):
        at[: len(row)] = row
    logits = np.asarray(recall.run(tokens)[0])
    said = [int(logits[i, len(row) - 1].argmax()) for i, row in enumerate(rows)]
    assert np.mean(np.equal(said, right)) >= 0.99


@pytest.mark.ci
def test_it_can_be_made_again(tmp_path: Path) -> None:
    figures = make_recall(tmp_path / "made", RecallConfig(n_layer=1, texts=64, steps=2, batch=8), lambda line: None)
    assert 0 <= figures["right"] < 0.5 and figures == json.loads((tmp_path / "made" / "figures.json").read_text())
    made = load_lm(str(tmp_path / "made"))
    assert (
        made.config.n_layer == 1
        and f"{figures['parameters']:,} parameters" in (tmp_path / "made" / "README.md").read_text()
    )
    ours, shipped = (json.loads((at / "tokenizer.json").read_text())["model"] for at in (tmp_path / "made", FOLDER))
    assert ours == shipped, "the shipped one comes from this code"
    (tmp_path / "file").write_text("kept")
    with pytest.raises(DataError, match="cannot be written"):
        make_recall(tmp_path / "file", RecallConfig(), lambda line: None)
