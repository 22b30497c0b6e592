"""Capture beside torch's forward pass of the same model to the same block, and beside our own forward pass alone."""

import json
import shutil
from pathlib import Path

import numpy as np

from benchmarks.bench.frame import Result, Told
from benchmarks.bench.markdown import table
from benchmarks.bench.protocol import ROOT
from benchmarks.bench.system_rows import Row, ours, ratio, spread, torch

ROWS = (Row("capture-gpt2"),)

# GPT-2's shape; the passes stop before the seventh of its twelve blocks.
_WIDTH, _HEADS, _BLOCK, _ROWS, _CONTEXT = 768, 12, 6, 8, 512


def run(row: Row, told: Told) -> Result:
    """Tokens a second of each, in turn. Weights are random: that costs what trained ones cost."""
    model, given = gpt2(told.folder / "gpt2"), told.folder / "given.npz"
    rates: dict[str, list[float]] = {}
    shape = {"rows": _ROWS, "context": _CONTEXT, "batches": 1 if told.quick else 3}
    beside = torch(told)
    with ours(told) as own:
        said = {"hook": f"blocks.{_BLOCK}.resid_pre", "given": str(given)}
        read = own.ask("prepare_capture", model=str(model), **said, **shape)["read"]
        contestants = {
            "saejax, capture": lambda: own.ask("capture", folder=str(told.folder / "captured")),
            "saejax, forward pass alone": lambda: own.ask("forward"),
        }
        if beside:
            beside.ask("prepare_capture", model=str(model), block=_BLOCK, given=str(given), read=read)
            contestants["torch, forward pass alone"] = lambda: beside.ask("forward")
        try:
            for _ in range(told.rounds):
                for name, ask in contestants.items():
                    rates.setdefault(name, []).append(ask()["tokens_per_second"])
        finally:
            if beside:
                beside.close()
    whole, alone = rates["saejax, capture"], rates["saejax, forward pass alone"]
    overhead = ratio(alone, whole) - 1
    figures = [{"what": "capture: overhead over the forward pass", "value": overhead, "aim": 0.05, "better": "less"}]
    if beside:
        over = ratio(whole, rates["torch, forward pass alone"])
        figures.append({"what": "capture over torch's forward pass", "value": over, "aim": 1.5, "better": "more"})
    return {"rates": rates, "read": read, "figures": figures}


def lines(results: list[Result]) -> list[str]:
    found: list[str] = []
    for r in results:
        found += [
            f"{r['row']}: a random model of GPT-2's shape to the input of block {_BLOCK}, {_ROWS} x {_CONTEXT} tokens",
            f"a batch, {r['read']:,} tokens a turn. A capture packs the text, runs, and writes a store with checksums.",
            "",
            *table(("", "tokens/s, median (range)"), [[name, spread(of, ",.0f")] for name, of in r["rates"].items()]),
            "",
            "Medians over the rounds: " + "; ".join(f"{f['what']} {f['value']:.2f}" for f in r["figures"]) + ".",
        ]
    return found


def gpt2(folder: Path, width: int = _WIDTH, layers: int = 12, vocabulary: int = 50257) -> Path:
    """A folder with a random model as Hugging Face writes GPT-2, and the demo model's tokenizer."""
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocabulary, width), "wpe.weight": (1024, width)}
    for name in [*(f"h.{i}.ln_{n}" for i in range(layers) for n in (1, 2)), "ln_f"]:
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    for name, reads, writes in (("attn.c_attn", 1, 3), ("attn.c_proj", 1, 1), ("mlp.c_fc", 1, 4), ("mlp.c_proj", 4, 1)):
        for i in range(layers):
            shapes[f"h.{i}.{name}.weight"] = (reads * width, writes * width)
            shapes[f"h.{i}.{name}.bias"] = (writes * width,)
    rng = np.random.default_rng(0)
    tensors = {
        f"transformer.{name}": np.ones(shape, np.float32)
        if ".ln_" in f".{name}" and name.endswith("weight")
        else np.float32(0.02) * rng.standard_normal(shape, np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    demo = ROOT / "saejax/lm/demo"
    config = json.loads((demo / "config.json").read_text())
    config |= {"vocab_size": vocabulary, "n_positions": 1024, "n_ctx": 1024, "n_embd": width, "n_layer": layers}
    (folder / "config.json").write_text(json.dumps(config | {"n_head": _HEADS}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, folder)
    return folder
