"""What is on disk counts as done by what it was made from, and not by its name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saejax.core.errors import DataError
from saejax.runs.made import differing, digest, existing, made


def test_an_artifact_is_made_once_for_each_content(tmp_path: Path) -> None:
    path, calls, said = tmp_path / "below" / "figures.json", [], []

    def make(of: dict[str, Any], redo: bool = False) -> dict[str, Any]:
        def figures() -> dict[str, Any]:
            calls.append(of)
            return {"figure": len(calls)}

        return made(path, of, figures, redo, "figures", said.append)

    one, other = {"sha256": digest("a"), "bar": np.inf}, {"sha256": digest("b"), "bar": np.inf}
    assert make(one) == make(one) == json.loads(path.read_text())
    assert len(calls) == 1 and said == [f"figures: already done, {path}"]
    with pytest.raises(DataError, match=rf"{path} was made from something else \(sha256: .*--redo") as caught:
        make(other)
    assert len(str(caught.value).splitlines()) == 1 and json.loads(path.read_text())["figure"] == 1
    assert make(other, redo=True)["figure"] == 2 and existing(path, other) == make(other)
    path.write_text(json.dumps({"bar": None, "figure": 7}))
    with pytest.raises(DataError, match="sha256: None -> "):
        make(one)
    path.write_text("[]")
    with pytest.raises(DataError, match="not an object"):
        make(one)


def test_digests_are_of_content_place_and_kind() -> None:
    x = np.arange(6.0)
    others = x.reshape(2, 3), x[::-1], x.astype(np.float32), "text", ("te", "xt"), ["te", "xt"]
    assert len({digest(x), *map(digest, others)}) == 1 + len(others)
    assert digest(x[::2]) == digest(x[::2].copy()) and digest("a", x) != digest(x, "a")
    assert differing({"a": {"b": 1}}, {"a": {"b": 2}}) == ["a.b: 1 -> 2"]
