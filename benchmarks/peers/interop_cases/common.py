"""Weights in no special position, and the folder that the cases are written to with what the peer computes."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

D_IN, D_OUT, D_SAE, K, N = 14, 12, 44, 8, 12
MODEL = "gpt2"


def weights(seed: int, d_in: int = D_IN, d_sae: int = D_SAE, d_out: int | None = None) -> dict[str, torch.Tensor]:
    """Every tensor that a format may ask for, float32: W_enc [d_in, d_sae], W_dec [d_sae, d_out], W_skip [d_out, d_in].

    Decoder rows have lengths from 0.2 to 5, biases are not zero. Thresholds: one is 0, one negative, one large, one
    never reached. Latents 5 and 6 see no input: the first one's pre-activation is its threshold exactly (off), the
    second one's is 0.001 above it (on). Few biases are positive, so that a token near the origin has fewer than K
    positive pre-activations.
    """
    rng, d_out = np.random.default_rng(seed), d_out or d_in
    w = {
        "W_enc": rng.normal(size=(d_in, d_sae)) * 0.35,
        "W_dec": rng.normal(size=(d_sae, d_out)) * np.exp(rng.normal(size=(d_sae, 1)) * 0.5) / np.sqrt(d_out),
        "b_enc": rng.normal(size=d_sae) * 0.3 - 0.5,
        "b_dec": rng.normal(size=d_out) * 0.4,
        "threshold": np.abs(rng.normal(size=d_sae)) * 0.5 + 0.05,
        "W_skip": rng.normal(size=(d_out, d_in)) * 0.3,
        "r_mag": rng.normal(size=d_sae) * 0.3,
        "b_mag": rng.normal(size=d_sae) * 0.3,
    }
    w["W_enc"][:, [5, 6]] = 0.0
    w["b_enc"][[5, 6]] = 0.5, 0.501
    w["threshold"][[0, 1, 2, 3, 5, 6]] = 0.0, -0.2, 2.5, 50.0, 0.5, 0.5
    return {name: torch.tensor(a, dtype=torch.float32) for name, a in w.items()}


def inputs(seed: int, d_in: int = D_IN, centre: torch.Tensor | None = None, layers: int = 0) -> torch.Tensor:
    """Activations [N, d_in] (or [N, layers, d_in]); the first is `centre` (b_dec), the second nearly zero."""
    rng = np.random.default_rng(1000 + seed)
    shape = (N, layers, d_in) if layers else (N, d_in)
    x = torch.tensor(rng.normal(size=shape) * 1.2, dtype=torch.float32)
    x[1] *= 0.01
    if centre is not None:
        x[0] = centre
    return x


def fill(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Puts the tensors into the parameters of those names, all of which the module must have."""
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    with torch.no_grad():
        for name, tensor in tensors.items():
            held[name].copy_(tensor)


@dataclasses.dataclass
class Fixtures:
    """The folder of all cases, and its index.

    Attributes:
        root: tests/fixtures/interop.
        rows: what index.json will hold.
    """

    root: Path
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def folder(self, format: str, case: str, inside: str = "files") -> Path:
        """Where the peer is to write the case, empty."""
        place = self.root / format / case
        shutil.rmtree(place, ignore_errors=True)
        (place / inside).mkdir(parents=True)
        return place / inside

    def add(
        self,
        folder: Path,
        peer: str,
        *,
        topology: str,
        sparsity: str,
        hooks_in: list[str],
        hooks_out: list[str] | None = None,
        model: str | None = MODEL,
        arrays: dict[str, torch.Tensor] | None = None,
        refuse: str | None = None,
        note: str | None = None,
    ) -> None:
        """Writes expected.npz beside what the peer wrote at `folder` (or the file there), and a row of the index.

        Args:
            arrays: x, latents, reconstructions as the peer's inference path gives them; more as `note` says.
            refuse: why saejax refuses it.
        """
        format, case = folder.relative_to(self.root).parts[:2]
        expected = None
        if arrays is not None:
            expected = f"{format}/{case}/expected.npz"
            held = {name: a.detach().to(torch.float32).numpy() for name, a in arrays.items()}
            if not all(np.isfinite(a).all() for a in held.values()):
                raise ValueError(f"{format}/{case}: the peer's numbers are not finite")
            np.savez_compressed(self.root / expected, **held)
        name, version = peer.split("==")
        self.rows.append(
            {
                "format": format,
                "case": case,
                "path": str(folder.relative_to(self.root)),
                "peer": name,
                "version": version,
                "model": model,
                "hooks_in": hooks_in,
                "hooks_out": hooks_out or hooks_in,
                "topology": topology,
                "sparsity": sparsity,
                "expected": expected,
                "refuse": refuse,
                "note": note,
            }
        )

    def write_index(self) -> None:
        text = ",\n".join(json.dumps(row) for row in self.rows)
        (self.root / "index.json").write_text(f"[\n{text}\n]\n")


def few_positive(pre: torch.Tensor, k: int = K) -> None:
    """Raises unless some token has fewer than k positive pre-activations, and another more."""
    positive = (pre > 0).sum(-1)
    if not (positive.min() < k < positive.max()):
        raise ValueError(f"positive pre-activations by token: {positive.tolist()}, k {k}")
