"""Optional packages that are not there are refused with the configuration, and not after hours of work."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import planted_experiment, replaced, tiny_experiment

from saejax.app import extras
from saejax.app.extras import refuse_missing
from saejax.app.stages import run_capture, run_pipeline, run_train
from saejax.app.sweep.run import run_sweep
from saejax.app.workspace import Workspace
from saejax.core.errors import ConfigError


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a package one that is not installed, and all others installed."""
    return lambda name: monkeypatch.setattr(extras, "_is_there", lambda package: package != name)


def test_a_package_is_looked_for_and_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert extras._is_there("numpy") and not extras._is_there("no_such_package_of_anybody")
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert not extras._is_there("numpy")


@pytest.mark.parametrize(
    ("package", "sections", "part", "said"),
    [
        ("gguf", {"lm": {"model": "a/b.GGUF"}}, "lm", r"lm.model='a/b.GGUF'.*pip install 'gguf"),
        ("gguf", {"lm": {"second": "b.gguf"}}, "lm", r"lm.second='b.gguf'.*pip install 'gguf"),
        ("tensorboardX", {"train": {"tensorboard": True}}, "train", "tensorboard=True.*pip install 'tensorboardX"),
        ("wandb", {"train": {"wandb": True}}, "train", "train.wandb=True.*pip install 'wandb"),
        ("datasets", {"text": {"source": "hub", "dataset": "a/b"}}, "text", "text.source='hub'.*pip install 'datasets"),
        ("pyarrow", {"text": {"source": "files", "paths": ("x",)}}, "text", "b.parquet'.*pip install 'datasets"),
        ("zstandard", {"text": {"source": "prompts", "paths": ("x",)}}, "text", "c.txt.zst'.*pip install 'datasets"),
        (
            "jinja2",
            {"text": {"source": "files", "paths": ("x",), "chat": True}},
            "text",
            "text.chat=True.*pip install 'jinja2",
        ),
        ("torch", {"lm": {"backend": "torch"}}, "lm", "lm.backend='torch'.*pip install 'torch"),
        (
            "pyarrow",
            {"text": {"sources": ({"source": "files", "paths": ("x",)},)}},
            "text",
            "b.parquet'.*pip install 'datasets",
        ),
    ],
)
def test_each_extra_is_asked_for_by_its_setting(
    package: str, sections: Any, part: Any, said: str, tmp_path: Path, without: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").mkdir()
    for name in ("a.jsonl", "b.parquet", "c.txt.zst"):
        (tmp_path / "x" / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(extras, "refuse_no_login", lambda: None)
    e = tiny_experiment(tmp_path, **sections)
    without("")
    refuse_missing(e, "text", "lm", "train")
    without(package)
    refuse_missing(e, *{"text", "lm", "train"} - {part})
    refuse_missing(tiny_experiment(tmp_path), "text", "lm", "train")
    with pytest.raises(ConfigError, match=rf"{said}"):
        refuse_missing(e, part)


@pytest.mark.parametrize("run", [run_pipeline, run_sweep, run_train])
def test_nothing_is_captured_or_written_before(run: Any, tmp_path: Path, without: Any) -> None:
    """tensorboardX was missed when the training began: after the capture, and in a folder that was its by then."""
    e = planted_experiment(tmp_path, "board", tensorboard=True)
    e = replaced(e, "sweep", lrs=(1e-3, 2e-3)) if run is run_sweep else e
    without("tensorboardX")
    with pytest.raises(ConfigError, match=r"train\.tensorboard=True needs the package tensorboardX: pip install"):
        run(Workspace(e))
    assert not (e.run_dir / "config.json").exists()


def test_a_capture_asks_for_what_it_reads_alone(tmp_path: Path, without: Any) -> None:
    without("datasets")
    e = tiny_experiment(tmp_path, text={"source": "hub", "dataset": "a/b"}, train={"tensorboard": True})
    with pytest.raises(ConfigError, match="needs the package datasets"):
        run_capture(Workspace(e))
    assert not (tmp_path / "stores").exists()
