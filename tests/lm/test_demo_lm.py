"""The embedded demo model: small, complete, and a language model (transformers' view: test_lm_torch.py)."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.demo_lm.make import DemoConfig, make_demo
from benchmarks.demo_lm.ngram import ngram_losses
from benchmarks.demo_lm.pretrain import evaluate
from saejax.core.errors import DataError
from saejax.lm import LanguageModel, checkpoint, load_lm
from saejax.text import PackedRows, Packer, TextConfig, open_source

FOLDER = Path(checkpoint.__file__).parent / "demo"


@pytest.fixture(scope="module")
def demo() -> LanguageModel:
    return load_lm("demo")


def test_the_folder_is_complete_and_small() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(files)
    assert sum(files.values()) <= 8_000_000
    assert "Python standard library" in (FOLDER / "README.md").read_text()


def test_a_folder_that_is_a_file_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("kept")
    for out in (tmp_path / "out", tmp_path / "out" / "below"):
        with pytest.raises(DataError, match=r"out.* cannot be written: .*Choose another folder"):
            make_demo(out, DemoConfig(), print)
    assert (tmp_path / "out").read_text() == "kept"


def test_its_parts_belong_together(demo: LanguageModel) -> None:
    assert demo.identity["model"] == "demo"
    assert demo.tokenizer.vocab_size == demo.config.vocab_size
    assert demo.tokenizer.bos_id in demo.tokenizer.special_ids
    assert demo.config.context_length == TextConfig().context_length, "the default text fills its rows"
    text = "def é(x):\n    return x + 1\n\n\tπ  =  3.14159\r\n"
    assert demo.tokenizer.decode(demo.tokenizer.encode(text)) == text


def test_it_predicts_unseen_modules_better_than_counting_words(demo: LanguageModel) -> None:
    packer = Packer(open_source(TextConfig()), demo.tokenizer, demo.config.context_length)

    def rows(split: str, count: int) -> dict[str, np.ndarray]:
        batch: PackedRows = next(packer.batches(split, count))
        return {name: getattr(batch, name) for name in ("tokens", "positions", "segments")}

    # Every 16th row: many modules, not the first two.
    test = {name: value[::16] for name, value in rows("heldout", 256).items()}
    unigram, _, trigram = ngram_losses(rows("train", 1500), test, demo.config.vocab_size)
    loss = evaluate(demo.config, demo.params, test, batch=16)
    assert loss < unigram - 1.5
    assert loss < trigram - 0.3
