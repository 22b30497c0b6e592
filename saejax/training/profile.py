"""The time of a training: a trace of some steps, a table by component, and memory over time.

profile/          the trace, for Perfetto and TensorBoard
profile.json      the figures; profile.md shows them as tables
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from saejax.core.files import write_json, writing
from saejax.core.host import resident_memory
from saejax.runs import Run
from saejax.training.program import Program
from saejax.training.trace import newest_trace, row
from saejax.training.watch import Phases, Watch, device_memory

# Steps before the trace, and in it: the prediction of a run's length looks at later ones.
_WARM, _TRACED = 3, 10

# What the loop does beside the step, in the order of the table.
PHASES = {
    "data": "wait for data",
    "start": "hand the batch over, start the step",
    "device": "wait for the step",
    "metrics": "write metrics",
    "validation": "validation",
    "checkpoint": "checkpoints",
    "profile": "the profile itself",
    "": "the loop itself",
}

# At most so many points of memory; then every other one goes, and half as many come.
_POINTS = 400

# What is idle for less than this share of a step is left out of the table.
_SHOWN = 0.0005


class Profiler(Watch):
    """Traces some steps after the first few, and measures the loop's own work and memory over the session.

    Numbers and order of the training stay as they are: it waits for steps, and reads nothing of them.

    Args:
        folder: where profile/, profile.json and profile.md are written; those of an earlier session go.
        devices: those of this process that train.
        tell: takes a line for the user.
    """

    def __init__(self, folder: Path, devices: Sequence[jax.Device], tell: Callable[[str], None]):
        self._folder, self._run, self._devices, self._tell = folder, Run(folder), devices, tell
        self._memory: list[dict[str, float]] = []
        self._every = 1
        self._trace: dict[str, Any] | None = None
        self._tracing: int | None = None

    @contextlib.contextmanager
    def over(self, programs: Sequence[Program], first: int, total: int, phases: Phases) -> Iterator[None]:
        self._program, self._first, self._taken = programs[0].step, first, first
        self._from = first + _WARM
        self._to = min(total, self._from + _TRACED)
        self._begun, self._phases = time.perf_counter(), phases
        try:
            yield
        finally:
            self._stop()
            self._write()
            where = self._run.profile.with_suffix(".md")
            if self._trace is None:
                self._tell(f"train: {where}; no steps were traced, since the first {_WARM} of a session are not")
            else:
                self._tell(
                    f"train: {where} says what took the time; {self._folder / self._trace['perfetto']} is its trace"
                )

    def before_step(self, step: int, states: Sequence[Any]) -> None:
        self._taken = step
        with self._phases.within("profile"):
            if step in (self._from, self._to):
                jax.block_until_ready(states)
            if step == self._to:
                self._stop()
                self._write()
            elif step == self._from:
                self._start(step)
            if (step - self._first) % self._every == 0:
                self._measure(step)
        self._taken = step + 1

    def _measure(self, step: int) -> None:
        point = {"step": step, "seconds": time.perf_counter() - self._begun}
        if host := resident_memory():
            point["host_bytes"] = host
        if memory := device_memory(self._devices):
            point["device_bytes"], point["device_peak_bytes"] = memory
        self._memory.append(point)
        if len(self._memory) > _POINTS:
            self._memory = self._memory[::2]
            self._every *= 2

    def _start(self, step: int) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it would slow the steps and fill the trace
        shutil.rmtree(self._run.trace, ignore_errors=True)
        try:
            jax.profiler.start_trace(str(self._run.trace), profiler_options=options)
        except RuntimeError as error:  # somebody else's trace is running
            self._tell(f"train: no trace ({error})")
        else:
            self._tracing = step

    def _stop(self) -> None:
        """End the trace, if there is one, and read it."""
        if self._tracing is None:
            return
        first, self._tracing = self._tracing, None
        jax.profiler.stop_trace()
        steps = self._taken - first
        if found := newest_trace(self._run.trace, self._program, steps):
            for_perfetto = found[0].with_name(found[0].name.replace(".xplane.pb", ".trace.json.gz"))
            about = {"perfetto": str(for_perfetto.relative_to(self._folder)), "first_step": first + 1, "steps": steps}
            self._trace = about | found[1] | {"idle": [one | {"name": PHASES[one["name"]]} for one in found[1]["idle"]]}

    def content(self) -> dict[str, Any]:
        """The content of profile.json."""
        passed, steps = time.perf_counter() - self._begun, max(1, self._taken - self._first)
        each, seconds = 1e3 / steps, self._phases.seconds()
        seconds[""] = passed - sum(value for name, value in seconds.items() if name)
        device = self._devices[0]
        return {
            "machine": {
                "device": device.device_kind,
                "platform": device.platform,
                "devices": len(self._devices),
                "cpus": os.cpu_count(),
                "jax": jax.__version__,
            },
            "step": costs(self._program),
            "trace": self._trace,
            "session": {
                "steps": steps,
                "ms_per_step": each * passed,
                "phases": [row(PHASES[name], each * seconds.get(name, 0.0), each * passed) for name in PHASES],
            },
            "memory": self._memory,
        }

    def _write(self) -> None:
        content = self.content()
        write_json(self._run.profile, content)
        path = self._run.profile.with_suffix(".md")
        with writing(path):
            path.write_text(as_markdown(content), encoding="utf-8")


def costs(step: Any) -> dict[str, float]:
    """XLA's figures of a compiled step on one device: floating-point operations and bytes (a loop's body counts once),
    and the bytes of memory that it takes.
    """
    analysis = step.cost_analysis() or {}
    known = {
        "flops": analysis.get("flops"),
        "bytes": analysis.get("bytes accessed"),
        "memory_bytes": step_bytes(step.memory_analysis()),
    }
    return {name: float(value) for name, value in known.items() if value}


def step_bytes(memory: Any) -> int:
    """Bytes of memory of a compiled program while it runs, on one device: arguments, results and what is between."""
    if memory is None:
        return 0
    both = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(both + memory.temp_size_in_bytes)


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
