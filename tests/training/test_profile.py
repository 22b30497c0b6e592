"""A profile says what took the time, and changes nothing."""

import json
import random
from pathlib import Path
from typing import Any

import jax
import pytest
from tiny.trainings import assert_same, final, run

from saejax.app.experiment import default_config, experiment
from saejax.app.sweep.run import run_sweep
from saejax.app.workspace import Workspace
from saejax.core.errors import ConfigError
from saejax.training import Profiler
from saejax.training.trace import BETWEEN, COMPONENTS, REST, Span, by_component, component_of, operations, times


def profiled(folder: Path, devices: int = 1) -> tuple[Profiler, list[str]]:
    said: list[str] = []
    return Profiler(folder, jax.devices()[:devices], said.append), said


def read(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "profile.json").read_text())
    return value


def test_a_profile_adds_up_and_changes_no_number(store: Path, tmp_path: Path) -> None:
    """Stopped within the traced steps and continued, both profiled: the end is bitwise that of a run without."""
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    assert run(store, plain).finished

    watch, said = profiled(watched)
    assert not run(store, watched, stop_at=8, watches=[watch]).finished
    first = read(watched)
    assert (first["trace"]["first_step"], first["trace"]["steps"], first["session"]["steps"]) == (4, 6, 9)
    assert run(store, watched, watches=[profiled(watched)[0]]).finished
    assert_same(final(plain), final(watched))

    content = read(watched)
    trace = content["trace"]
    assert (trace["first_step"], trace["steps"], content["session"]["steps"]) == (13, 10, 21)
    names = [row["name"] for row in trace["components"]]
    assert {"encode", "select", "decode", "loss", "backward of encode", "backward of decode", "optimizer"} <= set(names)
    assert names == [name for name in COMPONENTS if name in names] and BETWEEN not in names
    parts = [*trace["components"], *trace["idle"]]
    assert sum(row["ms"] for row in parts) == pytest.approx(trace["step_ms"])
    assert sum(row["share"] for row in parts) == pytest.approx(1)
    phases = content["session"]["phases"]
    assert sum(row["ms"] for row in phases) == pytest.approx(content["session"]["ms_per_step"], rel=1e-3)
    assert content["step"]["flops"] > 2 * 128 * 16 * 64 and content["step"]["memory_bytes"] > 0
    steps = [point["step"] for point in content["memory"]]
    assert steps == list(range(9, 30)) and all(point["host_bytes"] > 1e7 for point in content["memory"])
    assert (watched / trace["perfetto"]).is_file()
    table = (watched / "profile.md").read_text()
    assert "| encode " in table and "wait for data" in table and "profile.md says what took the time" in said[0]


@pytest.mark.parametrize(("mode", "mesh"), [("jit", (2, 2)), ("pmap", (2, 1))])
def test_several_devices_are_profiled(store: Path, tmp_path: Path, mode: str, mesh: tuple[int, int]) -> None:
    watch, _ = profiled(tmp_path, devices=mesh[0] * mesh[1])
    assert run(store, tmp_path, "standard", mesh=mesh, mode=mode, watches=[watch]).finished
    names = {row["name"] for row in read(tmp_path)["trace"]["components"]}
    assert {"encode", "backward of encode", "optimizer", BETWEEN} <= names


def test_what_cannot_be_profiled_is_refused(tmp_path: Path) -> None:
    c = default_config()
    c.runs_dir, c.train.profile, c.sweep.seeds = str(tmp_path), True, (0, 1)
    with pytest.raises(ConfigError, match=r"train\.profile"):
        run_sweep(Workspace(experiment(c)))
    import saejax

    with pytest.raises(ConfigError, match="run folder"):
        saejax.train(jax.numpy.eye(64), "topk", k=2, d_sae=32, profile=True, progress=False)


def test_names_of_parts() -> None:
    wanted = {
        ("dot.1", "jit(step)/jvp(encode)/dot_general"): "encode",
        ("add.3", "jit(step)/jvp(select)/encode/gather"): "encode",
        ("top.1", "jit(step)/vmap(jvp(select))/top_k"): "select",
        ("mul.2", "jit(step)/transpose(jvp(decode))/while/body/closed_call/mul"): "backward of decode",
        ("dot.9", "jit(step)/jvp(loss/auxk)/cond/branch_1_fun/encode/dot_general"): "loss",
        ("dot.8", "jit(step)/transpose(jvp(loss/auxk))/decode/dot_general"): "backward of loss",
        ("select.1", "jit(step)/optimizer/jit(_where)/select_n"): "optimizer",
        ("all-reduce.4", "jit(step)/transpose(jvp(decode))/psum"): BETWEEN,
        ("add.1", "jit(decoder)/encoded/select_n"): "",
    }
    assert {key: component_of(*key) for key in wanted} == wanted


def test_an_operation_without_a_name_counts_to_its_loop_or_branch() -> None:
    module, found = operations(
        """HloModule jit_step, is_scheduled=true

%body.1 (p: (s32[])) -> (s32[]) {
  %p = (s32[]) parameter(0)
  ROOT %copy.7 = (s32[]) copy(%p)
}

%region_1.2 (p: (s32[])) -> (s32[]) {
  ROOT %copy.5 = (s32[]) copy(%p)
}

%region_2.3 (p: (s32[])) -> (s32[]) {
  ROOT %copy.6 = (s32[]) copy(%p)
}

ENTRY %main.9 (a: f32[2]) -> f32[2] {
  %while.3 = (s32[]) while(%t), condition=%cond.1, body=%body.1, metadata={op_name="jit(step)/jvp(decode)/while"}
  %c.4 = s32[] conditional(%i), branch_computations={%region_1.2, %region_2.3}, metadata={op_name="jit(f)/select"}
  ROOT %copy.8 = f32[2] copy(%a)
}
"""
    )
    assert module == "jit_step"
    assert {name: one.component for name, one in found.items() if "copy" in name} == {
        "copy.5": "select",
        "copy.6": "select",
        "copy.7": "decode",
        "copy.8": REST,
    }


def test_times_against_a_count_of_moments() -> None:
    """Nested operations on two threads, some that go on after their thread has left them: each moment by hand."""
    rng = random.Random(0)
    for _ in range(50):
        threads = [_thread(rng, name) for name in "ab"]
        host = [Span(0, 30, "loop", 30), Span(5, 12, "data", 12)]
        found = times(threads, host, (0, 40))
        wanted: dict[tuple[str, str], float] = {}
        for moment in range(40):
            keys = _at(moment + 0.5, threads, host)
            for key in keys:
                wanted[key] = wanted.get(key, 0) + 1 / len(keys)
        assert found == pytest.approx(wanted) and sum(found.values()) == pytest.approx(40)


def _thread(rng: random.Random, name: str) -> list[Span]:
    outer = sorted(rng.sample(range(40), 4))
    spans = [
        Span(outer[0], outer[1], f"{name}0", outer[1]),
        Span(outer[2], outer[3], f"{name}1", outer[3] + rng.randint(0, 8)),
    ]
    if outer[3] - outer[2] > 2:
        spans.append(Span(outer[2] + 1, outer[3] - 1, f"{name}2", outer[3] - 1))
    return spans


def _at(moment: float, threads: list[list[Span]], host: list[Span]) -> list[tuple[str, str]]:
    running = [
        max(inside, key=lambda s: s.start) for t in threads if (inside := [s for s in t if s.start < moment < s.stop])
    ]
    if running:
        return [("op", span.name) for span in running]
    waiting = [span for t in threads for span in t if span.stop < moment < span.ended]
    if waiting:
        return [("op", max(reversed(waiting), key=lambda s: s.stop).name)]
    return [
        (
            "idle",
            max((s for s in host if s.start < moment < s.stop), key=lambda s: s.start, default=Span(0, 0, "", 0)).name,
        )
    ]


def test_a_trace_without_operations_says_so() -> None:
    assert by_component({}, [], {}, 3)["components"] == []
