"""Tokens a second of the forward pass alone, to the logits and to a hook point, and of the capture of that hook point.

    python -m benchmarks.capture [--model=demo --hook=blocks.1.resid_post --tokens=100000]

The forward passes are compiled, each is waited for, and the two take turns on the same batches, so that a busy machine
slows both. The capture packs, runs, and writes a store with its checksums in a temporary folder; its overhead is over
the forward pass to the hook point. Tokens are all but padding.
"""

import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from saejax.capture import CaptureConfig, capture
from saejax.capture.ahead import tokens_read
from saejax.lm import load_lm
from saejax.parallel import ParallelConfig, make_mesh
from saejax.text import PackedRows, Packer, TextConfig, open_source

_MODEL = flags.DEFINE_string("model", "demo", "A folder, a repository, or demo.")
_HOOK = flags.DEFINE_string("hook", "blocks.1.resid_post", "Hook point to capture.")
_TOKENS = flags.DEFINE_integer("tokens", 100_000, "Activations to capture.")
_ROWS = flags.DEFINE_integer("rows", 32, "Packed rows in a forward pass.")
_CONTEXT = flags.DEFINE_integer("context", 256, "Tokens in a row.")
_BATCHES = flags.DEFINE_integer("batches", 5, "Batches that are timed, after one that is not.")


def seconds_of(run: Callable[[PackedRows], Any], packed: PackedRows) -> float:
    started = time.perf_counter()
    jax.block_until_ready(run(packed))
    return time.perf_counter() - started


def main(_: list[str]) -> None:
    text = TextConfig(context_length=_CONTEXT.value)
    config = CaptureConfig((_HOOK.value,), batch_rows=_ROWS.value)
    lm, source, mesh = load_lm(_MODEL.value), open_source(text), make_mesh(ParallelConfig((1, 1)))
    packer = Packer.of(source, lm.tokenizer, text)
    batches = list(itertools.islice(packer.batches("train", _ROWS.value), _BATCHES.value))
    to_logits = jax.jit(lambda params, *rows: lm.apply(params, *rows)[0])
    runs: dict[str, Callable[[PackedRows], Any]] = {
        "forward pass to the logits": lambda b: to_logits(lm.params, b.tokens, b.positions, b.segments),
        f"forward pass to {_HOOK.value}": lm.make_forward(
            [lm.hook_point(_HOOK.value)], (_ROWS.value, _CONTEXT.value), mesh
        ),
    }
    print(f"{_MODEL.value}, {jax.devices()[0].device_kind}, jax {jax.__version__}, {_ROWS.value} x {_CONTEXT.value}")
    for run in runs.values():
        seconds_of(run, batches[0])
    times: dict[str, list[float]] = {name: [] for name in runs}
    for packed in batches:
        for name, run in runs.items():
            times[name].append(seconds_of(run, packed))
    read = statistics.mean(map(tokens_read, batches))
    for name in runs:
        median, fastest = statistics.median(times[name]), min(times[name])
        print(f"{name:<44} median {read / median:10,.0f} tokens/s   fastest {read / fastest:10,.0f} tokens/s")
    folder = Path(tempfile.mkdtemp())
    try:
        done = capture(folder / "store", lm, source, text, config, mesh, split="train", n_tokens=_TOKENS.value, seed=0)
    finally:
        shutil.rmtree(folder)
    overhead = "too short to tell the overhead" if done.overhead is None else f"overhead {done.overhead:.1%}"
    print(f"{f'capture of {_HOOK.value}':<44} {done.read / done.seconds:17,.0f} tokens/s   {overhead}")


if __name__ == "__main__":
    app.run(main)
