"""The tables of train steps, and the figures to reach, from the results alone."""

import math
from pathlib import Path
from typing import Any

from benchmarks.bench import training_pictures
from benchmarks.bench.frame import Result
from benchmarks.bench.markdown import number, table
from benchmarks.bench.rows import PEERS as HAVE
from benchmarks.bench.rows import shape
from benchmarks.bench.training_result import (
    AXES,
    PEERS,
    busy,
    by_round,
    done,
    faster_peer,
    for_a_doubling,
    in_kernel,
    late_over_early,
    neighbours,
    over_beside,
    over_peer,
    rate,
    seconds,
    share_of_floor,
)

# From this many tokens on a row's FVE says who learned more; before, only that all do the same work.
_LONG = 500_000

# --- the figures to reach ----------------------------------------------------------------------------------------


def figures(results: list[Result]) -> list[dict[str, Any]]:
    """Each row's figures that have an aim: {what, row, value, aim, better}."""
    found = []

    def add(what: str, row: str, value: float | None, aim: float, better: str) -> None:
        if value is not None and math.isfinite(value):
            found.append({"what": what, "row": row, "value": value, "aim": aim, "better": better})

    rows = done(results)
    for r in rows:
        about, row, preset = r["about"], r["row"], r["about"]["preset"]
        gpu, ours = row.startswith("gpu-"), r["contestants"]["saejax"]
        if gpu:
            add("times the faster peer", row, over_peer(r), 2.0, "more")
        elif preset in ("topk", "batchtopk"):
            add(f"{preset}: times the faster peer", row, over_peer(r), 4.0, "more")
        elif preset in ("standard", "jumprelu"):
            add("dense coders: times the faster peer", row, over_peer(r), 1.3, "more")
        beside = about["beside"]
        if about["dead"]:
            add("time with dead latents over none", row, over_beside(r), 1.3, "less")
        elif beside and preset == "batchtopk":
            add("batchtopk's time over topk's", row, over_beside(r), 1.2, "less")
        elif beside and preset == "matryoshka":
            add("matryoshka's time over batchtopk's", row, over_beside(r), 1.3, "less")
        if about["d_sae"] >= 24576:
            add("share of the floor", row, share_of_floor(r), 0.5 if gpu else 0.6, "more")
        if not gpu:
            add(f"cores busy, of {r['cores']}", row, busy(ours), 0.925 * r["cores"], "more")
            add("share of the CPU's time in the kernel", row, in_kernel(ours), 0.05, "less")
        if r["tokens"] >= _LONG and (peers := [p for p in PEERS if seconds(r, p) is not None]):
            best = max(r["contestants"][peer]["fve"] for peer in peers)
            add("FVE less the better peer's", row, ours["fve"] - best, -0.005, "more")
        if row == "gpu-batchtopk-4096":
            add("tokens a second, 5 x the best published", row, rate(r), 1_110_000, "more")
    for axis, before, after in neighbours(rows):
        row, value = after["row"], for_a_doubling(axis, before, after)
        add(f"times as long for twice the {AXES[axis]}", row, value, 2.2, "less")
    add("late steps over early ones", *late_over_early(rows), 1.1, "less")
    return found


# --- the page ----------------------------------------------------------------------------------------------------


def page(results: list[Result], folder: Path) -> list[str]:
    rows = done(results)
    if not rows:
        return []
    pictures = training_pictures.write(rows, folder)
    return [
        "Milliseconds of a full step (forward, gradient, clipping, Adam, statistics): the median of all steps.",
        "Everybody takes turns in several rounds, on the same activations in the same order, with its own default",
        "settings but for the learning rate, which is the same and constant. In brackets: the lowest and the highest",
        "round. Floor: one encoder product for sparse latents, five for dense ones, by the faster of XLA and torch in",
        "the same rounds, and Adam's bytes through memory at the rate that was measured after them.",
        "",
        *table(_TIMES, [_times(r) for r in rows]),
        "",
        *[f"![{title}](bench/{name})" for name, title in pictures.items()],
        "",
        "### What they learned, and what it took",
        "",
        "FVE and L0 of held-out activations through each one's training forward pass, after the same tokens; "
        f"whoever finds every feature has {rows[0]['ceiling']:.3f}.",
        f"Below {_LONG:,} tokens it says that all do the same work, not who learns more. Memory is the most that the",
        "process (on a GPU: its arrays) held. Cores and kernel: CPU seconds of our process over the clock's, and their",
        "share in the system.",
        "",
        *table(_TAKEN, [_taken(r) for r in rows]),
        "",
        "### XLA's own count",
        "",
        "FLOPs and bytes of our compiled step by XLA's cost analysis (each operation's operands and results, as if",
        "nothing stayed in a cache; a loop's body counts once), beside those of the floor.",
        "",
        *table(_COUNTS, [_counted(r) for r in rows]),
        *_beside(rows),
        *_growth(rows),
        *_parts(rows),
        *_published(rows),
    ]


_TIMES = ("row", "shape", "saejax", "SAELens", "dictionary_learning", "times the faster peer", "floor", "share of it")
_TAKEN = ("row", "tokens", "FVE: saejax", "SAELens", "d. learning", "L0", "GB: saejax", "SAELens", "d. learning",
          "cores", "kernel")  # fmt: skip
_COUNTS = ("row", "GFLOP by XLA", "of the floor", "GB by XLA", "of the floor", "compiled in, s", "products in")


def _times(r: Result) -> list[str]:
    peer = faster_peer(r)
    ratio = "not measured" if r["about"]["preset"] in HAVE else "no peer"
    if peer is not None:
        rounds = by_round(r, peer, "saejax")
        ratio = f"**{over_peer(r):.2f}** ({min(rounds):.2f} to {max(rounds):.2f})"
    floor = r["floor"]["products"] + r["floor"]["adam"]
    return [
        r["row"],
        shape(r["about"]),
        f"{_ms(r, 'saejax')} ({rate(r):,.0f} tokens/s)",
        *(_ms(r, name) for name in PEERS),
        ratio,
        f"{1000 * r['floor']['products']:,.1f} + {1000 * r['floor']['adam']:,.1f} = {1000 * floor:,.1f}",
        f"{share_of_floor(r):.0%}",
    ]


def _ms(r: Result, name: str) -> str:
    said = r["contestants"].get(name)
    if said is None:
        return "-"
    return "failed" if "failed" in said else f"{1000 * said['median']:,.1f}"


def _taken(r: Result) -> list[str]:
    said = {name: one for name, one in r["contestants"].items() if "failed" not in one}
    ours = said["saejax"]
    names = ("saejax", *PEERS)
    fve = [f"{said[n]['fve']:.4f}" if n in said else "-" for n in names]
    l0 = " / ".join(f"{said[n]['l0']:.0f}" for n in names if n in said)
    memory = [f"{said[n]['peak'] / 1e9:.1f}" if n in said else "-" for n in names]
    return [r["row"], f"{r['tokens']:,}", *fve, l0, *memory, f"{busy(ours):.2f}", f"{in_kernel(ours):.1%}"]


def _counted(r: Result) -> list[str]:
    ours, floor = r["contestants"]["saejax"], r["floor"]
    counted = [
        number(ours.get("flops"), 1e9),
        number(floor["flops"], 1e9),
        number(ours.get("bytes"), 1e9),
        number(floor["bytes"], 1e9),
    ]
    return [r["row"], *counted, f"{ours['compile_seconds']:.1f}", ours["matmul_dtype"]]


def _beside(rows: list[Result]) -> list[str]:
    lines = [
        [r["row"], r["about"]["beside"], f"{over_beside(r):.2f}", _range(r)] for r in rows if over_beside(r) is not None
    ]
    heading = ["", "### Ours beside ours, in the same rounds", ""]
    return [*heading, *table(("row", "beside", "times as long", "rounds"), lines)] if lines else []


def _range(r: Result) -> str:
    rounds = by_round(r, "saejax", f"saejax {r['about']['beside']}")
    return f"{min(rounds):.2f} to {max(rounds):.2f}"


_OVER_TOKENS = (
    "Over the tokens: the steps of the later rounds of {row} take {late:.2f} times as long as the earlier ones'."
)


def _growth(rows: list[Result]) -> list[str]:
    lines = [
        [AXES[axis], before["row"], after["row"], _ms(before, "saejax"), _ms(after, "saejax"),
         f"{for_a_doubling(axis, before, after):.2f}"]
        for axis, before, after in neighbours(rows)
    ]  # fmt: skip
    row, late = late_over_early(rows)
    heading = ("grows", "from", "to", "ms", "ms", "times as long for twice as much")
    return [
        *(["", "### Growth", "", *table(heading, lines)] if lines else []),
        *(["", _OVER_TOKENS.format(row=row, late=late)] if late is not None else []),
    ]


def _parts(rows: list[Result]) -> list[str]:
    lines = [
        [r["row"], *(f"{1000 * r['parts'][part]:,.1f}" for part in r["parts"]), _ms(r, "saejax")]
        for r in rows
        if "parts" in r
    ]
    if not lines:
        return []
    names = next(tuple(r["parts"]) for r in rows if "parts" in r)
    return [
        "",
        "### Parts of our step, each compiled alone, ms",
        "",
        "The loss holds the encoder, and its gradient holds the loss. The rest of a step is the optimizer.",
        "",
        *table(("row", *names, "step"), lines),
    ]


def _published(rows: list[Result]) -> list[str]:
    lines = [[r["row"], f"{rate(r):,.0f} tokens/s", r["about"]["published"]] for r in rows if r["about"]["published"]]
    return ["", "### Beside published figures", "", *table(("row", "here", "published"), lines)] if lines else []
