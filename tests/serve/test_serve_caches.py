"""Caches bounded in bytes, compared with a list of what should be there; one worker with a queue that has an end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from saejax.core.errors import DataError
from saejax.serve.caches import Cache, Caches
from saejax.serve.problems import Problem
from saejax.serve.worker import Worker


def test_what_is_kept_is_what_a_list_by_last_use_keeps() -> None:
    cache, rng = Cache(100), random.Random(3)
    kept: list[tuple[int, int]] = []  # (key, size), the last used last
    hits = misses = made = 0

    def make(key: int) -> int:
        nonlocal made
        made += 1
        return -key

    for _ in range(3000):
        key = rng.randrange(30)
        size = 1 + key * 7 % 60 if key else 101  # 0 is larger than all
        there = any(key == one for one, _ in kept)
        assert cache.get(key, lambda: make(key), lambda _: size) == -key  # noqa: B023 (called at once)
        hits, misses = hits + there, misses + (not there)
        kept = [one for one in kept if one[0] != key]
        if size <= 100:
            kept.append((key, size))
        while sum(one for _, one in kept) > 100:
            kept.pop(0)
        if rng.random() < 0.05:
            cache.drop(key)
            kept = [one for one in kept if one[0] != key]
    stats = cache.stats()
    assert (stats["hits"], stats["misses"], made) == (hits, misses, misses)
    assert stats["bytes"] == sum(size for _, size in kept) and stats["entries"] == len(kept)
    assert stats["hit_rate"] == hits / 3000 and stats["limit_bytes"] == 100


def test_those_who_ask_at_once_wait_for_one() -> None:
    cache, begun, go = Cache(1000), threading.Event(), threading.Event()
    calls = []

    def make() -> str:
        calls.append(1)
        begun.set()
        assert go.wait(10)
        return "made"

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(cache.get, "key", make, len) for _ in range(8)]
        assert begun.wait(10)
        # Other keys do not wait.
        assert cache.get("other", lambda: "x", len) == "x"
        deadline = time.monotonic() + 10
        while cache.stats()["hits"] < 7 and time.monotonic() < deadline:
            time.sleep(0.005)
        go.set()
        assert [one.result(10) for one in asked] == ["made"] * 8
    assert calls == [1] and cache.stats()["misses"] == 2


def test_an_error_goes_to_whoever_asked_and_is_not_kept() -> None:
    cache = Cache(1000)

    def fail() -> str:
        raise DataError("damaged")

    for _ in range(2):
        with pytest.raises(DataError, match="damaged"):
            cache.get("key", fail, len)
    assert cache.get("key", lambda: "mended", len) == "mended"
    # Of a size that cannot be told nothing is kept either, and the next one does not wait for ever.
    with pytest.raises(TypeError):
        cache.get("number", lambda: 3, len)
    assert cache.get("number", lambda: 3, lambda _: 1) == 3
    assert cache.stats()["entries"] == 2


def test_the_three_of_a_server() -> None:
    caches = Caches(10, 20, 30)
    caches.provenance.get(1, lambda: 1, lambda _: 1)
    caches.provenance.get(1, lambda: 1, lambda _: 1)
    stats = caches.stats()
    assert [stats[name]["limit_bytes"] for name in ("feature", "provenance", "inference")] == [10, 20, 30]
    assert stats["provenance_cache_hit_rate"] == 0.5 and stats["feature_cache_hit_rate"] == 0.0


@pytest.fixture
def worker() -> Iterator[Worker]:
    one = Worker(waiting=2, seconds=20)
    yield one
    one.close()


def test_work_is_done_in_one_thread_in_order(worker: Worker) -> None:
    def nested() -> tuple[int, int]:
        return threading.get_ident(), worker.run(threading.get_ident)

    own, inner = worker.run(nested)
    assert own == inner == worker.run(threading.get_ident) != threading.get_ident()
    with pytest.raises(DataError, match="no such"):
        worker.run(lambda: (_ for _ in ()).throw(DataError("no such")))
    with pytest.raises(TimeoutError, match="of the work"):
        worker.run(lambda: (_ for _ in ()).throw(TimeoutError("of the work")))
    assert worker.run(lambda: 3) == 3


def test_a_full_queue_and_a_late_answer_are_said(worker: Worker) -> None:
    begun, go, done = threading.Event(), threading.Event(), []

    def slow() -> None:
        begun.set()
        assert go.wait(10)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(worker.run, slow)
        assert begun.wait(10)
        with pytest.raises(Problem, match=r"longer than 0\.05 s") as late:
            worker.run(lambda: done.append("late"), 0.05)
        assert late.value.status == 504
        second = pool.submit(worker.run, lambda: done.append("second"))
        deadline = time.monotonic() + 10
        while worker._queue.qsize() < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        with pytest.raises(Problem, match="busy: 2 requests") as full:
            worker.run(lambda: done.append("too many"))
        assert full.value.status == 503
        go.set()
        first.result(10)
        second.result(10)
    assert done == ["second"]  # what came too late was not begun


def test_a_closed_worker_takes_nothing(worker: Worker) -> None:
    worker.run(lambda: None)
    worker.close()
    with pytest.raises(Problem, match="ending"):
        worker.run(lambda: None)
