"""A dictionary of one language model as the start of one for its fine-tuned copy: how many tokens does that save?

    python -m benchmarks.warm_start [--folder=FOLDER --tokens=524288 --seeds=3 --texts=new --output=FILE]

The demo model knows the standard library. A copy of it is trained further on the sources of the installed package jax,
with saejax's own decoder, and is written as a checkpoint that `load_lm` reads. For each seed a TopK with 512 latents
is trained on the demo model's activations for the standard library. Then, on the copy's activations, one is trained
from scratch, and others start from the first with a sixteenth to a half of those tokens. Each has a
whole schedule of its own. FVE is measured on held-out activations of the copy. --texts=new,old does the same
with the old text, the standard library, too.
With --folder the same command continues after a stop.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import saejax
from benchmarks.demo_lm.make import all_rows
from benchmarks.demo_lm.pretrain import PretrainConfig, evaluate, pretrain
from saejax.app.experiment import default_config, experiment
from saejax.app.stages import run_capture
from saejax.app.workspace import Workspace
from saejax.core.files import read_json, write_json
from saejax.core.metrics import read_metrics
from saejax.lm import LanguageModel, checkpoint
from saejax.text import Packer, TextConfig, open_source

HOOK = "blocks.3.resid_post"
STORED, HELDOUT, BATCH = 131_072, 16_384, 1024
SHARES = (16, 8, 4, 2)
FINE_TUNING = PretrainConfig(steps=120, batch=8, lr=5e-4, weight_decay=0.0)
# {training: [(tokens, FVE on held-out activations)]}
Curves = dict[str, list[tuple[int, float]]]

HOW: dict[str, Any] = {"d_sae": 512, "k": 16, "lr": 3e-3, "batch_size": BATCH, "dead_after_tokens": 100_000}


def write_text(path: Path) -> None:
    """The sources of the installed package jax, a document a file."""
    files = sorted(Path(jax.__file__).parent.rglob("*.py"))
    texts = [text for file in files if len(text := file.read_text(encoding="utf-8", errors="replace")) > 200]
    order = np.random.default_rng(0).permutation(len(texts))
    path.write_text("".join(json.dumps({"text": texts[i]}) + "\n" for i in order))


def fine_tune(folder: Path, text: TextConfig) -> tuple[float, float]:
    """Write the copy to `folder`, once; returns its held-out loss on the text, in nats a token, before and after."""
    if (folder / "losses.json").is_file():
        before, after = read_json(folder / "losses.json")
        return before, after
    demo = saejax.load_lm("demo")
    assert isinstance(demo, LanguageModel)
    packer = Packer(open_source(text), demo.tokenizer, 256)
    rows, heldout = (all_rows(packer, split) for split in ("train", "heldout"))
    heldout = {name: value[:256] for name, value in heldout.items()}
    before = evaluate(demo.config, demo.params, heldout)
    params = pretrain(
        demo.config,
        FINE_TUNING,
        rows,
        lambda step, loss, _: print(f"fine-tuning: step {step}, {loss:.3f} nats", flush=True),
        demo.params,
    )
    shipped = Path(checkpoint.__file__).parent / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write(folder, json.loads((shipped / "config.json").read_text()), params)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shipped / name, folder / name)
    losses = (before, evaluate(demo.config, params, heldout))
    write_json(folder / "losses.json", losses)
    return losses


def capture(folder: Path, name: str, model: str, **text: Any) -> Path:
    """Stores of a model's activations; returns their folder."""
    c = default_config()
    c.name = c.store = name
    c.runs_dir, c.stores_dir = str(folder / "runs"), str(folder / "stores")
    c.lm.model = model
    c.text.update(text)
    c.capture.update(hook_points=(HOOK,), tokens=STORED, heldout_tokens=HELDOUT)
    run_capture(Workspace(experiment(c)))
    return folder / "stores" / name


def trained(store: Path, run: Path, tokens: int, seed: int, init_from: str | Path = "") -> list[tuple[int, float]]:
    """[(tokens, FVE on held-out activations)] of a training, the start and the end among them."""
    steps = tokens // BATCH
    saejax.train(
        store / "train",
        "topk",
        run=run,
        heldout=store / "heldout",
        seed=seed,
        init_from=init_from,
        tokens=tokens,
        validate_every=max(1, steps // 10),
        checkpoint_every=10**6,
        mesh=(1, 1),
        progress=False,
        **HOW,
    )
    rows = read_metrics(run / "metrics.jsonl")
    return [(row["step"] * BATCH, row["val/fve"]) for row in rows if "val/fve" in row]


def compare(folder: Path, tokens: int, seeds: int, texts: list[str]) -> Iterator[dict[str, Any]]:
    """What the page says, after each text."""
    write_text(folder / "jax.jsonl")
    new: dict[str, Any] = {"source": "files", "paths": (str(folder / "jax.jsonl"),)}
    losses = fine_tune(folder / "copy", TextConfig(**new, context_length=256))
    print(f"held-out loss on jax's sources {losses[0]:.3f} -> {losses[1]:.3f}", flush=True)
    first = capture(folder, "demo", "demo")
    found: dict[str, list[Curves]] = {}
    known = {"new": ("jax's sources", "copy", new), "old": ("the standard library", "copy-stdlib", {})}
    for text, name, told in (known[word] for word in texts):
        store = capture(folder, name, str(folder / "copy"), **told)
        found[text] = []
        for seed in range(seeds):
            runs = folder / "runs" / str(seed)
            trained(first, runs / "source", tokens, seed)
            curves = {"scratch": trained(store, runs / name / "scratch", tokens, seed)}
            for share in SHARES:
                run = runs / name / f"warm-{share}"
                curves[f"1/{share}"] = trained(store, run, tokens // share, seed, runs / "source")
            found[text].append(curves)
            print(text, seed, {name: round(curve[-1][1], 4) for name, curve in curves.items()}, flush=True)
        yield {"words": texts, "tokens": tokens, "losses": losses, "curves": found}


def needed(curves: Curves) -> str:
    """The least share of the tokens whose warm training ends at the FVE of the one from scratch, or above."""
    enough = [f"1/{share}" for share in SHARES if curves[f"1/{share}"][-1][1] >= curves["scratch"][-1][1]]
    return enough[0] if enough else f"more than 1/{SHARES[-1]}"


def table(found: list[Curves]) -> str:
    titles = ["seed", "from scratch", "source as it is", *(f"warm, 1/{share}" for share in SHARES), "tokens needed"]
    rows = []
    for seed, curves in enumerate(found):
        ends = [curves["scratch"][-1], curves[f"1/{SHARES[0]}"][0], *(curves[f"1/{share}"][-1] for share in SHARES)]
        rows.append([str(seed), *(f"{fve:.4f}" for _, fve in ends), needed(curves)])
    return "\n".join(f"| {' | '.join(row)} |" for row in [titles, ["---"] * len(titles), *rows])


def page(found: dict[str, Any]) -> str:
    before, after = found["losses"]
    tokens, fine, curves = found["tokens"], FINE_TUNING, found["curves"]
    tables = "\n\n".join(f"## On {text}\n\n{table(of_text)}" for text, of_text in curves.items())
    seeds = len(next(iter(curves.values())))
    return f"""# A dictionary for a fine-tuned model: from scratch, or from the original's

`python -m benchmarks.warm_start --tokens={tokens} --seeds={seeds} --texts={",".join(found["words"])}` on a virtual
machine with 2 CPU cores, 24 GB, no accelerator; {time.strftime("%Y-%m-%d")}.

The demo language model was trained further for {fine.steps} steps of {fine.batch} x 256 tokens of the sources of the
package jax {jax.__version__}. Its held-out loss on them fell from {before:.3f} to {after:.3f} nats a token.
Dictionaries: TopK, {HOW["d_sae"]:,} latents, k {HOW["k"]}, {HOOK} (width 128), lr {HOW["lr"]}, batches of {BATCH:,}.
The source was trained on {tokens:,} activations of the demo model for the standard library.

FVE on {HELDOUT:,} held-out activations of the fine-tuned model, which no training saw. "From scratch" has {tokens:,}
activations of it ({STORED:,} different ones). A warm start has the given share of them, with a whole schedule of its
own. "Tokens needed": the least share with which it ends at the FVE of the one from scratch, or above.

{tables}

![FVE against tokens](warm_start.png)
"""


def draw(found: dict[str, list[Curves]], path: Path) -> None:
    """FVE against tokens, a line a training."""
    figure = Figure(figsize=(5 * len(found), 3.6), layout="constrained")
    labels = {"scratch": "from scratch"} | {f"1/{share}": f"warm, 1/{share} of the tokens" for share in SHARES}
    for at, (text, of_text) in enumerate(found.items()):
        axes = figure.add_subplot(1, len(found), at + 1, xlabel="activations", ylabel="FVE, held out", title=text)
        for colour, (name, label) in enumerate(labels.items()):
            for i, curves in enumerate(of_text):
                axes.plot(*zip(*curves[name], strict=True), color=f"C{colour}", label=None if i else label, linewidth=1)
        axes.set_ylim(min(curves["1/4"][0][1] for curves in of_text) - 0.1, None)
        axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where models, stores and runs go; a temporary one if left out")
    parser.add_argument("--tokens", type=int, default=524_288)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--texts", default="new")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/warm_start.md"))
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = told.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for found in compare(folder, told.tokens, told.seeds, told.texts.split(",")):
            told.output.write_text(page(found))
            draw(found["curves"], told.output.with_suffix(".png"))
            print(page(found), flush=True)


if __name__ == "__main__":
    main()
