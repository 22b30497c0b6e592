"""What a study refuses before it computes, each in one line that names the thing, the value and the remedy."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny.studies import READS, WRITES, dictionary, never, small

from saejax.app.experiment import experiment
from saejax.core.errors import ConfigError, DataError, SaejaxError
from saejax.studies.behaviours import Pair, as_jsonl
from saejax.studies.run import run_study
from saejax.studies.table import Table

GOOD = Pair("data[x", "data(x", "]", ")")


def lines(*pairs: Pair) -> bytes:
    return as_jsonl(pairs).encode()


def changed(**parts: str) -> bytes:
    return lines(dataclasses.replace(GOOD, **parts))


# --- files of pairs ------------------------------------------------------------------------------------------------

FILES: dict[str, tuple[bytes, str]] = {
    "a key is missing": (b'{"clean": "a", "corrupt": "b", "right": "c"}', r"line 1 has no text 'wrong'; a line is"),
    "a value is a number": (b'{"clean": 1}', r"line 1 has no text 'clean'"),
    "a list": (lines(GOOD) + b"[]", r"line 2 has no text 'clean'"),
    "no JSON": (lines(GOOD) + b"x", r"line 2 is not JSON"),
    "deep": (b"[" * 10**4, r"line 1 is not JSON"),
    "an empty prompt": (lines(GOOD) + b'{"clean": "", "corrupt": "b"}', r"line 2 has an empty 'clean'"),
    "empty": (b"", r"holds no pair; write one"),
    "blank lines": (b"\n \n", r"holds no pair; write one"),
    "not UTF-8": (lines(GOOD) + b'{"clean": "\xff"}', r"line 2 is not UTF-8"),
    "half a letter": (lines(GOOD).replace(b"data[x", b"\\ud800"), r"line 1 has half of a surrogate pair in 'clean'"),
    "a huge line": (b'{"clean": "' + b"a" * 70_000 + b'"}', r"line 1 has 70,013 bytes, and a pair at most 65,536"),
    "an answer of several tokens": (
        changed(right="] and more"),
        r"0 of 1 different ones in .*mine.jsonl can be compared. The first that cannot: the answer '\] and more' has "
        r"3 tokens, not one. Lower study.train_pairs",
    ),
    "equal answers": (changed(wrong="]"), r"cannot: both answers are '\]'"),
    "prompts of different length": (
        changed(corrupt="my data(x"),
        r"cannot: 'data\[x' has 3 tokens and 'my data\(x' has",
    ),
    "equal prompts": (changed(corrupt="data[x"), r"cannot: both prompts are 'data\[x'"),
    "a prompt longer than the model reads": (
        changed(clean="x " * 2000 + "[", corrupt="x " * 2000 + "("),
        r"cannot: 'x x x .*\.\.\.' has \d+ tokens, and the model reads \d+",
    ),
    "too few": (lines(GOOD), r"4 \+ 4 pairs are wanted, and 1 of 1 different ones in .* can be compared. Lower"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_of_pairs(case: str, tmp_path: Path) -> None:
    content, message = FILES[case]
    (tmp_path / "mine.jsonl").write_bytes(content)
    refused(small(tmp_path, behaviours=(f"mine={tmp_path}/mine.jsonl",)), DataError, message)


def refused(config: Any, kind: type[SaejaxError], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        run_study(experiment(config))
    assert "\n" not in str(caught.value)
    assert not (Path(config.runs_dir) / "mine" / "study" / "graphs").exists()


# --- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"behaviours": ("brackets",)}, r"No behaviour 'brackets'; there are bracket, .*name=pairs.jsonl"),
        ({"behaviours": ()}, r"study\.behaviours is empty: name one"),
        ({"behaviours": ("bracket", "bracket")}, r"names 'bracket' twice; names must differ"),
        ({"behaviours": ("../x=a.jsonl",)}, r"names '\.\./x'; a name is at most 80 of A-Z"),
        ({"behaviours": ("my own=a.jsonl",)}, r"names 'my own'; a name is"),
        ({"groups": 0}, r"study\.groups is 0"),
        ({"controls": -1}, r"study\.controls is -1"),
        ({"positions": 0}, r"study\.positions is 0"),
        ({"test_pairs": 1}, r"study\.test_pairs is 1"),
        ({"least_accuracy": 1.5}, r"study\.least_accuracy is 1\.5"),
        ({"positons": 3}, r"config\.study\.positons.*Did you mean 'positions'"),
    ],
)
def test_settings(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(small(tmp_path, **settings), ConfigError, message)


# --- dictionaries --------------------------------------------------------------------------------------------------

RESIDUALS = ("blocks.0.resid_post", "blocks.1.resid_post")


def _another_model(folder: Path) -> None:
    dictionary(folder, model="gpt2")


def _crosscoder(folder: Path) -> None:
    dictionary(folder, "crosscoder", RESIDUALS, RESIDUALS)


def _layernorm(folder: Path) -> None:
    dictionary(folder, "layernorm_autoencoder", RESIDUALS[:1], RESIDUALS[:1])


def _backwards(folder: Path) -> None:
    dictionary(folder, "transcoder", READS[1:], WRITES[:1])


def _nowhere(folder: Path) -> None:
    dictionary(folder, "transcoder", ("blocks.9.mlp_in",), ("blocks.9.mlp_out",))


def _twice(folder: Path) -> None:
    for name in ("a", "b"):
        dictionary(folder / name, "transcoder", READS[:1], WRITES[:1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_another_model, r"is of the model 'gpt2'; the graph is of 'demo'"),
        (_crosscoder, r"cannot be a part of an attribution graph: one latent of it reads several hook points"),
        (_layernorm, r"cannot be a part of an attribution graph: it divides by its input's standard deviation"),
        (_backwards, r"writes blocks\.0\.mlp_out before the model has computed what it reads, blocks\.1\.mlp_in"),
        (_nowhere, r"blocks\.9\.mlp_in"),
        (_twice, r"Two dictionaries write blocks\.0\.mlp_out"),
        (lambda folder: None, r"clt does not exist\. Give a run"),
    ],
)
def test_dictionaries(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    """Before anything of the model is run."""
    make(tmp_path / "clt")
    refused(small(tmp_path), SaejaxError, message)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("coder", "message"),
    [
        ({"preset": "crosscoder"}, "cannot be a part of an attribution graph: one latent"),
        ({"preset": "topk"}, r"Two dictionaries write blocks\.0\.resid_post"),
    ],
)
def test_dictionaries_that_are_to_be_trained(coder: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Before hours of capture and training."""
    c = small(tmp_path, dictionaries=())
    c.capture.hook_points, c.coder.preset, c.stores_dir = RESIDUALS, coder["preset"], str(tmp_path / "stores")
    if coder["preset"] == "topk":
        c.sweep.seeds, c.hook_point = (0, 1), RESIDUALS[0]
    refused(c, ConfigError, message)
    assert not (tmp_path / "stores").exists()


# --- folders that hold something -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study whose behaviours were refused behind its baseline; error.txt holds what it said."""
    folder = tmp_path_factory.mktemp("begun")
    dictionary(folder / "clt")
    with pytest.raises(DataError) as caught:
        run_study(experiment(_settings(folder, folder)))
    (folder / "error.txt").write_text(str(caught.value))
    return folder


def _settings(folder: Path, pairs: Path) -> Any:
    return small(folder, behaviours=("argument", never(pairs, 44)), least_accuracy=1.0, train_pairs=40)


def _in(begun: Path, tmp_path: Path) -> tuple[Any, Path]:
    shutil.copytree(begun, tmp_path / "copy")
    return _settings(tmp_path / "copy", begun), tmp_path / "copy" / "runs" / "mine" / "study"


def test_behaviours_none_of_which_the_model_has(begun: Path) -> None:
    said = (
        r"right for argument in \d+%, never in 0%, and study.least_accuracy is 100%. Take other .*baseline.csv has each"
    )
    error = (begun / "error.txt").read_text()
    assert re.search(said, error) and "\n" not in error


def test_results_of_another_study_are_kept_and_refused(begun: Path, tmp_path: Path) -> None:
    c, folder = _in(begun, tmp_path)
    (folder / "graphs").mkdir()
    before = (folder / "baseline.csv").read_bytes()
    for settings in ({"controls": 3}, {"behaviours": ("bracket",)}, {"train_pairs": 5}):
        other = c.copy_and_resolve_references()
        other.study.update(settings)
        with pytest.raises(DataError, match=r"holds another study \(.*->.*\)\. Choose another --config.name, rest"):
            run_study(experiment(other))
    c.seed = 7
    with pytest.raises(DataError, match=r"holds another study \(seed: 0 -> 7; pairs\.argument"):
        run_study(experiment(c))
    assert (folder / "baseline.csv").read_bytes() == before


def test_a_baseline_without_graphs_is_begun_anew(
    begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    c, folder = _in(begun, tmp_path)
    c.study.behaviours, c.study.train_pairs = (never(tmp_path),), 4
    with pytest.raises(DataError, match="right for never in 0%"):
        run_study(experiment(c))
    assert "it is begun anew" in capsys.readouterr().out
    rows = (folder / "baseline.csv").read_text().splitlines()[1:]
    assert len(rows) == 8 and all(row.startswith("never,") for row in rows)
    assert sorted(path.name for path in (folder / "pairs").iterdir()) == ["never.test.jsonl", "never.train.jsonl"]


def test_results_of_nobody_knows_which_study_are_refused(begun: Path, tmp_path: Path) -> None:
    c, folder = _in(begun, tmp_path)
    (folder / "study.json").unlink()
    with pytest.raises(DataError, match=r"holds pairs, baseline.csv and no study.json, which says of which study"):
        run_study(experiment(c))
    (folder / "study.json").write_text("[]")
    with pytest.raises(DataError, match=r"study.json is damaged: it holds a list, not an object"):
        run_study(experiment(c))


def test_other_dictionaries_are_refused(begun: Path, tmp_path: Path) -> None:
    c, folder = _in(begun, tmp_path)
    content = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(content | {"dictionaries": {"clt": "0" * 64}}))
    c.study.least_accuracy = 0.0
    with pytest.raises(DataError, match=r"holds another study \(dictionaries\.clt: '0000.* -> .*\)"):
        run_study(experiment(c))


# --- tables --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x,y\n1,2\n", r"a\.csv is not the table of name, value\. Move it away"),
        (b"", r"is not the table"),
        (b"name,value\na,1\nb\n", r"a\.csv, line 3 is damaged: it must have name, value\. Delete the file"),
        (b"name,value\na,1,2\n", r"line 2 is damaged"),
        (b'name,value\na,"1\n', r"line 2 is damaged"),
        (b"name,value\na,one\n", r"line 2 is damaged"),
        (b"name,value\n\xff,1\n", r"line 2 is damaged"),
    ],
)
def test_damaged_tables(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    table = Table(tmp_path / "a.csv", ("name", "value"))
    with pytest.raises(DataError, match=message):
        table.numbers("value", table.read())


def test_a_table_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.csv does not exist"):
        Table(tmp_path / "a.csv", ("name",)).read()
