"""Dictionaries there and back: ours read by the peers' own loaders, the peers' read by us.

    python -m benchmarks.interop [--peers=build/peers-venv/bin/python] [--llamascopium=<checkout>]
        [--output=benchmarks/interop.md]

Writes one coder of each topology and sparsity in every format that can say it; benchmarks/peers/check_interop.py loads
it in the peers' environment. Then reads every dictionary of tests/fixtures/interop, which the peers' own code wrote
together with what it computes. Exits with 1 where latents or reconstructions differ by more than 1e-5 of the largest
entry.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

import saejax
from saejax.core.errors import SaejaxError
from saejax.interop import FORMATS
from saejax.interop.assemble import coder_kind
from saejax.interop.table import examples
from saejax.trained import Format, Origin, TrainedCoder, coder_of, sites_of

D, F, K, N = 64, 256, 16, 256
LIMIT = 1e-5
PEERS = Path(__file__).parent / "peers"
FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures" / "interop"
# Gemma Scope's files are found by the names of their folders.
_INSIDE = {"gemma_scope": "gemma-scope-2b-pt-res/layer_0/width_16k/average_l0_20"}


def a_coder(example: TrainedCoder, seed: int, layer: int = 0) -> TrainedCoder:
    """A coder of the example's kind: decoder rows of different lengths, biases and thresholds in no special position.

    Thresholds are not below 0, and few biases are above it: some tokens keep fewer latents than k.
    """
    described = example.describe() | {"d_in": D, "d_sae": F, "d_out": D}
    described["sparsity"] = described["sparsity"] | ({"k": K} if "k" in described["sparsity"] else {})
    for side in ("reads", "writes"):
        described[side] = [name.replace("blocks.0", f"blocks.{layer}") for name in described[side]]
    if layer == 0:
        described["reads"], described["writes"] = list(example.sites.reads), list(example.sites.writes)
    coder, rng = coder_of(described), np.random.default_rng(seed)
    params: dict[str, np.ndarray] = {}
    for name, leaf in coder.init(jax.random.key(0)).items():
        if leaf.size == 1:  # a layer norm's eps
            params[name] = np.asarray(leaf)
            continue
        value = rng.normal(size=leaf.shape)
        if name.startswith("W_dec"):
            lengths = np.exp(0.5 * rng.normal(size=(F, *[1] * (value.ndim - 1))))
            value *= lengths if value.shape[0] == F else lengths.reshape(-1, 1)
        scales = {"W_enc": 0.35, "b_enc": 0.3, "b_mag": 0.3, "r_mag": 0.3, "b_dec": 0.4, "W_skip": 0.3}
        value *= scales.get(name, D**-0.5)
        params[name] = value.astype(np.float32)
    params["b_enc"] -= 0.5
    if "threshold" in params:
        params["threshold"] = np.abs(rng.normal(size=params["threshold"].shape)).astype(np.float32)
    return TrainedCoder(coder, params, sites_of(described), Origin(model="gpt2"))


def activations(sae: TrainedCoder, seed: int) -> np.ndarray:
    """[N, ...]: of different lengths, one near the origin."""
    rng = np.random.default_rng(seed)
    shape = sae.coder.topology.in_shape
    x = rng.normal(size=(N, *shape)) * rng.exponential(1.0, (N, *[1] * len(shape)))
    x[0] *= 0.01
    return x.astype(np.float32)


def write(format: Format, example: TrainedCoder, root: Path, seed: int) -> None:
    """Writes a coder (of a set: those of two layers) with what saejax computes, if the format can say it."""
    layers = 2 if format.sets and len(example.sites.reads) == 1 else 1
    saes = [a_coder(example, seed + layer, layer) for layer in range(layers)]
    if format.refuses(saes[0]):
        return
    topology, sparsity = coder_kind(saes[0])
    case = root / format.name / f"{topology}_x_{sparsity}".replace(" ", "_")
    folder = case / _inside(format, topology)
    x = np.stack([activations(sae, seed + 100 + i) for i, sae in enumerate(saes)])
    for sae in saes:
        sae.save(folder, format=format.name)
    places = [str(format.place_of(sae, folder).relative_to(case)) for sae in saes]
    latents = [sae.encode(rows) for sae, rows in zip(saes, x, strict=True)]
    out = [sae.decode(f, rows) for sae, f, rows in zip(saes, latents, x, strict=True)]
    np.savez(case / "expected.npz", x=x, latents=np.stack(latents), reconstructions=np.stack(out))
    (case / "case.json").write_text(json.dumps({"places": places}))


def _inside(format: Format, topology: str) -> str:
    if format.name == "gemma_scope_2":
        kind = {"transcoder": "transcoder", "skip_transcoder": "transcoder"}.get(topology, "resid_post")
        return f"gemma-scope-2-1b-pt/{kind}/layer_0_width_16k_l0_small" + "_affine" * (topology == "skip_transcoder")
    return _INSIDE.get(format.name, "files")


# --- reading -----------------------------------------------------------------------------------------------------


def read(case: dict[str, Any]) -> tuple[str, bool]:
    """(a line of the table of reading, whether it is as it should be)"""
    start = f"| {case['peer']} {case['version']} | {case['format']}/{case['case']} | "
    try:
        coders = _loaded(FIXTURES / case["path"])
    except SaejaxError as error:
        by_name = any(format.here(FIXTURES / case["path"]) for format in FORMATS.values())
        return f"{start}refused: {_short(str(error))} | |", bool(case["refuse"]) and by_name
    if case["refuse"]:
        return f"{start}read, though it was to be refused: {case['refuse']} | |", False
    with np.load(FIXTURES / case["expected"]) as held:
        x, reconstructions = held["x"], held["reconstructions"]
        latents = held["latents_weighted" if "latents_weighted" in held else "latents"]
    if len(coders) > 1:  # a set: one of each layer
        mine = np.stack([sae.encode(x[:, i]) for i, sae in enumerate(coders)], 1)
        back = np.stack([sae.decode(mine[:, i], x[:, i]) for i, sae in enumerate(coders)], 1)
    else:
        mine = coders[0].encode(x)
        back = coders[0].decode(mine, x)
    if mine.size == latents.size:
        mine = mine.reshape(latents.shape)
    elif mine.ndim < latents.ndim:  # llamascopium repeats a crosscoder's latents for each hook point
        mine = np.broadcast_to(mine[:, None], latents.shape)
    apart = _apart(mine, latents), _apart(back, reconstructions)
    return f"{start}{apart[0]:.0e} | {apart[1]:.0e} |", max(apart) <= LIMIT


def _loaded(path: Path) -> list[TrainedCoder]:
    """The coder at a path, or those of a set, by layer."""
    for format in FORMATS.values():
        if len(places := format.here(path)) > 1:
            return [format.read(place) for place in places]
    return [saejax.load(path)]


def _short(message: str) -> str:
    """A message without the path that it begins with, on one line of a table."""
    return message.replace(str(FIXTURES) + "/", "").replace("|", "/").split(". ")[0].rstrip(".")


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape or not np.isfinite(a).all():
        return float("inf")
    return float(np.abs(a.astype(np.float64) - b).max() / np.abs(b).max())


# --- the tables --------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="build/peers-venv/bin/python", help="the Python of the peers' environment")
    parser.add_argument("--llamascopium", type=Path, help="a checkout of OpenMOSS/Language-Model-SAEs")
    parser.add_argument("--output", type=Path, help="also write the tables there")
    asked, started = parser.parse_args(), time.time()
    with tempfile.TemporaryDirectory() as root:
        for format in FORMATS.values():
            for seed, example in enumerate(examples()):
                write(format, example, Path(root), 1000 + 10 * seed)
        more = [f"--llamascopium={asked.llamascopium}"] if asked.llamascopium else []
        check = [asked.peers, "-W", "ignore", str(PEERS / "check_interop.py"), root, *more]
        checked = subprocess.run(check, stdout=subprocess.PIPE, text=True, check=False)
    good = checked.returncode == 0
    ours = checked.stdout if "| coder |" in checked.stdout else "(the check failed)"
    print(ours, flush=True)
    theirs = ["| peer | dictionary | latents | reconstructions |", "|---|---|---|---|"]
    for case in json.loads((FIXTURES / "index.json").read_text()):
        line, as_it_should = read(case)
        theirs.append(line)
        good &= as_it_should
        print(line + ("" if as_it_should else "   <- not as it should be"), flush=True)
    text = _HEAD.format(
        command=" ".join(["python -m benchmarks.interop", *["--llamascopium=<checkout>"] * bool(asked.llamascopium)]),
        machine=f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPU cores, Python {platform.python_version()}, "
        f"jax {jax.__version__}, {time.time() - started:,.0f} s",
        size=f"width {D}, {F} latents (a layer), k {K}, {N} tokens",
        ours=ours.strip(),
        theirs="\n".join(theirs),
    )
    if asked.output:
        asked.output.write_text(text)
    sys.exit(0 if good else 1)


_HEAD = """# Dictionaries there and back

`{command}`:
{machine}. float32.

## Ours, read by their own loaders

Each coder ({size}; decoder rows of different
lengths) is written in every format that can say it and loaded by SAE.load_from_disk, SparseCoder.load_from_disk,
load_dictionary, circuit-tracer's load_transcoders, SAELens' converters of Gemma Scope, and llamascopium.
Latents / reconstructions: max |theirs - ours| / max |ours|. Sets of one-layer coders: two layers, both counted.

{ours}

-: the format cannot say this coder, and `saejax formats` says why. A batchtopk is a jumprelu after training, a
matryoshka what it was trained with.

## Theirs, read by us

The dictionaries of tests/fixtures/interop: files and numbers by the peers' own code (benchmarks/peers). Of latents and
of reconstructions: max |ours - theirs| / max |theirs|. llama_scope/today_topk selects by latents times the lengths of
their decoder rows; those are the latents here, and are compared.

{theirs}
"""


if __name__ == "__main__":
    main()
