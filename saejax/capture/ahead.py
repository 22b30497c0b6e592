"""Work done ahead, so that the device does not wait: batches are packed in a thread, and the next forward is running
while the results of the last one are handed on."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax

from saejax.core.host import give_way
from saejax.text import PackedRows

Item = TypeVar("Item")
Forward = Callable[[PackedRows], tuple[dict[str, jax.Array], jax.Array]]
# Reading and tokenising go by the megabyte: a few batches cover most of the pauses, and cost little memory.
_BATCHES_AHEAD = 4


def prefetched(items: Iterator[Item], depth: int = _BATCHES_AHEAD) -> Generator[Item, None, None]:
    """The same items in the same order, up to `depth` of them made ahead in a thread.

    What making them raises is raised here, after the items before it. Closing the iterator ends the thread, and closes
    `items` where that is a generator.
    """
    end: Any = object()
    pool = ThreadPoolExecutor(1, thread_name_prefix="capture-packer", initializer=give_way)
    alone = threading.Lock()

    def make() -> Any:
        with alone:
            return next(items, end)

    try:
        # One more than `depth`: while those wait, the thread makes the next.
        ahead = deque(pool.submit(make) for _ in range(depth + 1))
        while (item := ahead.popleft().result()) is not end:
            ahead.append(pool.submit(make))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)
        # A signal that came while the thread was starting leaves one that the pool does not wait for.
        with alone:
            if isinstance(items, Generator):
                items.close()


def one_ahead(
    forward: Forward, batches: Iterator[PackedRows], last: Callable[[PackedRows], bool]
) -> Iterator[tuple[PackedRows, dict[str, jax.Array], jax.Array]]:
    """Each batch with its results, the next batch dispatched before the results are waited for.

    After a batch for which `last` is true nothing is dispatched until the consumer asks for more. The forward pass
    after the end of a capture would be wasted.
    """
    running: tuple[PackedRows, dict[str, jax.Array], jax.Array] | None = None
    for packed in batches:
        if running is not None and last(running[0]):
            yield running
            running = None
        ahead = (packed, *forward(packed))
        if running is not None:
            yield running
        running = ahead
    if running is not None:
        yield running


def forward_rate(forward: Forward, batches: list[PackedRows]) -> float:
    """Tokens a second of the forward pass alone, each batch waited for; tokens are all but padding.

    The first batch runs once before, untimed.
    """
    jax.block_until_ready(forward(batches[0]))
    started = time.perf_counter()
    for packed in batches:
        jax.block_until_ready(forward(packed))
    return sum(tokens_read(packed) for packed in batches) / (time.perf_counter() - started)


def tokens_read(packed: PackedRows) -> int:
    """Tokens of a batch that are not padding, stored or not."""
    return int((packed.segments >= 0).sum())
