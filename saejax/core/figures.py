"""Pictures of matplotlib: the figure, its panels and colours, and its files. Only here matplotlib is imported."""

import io
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vP*Xph<>"
# Okabe and Ito's colours, which are told apart also by those who see fewer.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f")
_DPI = 120


def blank_figure(inches: tuple[float, float]) -> "Figure":
    """A figure without a window, which a notebook shows. matplotlib is imported late: that takes longer than most
    commands need to start."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            return png_of(self)

    figure = Picture(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def panels(figure: "Figure", count: int = 1, grid: bool = True) -> list["Axes"]:
    """Axes side by side."""
    side_by_side: list[Axes] = figure.subplots(1, count, squeeze=False)[0].tolist()
    for axes in side_by_side:
        axes.grid(grid, color="0.9") if grid else None
        axes.spines[["top", "right"]].set_visible(False)
    return side_by_side


def say_inside(axes: "Axes", text: str) -> None:
    """Write a line into the middle of a panel that shows nothing."""
    axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes)


def log_axis(axes: "Axes", l0: Sequence[float]) -> None:
    """A log axis with plain numbers, wide enough that points of one L0 do not fill it with noise."""
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    low, high = min(l0) / 1.15, max(l0) * 1.15
    if high / low < 3:
        middle = (low * high) ** 0.5
        low, high = middle / 3**0.5, middle * 3**0.5
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    within = (1, 2, 3, 4, 5, 6, 8) if high / low < 10 else (1, 2, 5)
    ticks = [m * 10.0**n for n in range(-2, 6) for m in within]
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())


def png_of(figure: "Figure") -> bytes:
    with io.BytesIO() as buffer:
        figure.savefig(buffer, dpi=_DPI, format="png")
        return buffer.getvalue()


def image_of(figure: "Figure", form: str) -> bytes:
    """The picture as "svg" or "pdf": the same bytes each time, and letters that a program can still edit."""
    from matplotlib import rc_context

    dated = {"svg": "Date", "pdf": "CreationDate"}[form]
    with io.BytesIO() as buffer, rc_context({"svg.hashsalt": "saejax", "pdf.fonttype": 42}):
        figure.savefig(buffer, format=form, metadata={dated: None})
        return buffer.getvalue()


def least_width(png: bytes) -> int:
    """Pixels of a page below which a picture's letters, of 10 points, would be lower than 9 pixels: it is scrolled."""
    (width,) = struct.unpack(">I", png[16:20])
    return round(width * 9 / (10 / 72 * _DPI))
