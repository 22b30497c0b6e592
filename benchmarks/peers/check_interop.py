"""What the peers' own loaders make of dictionaries that saejax wrote in their formats.

    build/peers-venv/bin/python benchmarks/peers/check_interop.py <folder> [--llamascopium=<checkout>]

benchmarks/interop.py writes the folder and calls this. <folder>/<format>/<coder>/ holds the files, expected.npz (x,
latents, reconstructions by saejax, of one coder or of a set of them: [coders, N, ...]) and case.json (where the coders
of the set are). Prints a table, coder x format: the largest difference over the largest entry, of latents and of
reconstructions. Exits with 1 where one is above 1e-5.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import stand_ins  # before the peers

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch

LIMIT = 1e-5
# (latents, reconstructions) of the coders at `places`, for x [coders, N, ...]
Numbers = tuple[torch.Tensor, torch.Tensor]


def saelens(places: Sequence[Path], x: torch.Tensor) -> Numbers:
    from sae_lens import SAE

    out = []
    for place, rows in zip(places, x, strict=True):
        sae = SAE.load_from_disk(place).eval()
        if sae.hook_z_reshaping_mode:
            sae.turn_off_forward_pass_hook_z_reshaping()
        out.append((sae.encode(rows), sae(rows)))
    return _stacked(out)


def sparsify(places: Sequence[Path], x: torch.Tensor) -> Numbers:
    from interop_cases.sparsify_ import expected
    from sparsify import SparseCoder

    got = [expected(SparseCoder.load_from_disk(place), rows) for place, rows in zip(places, x, strict=True)]
    return _stacked([(one["latents"], one["reconstructions"]) for one in got])


def dictionary_learning(places: Sequence[Path], x: torch.Tensor) -> Numbers:
    from dictionary_learning.utils import load_dictionary

    out = []
    for place, rows in zip(places, x, strict=True):
        latents = (coder := load_dictionary(str(place), "cpu")[0]).encode(rows)
        out.append((latents, coder.decode(latents)))
    return _stacked(out)


def circuit_tracer(places: Sequence[Path], x: torch.Tensor) -> Numbers:
    """A set of per-layer transcoders is one model of circuit-tracer's, and so is a cross-layer transcoder."""
    from interop_cases.circuit_tracer_ import expected

    folder = places[0] if places[0].is_dir() else places[0].parent
    by_token = x[0] if x.ndim == 4 else x.transpose(0, 1)
    got = expected(folder, by_token)
    out = [got[name] for name in ("latents", "reconstructions")]
    latents, reconstructions = (a[None] if x.ndim == 4 else a.transpose(0, 1) for a in out)
    return latents, reconstructions


def gemma_scope(places: Sequence[Path], x: torch.Tensor) -> Numbers:
    """Version 1, through SAELens' converter; the folder is called as on the hub."""
    return _hub(places, x, "gemma_2", 4, d_in=x.shape[-1], d_sae=_width(places[0]))


def gemma_scope_2(places: Sequence[Path], x: torch.Tensor) -> Numbers:
    return _hub(places, x, "gemma_3", 3)


def llama_scope(places: Sequence[Path], x: torch.Tensor) -> Numbers:
    from interop_cases.llama_scope import as_used, modules

    got = [as_used(modules(), place, rows, rows.ndim == 3) for place, rows in zip(places, x, strict=True)]
    return _stacked([(one["latents"], one["reconstructions"]) for one in got])


def _width(place: Path) -> int:
    with np.load(place / "params.npz") as held:
        return len(held["b_enc"])


def _hub(places: Sequence[Path], x: torch.Tensor, loader: str, depth: int, **settings: object) -> Numbers:
    """`depth` folders up from a place is what stands for the hub: repository/path/of/the/place."""
    from interop_cases.gemma_scope import LocalHub, through_saelens

    out = []
    for place, rows in zip(places, x, strict=True):
        root = place.parents[depth - 1]
        repo, path = place.relative_to(root).parts[0], "/".join(place.relative_to(root).parts[1:])
        sae = through_saelens(LocalHub(root), loader, repo, path, **settings)
        out.append((sae.encode(rows), sae(rows)))
    return _stacked(out)


def _stacked(pairs: Sequence[Numbers]) -> Numbers:
    latents, reconstructions = zip(*pairs, strict=True)
    return torch.stack(latents), torch.stack(reconstructions)


LOADERS: dict[str, Callable[[Sequence[Path], torch.Tensor], Numbers]] = {
    function.__name__: function
    for function in (saelens, sparsify, dictionary_learning, circuit_tracer, gemma_scope, gemma_scope_2, llama_scope)
}


def differences(case: Path, format: str) -> tuple[float, float]:
    """(of latents, of reconstructions); infinite where something is not finite or has another shape."""
    places = [case / place for place in json.loads((case / "case.json").read_text())["places"]]
    with np.load(case / "expected.npz") as held:
        x, wanted = torch.from_numpy(held["x"]), [held[name] for name in ("latents", "reconstructions")]
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        got = [a.numpy().astype(np.float64) for a in LOADERS[format](places, x)]
    return tuple(_apart(a, b) for a, b in zip(got, wanted, strict=True))


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape or not np.isfinite(a).all():
        return float("inf")
    return float(np.abs(a - b).max() / np.abs(b).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llamascopium", type=Path, help="a checkout of OpenMOSS/Language-Model-SAEs")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    if asked.llamascopium:
        import interop_cases.llama_scope as llama

        llama.checkout = asked.llamascopium
    cases = sorted(path.parent for path in asked.folder.glob("*/*/case.json"))
    skipped = set() if asked.llamascopium else {"llama_scope"}
    formats = sorted({case.parent.name for case in cases if case.parent.name in LOADERS} - skipped)
    coders, found, good = sorted({case.name for case in cases}), {}, True
    for case in cases:
        if case.parent.name in formats:
            found[case.name, case.parent.name] = apart = differences(case, case.parent.name)
            good &= max(apart) <= LIMIT
    peers = ("sae-lens", "dictionary-learning", "eai-sparsify", "circuit-tracer", "torch")
    versions = [f"{peer} {stand_ins.version(peer)}" for peer in peers]
    versions += [f"llamascopium {llama.VERSION}"] if asked.llamascopium else []
    print(f"{', '.join(versions)}.\n")
    print("| coder | " + " | ".join(formats) + " |\n|---|" + "---|" * len(formats))
    for coder in coders:
        cells = [found.get((coder, format)) for format in formats]
        shown = [" / ".join(f"{a:.0e}" for a in apart) if apart else "-" for apart in cells]
        if any(cells):
            print(f"| {coder.replace('_', ' ')} | {' | '.join(shown)} |")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
