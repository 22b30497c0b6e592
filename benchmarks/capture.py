"""Capture against torch's forward pass of the same model, and against saejax's own forward pass.

    python -m benchmarks.capture [--model=demo --hook=blocks.3.resid_post --tokens=300000 --rounds=3]
    python -m benchmarks.capture --model=random_gpt2 --hook=blocks.6.resid_pre --rows=8 --context=512 --tokens=16000
    python -m benchmarks.capture --model=build/real/SmolLM2-135M-Instruct.Q4_1.gguf --hook=blocks.14.resid_post \\
        --text=build/real/english.jsonl --rows=8 --tokens=8000 [--dtype=bfloat16]       after make real ARGS=--fetch

Each round runs the same text in turn: saejax's forward pass to the logits and to the hook point, each batch waited
for; the capture, which packs, runs, and writes a store with its checksums in a temporary folder; and PyTorch's forward
pass of the model, to the logits and to the same place, where a hook ends it (transformers, sdpa, inference_mode, all
threads). So a busy machine slows all of them, and ratios are medians over the rounds. The overhead is (seconds of the
capture) / (seconds of the forward passes to the hook point alone) - 1. Nothing is compiled while a clock runs. Tokens
are all but padding.

PyTorch has a process of its own, which sleeps while others run, with malloc as it comes. It reads each row as one
document, which is less work than keeping the documents apart; the values of each row's first document must agree.
random_gpt2 is GPT-2 small in shape, with random weights and the demo's tokenizer; it is made when asked for. A GGUF
file is written as a folder that both read.
"""

import argparse
import contextlib
import dataclasses
import itertools
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np

from saejax.capture import CaptureConfig, capture
from saejax.capture.ahead import tokens_read
from saejax.core.files import read_json
from saejax.core.host import keep_memory
from saejax.lm import load_lm
from saejax.lm.checkpoint import write
from saejax.lm.gguf.folder import as_folder
from saejax.parallel import ParallelConfig, make_mesh
from saejax.text import PackedRows, Packer, TextConfig, open_source

Rates = dict[str, list[float]]  # way -> tokens a second in each round
_LOGIT_BATCHES = 2  # of a round, to the logits: enough to show what stopping early saves
_DEMO = Path(__file__).parents[1] / "saejax" / "lm" / "demo"


def rates(
    model: str,
    hook: str,
    rows: int,
    context: int,
    tokens: int,
    rounds: int,
    with_torch: bool = True,
    text: str = "",
    dtype: str = "float32",
) -> Rates:
    """{"logits", "forward", "capture", "torch", "torch logits" (where wanted): tokens a second in each round}.

    Args:
        model: a folder, a repository, or demo.
        tokens: activations to capture in a round.
        text: a file of documents; Python's own sources without one.
        dtype: of both models.
    """
    text_config = TextConfig(context_length=context)
    if text:
        text_config = dataclasses.replace(text_config, source="files", paths=(text,))
    config = CaptureConfig((hook,), batch_rows=rows)
    lm, source, mesh = load_lm(model, dtype=dtype), open_source(text_config), make_mesh(ParallelConfig((1, 1)))
    packer = Packer.of(source, lm.tokenizer, text_config)
    batches = list(itertools.islice(packer.batches("train", rows), -(-tokens // (rows * context))))
    logits = jax.jit(lambda params, *packed: lm.apply(params, *packed)[0])
    forward = lm.make_forward([lm.hook_point(hook)], (rows, context), mesh)

    def to_logits() -> tuple[int, float]:
        few = batches[:_LOGIT_BATCHES]
        return _read(few), seconds_of(lambda b: logits(lm.params, b.tokens, b.positions, b.segments), few)

    def captured() -> tuple[int, float]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "store"
            done = capture(path, lm, source, text_config, config, mesh, split="train", n_tokens=tokens, seed=0)
        return done.read, done.seconds

    ways: dict[str, Callable[[], tuple[int, float]]] = {
        "logits": to_logits,
        "forward": lambda: (_read(batches), seconds_of(forward, batches)),
        "capture": captured,
    }
    with contextlib.ExitStack() as stack:
        if with_torch:
            torch_seconds, first = stack.enter_context(_torch(model, dtype, hook, batches))
            ours = forward(batches[0])[0][lm.hook_point(hook)]
            _check_same(first, ours, batches[0], 0.01 if dtype == "float32" else 0.1)
            ways["torch logits"] = lambda: (_read(batches[:_LOGIT_BATCHES]), torch_seconds("logits"))
            ways["torch"] = lambda: (_read(batches), torch_seconds("hook"))
        found: Rates = {name: [] for name in ways}
        for _ in range(rounds):
            for name, run in ways.items():
                read, seconds = run()
                found[name].append(read / seconds)
    return found


def ratios(found: Rates) -> dict[str, float]:
    """Medians over the rounds: what the capture costs beyond its forward passes, and speeds over torch's."""

    def median_of(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(found[one], found[other], strict=True))

    known = {"overhead": median_of("forward", "capture") - 1}
    if "torch" in found:
        known |= {f"{name} / torch": median_of(name, "torch") for name in ("forward", "capture")}
        known |= {f"{name} / torch logits": median_of(name, "torch logits") for name in ("logits", "capture")}
    return known


@contextlib.contextmanager
def model_named(name: str) -> Iterator[str]:
    """The model to load: `name`; or a folder, gone afterwards, of a random GPT-2 or of what a GGUF file holds."""
    if name != "random_gpt2" and not name.endswith(".gguf"):
        yield name
        return
    with tempfile.TemporaryDirectory() as folder:
        if name == "random_gpt2":
            import torch
            import transformers

            torch.manual_seed(0)
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=0, eos_token_id=0))
            model.save_pretrained(folder)
            files = _DEMO.glob("tokenizer*.json")
        else:
            of_gguf = as_folder(Path(name))
            write(Path(folder), read_json(of_gguf / "config.json"), load_lm(name).params)
            files = of_gguf.glob("tokenizer*.json")
        for file in files:
            shutil.copy(file, folder)
        yield folder


def seconds_of(run: Callable[[PackedRows], Any], batches: list[PackedRows]) -> float:
    """Each batch waited for; the first also runs once before the clock starts."""
    jax.block_until_ready(run(batches[0]))
    started = time.perf_counter()
    for packed in batches:
        jax.block_until_ready(run(packed))
    return time.perf_counter() - started


def _read(batches: list[PackedRows]) -> int:
    return sum(map(tokens_read, batches))


@contextlib.contextmanager
def _torch(
    model: str, dtype: str, hook: str, batches: list[PackedRows]
) -> Iterator[tuple[Callable[[str], float], np.ndarray]]:
    """(seconds of PyTorch's passes over the batches to "hook", over a few to "logits"; [R S, d] of the first batch)."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    tokens = [np.asarray(packed.tokens, np.int64) for packed in batches]
    spawned = multiprocessing.get_context("spawn").Process
    process = spawned(target=_torch_worker, args=(there, model, dtype, hook, tokens))
    process.start()
    there.close()  # so that the worker's end is the only one, and its death is noticed

    def seconds(to: str) -> float:
        here.send(to)
        return float(here.recv())

    try:
        yield seconds, here.recv()
    finally:
        with contextlib.suppress(OSError):
            here.send("")
        process.join()


def _torch_worker(pipe: Connection, model: str, dtype: str, hook: str, tokens: list[np.ndarray]) -> None:
    import torch

    from saejax.lm.rows import Chunk
    from saejax.lm.torch_hooks.hooks import run_chunk

    lm: Any = load_lm(model, dtype=dtype, backend="torch")
    name = lm.hook_point(hook)
    # No place is the end: the logits.
    ways = {"hook": (lm.aliases.get(name, name), tokens), "logits": ("", tokens[:_LOGIT_BATCHES])}

    def run(ids: np.ndarray, place: str) -> Any:
        with torch.inference_mode():
            return run_chunk(lm.module, Chunk(ids, np.arange(ids.size).reshape(ids.shape)), [place])[place]

    first = run(tokens[0], ways["hook"][0]).float().cpu().numpy()
    pipe.send(first.reshape(-1, first.shape[-1]))
    while to := pipe.recv():
        place, batches = ways[to]
        run(batches[0], place)
        started = time.perf_counter()
        for ids in batches:
            run(ids, place)
        pipe.send(time.perf_counter() - started)


def _check_same(torch_ND: np.ndarray, ours_ND: Any, packed: PackedRows, share: float) -> None:
    """Raises AssertionError where the two differ by more than this share, in the first document of a row."""
    first = (packed.segments == packed.segments[:, :1]).ravel()
    ours_ND = np.asarray(ours_ND, np.float32)[first]
    np.testing.assert_allclose(ours_ND, torch_ND[first], atol=share * np.abs(torch_ND[first]).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a folder, a repository, demo, or random_gpt2")
    parser.add_argument("--hook", default="blocks.3.resid_post", help="hook point to capture")
    parser.add_argument("--text", default="", help="a file of documents; Python's own sources without one")
    parser.add_argument("--dtype", default="float32", help="of both models: float32 or bfloat16")
    for name, value, what in (
        ("tokens", 300_000, "activations to capture in a round"),
        ("rounds", 3, "rounds"),
        ("rows", 32, "packed rows in a forward pass"),
        ("context", 256, "tokens in a row"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{what} ({value})")
    given = parser.parse_args()
    keep_memory()
    print(f"{given.model}, {jax.devices()[0].device_kind}, jax {jax.__version__}, {given.rows} x {given.context}")
    with model_named(given.model) as model:
        how = model, given.hook, given.rows, given.context, given.tokens, given.rounds
        found = rates(*how, text=given.text, dtype=given.dtype)
    for name, each in found.items():
        print(f"{name:<12} median {statistics.median(each):8,.0f} tokens/s   ({min(each):,.0f} to {max(each):,.0f})")
    for name, ratio in ratios(found).items():
        print(f"{name}: {ratio:.1%}" if name == "overhead" else f"{name}: {ratio:.2f}")


if __name__ == "__main__":
    main()
