"""Tokens a second of the forward pass alone, to the logits and to a hook point, and of the capture of that hook point.

    python -m benchmarks.capture [--model=demo --hook=blocks.3.resid_post --tokens=300000 --rounds=3]

Each round runs the same text three times: forward to the logits and to the hook point, each batch waited for, and the
capture, which packs, runs, and writes a store with its checksums in a temporary folder. So a busy machine slows all
three, and the overhead is the median over the rounds of (seconds of the capture) / (seconds of the forward passes to
the hook point alone) - 1. Nothing is compiled while a clock runs. Tokens are all but padding.
"""

import itertools
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
_HOOK = flags.DEFINE_string("hook", "blocks.3.resid_post", "Hook point to capture.")
_TOKENS = flags.DEFINE_integer("tokens", 300_000, "Activations to capture in a round.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds.")
_ROWS = flags.DEFINE_integer("rows", 32, "Packed rows in a forward pass.")
_CONTEXT = flags.DEFINE_integer("context", 256, "Tokens in a row.")
_LOGIT_BATCHES = 2  # of a round, to the logits: enough to show what stopping early saves


def seconds_of(run: Callable[[PackedRows], Any], batches: list[PackedRows]) -> float:
    """Each batch waited for; the first also runs once before the clock starts."""
    jax.block_until_ready(run(batches[0]))
    started = time.perf_counter()
    for packed in batches:
        jax.block_until_ready(run(packed))
    return time.perf_counter() - started


def main(_: list[str]) -> None:
    text = TextConfig(context_length=_CONTEXT.value)
    config = CaptureConfig((_HOOK.value,), batch_rows=_ROWS.value)
    lm, source, mesh = load_lm(_MODEL.value), open_source(text), make_mesh(ParallelConfig((1, 1)))
    packer = Packer.of(source, lm.tokenizer, text)
    count = -(-_TOKENS.value // (_ROWS.value * _CONTEXT.value))
    batches = list(itertools.islice(packer.batches("train", _ROWS.value), count))
    read = sum(map(tokens_read, batches))
    logits = jax.jit(lambda params, *rows: lm.apply(params, *rows)[0])
    forward = lm.make_forward([lm.hook_point(_HOOK.value)], (_ROWS.value, _CONTEXT.value), mesh)
    rates: dict[str, list[float]] = {}

    def note(name: str, tokens: int, seconds: float) -> None:
        rates.setdefault(name, []).append(tokens / seconds)

    print(f"{_MODEL.value}, {jax.devices()[0].device_kind}, jax {jax.__version__}, {_ROWS.value} x {_CONTEXT.value}")
    for _ in range(_ROUNDS.value):
        few = batches[:_LOGIT_BATCHES]
        seconds = seconds_of(lambda b: logits(lm.params, b.tokens, b.positions, b.segments), few)
        note("forward pass to the logits", sum(map(tokens_read, few)), seconds)
        note(f"forward pass to {_HOOK.value}", read, seconds_of(forward, batches))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "store"
            done = capture(path, lm, source, text, config, mesh, split="train", n_tokens=_TOKENS.value, seed=0)
        note(f"capture of {_HOOK.value}", done.read, done.seconds)
    for name, found in rates.items():
        print(f"{name:<44} median {statistics.median(found):8,.0f} tokens/s   ({min(found):,.0f} to {max(found):,.0f})")
    alone, whole = list(rates.values())[1:]
    overheads = [a / w - 1 for a, w in zip(alone, whole, strict=True)]
    spread = f"{min(overheads):.1%} to {max(overheads):.1%}"
    print(f"overhead, median of the rounds: {statistics.median(overheads):.1%} ({spread})")


if __name__ == "__main__":
    app.run(main)
