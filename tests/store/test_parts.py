"""One store by many processes: what is on disk depends on the parts, never on who wrote them, or in what order."""

import dataclasses
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import ROOT, fill, one_device, replaced, tiny_experiment
from tiny.commands import run_command

from configs.quickstart import get_config
from saejax.app.experiment import Experiment
from saejax.app.experiment import experiment as from_config
from saejax.app.stages import run_capture, run_evaluate, run_pipeline, run_report
from saejax.app.store_rows import token_context
from saejax.app.sweep.run import run_sweep
from saejax.app.workspace import Workspace
from saejax.core.errors import BusyError, ConfigError, DataError
from saejax.parallel import ParallelConfig, Process, local_mesh, refuse_many, this_process
from saejax.store import Batches, StoreLayout, StoreReader, StoreWriter, describe, merge, verify
from saejax.store.files import seal
from saejax.store.order import RowOrder
from saejax.text import Source

HOOKS = {"h": 6, "g": 3}
LAYOUT = StoreLayout(64, 16)
PARTS, BATCH, PLENTY = 4, 37, 10**9
# 1000 rows are 16 shards, 4 for each part, and the last of part 3 has 40 rows.
TOKENS, QUOTAS = 1000, (256, 256, 256, 232)
# Of the first part all, of the second a shard and a piece, of the third nothing, of the last two whole shards.
RAGGED = (PLENTY, 100, 0, 128)


def contents(path: Path) -> dict[str, bytes]:
    """Every file of a store but the leases: relative name -> bytes."""
    found = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith(".lock"))
    return {str(file.relative_to(path)): file.read_bytes() for file in found}


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16)


def batch(part: int, index: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Batch `index` of a part's stream: its document is the part, its positions count up, its tokens are its own."""
    rng = np.random.default_rng([part, index])
    position = np.arange(index * BATCH, (index + 1) * BATCH)
    tokens = {"token_id": position * PARTS + part, "document": np.full(BATCH, part), "position": position}
    return {name: rng.normal(1.0, 2.0, (BATCH, d)).astype(np.float32) for name, d in HOOKS.items()}, tokens


def opened(path: Path, part: int, parts: int = PARTS, n_tokens: int = TOKENS) -> StoreWriter:
    return StoreWriter.open(
        path,
        identity={"text": "t", "lm": {"model": "m"}},
        hook_points=HOOKS,
        n_tokens=n_tokens,
        layout=LAYOUT,
        seed=3,
        part=part,
        parts=parts,
    )


def write(path: Path, part: int, available: int, n_tokens: int = TOKENS, stop_after: int | None = None) -> bool:
    """Write a part until it is full or its text ends; False if it was left after `stop_after` batches."""
    with opened(path, part, n_tokens=n_tokens) as writer:
        if writer.done:
            return True
        if not fill(writer, lambda index: batch(part, index), BATCH, available, stop_after):
            return False
        assert writer.done
    return True


def expected(available: tuple[int, ...]) -> dict[tuple[int, int], dict[str, np.ndarray]]:
    """{(part, position): its row as stored} of all rows that a store must have."""
    found = {}
    for part, (there, quota) in enumerate(zip(available, QUOTAS, strict=True)):
        for i in range(min(there, quota)):
            activations, _ = batch(part, i // BATCH)
            found[part, i] = {name: values[i % BATCH].astype("bfloat16") for name, values in activations.items()}
    return found


def made(path: Path, available: tuple[int, ...]) -> Path:
    for part, there in enumerate(available):
        write(path, part, there)
    return path


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose text ran out in three of four parts, in one of them before the first row."""
    return made(tmp_path_factory.mktemp("parts") / "ragged", RAGGED)


@pytest.mark.parametrize("available", [(PLENTY,) * 4, RAGGED, (0, 0, 0, 5), (10, 64, 65, 0)])
def test_all_rows_are_there_once_with_their_tokens(tmp_path: Path, available: tuple[int, ...]) -> None:
    path = made(tmp_path / "s", available)
    assert verify(path) == []
    wanted, reader = expected(available), StoreReader.open(path)
    assert reader.n_tokens == len(wanted)
    rows = reader.rows(0, reader.n_tokens, metadata=True)
    keys = list(zip(rows["document"].tolist(), rows["position"].tolist(), strict=True))
    assert sorted(keys) == sorted(wanted)
    assert (rows["token_id"] == rows["position"] * PARTS + rows["document"]).all()
    for i, key in enumerate(keys):
        for name in HOOKS:
            assert np.array_equal(bits(rows[name][i]), bits(wanted[key][name]))
    for name in HOOKS:
        x = np.stack([row[name] for row in wanted.values()]).astype(np.float64)
        statistics = reader.statistics[name]
        assert statistics.count == len(x) and np.allclose(statistics.mean, x.mean(0), rtol=1e-12)
        assert statistics.mean_norm == pytest.approx(np.linalg.norm(x, axis=1).mean(), rel=1e-12)
    # Each part's last batch that holds a row that is wanted is its last one.
    batches = [-(-min(there, quota) // BATCH) for there, quota in zip(available, QUOTAS, strict=True)]
    assert reader.counters.get("seen", 0) == sum(batches) * BATCH


def test_full_shards_come_first_and_any_range_of_rows_can_be_read(ragged: Path) -> None:
    """Part 0 is shards 0, 4, 8, 12, part 1 is 1 and 36 rows of 5, part 3 is 3 and 7: the 36 rows come last."""
    reader = StoreReader.open(ragged)
    whole = reader.rows(0, reader.n_tokens, metadata=True)
    documents = [0, 1, 3, 0, 3, 0, 0]
    assert whole["document"].tolist() == np.repeat([*documents, 1], [64] * 7 + [36]).tolist()
    assert reader.shard_starts.tolist() == [*range(0, 449, 64), 484]
    rng = random.Random(0)
    spans = [tuple(sorted(rng.choices(range(485), k=2))) for _ in range(60)]
    for low, high in spans:
        assert np.array_equal(bits(reader.rows(low, high)["h"]), bits(whole["h"][low:high]))
    for (low, high), values in zip(spans, reader.read_pieces("token_id", spans), strict=True):
        assert np.array_equal(values, whole["token_id"][low:high]) and values.dtype == np.int32
    for shard in range(8):
        start = int(reader.shard_starts[shard])
        places = reader.stream_places(shard)
        assert (np.diff(whole["position"][start + places]) == 1).all()
    with pytest.raises(DataError, match="it has rows 0 to 484"):
        reader.rows(0, 485)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=12), st.data())
@settings(deadline=None, max_examples=200)
def test_the_order_of_rows_is_a_bijection_with_full_shards_first(counts: list[int], data: st.DataObject) -> None:
    order = RowOrder(8, counts)
    rows = [row for low, high in order.pieces(0, sum(counts)) for row in range(low, high)]
    assert sorted(rows) == [i * 8 + r for i, count in enumerate(counts) for r in range(count)]
    sizes = [counts[shard] for shard in order.shards]
    assert sizes == sorted(sizes, key=lambda size: size < 8) and order.starts[-1] == sum(counts)
    low = data.draw(st.integers(0, sum(counts)))
    high = data.draw(st.integers(low, sum(counts)))
    pieces = order.pieces(low, high)
    assert [row for a, b in pieces for row in range(a, b)] == rows[low:high]
    assert all(a < b and a // 8 == (b - 1) // 8 for a, b in pieces)
    assert order.is_plain == (rows == list(range(sum(counts))))


def test_batches_visit_every_row_once_an_epoch(ragged: Path) -> None:
    reader = StoreReader.open(ragged)
    batches = Batches(reader, 44, seed=1, block_chunks=5)  # 484 rows are 11 batches
    seen = Counter(bits(row).tobytes() for step in range(11) for row in batches.batch_at(step)["h"])
    assert seen == Counter(bits(row).tobytes() for row in reader.rows(0, 484)["h"])


@settings(deadline=None, max_examples=12)
@given(
    available=st.tuples(*[st.sampled_from([0, 1, 63, 64, 70, 128, 300])] * PARTS).filter(any),
    stops=st.lists(st.tuples(st.integers(0, PARTS - 1), st.integers(0, 5)), max_size=8),
    order=st.permutations(range(PARTS)),
)
def test_no_order_and_no_interruption_changes_a_byte(
    tmp_path_factory: pytest.TempPathFactory, available: tuple[int, ...], stops: list[tuple[int, int]], order: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("orders")
    for part, batches in stops:
        write(folder / "disturbed", part, available[part], stop_after=batches)
    for part in order:
        write(folder / "disturbed", part, available[part])
    assert contents(folder / "disturbed") == contents(made(folder / "plain", available))
    assert verify(folder / "plain") == []


def test_parts_written_at_the_same_time_do_not_touch_each_other(tmp_path: Path) -> None:
    """Four writers open at once take turns; a fifth one of a part is refused at once, and so is another store."""
    path = tmp_path / "s"
    writers = [opened(path, part) for part in range(PARTS)]
    started = time.perf_counter()
    with pytest.raises(BusyError, match=r"Part 2 of .*s is being written"):
        opened(path, 2)
    assert time.perf_counter() - started < 1
    with pytest.raises(DataError, match="parts: the store has 4, this run wants nothing"):
        opened(path, 0, parts=1)
    for index in range(-(-256 // BATCH)):
        for part, writer in enumerate(writers):
            activations, tokens = batch(part, index)
            writer.append(activations, tokens, cursor={"batch": index}, counters={"seen": BATCH, "batches": 1})
    for part, writer in enumerate(writers):
        # A leftover lock of another part's write may be in use: it stays. An own one goes at the next opening.
        (path / "commits" / f"{part:06d}.json.__lock").write_bytes(b"")
        writer.finish()
        assert writer.complete == (part == PARTS - 1)
        assert writer.missing == tuple(range(part + 1, PARTS))
        opened(path, part).close()
        assert len(list(path.glob("commits/*.__lock"))) == 0
    assert contents(path) == contents(made(tmp_path / "plain", (PLENTY,) * 4))


def test_an_unfinished_store_says_how_far_each_part_is(tmp_path: Path) -> None:
    path = tmp_path / "s"
    write(path, 1, 100)
    write(path, 3, PLENTY, stop_after=3)
    lines = describe(path)
    assert "unfinished: 164 of 1,000 rows (16.4%)" in lines[1]
    assert [line.strip() for line in lines if "part " in line] == [
        "part 0 of 4: 0 of 256 rows",
        "part 1 of 4: 100 of 256 rows, done",
        "part 2 of 4: 0 of 256 rows",
        "part 3 of 4: 64 of 232 rows",
    ]
    with pytest.raises(DataError, match=r"not complete: 164 of 1,000 tokens"):
        StoreReader.open(path)


def test_damage_is_found_and_healed_by_the_part_it_belongs_to(tmp_path: Path, ragged: Path) -> None:
    before = contents(made(tmp_path / "s", RAGGED))
    assert before == contents(ragged)
    path = tmp_path / "s"
    for name, part in {
        "commits/000001.json": 1,
        "commits/000002.json": 2,  # the one that says that there is no row
        "commits/000007.json": 3,
        "arrays/g/c/5/0": 1,
        "arrays/position/c/0": 0,
        "manifest.json": 2,
        "arrays/h/zarr.json": 0,
    }.items():
        (path / name).unlink()
        assert verify(path), name
        write(path, part, RAGGED[part])
        assert contents(path) == before, name
    (path / "commits" / "000007.json").unlink()
    assert not write(path, 3, RAGGED[3], stop_after=0)
    with pytest.raises(DataError, match="not complete: 420 of 1,000"):
        StoreReader.open(path)
    write(path, 3, RAGGED[3])
    (path / "commits" / "000006.json").write_bytes(before["commits/000002.json"])
    assert [problem for problem in verify(path) if "000006.json is no commit of this store" in problem]


def test_manifests_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "s", RAGGED)
    manifest = json.loads((path / "manifest.json").read_bytes())
    del manifest["seal"]
    no_rows = {"rows": 0, "sha256": {}}
    for change in (
        {"parts": 0},
        {"parts": 10**12},
        {"parts": True},
        {"parts": 1},
        {"parts": 5},  # then shard 6 would come behind shard 1, which is not full
        {"shards": [*manifest["shards"], no_rows]},
        {"shards": [no_rows, *manifest["shards"][1:]], "n_tokens": 420},
    ):
        (path / "manifest.json").write_bytes(seal({**manifest, **change}))
        with pytest.raises(DataError, match="contradicts itself"):
            StoreReader.open(path)


def test_a_text_without_a_row_is_an_error_and_not_an_empty_store(tmp_path: Path) -> None:
    for part in range(3):
        write(tmp_path, part, 0)
    for _ in range(2):
        with pytest.raises(DataError, match="not one row"):
            write(tmp_path, 3, 0)


def test_batches_without_a_row_behind_a_full_shard_end_a_part_as_well(tmp_path: Path) -> None:
    """Such as a text ends with when its last tokens are all special: the shard before them is the last one."""
    activations, tokens = ({name: np.repeat(v[:1], 64, 0) for name, v in rows.items()} for rows in batch(0, 0))
    none = [{name: values[:0] for name, values in rows.items()} for rows in (activations, tokens)]
    for part in range(2):
        with opened(tmp_path, part, parts=2) as writer:
            writer.append(activations, tokens, cursor={"batch": 0}, counters={"seen": 64})
            writer.append(*none, cursor={"batch": 1}, counters={"seen": 5})
            writer.finish()
        with opened(tmp_path, part, parts=2) as writer:
            assert writer.done and writer.complete == (part == 1)
    reader = StoreReader.open(tmp_path)
    assert verify(tmp_path) == [] and (reader.n_tokens, reader.counters) == (128, {"seen": 138})


def test_fewer_shards_than_parts(tmp_path: Path) -> None:
    """100 rows are 2 shards: parts 2 and 3 have nothing to do, and need not even be there."""
    write(tmp_path, 3, PLENTY, n_tokens=100)
    write(tmp_path, 1, PLENTY, n_tokens=100)
    write(tmp_path, 0, PLENTY, n_tokens=100)
    assert StoreReader.open(tmp_path).rows(0, 100, metadata=True)["document"].tolist() == [0] * 64 + [1] * 36
    assert verify(tmp_path) == []


def test_merge_sample_and_info_of_a_ragged_store(
    tmp_path: Path, ragged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = made(tmp_path / "other", (70, PLENTY, 30, 0))
    rows = merge(tmp_path / "both", [ragged, other])
    reader = StoreReader.open(tmp_path / "both")
    assert rows == reader.n_tokens == 484 + 70 + 256 + 30 and verify(tmp_path / "both") == []
    document = reader.rows(0, rows, metadata=True)["document"]
    assert Counter(document.tolist()) == {0: 256, 1: 100, 3: 128, 4: 70, 5: 256, 6: 30}
    # Neighbours of the same document, also in the shard that is not full and lies behind another's place.
    source = StoreReader.open(ragged)
    stored = source.rows(0, 484, metadata=True)
    for row in (0, 100, 300, 448, 460, 483):
        before, own, after = token_context(source, row, 3)
        assert own == [int(stored["token_id"][row])]
        assert np.array_equal(np.diff([*before, *own, *after]), [PARTS] * (len(before) + len(after)))
        assert len(before) + len(after) >= 3
    assert run_command("store", ["sample", str(ragged)], **{"rows": 484}) == 0
    assert capsys.readouterr().out.count("\n  row ") == 484
    run_command("store", ["info", str(ragged)])
    assert "complete: 484 rows in 8 shards (of 1,000 asked for" in capsys.readouterr().out


def test_the_parts_of_a_source_are_its_documents_each_once() -> None:
    source = Source({"s": 1}, lambda start: ((i, str(i), str(i), f"t{i}") for i in range(start, 4000)), 0.25)
    whole = [document.index for document in source.documents("train")]
    parts = [[document.index for document in source.part(p, 4).documents("train")] for p in range(4)]
    assert sorted(itertools.chain(*parts)) == whole and all(part == sorted(part) for part in parts)
    assert all(600 < len(part) < 900 for part in parts)
    # Not by turns: a mixture that alternates gives every part some of each.
    assert all(300 < sum(i % 2 for i in part) < 450 for part in parts)
    assert [d.index for d in source.part(1, 4).documents("train", 2000)] == [i for i in parts[1] if i >= 2000]
    assert source.part(1, 4).identity == source.identity and source.part(0, 1) is source
    with pytest.raises(ConfigError, match="no part 4 of 4"):
        source.part(4, 4)


# --- captures ----------------------------------------------------------------------------------------------


def experiment(folder: Path, **capture: Any) -> Experiment:
    chosen = {"tokens": 1500, "heldout_tokens": 300, "shard_rows": 128, "parts": 4} | capture
    return tiny_experiment(folder, capture=chosen)


def captured(e: Experiment, processes: str, work: Workspace) -> None:
    own = replaced(e, "parallel", processes=processes)
    run_capture(dataclasses.replace(work, experiment=own))


def stores(e: Experiment) -> dict[str, bytes]:
    return contents(Path(e.stores_dir))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, Workspace]:
    """Four parts, captured by one process."""
    e = experiment(tmp_path_factory.mktemp("alone"))
    work = Workspace(e)
    run_capture(work)
    return e, work


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(["1/2", "0/2"], marks=pytest.mark.soak),
        pytest.param(["2/4", "0/4", "3/4", "1/4"], marks=pytest.mark.soak),
        pytest.param(["0/3", "1/4", "1/2", "0/1"], marks=pytest.mark.ci),
    ],
)
def test_any_number_of_processes_leaves_the_same_bytes(
    tmp_path: Path, alone: tuple[Experiment, Workspace], order: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    one, work = alone
    e = experiment(tmp_path)
    for processes in order:
        captured(e, processes, work)
    assert stores(e) == stores(one)
    for split, rows in (("train", 1500), ("heldout", 300)):
        path = e.store_dir(split)
        assert verify(path) == [] and StoreReader.open(path).n_tokens == rows
    said = capsys.readouterr().out
    assert "this process's parts are done" in said and "still to come" in said
    assert said.count("capture train: 1,500 activations in") == 1
    # The figures of a stage are those of the first process alone.
    stages = json.loads((e.run_dir / "stages.json").read_text())
    assert 0 < stages["capture train"]["tokens"] < 1500
    captured(e, order[0], work)
    assert "already done, 1,500 activations" in capsys.readouterr().out


def test_parts_hold_the_rows_that_one_part_holds(tmp_path: Path) -> None:
    """Prompts, each in a row of its own, all of them taken: the same (document, position, token) and activations."""
    (tmp_path / "prompts.txt").write_text("".join(f"def f{i}(x): return {i} * x + {i % 7}\n" for i in range(80)))
    text = {"source": "prompts", "paths": (str(tmp_path / "prompts.txt"),)}
    found = []
    for parts in (1, 4):
        e = tiny_experiment(tmp_path / str(parts), text=text, capture={"tokens": 9000, "parts": parts})
        run_capture(Workspace(e))
        assert verify(e.store_dir("train")) == []
        reader = StoreReader.open(e.store_dir("train"))
        rows = reader.rows(0, reader.n_tokens, metadata=True)
        keys = np.stack([rows[name] for name in ("document", "position", "token_id")])
        order = np.lexsort(keys)
        found.append((keys[:, order], rows["blocks.1.resid_post"][order].astype(np.float32), reader.counters))
    assert np.array_equal(found[0][0], found[1][0]) and found[0][0].shape[1] > 500
    assert np.allclose(found[0][1], found[1][1], rtol=8e-3, atol=1e-3)


def test_parts_are_of_the_identity_only_where_there_are_several(alone: tuple[Experiment, Workspace]) -> None:
    one, work = alone
    assert "parts" not in work.reader("train").identity["text"] and work.reader("train").identity["parts"] == 4
    single = replaced(one, "capture", parts=1).capture
    assert "parts" not in single.identity
    other = dataclasses.replace(work, experiment=replaced(one, "capture", parts=2))
    with pytest.raises(DataError, match="parts: the store has 4, this run wants 2"):
        other.reader("train")
    with pytest.raises(DataError, match="parts: the store has 4, this run wants 2"):
        run_capture(other)


def test_more_processes_than_parts_are_refused(tmp_path: Path, alone: tuple[Experiment, Workspace]) -> None:
    with pytest.raises(ConfigError, match=r"8 processes cannot share 4 parts: set capture\.parts to 8"):
        captured(experiment(tmp_path), "7/8", alone[1])
    assert not Path(tmp_path / "stores").exists()


def test_the_other_stages_are_the_work_of_one_process(tmp_path: Path) -> None:
    work = Workspace(replaced(tiny_experiment(tmp_path), "parallel", processes="slurm"))
    for stage in (run_evaluate, run_report, run_pipeline, run_sweep):
        with pytest.raises(ConfigError, match=r"'slurm', and \S+ ?\w* is the work of one process\. Run saejax capture"):
            stage(work)
    assert not any(tmp_path.iterdir())
    refuse_many(ParallelConfig(), "launch.report")


# --- who am I ----------------------------------------------------------------------------------------------


def test_who_this_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    assert this_process(ParallelConfig()) == Process(0, 1)
    assert this_process(ParallelConfig(processes="2/8")) == Process(2, 8)
    assert list(Process(2, 8).share(20)) == [2, 10, 18] and list(Process().share(3)) == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"SLURM_PROCID=''.*Start it by srun"):
        this_process(ParallelConfig(processes="slurm"))
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "5")
    assert this_process(ParallelConfig(processes="slurm")) == Process(3, 5)
    assert this_process(ParallelConfig()) == Process(0, 1)  # a shell inside salloc has such variables too
    monkeypatch.setenv("SLURM_NTASKS", "3")
    with pytest.raises(ConfigError, match="SLURM_PROCID='3', SLURM_NTASKS='3'"):
        this_process(ParallelConfig(processes="slurm"))
    # This process has looked for devices long ago.
    with pytest.raises(ConfigError, match=r"cannot join its processes \(.+\)\. It knows them on Cloud TPU"):
        this_process(ParallelConfig(processes="jax"))
    for wrong in ("8/8", "1", "a/b", "-1/2", "1/2/3", "SLURM", "auto"):
        with pytest.raises(ConfigError, match=r"parallel\.processes is .*; it must be rank/processes"):
            ParallelConfig(processes=wrong)


def test_one_of_several_processes_uses_its_own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_mesh(ParallelConfig(), Process()).devices.size == jax.device_count()
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[2:4])
    assert local_mesh(ParallelConfig(), Process(1, 4)).devices.size == 2


def python(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=one_device() | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    return output


def test_two_processes_of_jax_know_each_other_and_part_again() -> None:
    """Over loopback, found as under SLURM; afterwards each has its own device and outlives the other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    program = (
        "from saejax.parallel import ParallelConfig, local_mesh, this_process; import jax, jax.numpy as jnp, time;"
        "config = ParallelConfig(processes='jax'); process = this_process(config);"
        "time.sleep(2 * process.rank);"
        "mesh = local_mesh(config, process); x = jax.jit(jnp.sum)(jnp.arange(4));"
        "print(process.rank, process.world, mesh.devices.size, int(x), jax.distributed.is_initialized())"
    )
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2"}
    both = [
        python("-c", program, **slurm, SLURM_PROCID=str(r), SLURM_LOCALID=str(r), JAX_COORDINATOR_PORT=port)
        for r in range(2)
    ]
    assert [finish(process).splitlines()[-1] for process in both] == ["0 2 1 6 False", "1 2 1 6 False"]


@pytest.mark.soak
def test_a_killed_process_s_parts_are_finished_by_another(tmp_path: Path) -> None:
    """Two real processes, one of them killed in the middle: its parts are missing, one process does them."""
    settings = {
        "capture.tokens": 4000,
        "capture.heldout_tokens": 200,
        "capture.batch_rows": 8,
        "capture.shard_rows": 64,
        "capture.chunk_rows": 64,
        "capture.parts": 4,
        "parallel.mesh": (1, 1),
    }

    def start(processes: str = "") -> subprocess.Popen[str]:
        places = {key: tmp_path / key for key in ("runs_dir", "stores_dir")}
        flags = [f"--config.{key}={value}" for key, value in (settings | places).items()]
        flags += [f"--config.parallel.processes={processes}"] * bool(processes)
        # The devices of this very process, so that what it computes has the same bits.
        devices = os.environ["XLA_FLAGS"]
        return python("-m", "launch.capture", "--config=configs/quickstart.py:tiny", *flags, XLA_FLAGS=devices)

    config = get_config("tiny")
    config.update_from_flattened_dict(settings)
    config.runs_dir, config.stores_dir = str(tmp_path / "runs"), str(tmp_path / "whole")
    run_capture(Workspace(from_config(config)))

    store = tmp_path / "stores_dir" / "quickstart-tiny"
    first, second = start("0/2"), start("1/2")
    deadline = time.monotonic() + 120
    while not (store / "train" / "commits" / "000005.json").is_file() and time.monotonic() < deadline:
        time.sleep(0.003)
    second.send_signal(signal.SIGKILL)
    second.communicate()
    assert second.returncode == -signal.SIGKILL
    said = finish(first)
    assert "this process's parts are done" in said and re.search(r"parts? (1, )?3 of 4 still to come", said)
    assert "unfinished" in describe(store / "train")[1]
    said = finish(start())
    assert "capture train: 4,000 activations" in said and "capture heldout: 200 activations" in said
    assert contents(store) == contents(tmp_path / "whole" / "quickstart-tiny")
    assert verify(store / "train") == []
