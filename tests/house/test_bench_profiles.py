"""The table of what steps are made of, loops by hand, and the two libraries in turn."""

import shutil
from pathlib import Path

import pytest

from benchmarks import products
from benchmarks.bench import loops, profiles
from benchmarks.bench.rows import CPU_ROWS, Row
from saejax.training.trace import row as a_time

pytestmark = pytest.mark.ci


def test_parts_stand_beside_each_other_by_row() -> None:
    first, second = CPU_ROWS[:2]

    def found(**ms: float) -> dict[str, object]:
        parts = [a_time(name.replace("_", " "), value, 10.0) for name, value in ms.items()]
        largest = [one | {"component": one["name"], "origin": ""} for one in parts]
        return {"step_ms": 10.0, "components": parts, "idle": [a_time("", 0.5, 10.0)], "largest": largest}

    page = profiles.page({first: found(encode=6.0, select=3.5), second: found(encode=9.5)})
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    assert lines[0] == ["part", first.name, second.name]
    assert ["encode", "6.0", "9.5"] in lines and ["select", "3.5", "-"] in lines
    assert ["idle", "0.5", "0.5"] in lines and ["**whole**", "10.0", "10.0"] in lines
    assert [first.name, "2,048 x 128 -> 1,024, k 16", "encode: 6.0; select: 3.5"] in lines


def test_libraries_take_turns_and_the_first_call_of_each_does_not_count() -> None:
    calls: list[str] = []
    taken = products.seconds({name: lambda name=name: calls.append(name) for name in ("default", "Eigen")}, 3)
    assert calls == ["default", "Eigen"] * 4
    assert {name: len(of) for name, of in taken.items()} == {"default": 3, "Eigen": 3}


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
def test_loops_by_hand_give_the_sums_of_a_step(tmp_path: Path) -> None:
    found = loops.parts(Row("tiny", "topk", 24, 160, k=5, batch=64), loops.compiled(tmp_path))  # raises if they differ
    assert [name for name, *_ in found] == ["select", "decode", "gradient of the values", "gradient of the rows"]
    assert found[0][1] == 64 * 160 * 4 / 1e6 and all(ms > 0 for ms in loops.milliseconds(found[1]))
