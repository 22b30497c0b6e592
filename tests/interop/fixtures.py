"""Small dictionaries that the peers' own code wrote, with what it computes from them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import saejax
from saejax.trained import TrainedCoder

ROOT = Path(__file__).resolve().parents[1] / "fixtures" / "interop"


def cases(format: str) -> list[dict[str, Any]]:
    """The rows of index.json of one format: case, path, model, hooks_in, hooks_out, topology, sparsity, refuse, ..."""
    return [case for case in json.loads((ROOT / "index.json").read_text()) if case["format"] == format]


def read(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [case for case in cases if not case["refuse"]]


def refused(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [case for case in cases if case["refuse"]]


def name(case: dict[str, Any]) -> str:
    return case["case"]


def path(case: dict[str, Any]) -> Path:
    return ROOT / case["path"]


def copied(case: dict[str, Any], to: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(path(case), to))


def load(case: dict[str, Any], hook_points: Sequence[str] = ()) -> TrainedCoder:
    return saejax.load(path(case), hook_points=hook_points)


def check(sae: TrainedCoder, case: dict[str, Any]) -> None:
    """Latents and reconstructions are the peer's, to 1e-5 of the largest entry (16-bit peers: of their rounding)."""
    with np.load(ROOT / case["expected"]) as expected:
        x, latents, reconstructions = (expected[key] for key in ("x", "latents", "reconstructions"))
    mine = sae.encode(x)
    assert (latents != 0).any()
    bits = 4e-2 if any("16 bits" in note for note in sae.origin.notes) else 1e-5
    for here, there in ((mine, latents), (sae.decode(mine, x), reconstructions)):
        assert here.shape == there.shape
        np.testing.assert_allclose(here, there, rtol=0, atol=bits * np.abs(there).max())
