"""Configuration, metrics file, random streams, JSON files, the lease, and the command line."""

import dataclasses
import errno
import json
import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny.torches import torch

from saejax.app.experiment import Experiment, default_config, experiment
from saejax.coders import CoderConfig
from saejax.core import environment, files
from saejax.core import lease as leases
from saejax.core.config import differences, from_config_dict, nearest, to_config_dict, to_json
from saejax.core.errors import BusyError, ConfigError, DataError, SaejaxError
from saejax.core.files import read_json, unwritable, write_json
from saejax.core.lease import held, lease
from saejax.core.metrics import JsonlWriter, TensorBoardWriter, read_metrics
from saejax.core.rng import stream
from saejax.core.settings import Settings, setting
from saejax.lm import LMConfig
from saejax.parallel import ParallelConfig

ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------------------------------------- configuration


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    steps: int = 3
    note: str | None = None
    sizes: tuple[int, ...] = (1, 2)


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str = "x"
    flag: bool = False
    inner: Inner = Inner()
    maybe: Inner | None = None
    limit: int | None = None
    names: tuple[str, ...] = ()
    weights: tuple[float, ...] | None = None


FULL = Outer("y", True, Inner(1e-3, 7, "n", (4,)), maybe=Inner(note="m"), limit=5, names=("a", "b"), weights=(0.5, 1.0))


@pytest.mark.parametrize("value", [Outer(), FULL], ids=["defaults", "all set"])
def test_config_round_trip(value: Outer) -> None:
    assert from_config_dict(Outer, to_config_dict(value).to_dict()) == value


@pytest.mark.parametrize("value", [Outer(), FULL], ids=["defaults", "all set"])
def test_config_round_trip_through_json(value: Outer) -> None:
    assert from_config_dict(Outer, json.loads(json.dumps(to_json(value)))) == value


def test_a_missing_optional_can_be_set_to_its_type_and_to_no_other() -> None:
    config = to_config_dict(Outer())
    config.limit = 4
    config.inner.note = "hello"
    config.weights = (0.25,)
    got = experiment_like(config)
    assert (got.limit, got.inner.note, got.weights) == (4, "hello", (0.25,))
    with pytest.raises(ConfigError, match="limit is 'four'; it must be int"):
        config.limit = "four"


def experiment_like(config: Any) -> Outer:
    return from_config_dict(Outer, config.to_dict())


def test_keys_left_out_take_their_defaults() -> None:
    assert from_config_dict(Outer, {"inner": {"steps": 9}}) == Outer(inner=Inner(steps=9))


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"inner": {"steps": True}}, "config.inner.steps is True (bool); it must be int"),
        ({"inner": {"steps": 3.0}}, "config.inner.steps is 3.0 (float); it must be int"),
        ({"inner": {"steps": "3"}}, "config.inner.steps is '3' (str); it must be int"),
        ({"inner": {"rate": "0.5"}}, "config.inner.rate is '0.5' (str); it must be float"),
        ({"inner": {"rate": False}}, "config.inner.rate is False (bool); it must be float"),
        ({"inner": {"rate": None}}, "config.inner.rate is None (NoneType); it must be float"),
        ({"inner": {"note": 3}}, "config.inner.note is 3 (int); it must be str"),
        ({"inner": {"sizes": [1, 2.5]}}, "config.inner.sizes[1] is 2.5 (float); it must be int"),
        ({"inner": 4}, "config.inner is 4; it must be a section"),
        ({"maybe": "text"}, "config.maybe is 'text'; it must be a section"),
        ({"names": "a"}, "config.names is 'a'; it must be a list of str"),
        ({"names": 5}, "config.names is 5; it must be a list of str"),
        ({"names": ["a", 1]}, "config.names[1] is 1 (int); it must be str"),
        ({"flag": 1}, "config.flag is 1 (int); it must be bool"),
        ({"flag": "true"}, "config.flag is 'true' (str); it must be bool"),
        ({"name": None}, "config.name is None (NoneType); it must be str"),
        ({"name": 1}, "config.name is 1 (int); it must be str"),
    ],
    ids=str,
)
def test_wrong_types_are_refused_by_name(config: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_config_dict(Outer, config)
    assert str(caught.value).startswith(where)


def numbers_of(
    section: dict[str, Any], hints: dict[str, Any], where: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """The keys of an experiment that take a number with a point, and lists of them."""
    for name, hint in hints.items():
        if dataclasses.is_dataclass(hint):
            yield from numbers_of(section[name], typing.get_type_hints(hint), (*where, name))
        elif float in (hint, *typing.get_args(hint)):
            yield (*where, name)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400], ids=str)
def test_no_key_takes_a_number_that_is_not_finite(value: float) -> None:
    """config.json has no word for it, and a run folder whose config.json cannot be read is lost."""
    keys = list(numbers_of(to_json(Experiment()), typing.get_type_hints(Experiment)))
    assert {("train", "lr"), ("gates", "r2"), ("coder", "l1_coefficient"), ("sweep", "lrs")} <= set(keys)
    for *sections, leaf in keys:
        hint = typing.get_type_hints(Experiment)
        for name in sections:
            hint = typing.get_type_hints(hint[name])
        config: Any = {leaf: (value,) if typing.get_origin(hint[leaf]) is tuple else value}
        for name in reversed(sections):
            config = {name: config}
        with pytest.raises(ConfigError, match=rf"^config\.{'.'.join([*sections, leaf])}(\[0\])? is .*finite number"):
            from_config_dict(Experiment, config)


def test_what_is_accepted_in_place_of_the_exact_type() -> None:
    got = from_config_dict(Outer, {"inner": {"rate": 2, "note": "None"}, "limit": None, "weights": [1, 2.5]})
    assert got.inner.rate == 2.0 and type(got.inner.rate) is float
    assert got.inner.note is None and got.limit is None
    assert got.weights == (1.0, 2.5) and type(got.weights[0]) is float
    assert from_config_dict(Outer, {"name": "None"}).name == "None"  # not an optional: the word itself


PLAIN: list[tuple[str, list[Any]]] = [
    ("flag", [np.bool_(True), np.array(True), jnp.array(True), *([torch.tensor(True)] if torch else [])]),
    ("limit", [np.int64(3), np.uint8(3), np.array(3), jnp.int32(3), *([torch.tensor(3)] if torch else [])]),
    ("name", [Path("a/b"), np.str_("a/b")]),
    ("names", [["a", "b"], ("a", "b"), np.array(["a", "b"]), [np.str_("a"), Path("b")]]),
    ("weights", [[1, 0.5], np.array([1, 0.5]), (np.float32(1), np.float16(0.5)), jnp.array([1, 0.5])]),
    *([("weights", [torch.ones(2)])] if torch else []),
]


@pytest.mark.parametrize(("name", "values"), PLAIN, ids=[name for name, _ in PLAIN])
def test_numbers_of_numpy_jax_and_torch_and_paths_are_settings(name: str, values: list[Any]) -> None:
    """In a dict, in a ConfigDict, and given to a dataclass of settings itself."""
    kind: Any = dataclasses.make_dataclass(
        "Kind",
        [(f.name, f.type, setting(f.default, "A key.")) for f in dataclasses.fields(Outer) if f.name == name],
        bases=(Settings,),
        frozen=True,
    )
    for value in values:
        got = getattr(from_config_dict(Outer, {name: value}), name)
        parts = got if isinstance(got, tuple) else (got,)
        assert {type(part) for part in parts} <= {bool, int, float, str} and json.dumps(got)
        config = to_config_dict(Outer())
        setattr(config, name, value)
        assert getattr(from_config_dict(Outer, config.to_dict()), name) == got
        assert getattr(kind(value), name) == got


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"limit": np.float64(3)}, "limit is 3.0 (float); it must be int."),
        ({"limit": np.bool_(True)}, "limit is True (bool); it must be int."),
        ({"limit": np.array([3])}, "limit is [3] (list); it must be int."),
        ({"flag": np.int64(1)}, "flag is 1 (int); it must be bool."),
        ({"names": Path("a")}, "names is 'a'; it must be a list of str."),
        ({"weights": np.float32(2)}, "weights is 2.0; it must be a list of float."),
        ({"weights": np.array([1, np.nan])}, "weights[1] is nan; it must be a finite number."),
    ],
)
def test_what_is_of_another_type_stays_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_config_dict(Outer, values)
    assert str(caught.value) == f"config.{message}"


def test_settings_made_by_hand_are_of_their_types_too() -> None:
    """A range is of no use to a number that it does not see."""
    for made, message in (
        (lambda: CoderConfig("topk", k=np.int64(-3)), r"coder\.k is -3; it must be at least 1"),
        (lambda: CoderConfig("topk", k="3"), r"coder\.k is '3' \(str\); it must be int"),
        (lambda: ParallelConfig(mesh=2), r"parallel\.mesh is 2; it must be a list of int"),
        (lambda: LMConfig(dtype=np.float32), r"lm\.dtype is .*float32.* \(type\); it must be str"),
        (lambda: ParallelConfig(fsdp="no"), r"parallel\.fsdp is 'no' \(str\); it must be bool"),
    ):
        with pytest.raises(ConfigError, match=message):
            made()
    assert ParallelConfig(mesh=[np.int64(1), 1]).mesh == (1, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"nam": 1}, "Unknown key config.nam. Did you mean 'name'?"),
        ({"inner": {"stepz": 1}}, "Unknown key config.inner.stepz. Did you mean 'steps'?"),
        ({"qqqqq": 1}, "Unknown key config.qqqqq. There are: name, flag, inner, maybe, limit, names, weights."),
    ],
)
def test_an_unknown_key_names_the_nearest(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_config_dict(Outer, config)
    assert str(caught.value) == message and caught.value.exit_code == 2


def test_nearest() -> None:
    names = ["lr", "batch_size", "tokens"]
    assert nearest("batchsize", names) == " Did you mean 'batch_size'?"
    assert nearest("learning_rate", names) == " Did you mean 'lr'?"
    assert nearest("zzz", names) == " There are: lr, batch_size, tokens."
    assert nearest("x", []) == " There are: ."
    assert nearest("load", ["plan", "train"]) == " There are: plan, train."  # half of the letters are no likeness
    assert nearest("toknes", names, listed=True) == " Did you mean 'tokens'? There are: lr, batch_size, tokens."
    assert nearest("zzz", names, listed=True) == nearest("zzz", names)  # once


def mutated_keys(count: int) -> Iterator[tuple[dict[str, Any], str, str]]:
    """(experiment as JSON with one key changed by an edit, the wrong key, the right key)."""
    rng = random.Random(0)
    produced = 0
    while produced < count:
        tree = to_json(Experiment())
        section = rng.choice([None, *(k for k, v in tree.items() if isinstance(v, dict))])
        node = tree if section is None else tree[section]
        key = rng.choice(list(node))
        at, letter = rng.randrange(len(key)), rng.choice("abcdefghij_z")
        kind = rng.choice(["drop", "add", "replace", "swap"])
        wrong = {
            "drop": key[:at] + key[at + 1 :],
            "add": key[:at] + letter + key[at:],
            "replace": key[:at] + letter + key[at + 1 :],
            "swap": key[: max(at - 1, 0)] + key[max(at - 1, 0) : at + 1][::-1] + key[at + 1 :],
        }[kind]
        if wrong not in node:
            node[wrong] = node.pop(key)
            produced += 1
            yield tree, wrong if section is None else f"{section}.{wrong}", key


def test_every_mutated_key_of_an_experiment_is_refused_with_a_suggestion() -> None:
    named = 0
    for tree, wrong, right in mutated_keys(50):
        with pytest.raises(ConfigError) as caught:
            from_config_dict(Experiment, tree)
        message = str(caught.value)
        assert message.startswith(f"Unknown key config.{wrong}.")
        assert "Did you mean '" in message or "There are: " in message
        named += repr(right) in message or f" {right}" in message
    assert named >= 45  # the right key itself, save where another is as near


def test_the_default_configuration_is_the_default_experiment() -> None:
    config = default_config()
    assert experiment(config) == Experiment()
    config.train.lr = 1.0
    assert experiment(config).train.lr == 1.0 and Experiment().train.lr != 1.0


def test_differences() -> None:
    old = {"a": 1, "b": {"c": [1, 2], "d": None}, "gone": "x"}
    new = {"a": 1, "b": {"c": [1, 3], "d": None, "e": 0.5}}
    assert differences(old, new) == ["b.c: [1, 2] -> [1, 3]", "b.e: None -> 0.5", "gone: 'x' -> None"]
    assert differences(old, old) == []
    assert differences(to_json(FULL), to_json(Outer()))


# ----------------------------------------------------------------------------------------------- metrics.jsonl


def test_metrics_round_trip_in_order_of_step(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.write(2, {"train/loss": 0.5})
    writer.write(1, {"train/loss": 0.75})
    writer.write(2, {"val/fve": 0.25})  # other keys: not the same row
    assert len(read_metrics(tmp_path / "m.jsonl")) == 3, "a row must be readable before close"
    writer.close()
    assert read_metrics(tmp_path / "m.jsonl") == [
        {"step": 1, "train/loss": 0.75},
        {"step": 2, "train/loss": 0.5},
        {"step": 2, "val/fve": 0.25},
    ]


def test_after_a_resume_the_later_row_counts(tmp_path: Path) -> None:
    for loss in (3.0, 2.0):  # two sessions, the second from the beginning
        writer = JsonlWriter(tmp_path / "m.jsonl")
        for step in (1, 2):
            writer.write(step, {"loss": loss + step})
        writer.close()
    assert [row["loss"] for row in read_metrics(tmp_path / "m.jsonl")] == [3.0, 4.0]


def test_numbers_json_has_no_word_for_become_null(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.write(1, {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 1.5})
    writer.close()
    text = (tmp_path / "m.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "a": None, "b": None, "c": None, "d": 1.5}]


def test_a_file_cut_anywhere_in_its_last_line_is_read_and_mended(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    first, last = '{"step": 1, "loss": 0.5}\n', '{"step": 2, "loss": 0.25}\n'
    for cut in range(len(last)):
        path.write_text(first + last[:cut])
        whole = cut == len(last) - 1  # only the newline is missing
        assert [row["step"] for row in read_metrics(path)] == ([1, 2] if whole else [1])
        writer = JsonlWriter(path)
        writer.write(2, {"loss": 0.125})
        writer.close()
        assert read_metrics(path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.125}]


@pytest.mark.parametrize(
    "bad", [b"{not json", b"[1, 2]", b'{"loss": 1}', b"7", b"", b'{"step": "two"}', b'{"step": 1, "\xff": 2}'], ids=str
)
def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 3}\n')
    with pytest.raises(DataError, match=rf"{path}, line 2 is damaged"):
        read_metrics(path)


def test_empty_and_missing_metrics(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text("")
    assert read_metrics(tmp_path / "m.jsonl") == []
    with pytest.raises(DataError, match=r"absent\.jsonl does not exist"):
        read_metrics(tmp_path / "absent.jsonl")


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60))
def test_any_tail_of_bytes_is_read_or_refused(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + tail)
    try:
        assert {"step": 1} in read_metrics(path)
    except DataError as error:
        assert str(path) in str(error)


def test_tensorboard_without_the_extra_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(DataError, match=r"pip install 'tensorboardX>="):
        TensorBoardWriter(tmp_path)


# --------------------------------------------------------------------------------- random streams, environment


def test_streams_differ_by_seed_name_and_step_and_are_reproducible() -> None:
    def bits(*args: Any) -> tuple[int, ...]:
        return tuple(np.asarray(jax.random.key_data(stream(*args))).tolist())

    keys = {(s, n, t): bits(s, n, t) for s in (0, 1, 2**31) for n in ("init", "shuffle", "") for t in (0, 1, 99)}
    assert len(set(keys.values())) == len(keys) == 27
    assert all(bits(*args) == key for args, key in keys.items())
    assert bits(1, "init") == keys[1, "init", 0]
    traced = jax.jit(lambda step: jax.random.key_data(stream(1, "init", step)))(99)
    assert tuple(np.asarray(traced).tolist()) == keys[1, "init", 99]
    # A change here changes every run's numbers: it must be meant.
    want = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 0x3610A686), 5)  # crc32(b"hello")
    assert bits(7, "hello", 5) == tuple(np.asarray(jax.random.key_data(want)).tolist())


def test_the_environment_is_json_and_names_what_it_must() -> None:
    got = json.loads(json.dumps(environment.session_record()))
    assert got["packages"]["jax"] == jax.__version__
    assert len(got["devices"]) == jax.device_count() and got["command"]
    assert got["python"] == ".".join(map(str, sys.version_info[:3]))


def test_the_environment_outside_git_and_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_git(*args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError("git")

    monkeypatch.setattr(environment.subprocess, "run", no_git)
    monkeypatch.setattr(environment, "_PACKAGES", ["no-such-package-anywhere"])
    got = environment.session_record()
    assert got["git"] is None and got["packages"] == {"no-such-package-anywhere": None}


# -------------------------------------------------------------------------------------------------- JSON files


def test_json_round_trip(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, "ü"], "b": {"c": True}}
    write_json(tmp_path / "new" / "folder" / "x.json", value)
    assert read_json(tmp_path / "new" / "folder" / "x.json") == value
    assert [p.name for p in (tmp_path / "new" / "folder").iterdir()] == ["x.json"]


@pytest.mark.parametrize("point", ["fsync", "replace"])
def test_a_failure_before_the_rename_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"version": 1})

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = files.os if point == "fsync" else Path
    monkeypatch.setattr(target, point, fail)
    with pytest.raises(DataError, match=r"No space left to write .*x\.json\. Free some"):
        write_json(path, {"version": 2})
    monkeypatch.undo()
    assert read_json(path) == {"version": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"], "half of a file is left behind"


def test_a_process_killed_before_the_rename_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"version": 1})
    code = f"""
        import os
        from saejax.core import files
        files.os.fsync = lambda handle: os._exit(9)
        files.write_json({str(path)!r}, {{"version": 2}})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 9
    assert read_json(path) == {"version": 1}
    write_json(path, {"version": 3})
    assert read_json(path) == {"version": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_value_that_is_no_json_leaves_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", 1)
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"a": [1, object()]})
    assert read_json(tmp_path / "x.json") == 1


def test_reading_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.json does not exist"):
        read_json(tmp_path / "absent.json")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_json(tmp_path)
    for raw in (b'{"a": 1', b"", b"\xff\xfe{}", b"[" * 100_000):
        (tmp_path / "bad.json").write_bytes(raw)
        with pytest.raises(DataError, match=r"bad\.json is damaged \(.*restore it or delete it"):
            read_json(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "No space left to write store/x. Free some and run the same command again."),
        (errno.EDQUOT, "No space left to write store/x. Free some"),
        (errno.EFBIG, "No space left to write store/x. Free some"),
        (errno.EACCES, "store/x cannot be written: Permission denied. Choose another folder or mend its rights."),
        (errno.EROFS, "store/x cannot be written: Read-only file system. Choose another folder"),
        (errno.EIO, "store/x cannot be written: [Errno 5] Input/output error."),
    ],
    ids=lambda v: errno.errorcode.get(v, "") if isinstance(v, int) else "",
)
def test_what_the_file_system_says_becomes_a_remedy(code: int, remedy: str) -> None:
    error = unwritable("store/x", OSError(code, os.strerror(code)))
    assert isinstance(error, SaejaxError) and str(error).startswith(remedy)


# ------------------------------------------------------------------------------------------------------- lease

HOLD = """
    import sys, time
    from saejax.core.lease import lease
    with lease(sys.argv[1]):
        print("held", flush=True)
        time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lease of `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLD), str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_process_is_refused_at_once_with_the_holders_pid(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    started = time.perf_counter()
    with pytest.raises(BusyError) as caught, lease(tmp_path):
        pytest.fail("two writers")
    assert time.perf_counter() - started < 1
    message = str(caught.value)
    assert str(tmp_path) in message and f"pid {holder.pid} on " in message and "stop it" in message


def test_the_lease_is_free_after_the_holder_was_killed(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with lease(tmp_path):
        assert f"pid {os.getpid()} on " in (tmp_path / ".lock").read_text()
    with lease(tmp_path):  # and after a proper end
        pass


def test_an_error_inside_gives_the_lease_back(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), lease(tmp_path / "new"):
        raise RuntimeError
    with lease(tmp_path / "new"), lease(tmp_path / "other"):
        pass


@pytest.mark.parametrize("listed", [True, False], ids=["by the kernel's list", "without it"])
def test_who_holds_a_lease_is_asked_without_taking_it(
    tmp_path: Path, holder: subprocess.Popen[str], listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not listed:
        monkeypatch.setattr(leases, "_LOCKS", tmp_path / "no such list")
    elif not leases._LOCKS.is_file():
        pytest.skip("this kernel has no /proc/locks")
    assert (held(tmp_path) or "").startswith(f"pid {holder.pid} on ")
    assert held(tmp_path / "never held") is None and not (tmp_path / "never held").exists()
    holder.kill()
    holder.wait()
    assert held(tmp_path) is None
    with lease(tmp_path):
        assert (held(tmp_path) or "").startswith(f"pid {os.getpid()} on ")
        assert held(tmp_path, part=0) is None
    with lease(tmp_path, part=0):
        assert held(tmp_path) is None and held(tmp_path, part=0)


def test_asking_does_not_disturb_a_writer_that_starts(tmp_path: Path) -> None:
    """An asker that took the lock for a moment would refuse one of these."""
    if not leases._LOCKS.is_file():
        pytest.skip("this kernel has no /proc/locks")
    with lease(tmp_path):
        pass
    ask = "import sys; from saejax.core.lease import held\nfor _ in iter(int, 1): held(sys.argv[1])"
    asker = subprocess.Popen([sys.executable, "-c", ask, str(tmp_path)], cwd=ROOT)
    try:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            with lease(tmp_path):
                pass
    finally:
        asker.kill()
        asker.wait()


def test_a_container_s_lock_that_the_list_hides_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locks").write_text("1: FLOCK  ADVISORY  WRITE 1 00:01:1 0 EOF\n")
    monkeypatch.setattr(leases, "_LOCKS", tmp_path / "locks")
    with lease(tmp_path):
        (tmp_path / ".lock").write_text("pid 1 on 4f1c00aa\n")
        assert held(tmp_path) == "pid 1 on 4f1c00aa"
    assert held(tmp_path) is None


def test_a_record_lock_as_of_a_shared_disk_is_seen(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("pid 7 on node3\n")
    code = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, 2); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        assert held(tmp_path) == "pid 7 on node3"
        other.communicate("end\n", timeout=60)
    assert held(tmp_path) is None


RACE = """
    import sys
    from saejax.core.errors import BusyError
    from saejax.core.lease import lease
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        with lease(sys.argv[1]):
            print("won", flush=True)
            sys.stdin.readline()
    except BusyError:
        print("busy", flush=True)
"""


def test_of_many_at_the_same_moment_one_wins(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RACE), str(tmp_path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for _ in range(4)
    ]
    lines: list[str] = []
    for what in ("ready", "result"):
        for racer in racers if what == "result" else ():
            assert racer.stdin is not None
            racer.stdin.write("go\n")
        lines = [racer.stdout.readline().strip() for racer in racers if racer.stdout is not None]
    for racer in racers:
        racer.communicate("end\n", timeout=60)
    assert sorted(lines) == ["busy", "busy", "busy", "won"]


# ------------------------------------------------------------------------------------------------ command line

# A file like those in configs/, without the seconds it takes to import jax.
SMALL_CONFIG = """
    from ml_collections import config_dict
    def get_config(preset=""):
        train = dict(lr=1e-3, steps=4, batch_size=8, tensorboard=False)
        return config_dict.ConfigDict(dict(name="x", coder=dict(k=32, expansion=8), train=train))
"""
SMALL = "--config=small.py"
# (arguments, exit code, parts of the message)
COMMAND_LINES: list[tuple[list[str], int, list[str]]] = [
    ([f"--config={ROOT / 'configs' / 'quickstart.py'}:tyny"], 2, ["has no preset 'tyny'", "mean 'tiny'"]),
    ([SMALL, "--config.train.batchsize=1"], 2, ["Unknown key config.train.batchsize", "mean 'batch_size'"]),
    (["--config", "small.py", "--config.train.batchsize", "1"], 2, ["mean 'batch_size'"]),
    ([SMALL, "--config.trian.lr=1"], 2, ["Unknown key config.trian.", "mean 'train'"]),
    ([SMALL, "--config.train.lr.x=1"], 2, ["Unknown key config.train.lr.x."]),
    ([SMALL, "--config.coder.k=6.5"], 2, ["config.coder.k is '6.5'; it must be int (for example 32)"]),
    ([SMALL, "--config.train.lr=abc"], 2, ["config.train.lr is 'abc'; it must be float (for example 0.001)"]),
    ([SMALL, "--config.train.lr", "-x"], 2, ["config.train.lr"]),
    ([SMALL, "-config.train.tensorboard=maybe"], 2, ["config.train.tensorboard is 'maybe'; it must be bool"]),
    ([SMALL, "--config.train=5"], 2, ["config.train is a section", "batch_size"]),
    ([SMALL, "--confg=y.py"], 2, ["Unknown flag --confg.", "mean 'config'"]),
    ([SMALL, "--wya"], 2, ["Unknown flag --wya. There are: config."]),  # and not the flags of the library
    (
        ["--config=quickstart", "--config.text.paths=/a1,"],
        2,
        ["is '/a1,'; write each element", """--config.text.paths="'/a1',"."""],
    ),
    (["--confg=small.py"], 2, ["Unknown flag --confg.", "mean 'config'"]),
    ([SMALL, "stray"], 2, ["Unexpected argument 'stray'"]),
    (["--config=nowhere.py"], 2, ["No config file 'nowhere.py'"]),
    (["--config=nowhere.py", "--config.train.lr=1"], 2, ["No config file 'nowhere.py'"]),
    (["--config=quikstart"], 2, ["No config file 'quikstart'", "mean 'quickstart'"]),
    (["--config.train.batchsize=1"], 2, ["Unknown key config.train.batchsize", "mean 'batch_size'"]),
    (["--config="], 2, ["No config file ''"]),
    (["--config"], 2, ["--config has no value"]),
    (["--config=model_diff:tiny"], 2, ["model_diff has no presets; leave :tiny away"]),
    (["--config=empty.py"], 2, ["empty.py has no get_config()"]),
    (["--config.train.lr=1", SMALL], 2, ["before a value for --config"]),
    (["--help"], 1, ["python -m launch.train --config=configs/quickstart.py", "--config: Experiment file"]),
]


def test_a_wrong_type_in_an_experiment_s_file_is_one_line() -> None:
    """("x") is no tuple in Python: the comma is missed in files as often as on the line."""
    c = default_config()
    with pytest.raises(ConfigError, match=r"^paths is 'x'; .* tuple of one element has a comma, as in \('x',\)\.$"):
        c.text.paths = "x"
    with pytest.raises(ConfigError, match=r"^lr is 'high'; it must be float\.$"):
        c.train.lr = "high"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, str, str]]]:
    """(the folder they ran in, (exit code, stdout, stderr) of every command line), a few at a time."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "small.py").write_text(textwrap.dedent(SMALL_CONFIG))
    (folder / "empty.py").write_text("")
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    results: list[tuple[int, str, str]] = []
    for start in range(0, len(COMMAND_LINES), 4):
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "launch.train", *arguments],
                cwd=folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for arguments, _, _ in COMMAND_LINES[start : start + 4]
        ]
        for process in processes:
            out, err = process.communicate(timeout=120)
            results.append((process.returncode, out, err))
    return folder, results


@pytest.mark.ci
@pytest.mark.parametrize("i", range(len(COMMAND_LINES)), ids=[" ".join(c[0]) or "none" for c in COMMAND_LINES])
def test_a_wrong_command_line_is_explained_in_one_line(
    answers: tuple[Path, list[tuple[int, str, str]]], i: int
) -> None:
    _, expected_code, parts = COMMAND_LINES[i]
    code, out, err = answers[1][i]
    assert "Traceback" not in err, err
    assert code == expected_code
    for part in parts:
        assert part in out + err
    if code == 2:
        assert err.startswith("error: ") and err.count("\n") == 1 and out == ""


def test_wrong_command_lines_leave_nothing_on_disk(answers: tuple[Path, list[tuple[int, str, str]]]) -> None:
    assert sorted(p.name for p in answers[0].rglob("*")) == ["empty.py", "small.py"]


def test_the_default_configuration_is_the_quickstart() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launch.train", "--config.train.learning_rate=1"],
        cwd=ROOT,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2 and "Did you mean 'lr'?" in done.stderr and "Traceback" not in done.stderr
