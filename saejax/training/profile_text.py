"""profile.md: the figures of profile.json as tables."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# What is idle for less than this share of a step is left out.
_SHOWN = 0.0005


def as_markdown(content: Mapping[str, Any]) -> str:
    """The whole of profile.md."""
    machine, session, traced = content["machine"], content["session"], content["trace"]
    on = f"{machine['devices']} x {machine['device']} ({machine['platform']}), {machine['cpus']} CPUs"
    parts = [
        "# What took the time",
        f"{on}, jax {machine['jax']}. How to read this: docs/training.md, 'What takes the time'.",
        *(_traced(traced, content["step"]) if traced else ["No steps were traced."]),
        f"## The whole session: {session['steps']:,} steps, {session['ms_per_step']:,.1f} ms each",
        "What the loop waited for, or did itself; the device works meanwhile.",
        _times("the loop", session["phases"]),
        *_memory_table(content["memory"]),
    ]
    return "\n\n".join(parts) + "\n"


def _traced(traced: Mapping[str, Any], step: Mapping[str, float]) -> list[str]:
    if not traced["components"]:
        return ["The trace names no operations of the step: this backend does not record them."]
    first, count, ms = traced["first_step"], traced["steps"], traced["step_ms"]
    idle = [row | {"name": f"device idle: {row['name']}"} for row in traced["idle"] if row["share"] >= _SHOWN]
    rows = [*traced["components"], *idle, {"name": "all", "ms": ms, "share": 1.0}]
    largest = [
        [f"`{row['name']}`", row["component"], f"{row['ms']:,.2f}", f"{row['share']:.1%}", f"`{row['origin']}`"]
        for row in traced["largest"]
    ]
    return [
        f"## Steps {first:,} to {first + count - 1:,}: {ms:,.1f} ms each",
        _times("component", rows),
        _said_by_xla(step, ms),
        "## The longest operations",
        _aligned_table(["operation", "component", "ms", "share", "from"], largest, words=(0, 1, 4)),
    ]


def _said_by_xla(step: Mapping[str, float], ms: float) -> str:
    """The compiled step's own figures, and the rates that follow."""
    figures = [
        f"{step[key] / 1e9:,.2f} {unit} ({step[key] / 1e6 / ms:,.1f} {unit}/s)"
        for key, unit in (("flops", "GFLOP"), ("bytes", "GB"))
        if key in step
    ]
    counts = (
        f"XLA counts {' and '.join(figures)} in a step on one device; a loop's body counts once." if figures else ""
    )
    memory = f"The step takes {step['memory_bytes'] / 1e6:,.0f} MB of its memory." if "memory_bytes" in step else ""
    return f"{counts} {memory}".strip()


def _memory_table(points: Sequence[Mapping[str, float]]) -> list[str]:
    if not points:
        return []
    kinds = {"host_bytes": "host", "device_bytes": "device", "device_peak_bytes": "device, most so far"}
    rows = []
    for key, name in kinds.items():
        if known := [point for point in points if point.get(key)]:
            most = max(known, key=lambda point: point[key])
            values = [f"{point[key] / 1e6:,.0f}" for point in (known[0], most, known[-1])]
            rows.append([name, *values, f"{most['step']:,.0f}"])
    return ["## Memory (MB)", _aligned_table(["", "at first", "at most", "at last", "most at step"], rows, words=(0,))]


def _times(what: str, rows: Iterable[Mapping[str, Any]]) -> str:
    lines = [[row["name"], f"{row['ms']:,.2f}", f"{row['share']:.1%}"] for row in rows]
    return _aligned_table([what, "ms a step", "share"], lines, words=(0,))


def _aligned_table(head: Sequence[str], lines: Sequence[Sequence[str]], words: Sequence[int]) -> str:
    """A Markdown table whose columns line up as text; those not of `words` stand to the right."""
    cells = [[cell.replace("|", "\\|") for cell in line] for line in (head, *lines)]
    widths = [max(4, *(len(line[i]) for line in cells)) for i in range(len(head))]
    rule = ["-" * width if i in words else "-" * (width - 1) + ":" for i, width in enumerate(widths)]

    def drawn(line: Sequence[str]) -> str:
        sides = [
            cell.ljust(w) if i in words else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        return f"| {' | '.join(sides)} |"

    return "\n".join(map(drawn, [cells[0], rule, *cells[1:]]))
