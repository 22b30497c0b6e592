"""Times of the operations of a recorded trace, by part of the train step.

The step names its parts (`jax.named_scope`: encode, select, decode, loss/<term>, statistics, optimizer, resample). XLA
keeps the names in the metadata of its operations, autodiff writes transpose(...) around them, and a trace says which
operation ran when. A fusion belongs to the part of its last operation, which its metadata names.
"""

import collections
import dataclasses
import re
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

# The host's own work is annotated with names that begin so.
HOST = "saejax."

BETWEEN, REST, OTHERS = "between devices", "rest of the step", "other programs"
_PARTS = ("encode", "select", "decode", "loss", "statistics", "optimizer", "resample")
_BACKWARD = tuple(f"backward of {part}" for part in ("loss", "decode", "select", "encode"))

# So many single operations are listed.
_LISTED_OPERATIONS = 12

# As the table lists them.
COMPONENTS = (*_PARTS[:4], *_BACKWARD, *_PARTS[4:], BETWEEN, REST, OTHERS)

_PART_IN_NAME = re.compile(rf"(?:^|[/(])({'|'.join(_PARTS)})(?=[/)]|$)")
_BETWEEN_DEVICES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*)?\{?\s*$")
_CALLED = re.compile(
    r"(?:body|condition|calls|to_apply|branch_computations|true_computation|false_computation)=({[^}]*}|\S*)"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of a compiled program: the component that it counts to, and where in the program it comes from."""

    component: str
    origin: str


@dataclasses.dataclass(frozen=True)
class Span:
    """When something ran on one thread or stream of a device, in nanoseconds.

    Attributes:
        ended: when an operation was over that went on after its thread had left it; else `stop`.
    """

    start: float
    stop: float
    name: str
    ended: float


def component_of(op: str, origin: str) -> str:
    """The component of an operation called `op` whose metadata is `origin`; "" where it names none.

    Of several parts the innermost counts, but all that a loss term computes is the loss's.
    """
    if op.startswith(_BETWEEN_DEVICES):
        return BETWEEN
    if not (named := _PART_IN_NAME.findall(origin)):
        return ""
    part = "loss" if "loss" in named else named[-1]
    backward = f"backward of {part}"
    return backward if "transpose(" in origin and backward in _BACKWARD else part


def operations(hlo: str) -> tuple[str, dict[str, Operation]]:
    """(name of the module, {operation: what it is}) of a compiled program's text.

    An operation that names no part counts to what calls its computation: the loop or branch that it is of.
    """
    module = re.match(r"HloModule ([\w.\-]+)", hlo)
    origins: dict[str, str] = {}
    within: dict[str, str] = {}
    caller: dict[str, str] = {}
    computation = ""
    for line in hlo.splitlines():
        if not (instruction := _INSTRUCTION.match(line)):
            computation = head[1] if (head := _COMPUTATION.match(line)) else computation
            continue
        origin = _OP_NAME.search(line)
        origins[instruction[1]], within[instruction[1]] = origin[1] if origin else "", computation
        for names in _CALLED.findall(line):
            caller |= dict.fromkeys(re.findall(r"[\w.\-]+", names), instruction[1])

    def component(op: str) -> str:
        seen: set[str] = set()
        at: str | None = op
        while at is not None and at not in seen:
            if of := component_of(at, origins[at]):
                return of
            seen.add(at)
            at = caller.get(within[at])
        return REST

    return module[1] if module else "", {op: Operation(component(op), origin) for op, origin in origins.items()}


def device_spans(trace: Path, module: str, ops: Container[str]) -> tuple[dict[str, list[list[Span]]], list[Span]]:
    """({device: the operations of each of its threads}, what the host did) of an .xplane.pb file.

    Operations of other programs than the one that is called `module` and consists of `ops` have the name "". Devices
    that write planes of their own are read there; a CPU's operations stand among the host's events.
    """
    planes = jax.profiler.ProfileData.from_file(str(trace)).planes
    lines = [
        (plane.name, [(event.name, event.start_ns, event.duration_ns, dict(event.stats)) for event in line.events])
        for plane in planes
        for line in plane.lines
    ]
    # XLA says so of operations that go on in other threads; both have a number.
    over = {stats.get("_c"): at for _, events in lines for name, at, _, stats in events if name.startswith("end: ")}
    ours = _program(module, ops, (stats for _, events in lines for *_, stats in events if "hlo_op" in stats))
    on_host: dict[str, list[list[Span]]] = collections.defaultdict(list)
    on_device: dict[str, list[list[Span]]] = collections.defaultdict(list)
    host: list[Span] = []
    for plane, events in lines:
        by_device: dict[str, list[Span]] = collections.defaultdict(list)
        for called, start, took, stats in events:
            if called.startswith(HOST):
                host.append(Span(start, start + took, called.removeprefix(HOST), start + took))
            elif "hlo_op" in stats:
                name = str(stats["hlo_op"]) if _which(stats) == ours else ""
                ended = max(start + took, over.get(stats.get("_p"), 0))
                by_device[str(stats.get("device_ordinal", ""))].append(Span(start, start + took, name, ended))
        is_device = plane.startswith("/device:")
        for ordinal, spans in by_device.items():
            (on_device if is_device else on_host)[plane if is_device else ordinal].append(spans)
    return dict(on_device or on_host), host


def _which(stats: dict[str, Any]) -> tuple[Any, Any]:
    """The program that an operation is of."""
    return stats.get("hlo_module"), stats.get("program_id")


def _program(module: str, ops: Container[str], events: Iterable[dict[str, Any]]) -> tuple[Any, Any]:
    """The program with the most of the operations `ops`, of those that are called `module`: names are used again."""
    operations_of: dict[tuple[Any, Any], set[str]] = collections.defaultdict(set)
    for stats in events:
        if stats.get("hlo_module") == module and stats["hlo_op"] in ops:
            operations_of[_which(stats)].add(stats["hlo_op"])
    return max(operations_of, key=lambda program: len(operations_of[program]), default=(module, None))


def innermost(spans: Iterable[Span]) -> Iterator[tuple[float, float, str]]:
    """(start, stop, name) of what one thread was doing, without overlaps: of nested spans the inner ones."""
    stack: list[Span] = []
    at = 0.0
    for span in sorted(spans, key=lambda s: (s.start, -s.stop)):
        while stack and stack[-1].stop <= span.start:
            done = stack.pop()
            if done.stop > at:
                yield at, done.stop, done.name
                at = done.stop
        if stack and span.start > at:
            yield at, span.start, stack[-1].name
        at = max(at, span.start)
        stack.append(span)
    while stack:
        done = stack.pop()
        if done.stop > at:
            yield at, done.stop, done.name
            at = done.stop


def times(
    threads: Iterable[list[Span]], host: Iterable[Span], window: tuple[float, float]
) -> dict[tuple[str, str], float]:
    """{("op", name) or ("idle", what the host did): nanoseconds} of one device; they add up to the window.

    Threads at work at the same time share it evenly. Where none is seen at work, the operation that its thread left
    last and that has not ended goes on in threads that say nothing; copies that wait for those do not count.
    """
    stretches = [("host", *stretch) for stretch in innermost(host)]
    for thread in threads:
        stretches += [("run", *stretch) for stretch in innermost(thread)]
        stretches += [("wait", span.stop, span.ended, span.name) for span in thread if span.ended > span.stop]
    changes = [(edge, 0, "", "", -1) for edge in window]
    for number, (kind, start, stop, name) in enumerate(stretches):
        changes += [(start, 1, kind, name, number), (stop, -1, kind, name, number)]
    changes.sort(key=lambda change: (change[0], change[1]))

    active: dict[str, dict[int, str]] = {"run": {}, "wait": {}, "host": {}}
    total: dict[tuple[str, str], float] = collections.defaultdict(float)
    before = window[0]
    for at, sign, kind, name, which in changes:
        if (passed := min(at, window[1]) - before) > 0:
            for key in (keys := _busy(active)):
                total[key] += passed / len(keys)
            before += passed
        if sign > 0:
            active[kind][which] = name
        elif sign < 0:
            active[kind].pop(which, None)
    return dict(total)


def _busy(active: dict[str, dict[int, str]]) -> list[tuple[str, str]]:
    """The operations, or the idleness, that a stretch of time belongs to."""
    if running := active["run"]:
        return [("op", name) for name in running.values()]
    waiting = list(active["wait"].values())
    if at_work := [name for name in waiting if not name.startswith(("copy", "wrapped_copy"))] or waiting:
        return [("op", at_work[-1])]
    return [("idle", next(reversed(active["host"].values()), ""))]


def newest_trace(folder: Path, step: Any, steps: int) -> tuple[Path, dict[str, Any]] | None:
    """(.xplane.pb file, `by_component`) of the latest trace in a folder, of `steps` of a compiled step; or None."""
    if not steps or not (files := list(folder.rglob("*.xplane.pb"))):
        return None
    newest = max(files, key=lambda path: path.stat().st_mtime)
    module, ops = operations(step.as_text())
    return newest, by_component(*device_spans(newest, module, ops), ops, steps)


def by_component(
    devices: dict[str, list[list[Span]]], host: list[Span], ops: dict[str, Operation], steps: int
) -> dict[str, Any]:
    """The part of profile.json about `steps` traced steps, in milliseconds a step, as the mean over the devices.

    step_ms and its parts: components, and idle, where a device had nothing to do, by what the host did meanwhile. Also
    the operations that took the longest. All empty where the trace names no operations.
    """
    spans = [span for threads in devices.values() for thread in threads for span in thread if span.name]
    if not spans:
        return {"step_ms": None, "components": [], "idle": [], "largest": []}
    window = min(span.start for span in spans), max(span.ended for span in spans)
    by_op: dict[tuple[str, str], float] = collections.defaultdict(float)
    for threads in devices.values():
        for key, nanoseconds in times(threads, host, window).items():
            by_op[key] += nanoseconds / 1e6 / steps / len(devices)
    parts: dict[str, float] = collections.defaultdict(float)
    for (kind, name), ms in by_op.items():
        if kind == "op":
            parts[ops[name].component if name in ops else OTHERS] += ms
    whole = (window[1] - window[0]) / 1e6 / steps
    idle = sorted(((ms, name) for (kind, name), ms in by_op.items() if kind == "idle"), reverse=True)
    largest = sorted(((ms, name) for (kind, name), ms in by_op.items() if kind == "op" and name in ops), reverse=True)
    return {
        "step_ms": whole,
        "components": [row(name, parts[name], whole) for name in COMPONENTS if name in parts],
        "idle": [row(name, ms, whole) for ms, name in idle],
        "largest": [
            row(name, ms, whole) | {"component": ops[name].component, "origin": ops[name].origin}
            for ms, name in largest[:_LISTED_OPERATIONS]
        ],
    }


def row(name: str, ms: float, whole: float) -> dict[str, Any]:
    """A row of a table of times."""
    return {"name": name, "ms": ms, "share": ms / whole if whole else 0.0}
