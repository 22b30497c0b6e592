"""The walk from the stage `train` to the gradient of a step: which modules hand a training on."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tiny.doors import of_door, stage, write_stores

from saejax.coders import Coder

MOST = 12


def walked(frame: FrameType | None) -> list[str]:
    """Modules of saejax on the stack of a frame, the outermost first, each once."""
    names: list[str] = []
    while frame is not None:
        names.append(str(frame.f_globals.get("__name__", "")))
        frame = frame.f_back
    return list(dict.fromkeys(name for name in reversed(names) if name.startswith("saejax.")))


def test_a_training_passes_few_modules_from_the_stage_to_the_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stores(tmp_path)
    seen: list[list[str]] = []
    loss = Coder.loss_of_part

    def watched(self: Coder, *args: Any, **kwargs: Any) -> Any:
        seen.append(walked(sys._getframe(1)))
        return loss(self, *args, **kwargs)

    monkeypatch.setattr(Coder, "loss_of_part", watched)
    stage(of_door(tmp_path, tmp_path, train={"tokens": 2 * 128}))
    way = max(seen, key=len)
    assert way[0] == "saejax.app.stages.train" and way[-1] == "saejax.training.step", way
    assert len(way) <= MOST, way
