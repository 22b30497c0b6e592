"""`saejax convert` and `saejax formats`, as a user runs them."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny.commands import run_command

import saejax
from saejax.app.dictionaries import distinct
from saejax.commands import COMMANDS
from saejax.core.errors import ConfigError, DataError
from saejax.interop import FORMATS
from saejax.interop.assemble import coder_kind
from saejax.interop.table import examples
from saejax.trained import Format

CODERS = {coder_kind(sae): sae for sae in examples()}


def convert(*words: str | Path, to: str = "saelens", step: int | str | None = None) -> None:
    run_command("convert", words, to=to, **({} if step is None else {"step": str(step)}))


def test_one_goes_into_the_folder_several_into_folders_of_their_own(tmp_path: Path) -> None:
    sae = CODERS["autoencoder", "topk"]
    for name in ("one/x", "two/x", "two/y"):
        sae.save(tmp_path / "own" / name)
    convert(tmp_path / "own" / "one", tmp_path / "a")
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["cfg.json", "sae_weights.safetensors"]
    convert(tmp_path / "own", tmp_path / "b")
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["one-x", "two-x", "y"]
    convert(tmp_path / "a", tmp_path / "c", to="saejax")
    back = saejax.load(tmp_path / "c")
    assert all(np.array_equal(back.params[name], sae.params[name]) for name in sae.params)
    assert back.sites == sae.sites


def test_no_two_are_written_into_one_folder(tmp_path: Path) -> None:
    """Parts of paths that are joined may be called as another path is."""
    kinds = {"x/a-b": "relu", "y/a/b": "topk", "z/b": "gated"}
    for place, sparsity in kinds.items():
        CODERS["autoencoder", sparsity].save(tmp_path / place)
    convert(*(tmp_path / place for place in kinds), tmp_path / "out", to="saejax")
    back = sorted(saejax.load(path).describe()["sparsity"]["name"] for path in (tmp_path / "out").iterdir())
    assert back == sorted(kinds.values())


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", "a", "a-1"], ["a-1", "a", "a", "a-2"], ["a-0-0", "a", "a"]])
def test_names_that_are_told_apart_all_differ(names: list[str]) -> None:
    found = distinct(names)
    assert len(set(found)) == len(names) and all(one.startswith(name) for one, name in zip(found, names, strict=True))
    assert [one for one, name in zip(found, names, strict=True) if names.count(name) == 1] == [
        name for name in names if names.count(name) == 1
    ]


def test_a_run_is_converted_at_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.random.default_rng(0).normal(size=(512, 8)).astype(np.float32)
    saejax.train(x, "batchtopk", k=2, d_sae=16, batch_size=64, tokens=512, run=tmp_path / "run", checkpoint_every=4)
    convert(tmp_path / "run", tmp_path / "out", step=4)
    written = json.loads((tmp_path / "out" / "cfg.json").read_text())
    assert (written["architecture"], written["d_sae"]) == ("jumprelu", 16)
    there, here = saejax.load(tmp_path / "out"), saejax.load(tmp_path / "run", step=4)
    np.testing.assert_array_equal(there.encode(x), here.encode(x))
    out = capsys.readouterr().out
    assert "Read back: latents differ by 0e+00" in out
    (again,) = saejax.convert(tmp_path / "run", tmp_path / "out", "saelens", step=4)
    assert (
        out.endswith(f"\n{again!r}\n") and again.notes[-1].startswith("Read back") and again.folder == tmp_path / "out"
    )


def test_nothing_is_written_where_one_cannot_be_said(tmp_path: Path) -> None:
    CODERS["autoencoder", "relu"].save(tmp_path / "own" / "a")
    CODERS["crosscoder", "relu"].save(tmp_path / "own" / "b")
    with pytest.raises(ConfigError, match=r"b cannot be written for SAELens.*It can be for: saejax"):
        convert(tmp_path / "own", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "to", [name for name, form in FORMATS.items() if form.sets and type(form).write is not Format.write]
)
def test_one_folder_of_several_dictionaries_is_of_one_model(to: str, tmp_path: Path) -> None:
    """For every format that collects dictionaries in a folder; apart they may be of any."""
    sae = next(sae for sae in CODERS.values() if not FORMATS[to].refuses(sae))
    for model in ("gpt2", "pythia"):
        own = dataclasses.replace(sae, origin=dataclasses.replace(sae.origin, model=model))
        own.save(tmp_path / "own" / model)
    with pytest.raises(ConfigError, match=r"gpt2 is of the model gpt2, and .*pythia of pythia. Give those of one"):
        convert(tmp_path / "own", tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()
    convert(tmp_path / "own", tmp_path / "apart", to="saejax")


@pytest.mark.parametrize(
    ("words", "to", "message"),
    [
        (["a"], "saelens", "source and a destination"),
        (["a", "b"], "", r"Say into which format: --to=saejax, --to=.*--to=saelens(?!.*openai)"),
        (["a", "b"], "saelense", "Did you mean|saelens"),
        (["a", "a", "b"], "saelens", "given twice"),
        (["nowhere", "b"], "saelens", "nowhere does not exist"),
    ],
)
def test_wrong_lines_are_answered(words: list[str], to: str, message: str, tmp_path: Path) -> None:
    CODERS["autoencoder", "relu"].save(tmp_path / "a")
    with pytest.raises((ConfigError, DataError), match=message):
        convert(*(tmp_path / word for word in words), to=to)


def test_formats_prints_all_and_one(capsys: pytest.CaptureFixture[str]) -> None:
    run_command("formats", [])
    table = capsys.readouterr().out
    assert all(f"{form.name}: {form.title}" in table for form in FORMATS.values())
    run_command("formats", ["saelens"])
    one = capsys.readouterr().out
    assert "SAELens has no crosscoder" in one
    for wrong in ("nonsense", "saelense"):
        with pytest.raises(ConfigError, match=f"no format '{wrong}'") as caught:
            run_command("formats", [wrong])
        assert str(caught.value).count("circuit_tracer") == 1


def test_the_class_alone_knows_all_formats(tmp_path: Path) -> None:
    """`from saejax import TrainedCoder` and nothing else: formats are those of `saejax formats`."""
    CODERS["autoencoder", "topk"].save(tmp_path / "own")
    code = "from saejax import TrainedCoder; TrainedCoder.from_folder('own').save('out', format='saelens')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert coder_kind(saejax.load(tmp_path / "out")) == ("autoencoder", "topk")


@pytest.mark.ci
def test_as_a_process(tmp_path: Path) -> None:
    CODERS["skip_transcoder", "jumprelu"].save(tmp_path / "own")
    line = [sys.executable, "-m", "saejax", "convert", "own", "out", "--to=saelens"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "own -> out (saelens)" in done.stdout
    assert {"convert", "formats"} <= COMMANDS.keys()
    wrong = subprocess.run(line[:-1], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: Say into which format")
