"""What a capture does ahead of itself, and what it says of its speed. That it stores the same is test_stages' and
test_capture_options' concern."""

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import replaced, tiny_experiment
from tiny.by_hand import HOOK, ROW, documents, source, tiny_lm

from saejax.app.stages import run_capture
from saejax.app.workspace import Workspace
from saejax.capture import CaptureConfig, Captured, capture
from saejax.capture.ahead import forward_rate, one_ahead, prefetched, tokens_read
from saejax.lm import LanguageModel
from saejax.parallel import ParallelConfig, make_mesh
from saejax.text import PackedRows, Packer, TextConfig


@pytest.fixture
def packers() -> Callable[[], set[threading.Thread]]:
    """The threads that pack ahead, but for those that a test of another file left to the garbage collection."""

    def alive() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("capture-packer")}

    before = alive()
    return lambda: alive() - before


def test_a_signal_while_the_thread_starts_closes_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool does not know its thread yet, which is at work already."""
    start, closed = threading.Thread.start, list[str]()

    def items() -> Iterator[int]:
        try:
            while True:
                time.sleep(0.2)
                yield 1
        finally:
            closed.append("closed")

    def interrupted(self: threading.Thread) -> None:
        start(self)
        time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(prefetched(items()))
    assert closed == ["closed"]


def test_what_is_prefetched_comes_whole_and_in_order_and_no_further_ahead_than_it_may(
    packers: Callable[[], set[threading.Thread]],
) -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for i in range(50):
            made.append(i)
            yield i

    with contextlib.closing(prefetched(items(), depth=3)) as ahead:
        assert next(ahead) == 0
        deadline = time.monotonic() + 10
        while len(made) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        # One was taken, three wait, one more is held until there is room.
        assert made == list(range(5))
        assert list(ahead) == list(range(1, 50))
    assert not packers()


def test_an_error_comes_after_what_was_made_before_it_and_closing_ends_the_thread(
    packers: Callable[[], set[threading.Thread]],
) -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("no third")

    seen = []
    with pytest.raises(ValueError, match="no third"):
        for item in prefetched(items()):
            seen.append(item)
    assert seen == [1, 2] and not packers()

    def endless() -> Iterator[int]:
        while True:
            yield 0

    ahead = prefetched(endless())
    next(ahead)
    assert len(packers()) == 1
    ahead.close()
    assert not packers()


def batches_of(count: int) -> list[PackedRows]:
    packer = Packer(source(documents()), tiny_lm().tokenizer, ROW)
    return list(packer.batches("heldout", 1))[:count]


class Recorded:
    """A forward pass that only remembers for which batches it was asked."""

    def __init__(self) -> None:
        self.calls: list[PackedRows] = []

    def __call__(self, packed: PackedRows) -> Any:
        self.calls.append(packed)
        return {}, np.ones(packed.tokens.size, bool)


def test_the_next_forward_runs_before_the_results_are_handed_on_except_at_the_end() -> None:
    batches, forward = batches_of(5), Recorded()
    results = one_ahead(forward, iter(batches), last=lambda packed: packed is batches[2])
    assert next(results)[0] is batches[0] and len(forward.calls) == 2
    assert next(results)[0] is batches[1] and len(forward.calls) == 3
    assert next(results)[0] is batches[2] and len(forward.calls) == 3, "nothing behind the last one"
    # It was not the last after all.
    assert [packed is b for (packed, *_), b in zip(results, batches[3:], strict=True)] == [True, True]
    assert [a is b for a, b in zip(forward.calls, batches, strict=True)] == [True] * 5


def test_a_capture_runs_no_forward_pass_that_it_does_not_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, forward = tiny_lm(), Recorded()

    def fake(*_: Any) -> Any:
        def run(packed: PackedRows) -> Any:
            _, finite = forward(packed)
            return {HOOK: np.ones((packed.tokens.size, lm.hook_points()[HOOK]), np.float32)}, finite

        return run

    monkeypatch.setattr(LanguageModel, "make_forward", fake)
    done = capture(
        tmp_path / "s", lm, source(documents()), TextConfig(context_length=ROW), CaptureConfig((HOOK,), batch_rows=2),
        make_mesh(ParallelConfig((1, 1))), split="heldout", n_tokens=60, seed=0,
    )  # fmt: skip
    kept = np.cumsum([int(b.keep.sum()) for b in Packer(source(documents()), lm.tokenizer, ROW).batches("heldout", 2)])
    needed = int(np.searchsorted(kept, 60)) + 1
    assert (len(forward.calls), done.rows) == (needed, 60)
    assert done.read == sum(tokens_read(packed) for packed in forward.calls)


def test_the_forward_rate_counts_no_padding_and_no_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    batches, now = batches_of(99)[-3:], [0.0]

    def forward(packed: PackedRows) -> Any:
        # The first call, and it alone, takes an hour.
        now[0] += 3600.0 if not now[0] else 0.5
        return {}, np.ones(1)

    monkeypatch.setattr("saejax.capture.ahead.time.perf_counter", lambda: now[0])
    tokens = sum(int((b.segments >= 0).sum()) for b in batches)
    assert tokens < sum(b.tokens.size for b in batches)
    assert forward_rate(forward, batches) == pytest.approx(tokens / 1.5)


def test_the_overhead_is_of_the_same_tokens() -> None:
    done = Captured(rows=900, tokens=900, seconds=2.2, already_complete=False, read=1000, forward_rate=500.0)
    assert done.overhead == pytest.approx(0.1)
    assert dataclasses.replace(done, forward_rate=None).overhead is None


def test_the_summary_and_stages_json_state_the_overhead_of_a_capture_that_is_long_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    e = replaced(tiny_experiment(tmp_path), "capture", tokens=1200, heldout_tokens=60, batch_rows=2)
    run_capture(Workspace(e))
    out = capsys.readouterr().out
    assert out.count("the forward pass alone") == 1 and "overhead" in out
    stages = json.loads((e.run_dir / "stages.json").read_text())
    train, heldout = stages["capture train"], stages["capture heldout"]
    assert train["overhead"] == pytest.approx(train["forward_tokens_per_second"] / train["read_tokens_per_second"] - 1)
    # bos is read, and not stored.
    assert train["read_tokens_per_second"] > train["tokens_per_second"] > 0
    assert "overhead" not in heldout, "one batch says nothing"
