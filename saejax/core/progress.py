"""Progress, rate and time left of a long stage: a bar on a terminal or in a notebook, occasional lines in a log."""

import importlib.util
import sys
import time
from typing import Any

from tqdm import tqdm

_LOG_EVERY_SECONDS = 15.0


class Progress:
    """Progress in tokens, or what `unit` says. Use as a context manager; `advance(n)` after each piece of work.

    Attributes:
        tokens: those of this session, without those done before it.

    With `shown` false it only counts: of several processes one shows. Where whole batches end beyond `total`, what was
    done becomes the total.
    """

    def __init__(self, stage: str, total: int, done: int = 0, shown: bool = True, unit: str = "tokens"):
        self._stage, self._total, self._before, self._unit = stage, total, done, unit
        self.tokens = 0
        self._show: dict[str, str] = {}
        self._started = self._last_line = time.perf_counter()
        self._bar = None
        self._shown = shown
        bar = _notebook_bar() or (tqdm if sys.stderr.isatty() else None)
        if shown and bar:
            self._bar = bar(total=total, initial=done, desc=stage, unit=unit[:3], unit_scale=True, mininterval=0.2)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._shown and self.tokens:
            self._print_line()

    def advance(self, tokens: int, **show: str) -> None:
        """Count `tokens` more; `show` are a few words about the state of the work, kept until changed."""
        self.tokens += tokens
        self._total = max(self._total, self._before + self.tokens)
        self._show |= show
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.set_postfix(self._show, refresh=False)
            self._bar.update(tokens)
        elif self._shown and time.perf_counter() - self._last_line > _LOG_EVERY_SECONDS:
            self._print_line()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def _print_line(self) -> None:
        self._last_line = time.perf_counter()
        done, rate = self._before + self.tokens, self.tokens / max(self.seconds, 1e-9)
        left = tqdm.format_interval(max(0, self._total - done) / max(rate, 1e-9))
        state = "".join(f", {name} {value}" for name, value in self._show.items())
        speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        line = f"{self._stage}: {done:,}/{self._total:,} {self._unit}, {speed} {self._unit}/s, {left} left{state}"
        print(line, file=sys.stderr, flush=True)


def _notebook_bar() -> Any:
    """The bar of a Jupyter kernel, a widget where ipywidgets is installed; None elsewhere."""
    ipython = sys.modules.get("IPython")
    if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
        return None
    if importlib.util.find_spec("ipywidgets") is None:
        return tqdm
    from tqdm.notebook import tqdm as widget

    return widget
