"""Results of one request that are kept for the next: bounded in bytes, the longest unused goes first."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

V = TypeVar("V")


class Cache:
    """Values by key, with their sizes in bytes; for any number of threads.

    What is larger than the whole limit is given to whoever asked, and not kept.

    Attributes:
        limit: bytes.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._coming: dict[Hashable, Future[Any]] = {}
        self._bytes = self._hits = self._misses = 0

    def get(self, key: Hashable, make: Callable[[], V], size: Callable[[V], int]) -> V:
        """The value of the key, made where it is not kept. Those who ask while it is being made wait for the one.

        An error of `make` goes to all who wait, and nothing is kept. `make` may not ask for its own key.
        """
        with self._lock:
            if key in self._kept:
                self._hits += 1
                self._kept.move_to_end(key)
                return self._kept[key][0]
            coming = self._coming.get(key)
            if coming is None:
                self._misses += 1
                making: Future[Any] = Future()
                self._coming[key] = making
            else:
                self._hits += 1
        if coming is not None:
            return coming.result()
        try:
            value = make()
            self._keep(key, value, size(value))
        except BaseException as error:
            with self._lock:
                del self._coming[key]
            making.set_exception(error)
            raise
        making.set_result(value)
        return value

    def drop(self, key: Hashable) -> None:
        """Forget the value of a key, if there is one."""
        with self._lock:
            self._bytes -= self._kept.pop(key, (None, 0))[1]

    def stats(self) -> dict[str, float]:
        """hits, misses, entries, bytes, limit_bytes, and hit_rate: hits of all questions, 0 before the first."""
        with self._lock:
            questions = self._hits + self._misses
            return {
                "hits": self._hits,
                "misses": self._misses,
                "entries": len(self._kept),
                "bytes": self._bytes,
                "limit_bytes": self.limit,
                "hit_rate": self._hits / questions if questions else 0.0,
            }

    def _keep(self, key: Hashable, value: Any, size: int) -> None:
        with self._lock:
            del self._coming[key]
            if size > self.limit:
                return
            self._kept[key] = (value, size)
            self._bytes += size
            while self._bytes > self.limit:
                self._bytes -= self._kept.popitem(last=False)[1][1]


class Caches:
    """The three caches of a server.

    Attributes:
        feature: features, orders of searches, explanations and notes.
        provenance: where runs and examples come from.
        inference: dictionaries in memory, encoded texts, lengths of decoder rows.
    """

    def __init__(self, feature: int = 256 << 20, provenance: int = 32 << 20, inference: int = 2 << 30):
        self.feature, self.provenance, self.inference = Cache(feature), Cache(provenance), Cache(inference)

    def stats(self) -> dict[str, Any]:
        """Each cache's, and their hit rates once more by name."""
        stats = {name: cache.stats() for name, cache in vars(self).items()}
        return stats | {f"{name}_cache_hit_rate": figures["hit_rate"] for name, figures in stats.items()}
