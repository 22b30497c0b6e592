"""Bytes that a compiled program sends between devices, read from its text.

    for c in collectives(jax.jit(f).lower(...).compile().as_text()): print(c.kind, c.sent)

Those of one device move nothing, and are left out. A program is a tree of computations; one in a loop runs as often as
the loop, one in a branch perhaps not at all.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

MOVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
_BYTES = {"pred": 1, "bf16": 2} | {f"{kind}{8 * n}": n for kind in "suf" for n in (1, 2, 4, 8)}
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(MOVES)})(?:-start)?\(")
# Where an instruction names computations that it runs.
_RUNS = re.compile(
    r"\b(body|calls|to_apply|true_computation|false_computation|branch_computations)=(\{[^}]*\}|%[\w.-]+)"
)
_BRANCHES = ("true_computation", "false_computation", "branch_computations")
_TIMES = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction that moves data between devices.

    Attributes:
        kind: of `MOVES`.
        size: bytes of its result on one device.
        devices: how many take part together.
        times: how often it runs in a run of the program.
        branch: it runs only if a branch is taken.
    """

    kind: str
    size: int
    devices: int
    times: int
    branch: bool

    @property
    def sent(self) -> float:
        """Bytes that one device sends in a run of the program, if the devices stand in a ring: the least possible."""
        others = (self.devices - 1) / self.devices
        share = {
            "all-reduce": 2 * others,
            "all-gather": others,
            "reduce-scatter": self.devices - 1,
            "collective-permute": 1,
            "all-to-all": others,
        }
        return self.times * self.size * share[self.kind]


def collectives(text: str) -> list[Collective]:
    """Every collective of a compiled program (`compiled.as_text()`), in no particular order."""
    bodies, entry = _computations(text)
    spread = re.search(r"\bnum_partitions=(\d+)", text)
    every = _in_tree(bodies, entry, int(spread[1]) if spread else 1, 1, False)
    return [one for one in every if one.devices > 1]


def _in_tree(bodies: dict[str, list[str]], name: str, devices: int, times: int, branch: bool) -> Iterator[Collective]:
    for line in bodies.get(name, ()):
        found = _COLLECTIVE.search(line)
        if found:
            yield Collective(found[2], _size(found[1]), _devices(line, devices), times, branch)
            continue  # the computation that it names adds two numbers
        trips = _TIMES.search(line)
        for how, names in _RUNS.findall(line):
            again = int(trips[1]) if trips and how == "body" else 1
            for inner in re.findall(r"%([\w.-]+)", names):
                yield from _in_tree(bodies, inner, devices, times * again, branch or how in _BRANCHES)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """({name: its lines}, name of the one that the program starts with)."""
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        if start := re.match(r"(ENTRY )?%([\w.-]+) .*\{$", line):
            name = start[2]
            bodies[name] = []
            entry = name if start[1] else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _size(shape: str) -> int:
    """Bytes of a shape as the text writes it, `f32[8,4]{1,0}` or several in brackets."""
    return sum(
        _BYTES[dtype] * math.prod(int(n) for n in dimensions.split(",") if n)
        for dtype, dimensions in _SHAPE.findall(re.sub(r"/\*.*?\*/", "", shape))
        if dtype in _BYTES
    )


def _devices(line: str, devices: int) -> int:
    """The number of the program's devices in a group; the text writes groups in four ways."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", mesh[2]))
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(counted[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(listed[1].split(","))
    return devices if "replica_groups" in line else 2  # a permutation names pairs
