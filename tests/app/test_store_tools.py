"""Tools for stores: info, verify, merge, sample, import, and the room on disk."""

import contextlib
import dataclasses
import io
import json
import os
import re
import resource
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import time
import zipfile
from collections import namedtuple
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from tiny.commands import run_command

import saejax
from saejax.app.store_rows import find_tokenizer, sampled_row, token_context
from saejax.core.errors import BusyError, ConfigError, DataError
from saejax.store import Batches, ImportConfig, StoreLayout, StoreReader, StoreWriter, import_files, merge, verify
from saejax.store import importing as importing_module
from saejax.store import space as space_module
from saejax.store.manifest import Header
from saejax.store.parts import Naming, open_parts
from saejax.store.space import predicted_bytes
from saejax.text import Tokenizer

ROOT = Path(saejax.__file__).parents[1]
DEMO = ROOT / "saejax" / "lm" / "demo"
HOOKS = {"blocks.0.resid_pre": 6, "blocks.1.resid_pre": 4}
LAYOUT = StoreLayout(128, 16)
BF16 = ml_dtypes.bfloat16
CONFIG = ImportConfig("blocks.6.resid_pre", layout=LAYOUT)


def write(path, rows=1000, *, first=0, text="a", hooks=None, finish=True, **identity):
    """A store of `rows` rows in documents of 50, whose values and token ids begin at `first`.

    Without `finish` it holds the committed shards of half of them; such a store is opened again and left as it is.
    """
    hooks = hooks or HOOKS
    identity = {"lm": {"model": "tiny", "revision": "abc"}, "text": {"source": text}, "split": "train"} | identity
    with StoreWriter.open(path, identity=identity, hook_points=hooks, n_tokens=rows, layout=LAYOUT, seed=1) as writer:
        if writer.resume:
            return path
        ids = first + np.arange(rows if finish else rows // 2)
        activations = {
            name: np.random.default_rng([first, d]).normal(1, 2, (len(ids), d)).astype(np.float32)
            for name, d in hooks.items()
        }
        tokens = {"token_id": ids, "document": (ids - first) // 50, "position": (ids - first) % 50}
        writer.append(activations, tokens, cursor={"batch": 0}, counters={"seen": len(ids)})
        if finish:
            writer.finish()
    return path


def contents(path):
    files = (file for file in path.rglob("*") if file.is_file() and file.name != ".lock")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def bits(array):
    return np.asarray(array).astype(BF16).view(np.uint16)


def in_order(path):
    """All rows of a store in the order in which they came."""
    reader = StoreReader.open(path)
    rows = reader.rows(0, reader.n_tokens, metadata=True)
    shards = range(reader.layout.shards(reader.n_tokens))
    order = np.concatenate([s * reader.layout.shard_rows + reader.stream_places(s) for s in shards])
    return {name: values[order] for name, values in rows.items()}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    return write(folder / "a"), write(folder / "b", 700, first=5000, text="b")


# --- verify ---------------------------------------------------------------------------------------------------


def test_300_flipped_bits_are_all_found_and_their_files_named(tmp_path):
    path = write(tmp_path / "s", 300)
    files = contents(path)
    rng = np.random.default_rng(0)
    hit = set()
    for name in [*files, *rng.choice(sorted(files), 300 - len(files))]:
        damaged = bytearray(files[name])
        damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
        (path / name).write_bytes(damaged)
        problems = verify(path)
        (path / name).write_bytes(files[name])
        assert any(str(name) in problem for problem in problems), (name, problems)
        hit.add(str(name))
    assert hit == set(files)
    assert verify(path) == []


def test_every_lost_file_is_found_and_named_by_verify(stores):
    path, files = stores[0], contents(stores[0])
    for name in files:
        (path / name).unlink()
        problems = verify(path)
        (path / name).write_bytes(files[name])
        assert any(name in problem for problem in problems), (name, problems)
    assert verify(path) == []


def test_damage_of_one_file_does_not_hide_that_of_another(tmp_path):
    path = write(tmp_path / "s")
    for name in ("arrays/document/zarr.json", "arrays/blocks.1.resid_pre/zarr.json", "commits/000003.json"):
        (path / name).unlink()
    for name in ("arrays/blocks.0.resid_pre/c/2/0", "arrays/token_id/c/5"):
        damaged = bytearray((path / name).read_bytes())
        damaged[3] ^= 1
        (path / name).write_bytes(damaged)
    problems = verify(path)
    assert len(problems) == 5
    assert all(f"Delete {path}/" in problem or "is missing" in problem for problem in problems)


# --- merge ----------------------------------------------------------------------------------------------------


def test_a_merge_holds_the_rows_of_its_sources_in_their_order(tmp_path, stores):
    assert merge(tmp_path / "m", stores, seed=4) == 1700
    assert verify(tmp_path / "m") == []
    got, parts = in_order(tmp_path / "m"), [in_order(path) for path in stores]
    for name in (*HOOKS, "token_id", "position"):
        wanted = np.concatenate([part[name] for part in parts])
        assert got[name].tobytes() == wanted.tobytes()
    assert np.array_equal(got["document"], np.concatenate([parts[0]["document"], parts[1]["document"] + 20]))
    reader = StoreReader.open(tmp_path / "m")
    assert reader.identity["lm"] == {"model": "tiny", "revision": "abc"} and "text" not in reader.identity
    merged = reader.identity["merged"]
    assert [(m["text"], m["rows"], m["document_shift"]) for m in merged] == [
        ({"source": "a"}, 1000, 0),
        ({"source": "b"}, 700, 20),
    ]
    assert reader.counters == {"seen": 1700}
    again = {"blocks.0.resid_pre": np.concatenate([part["blocks.0.resid_pre"] for part in parts]).astype(np.float64)}
    np.testing.assert_allclose(
        reader.statistics["blocks.0.resid_pre"].mean, again["blocks.0.resid_pre"].mean(0), rtol=1e-12
    )


def test_merging_a_merged_store_keeps_documents_apart(tmp_path, stores):
    merge(tmp_path / "m", stores)
    third = write(tmp_path / "c", 300, first=9000, text="c")
    merge(tmp_path / "n", [tmp_path / "m", third])
    rows = in_order(tmp_path / "n")
    by_document = {}
    for token, document in zip(rows["token_id"], rows["document"], strict=True):
        by_document.setdefault(int(document), set()).add(int(token) // 50)
    assert len(by_document) == 40 and all(len(owners) == 1 for owners in by_document.values())
    assert StoreReader.open(tmp_path / "n").identity["merged"][0]["merged"][1]["text"] == {"source": "b"}


def test_the_remedy_for_a_damaged_shard_heals_a_merged_store(tmp_path, stores):
    merge(tmp_path / "m", stores)
    before = contents(tmp_path / "m")
    target = tmp_path / "m" / "arrays" / "token_id" / "c" / "9"
    damaged = bytearray(target.read_bytes())
    damaged[5] ^= 2
    target.write_bytes(damaged)
    (problem,) = verify(tmp_path / "m")
    assert "run the command that made the store again" in problem
    Path(re.search(r"Delete (\S+\.json)", problem)[1]).unlink()
    merge(tmp_path / "m", stores)
    assert contents(tmp_path / "m") == before


def test_unknown_documents_stay_unknown(tmp_path):
    for name, first in (("a", 0), ("b", 7)):
        with StoreWriter.open(
            tmp_path / name, identity={"text": name}, hook_points={"h": 2}, n_tokens=20, layout=LAYOUT
        ) as w:
            ids = np.arange(first, first + 20)
            tokens = {"token_id": ids, "document": np.where(ids % 2, -1, 3), "position": ids}
            w.append({"h": np.ones((20, 2), np.float32)}, tokens, cursor={})
            w.finish()
    merge(tmp_path / "m", [tmp_path / "a", tmp_path / "b"])
    rows = in_order(tmp_path / "m")
    assert np.array_equal(rows["document"], np.where(rows["token_id"] % 2, -1, np.repeat([3, 7], 20)))


def test_stores_that_do_not_belong_together_are_refused_by_name(tmp_path, stores):
    first = stores[0]
    others = {
        "model": ({"lm": {"model": "big", "revision": "abc"}}, r"identity\.lm\.model: .*/a has 'tiny', .*has 'big'"),
        "split": ({"split": "heldout"}, r"identity\.split: .*/a has 'train', .* has 'heldout'"),
        "width": ({"hooks": HOOKS | {"blocks.1.resid_pre": 5}}, r"hook_points: .*4.*5"),
        "hooks": ({"hooks": {"blocks.1.resid_pre": 4}}, "hook_points"),
    }
    for name, (changes, message) in others.items():
        with pytest.raises(DataError, match=message):
            merge(tmp_path / "m", [first, write(tmp_path / name, 100, **changes)])
    cases = [
        ([first], "two stores or more"),
        ([first, tmp_path / "m"], "both merged and written"),
        ([first, first], "are the same store"),
        ([first, shutil.copytree(first, tmp_path / "copy")], "are the same store"),
    ]
    for sources, message in cases:
        with pytest.raises(ConfigError, match=message):
            merge(tmp_path / "m", sources)
    with pytest.raises(DataError, match=r"384 of 1,000 tokens are committed"):
        merge(tmp_path / "m", [first, write(tmp_path / "half", finish=False)])
    assert not (tmp_path / "m").exists()


def test_document_ids_beyond_int32_are_refused(tmp_path):
    for name in ("a", "b"):
        with StoreWriter.open(
            tmp_path / name, identity={"text": name}, hook_points={"h": 2}, n_tokens=1, layout=LAYOUT
        ) as w:
            tokens = {key: np.array([2**31 - 1]) for key in ("token_id", "document", "position")}
            w.append({"h": np.ones((1, 2), np.float32)}, tokens, cursor={})
            w.finish()
    with pytest.raises(DataError, match=r"document ids up to 4,294,967,295"):
        merge(tmp_path / "m", [tmp_path / "a", tmp_path / "b"])


@pytest.mark.ci
def test_a_merge_killed_ten_times_leaves_the_same_bytes(tmp_path):
    sources = [write(tmp_path / "a", 5000), write(tmp_path / "b", 4000, first=10000, text="b")]
    merge(tmp_path / "whole", sources)
    rng = np.random.default_rng(int.from_bytes(os.urandom(4)))
    killed = 0
    for _ in range(10):
        process = script(tmp_path / "m", *sources)
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
    assert killed >= 7  # an undisturbed merge takes over a second: most kills must have met it running
    process = script(tmp_path / "m", *sources)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert contents(tmp_path / "m") == contents(tmp_path / "whole")


def test_a_second_merge_into_the_same_store_is_refused_within_a_second(tmp_path, stores):
    merge(tmp_path / "whole", stores)
    seconds = []

    def meddle(rows):
        start = time.monotonic()
        with pytest.raises(BusyError, match=f"pid {os.getpid()}"):
            merge(tmp_path / "m", stores)
        seconds.append(time.monotonic() - start)

    merge(tmp_path / "m", stores, progress=lambda total, done: meddle)
    assert len(seconds) == 14 and statistics.median(seconds) < 1
    assert contents(tmp_path / "m") == contents(tmp_path / "whole")


MERGE = """
import sys, time
from saejax.store import merge
print("ready", flush=True)
merge(sys.argv[1], sys.argv[2:], progress=lambda total, done: lambda rows: time.sleep(0.01))
"""


def script(out, *sources):
    """Merge in a process of its own, slowly."""
    return subprocess.Popen(
        [sys.executable, "-c", MERGE, str(out), *map(str, sources)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


# --- import ---------------------------------------------------------------------------------------------------

X = np.random.default_rng(0).normal(0, 3, (300, 8))


def as_npy(path, x=X, **_):
    np.save(path.with_suffix(".npy"), x)
    return path.with_suffix(".npy")


def as_safetensors(path, x=X, **metadata):
    safetensors.numpy.save_file({"acts": np.ascontiguousarray(x), **metadata}, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def as_parquet(path, x=X, fixed=True, **metadata):
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat = pa.array(np.ascontiguousarray(x).ravel())
    offsets = pa.array(np.arange(0, x.size + 1, x.shape[1], dtype=np.int32))
    lists = pa.FixedSizeListArray.from_arrays(flat, x.shape[1]) if fixed else pa.ListArray.from_arrays(offsets, flat)
    table = pa.table({"acts": lists, "label": pa.array(["x"] * len(x)), **metadata})
    pq.write_table(table, path.with_suffix(".parquet"), row_group_size=90)
    return path.with_suffix(".parquet")


def as_npz(path, x=X, **metadata):
    np.savez(path.with_suffix(".npz"), acts=x, **metadata)
    return path.with_suffix(".npz")


def as_torch(path, x=X, **metadata):
    torch = pytest.importorskip("torch")
    tensors = {name: torch.tensor(value) for name, value in metadata.items()}
    torch.save(
        {"acts": torch.tensor(x.astype(np.float32)).to(getattr(torch, str(x.dtype))), **tensors, "n": 3},
        path.with_suffix(".pt"),
    )
    return path.with_suffix(".pt")


def nested(x):
    """Lists of lists of numbers, as `datasets` stores an array of two axes."""
    import pyarrow as pa

    array = pa.array(np.ascontiguousarray(x).ravel())
    for axis in range(x.ndim - 1, 0, -1):
        count = int(np.prod(x.shape[:axis]))
        array = pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * x.shape[axis]), array)
    return array


def as_arrow(path, x=X, seekable=False, **metadata):
    import pyarrow as pa

    table = pa.table({"acts": nested(x)} | {name: nested(np.asarray(value)) for name, value in metadata.items()})
    with (pa.ipc.new_file if seekable else pa.ipc.new_stream)(path.with_suffix(".arrow"), table.schema) as sink:
        sink.write_table(table, max_chunksize=11 if x.ndim > 2 else 90)
    return path.with_suffix(".arrow")


def as_feather(path, x=X, **metadata):
    return as_arrow(path, x, seekable=True, **metadata)


def as_lists(path, x=X, **metadata):
    return as_parquet(path, x, fixed=False, **metadata)


BY_NAME = dataclasses.replace(CONFIG, hook_point="", tensors=("acts=blocks.6.resid_pre",))
FORMATS = [
    (as_npz, "float32"),
    (as_torch, "bfloat16"),
    *[(write, "float32") for write in (as_arrow, as_feather)],
    *[(as_npy, dtype) for dtype in ("float16", "float32", "float64", "bfloat16", "fortran")],
    *[(as_safetensors, dtype) for dtype in ("float16", "float32", "bfloat16")],
    *[(as_parquet, dtype) for dtype in ("float16", "float32", "float64")],
    (as_lists, "float32"),
]


@pytest.mark.parametrize(("write_file", "dtype"), FORMATS, ids=lambda value: getattr(value, "__name__", value))
def test_files_of_others_come_back_as_rows_and_as_batches(tmp_path, monkeypatch, write_file, dtype):
    monkeypatch.setattr(importing_module, "_MOST_PIECE_ROWS", 70)
    x = np.asfortranarray(X.astype(np.float32)) if dtype == "fortran" else X.astype(dtype)
    files = [write_file(tmp_path / "one", x[:170]), write_file(tmp_path / "two", x[170:])]
    assert import_files(tmp_path / "s", files, CONFIG) == (300, 0)
    assert verify(tmp_path / "s") == []
    rows = in_order(tmp_path / "s")
    assert np.array_equal(bits(rows["blocks.6.resid_pre"]), bits(x))
    assert set(rows["token_id"]) == {-1}
    assert np.array_equal(rows["document"], np.repeat([0, 1], [170, 130]))
    assert np.array_equal(rows["position"], np.concatenate([np.arange(170), np.arange(130)]))
    reader = StoreReader.open(tmp_path / "s")
    assert [file["name"] for file in reader.identity["imported"]["files"]] == [file.name for file in files]
    np.testing.assert_allclose(
        reader.statistics["blocks.6.resid_pre"].mean_norm,
        np.linalg.norm(x.astype(BF16).astype(np.float64), axis=1).mean(),
        rtol=1e-12,
    )
    batches = Batches(reader, 100, seed=1, block_chunks=4)
    epoch = np.concatenate([bits(batches.batch_at(step)["blocks.6.resid_pre"]) for step in range(3)])
    assert np.array_equal(np.sort(epoch, axis=0), np.sort(bits(x), axis=0))


@pytest.mark.parametrize("write_file", [as_safetensors, as_parquet, as_npz, as_torch, as_arrow])
def test_metadata_of_a_file_is_kept(tmp_path, write_file):
    given = {"token_id": np.arange(300) % 97, "position": (np.arange(300) % 50).astype(np.int16)}
    file = write_file(tmp_path / "x", X.astype(np.float32), **given)
    import_files(tmp_path / "s", [file], dataclasses.replace(BY_NAME, model="demo", revision="r", d=8))
    rows = in_order(tmp_path / "s")
    assert all(np.array_equal(rows[name], values) for name, values in given.items()) and not rows["document"].any()
    identity = StoreReader.open(tmp_path / "s").identity
    assert identity["lm"] == {"model": "demo", "revision": "r"}
    assert identity["imported"]["metadata"] == ["token_id", "position"]


def test_token_ids_are_integers_whatever_else_is_called_tokens(tmp_path):
    import pyarrow as pa

    words = pa.array(["a"] * 300)
    file = as_parquet(tmp_path / "x", X.astype(np.float32), tokens=words, input_ids=np.arange(300), token_ids=X[:, 0])
    import_files(tmp_path / "s", [file], CONFIG)
    assert np.array_equal(in_order(tmp_path / "s")["token_id"], np.arange(300))


def test_rows_that_are_not_finite_are_refused_or_dropped_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(importing_module, "_MOST_PIECE_ROWS", 40)
    x = X.astype(np.float64)
    x[[3, 77, 299], [1, 2, 3]] = np.nan, np.inf, 1e39  # the last one is infinite as bfloat16
    file = as_npy(tmp_path / "x", x)
    with pytest.raises(DataError, match=r"x\.npy: NaN or infinity .* 1 of the 40 rows from 0 on, the first is row 3"):
        import_files(tmp_path / "s", [file], CONFIG)
    dropping = dataclasses.replace(CONFIG, non_finite="drop")
    assert import_files(tmp_path / "t", [file], dropping) == (297, 3)
    rows = in_order(tmp_path / "t")
    kept = np.delete(np.arange(300), [3, 77, 299])
    assert np.array_equal(rows["position"], kept)
    assert np.array_equal(bits(rows["blocks.6.resid_pre"]), bits(x[kept]))
    with pytest.raises(DataError, match="not one row"):
        import_files(tmp_path / "u", [as_npy(tmp_path / "nan", np.full((9, 4), np.nan))], dropping)
    with pytest.raises(ConfigError, match="abort or drop"):
        ImportConfig("h", non_finite="keep")


@pytest.mark.parametrize(
    "write_file", [as_npy, as_parquet, *(pytest.param(write, marks=pytest.mark.ci) for write in (as_torch, as_arrow))]
)
@pytest.mark.parametrize("other_pieces", [70, 33])
def test_an_interrupted_import_leaves_the_same_bytes(tmp_path, monkeypatch, write_file, other_pieces):
    monkeypatch.setattr(importing_module, "_MOST_PIECE_ROWS", 70)
    x = np.random.default_rng(1).normal(size=(1000, 4)).astype(np.float32)
    x[::37] = np.nan
    files = [write_file(tmp_path / "one", x[:600]), write_file(tmp_path / "two", x[600:])]
    config = dataclasses.replace(CONFIG, non_finite="drop")
    whole = import_files(tmp_path / "whole", files, config)
    runs = 0
    pieces = 0

    def stopping(total, done):
        def advance(rows):
            nonlocal pieces
            pieces += 1
            if pieces % 7 == 0:
                raise KeyboardInterrupt

        return advance

    while runs < 20:
        runs += 1
        try:
            assert import_files(tmp_path / "broken", files, config, stopping) == whole
            break
        except KeyboardInterrupt:
            # The pieces of a later version need not be those of today.
            monkeypatch.setattr(importing_module, "_MOST_PIECE_ROWS", other_pieces)
    assert 2 < runs < 20
    if other_pieces == 70:
        assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
    one, two = in_order(tmp_path / "broken"), in_order(tmp_path / "whole")
    assert all(one[name].tobytes() == two[name].tobytes() for name in two)
    changed = as_npy(tmp_path / "one", x[:600] + 1)
    if write_file is as_npy:
        with pytest.raises(DataError, match="was made for something else"):
            import_files(tmp_path / "broken", [changed, files[1]], config)


def test_files_that_do_not_fit_each_other_are_refused(tmp_path):
    one = as_safetensors(tmp_path / "one", X.astype(np.float32), token_id=np.arange(300))
    other = as_npy(tmp_path / "other")
    wide = as_npy(tmp_path / "wide", np.ones((3, 9)))
    odd = as_safetensors(tmp_path / "odd", X.astype(np.float32), token_id=np.arange(299))
    words = as_safetensors(tmp_path / "words", X.astype(np.float32), document=np.ones(300, np.float32))
    cases = [
        ([], CONFIG, ConfigError, "no file to import"),
        ([one, other], CONFIG, DataError, r"token_id is in 1 of the files, blocks\.6\.resid_pre in 2: .*separately"),
        ([other, wide], CONFIG, DataError, r"wide\.npy has width 9, .* has 8"),
        ([other], dataclasses.replace(CONFIG, d=16), DataError, "has width 8, but d=16"),
        ([one], dataclasses.replace(BY_NAME, tensors=("act",)), DataError, r"No file has a tensor 'act'.*: .*'acts'"),
        ([odd], CONFIG, DataError, r"odd.*: 'token_id' \(token_id\) is \[299\], and 'acts' of .* \[300, 8\]"),
        ([words], CONFIG, DataError, r"document \(document\) is float32 of 1 axes; it must be integers"),
        ([tmp_path / "x.npy"], CONFIG, DataError, "is no file"),
        ([tmp_path / "x.bin"], CONFIG, ConfigError, r"ends in '\.bin'; .*\.npy, .*\.safetensors, \.pt,"),
        ([other], dataclasses.replace(CONFIG, hook_point="../x"), ConfigError, "cannot be a folder"),
    ]
    for files, config, kind, message in cases:
        with pytest.raises(kind, match=message):
            import_files(tmp_path / "s", files, config)
    two = tmp_path / "two.safetensors"
    safetensors.numpy.save_file({"a": np.ones((3, 4), np.float32), "b": np.ones((3, 4), np.float32)}, two)
    with pytest.raises(
        DataError, match=r"2 candidates .* 'a' \(float32, 2 axes\), 'b' .* Name one with --tensors=NAME="
    ):
        import_files(tmp_path / "s", [two], CONFIG)
    for settings in ({"hook_point": ""}, {"tensors": ("acts",)}):
        with pytest.raises(ConfigError, match=r"one of --hook_point=.*--tensors="):
            dataclasses.replace(CONFIG, **settings)
    assert not (tmp_path / "s").exists()


def npy_bytes(header, data=b"", length=None):
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) if length is None else length) + text + data


def npy_header(descr="<f4", shape="(3, 4)"):
    return f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}\n"


def tensors_bytes(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(3, 4), low=0, high=48):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [low, high]}


def npz_bytes(member, name_length=None):
    """An .npz of one stored member; its local header may say that the name is longer."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr("acts.npy", member)
    whole = bytearray(raw.getvalue())
    if name_length:
        whole[26:28] = struct.pack("<H", name_length)
    return bytes(whole)


def arrow_bytes(offsets=(0, 4, 8), tail=None):
    """A stream of two lists of four numbers; their offsets may lead out of them."""
    import pyarrow as pa

    table = pa.table({"acts": nested(np.ones((2, 4), np.float32))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    true, false = (np.array(numbers, np.int32).tobytes() for numbers in ((0, 4, 8), offsets))
    return sink.getvalue().to_pybytes().replace(true, false)[:tail]


HOSTILE = {
    "npy claims terabytes": (".npy", npy_bytes(npy_header(shape="(1000000000000, 4096)"), b"\0" * 64), "says it holds"),
    "npy overflows": (".npy", npy_bytes(npy_header(shape=f"({2**62}, {2**62})"), b"\0" * 64), "says it holds"),
    "npy is cut": (".npy", npy_bytes(npy_header(), b"\0" * 47), "48 bytes, but 47 follow"),
    "npy has a tail": (".npy", npy_bytes(npy_header(), b"\0" * 49), "48 bytes, but 49 follow"),
    "npy of objects": (".npy", npy_bytes(npy_header("|O"), b"cos\nsystem\n"), "Python objects .* never read"),
    "npy of integers": (".npy", npy_bytes(npy_header("<i4"), b"\0" * 48), r"'x' \(int32, 2 axes\).*float16"),
    "npy of complex": (".npy", npy_bytes(npy_header("<c8"), b"\0" * 96), "not float16"),
    "npy of one axis": (".npy", npy_bytes(npy_header(shape="(12,)"), b"\0" * 48), "'x' .float32, 1 axes"),
    "npy negative": (".npy", npy_bytes(npy_header(shape="(-3, -4)"), b"\0" * 48), "its shape is"),
    "npy nested": (".npy", npy_bytes("[" * 10000), "no readable"),
    "npy code": (".npy", npy_bytes("__import__('os').abort()"), "no readable"),
    "npy long header": (".npy", npy_bytes("x", length=60000), "claims 60,000 bytes"),
    "npy empty": (".npy", b"", "does not begin as one"),
    "npy no rows": (".npy", npy_bytes(npy_header(shape="(0, 4)")), "nothing to import"),
    "tensors claim terabytes": (
        ".safetensors",
        tensors_bytes({"a": entry(shape=(10**12, 4096), high=10**12 * 4096 * 4)}, b"\0" * 48),
        "does not fit its size or the file's",
    ),
    "tensors out of place": (".safetensors", tensors_bytes({"a": entry(low=8, high=56)}, b"\0" * 48), "does not fit"),
    "tensors lie": (".safetensors", tensors_bytes({"a": entry(shape=(3, 5))}, b"\0" * 48), "does not fit its size"),
    "tensors negative": (".safetensors", tensors_bytes({"a": entry(shape=(-3, -4))}, b"\0" * 48), "has shape"),
    "tensors long header": (".safetensors", tensors_bytes({}, length=2**63), "header claims"),
    "tensors nested": (".safetensors", tensors_bytes(b"[" * 100000), "no readable"),
    "tensors no dict": (".safetensors", tensors_bytes([1]), "no readable"),
    "tensors cut": (".safetensors", b"\1\2", "no readable"),
    "npz claims terabytes": (
        ".npz",
        npz_bytes(npy_bytes(npy_header(shape="(1000000000000, 4096)"))),
        "its size is another",
    ),
    "npz elsewhere": (".npz", npz_bytes(npy_bytes(npy_header(), b"\0" * 48), 60000), "does not lie where the zip says"),
    "npz of objects": (".npz", npz_bytes(npy_bytes(npy_header("|O"), b"cos")), "Python objects .* never read"),
    "npz no zip": (".npz", b"PK", "no readable"),
    "torch of before 1.6": (".pt", b"\x80\x02cos\nsystem\n", "bare pickle"),
    "torch no zip": (".pt", b"x", "no file of torch.save"),
    "arrow no stream": (".arrow", b"x" * 100, "no readable"),
    "arrow cut": (".arrow", arrow_bytes(tail=-9), "its end is missing"),
    "parquet cut": (".parquet", b"PAR1\0\0PAR1", "no readable"),
    "parquet no parquet": (".parquet", b"x" * 100, "no readable"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(tmp_path, case):
    ending, raw, message = HOSTILE[case]
    file = tmp_path / f"x{ending}"
    file.write_bytes(raw)
    with pytest.raises(DataError, match=message) as caught:
        import_files(tmp_path / "s", [file], CONFIG)
    assert str(file) in str(caught.value) and not (tmp_path / "s").exists()


SEQUENCES = np.random.default_rng(2).normal(size=(30, 5, 6)).astype(np.float32)
TOKENS = np.arange(150, dtype=np.int32).reshape(30, 5) % 17


@pytest.mark.parametrize(
    "write_file",
    [as_torch, as_arrow, *(pytest.param(write, marks=pytest.mark.ci) for write in (as_npz, as_safetensors))],
)
def test_sequences_become_rows_with_their_places(tmp_path, monkeypatch, write_file):
    monkeypatch.setattr(importing_module, "_MOST_PIECE_ROWS", 13)
    cut = [(slice(0, 12), "one"), (slice(12, 30), "two")]
    files = [write_file(tmp_path / name, SEQUENCES[part], token_ids=TOKENS[part]) for part, name in cut]
    config = dataclasses.replace(BY_NAME, layout=StoreLayout(32, 16))
    assert import_files(tmp_path / "s", files, config) == (150, 0)
    rows = in_order(tmp_path / "s")
    assert np.array_equal(bits(rows["blocks.6.resid_pre"]), bits(SEQUENCES.reshape(150, 6)))
    assert np.array_equal(rows["token_id"], TOKENS.ravel())
    assert np.array_equal(rows["document"], np.repeat(np.arange(30), 5))
    assert np.array_equal(rows["position"], np.tile(np.arange(5), 30))
    assert StoreReader.open(tmp_path / "s").identity["imported"]["metadata"] == ["token_id", "document", "position"]
    pieces = iter(range(1000))

    def stopping(total, done):
        def advance(rows):
            if next(pieces) % 5 == 4:
                raise KeyboardInterrupt

        return advance

    for _ in range(9):
        with contextlib.suppress(KeyboardInterrupt):
            import_files(tmp_path / "broken", files, config, stopping)
    assert contents(tmp_path / "broken") == contents(tmp_path / "s")


@pytest.mark.parametrize("write_file", [as_npz, as_arrow])
def test_pieces_begin_at_any_row(tmp_path, write_file):
    (part,) = open_parts([write_file(tmp_path / "x", SEQUENCES, token_ids=TOKENS)], Naming("h"))
    for start, size in ((0, 7), (7, 1), (54, 13), (55, 400), (149, 3)):
        pieces = list(part.pieces(start, size))
        for name, wanted in (("h", SEQUENCES.reshape(150, 6)), ("token_id", TOKENS.ravel())):
            assert np.array_equal(np.concatenate([piece[name] for piece in pieces]), wanted[start:])


@pytest.mark.parametrize("write_file", [as_torch, as_arrow])
def test_padding_is_left_out_and_counted(tmp_path, write_file):
    mask = np.arange(5) < (np.arange(30) % 5 + 1)[:, None]
    x = np.where(mask[..., None], SEQUENCES, np.nan)
    file = write_file(tmp_path / "x", x, attention_mask=mask if write_file is not as_arrow else mask.astype(np.int64))
    assert import_files(tmp_path / "s", [file], BY_NAME) == (90, 0)
    reader, rows = StoreReader.open(tmp_path / "s"), in_order(tmp_path / "s")
    assert reader.counters == {"dropped_non_finite": 0, "dropped_padding": 60}
    assert np.array_equal(bits(rows["blocks.6.resid_pre"]), bits(SEQUENCES[mask]))
    assert np.array_equal(rows["position"], np.nonzero(mask)[1])
    assert np.array_equal(rows["document"], np.nonzero(mask)[0])


def test_first_positions_are_left_out_where_it_is_known_which_they_are(tmp_path):
    config = dataclasses.replace(BY_NAME, drop_first=2)
    mask = np.arange(5) < (np.arange(30) % 5 + 1)[:, None]
    file = as_npz(tmp_path / "x", SEQUENCES, attention_mask=mask)
    left = mask & (np.arange(5) >= 2)
    assert import_files(tmp_path / "s", [file], config) == (int(left.sum()), 0)
    reader, rows = StoreReader.open(tmp_path / "s"), in_order(tmp_path / "s")
    first = int((mask & (np.arange(5) < 2)).sum())
    assert reader.counters == {"dropped_non_finite": 0, "dropped_padding": 60, "dropped_first": first}
    assert np.array_equal(bits(rows["blocks.6.resid_pre"]), bits(SEQUENCES[left]))
    assert np.array_equal(rows["position"], np.nonzero(left)[1])
    assert reader.identity["imported"]["drop_first"] == 2
    flat, places = SEQUENCES.reshape(150, 6), np.arange(150) % 7
    import_files(tmp_path / "t", [as_npz(tmp_path / "y", flat, position=places)], config)
    assert np.array_equal(bits(in_order(tmp_path / "t")["blocks.6.resid_pre"]), bits(flat[places >= 2]))
    with pytest.raises(DataError, match=r"rows in one line or.*integers named position"):
        import_files(tmp_path / "u", [as_npz(tmp_path / "z", flat)], config)
    with pytest.raises(DataError, match=r"padding in front.*integers named position"):
        import_files(tmp_path / "v", [as_npz(tmp_path / "w", SEQUENCES, attention_mask=mask[:, ::-1])], config)


def test_a_cache_of_transformer_lens_is_several_hook_points(tmp_path):
    torch = pytest.importorskip("torch")
    x = torch.tensor(SEQUENCES)
    cache = {"hook_embed": x + 1, "blocks.0.attn.hook_pattern": torch.ones(30, 2, 5, 5)}
    cache |= {f"blocks.{i}.hook_resid_post": (x * i).to(torch.bfloat16) for i in range(3)}
    cache["blocks.2.hook_resid_post"] = (x.permute(2, 0, 1).contiguous() * 2).permute(1, 2, 0)  # no row lies together
    torch.save(cache, tmp_path / "cache.pt")
    config = ImportConfig(tensors=("blocks.1.hook_resid_post=blocks.1.resid_post", "blocks.?.hook_resid_post"))
    import_files(tmp_path / "s", [tmp_path / "cache.pt"], config)
    rows = in_order(tmp_path / "s")
    names = ("blocks.0.hook_resid_post", "blocks.1.resid_post", "blocks.2.hook_resid_post")
    assert StoreReader.open(tmp_path / "s").hook_points.keys() == set(names)
    for i, name in enumerate(names):
        assert np.array_equal(bits(rows[name]), bits(SEQUENCES.reshape(150, 6) * i))
    cases = {
        "*": r"'blocks\.0\.attn\.hook_pattern' \(.*\) is float32 of 4 axes; activations are",
        "blocks.*=a": r"cache\.pt: 'blocks\.0\..*' and 'blocks\..*' are both to be a; name one",
    }
    for pattern, message in cases.items():
        with pytest.raises(DataError, match=message):
            import_files(tmp_path / "t", [tmp_path / "cache.pt"], ImportConfig(tensors=(pattern,)))
    torch.save(x, tmp_path / "bare.pth")
    import_files(tmp_path / "u", [tmp_path / "bare.pth"], CONFIG)
    assert np.array_equal(bits(in_order(tmp_path / "u")["blocks.6.resid_pre"]), bits(SEQUENCES.reshape(150, 6)))
    torch.save([x], tmp_path / "list.pt")
    with pytest.raises(DataError, match=r"list\.pt holds a list\. Save a dict"):
        import_files(tmp_path / "v", [tmp_path / "list.pt"], CONFIG)


def test_a_folder_holds_hook_points_side_by_side_and_shards_one_after_the_other(tmp_path):
    folder = tmp_path / "acts"
    x = np.random.default_rng(3).normal(size=(12, 10, 4)).astype(np.float32)
    for layer in (2, 10):
        (folder / f"layer_{layer}").mkdir(parents=True)
        for shard in range(12):
            np.save(folder / f"layer_{layer}" / f"{shard}.npy", x[shard] * layer)
    (folder / "tokens").mkdir()
    for shard in range(12):
        np.save(folder / "tokens" / f"{shard}.npy", np.full(10, shard))
    (folder / "notes.md").touch()
    (folder / ".scratch.npy").touch()
    (folder / "config.json").touch()
    handles = [len(os.listdir("/proc/self/fd"))]

    def count_open(total, done):
        return lambda rows: handles.append(len(os.listdir("/proc/self/fd")))

    config = ImportConfig(
        tensors=("layer_2/*=blocks.2.resid_post", "layer_10/*=blocks.10.resid_post", "tokens/*=token_id")
    )
    with pytest.warns(UserWarning, match=r"acts: 1 files are not read \(1 \.md\)\.$"):
        assert import_files(tmp_path / "s", [folder], config, count_open) == (120, 0)
    assert len(handles) == 13 and max(handles) < handles[0] + 20, "36 files are not open at once"
    (folder / "notes.md").unlink()
    rows = in_order(tmp_path / "s")
    for layer in (2, 10):
        assert np.array_equal(bits(rows[f"blocks.{layer}.resid_post"]), bits(x.reshape(120, 4) * layer))
    assert np.array_equal(rows["token_id"], np.repeat(np.arange(12), 10))
    assert np.array_equal(rows["document"], rows["token_id"])
    np.save(folder / "layer_2" / "7.npy", x[7][:9])
    with pytest.raises(
        DataError, match=r"layer_10/7\.npy: .* is \[10, 4\], and .*layer_2/7\.npy is \[9, 4\]: .* other rows"
    ):
        import_files(tmp_path / "t", [folder], config)
    (folder / "layer_2" / "7.npy").unlink()
    with pytest.raises(DataError, match=r"blocks\.2\.resid_post is in 11 of the files, .* in 12|in 12 .* in 11"):
        import_files(tmp_path / "t", [folder], config)
    x[0, 3, 1] = np.nan
    np.save(folder / "layer_2" / "7.npy", x[7])
    np.save(folder / "layer_10" / "0.npy", x[0])
    with pytest.raises(DataError, match=r"layer_10/0\.npy: NaN .* is row 3 of blocks\.10\.resid_post"):
        import_files(tmp_path / "t", [folder], config)
    assert import_files(tmp_path / "u", [folder], dataclasses.replace(config, non_finite="drop")) == (119, 1)


def test_a_data_set_of_saelens_is_read_by_its_list_of_files(tmp_path):
    folder = tmp_path / "cached"
    folder.mkdir()
    names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (slice(0, 12), slice(12, 30)), strict=True):
        as_arrow(folder / name, SEQUENCES[part], token_ids=TOKENS[part])
    as_arrow(folder / "cache-1.arrow", SEQUENCES + 1)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").touch()
    assert import_files(tmp_path / "s", [folder], CONFIG) == (150, 0)
    rows = in_order(tmp_path / "s")
    assert np.array_equal(bits(rows["blocks.6.resid_pre"]), bits(SEQUENCES.reshape(150, 6)))
    assert np.array_equal(rows["token_id"], TOKENS.ravel())
    whole = (folder / names[1]).read_bytes()
    for size in (100, len(whole) // 2, len(whole) - 8):
        (folder / names[1]).write_bytes(whole[:size])
        with pytest.raises(DataError, match=rf"{names[1]} is no readable \.arrow file"):
            import_files(tmp_path / "t", [folder], CONFIG)
    (folder / names[1]).unlink()
    with pytest.raises(DataError, match=rf"{names[1]} is missing, which state\.json lists"):
        import_files(tmp_path / "t", [folder], CONFIG)


def test_what_is_compressed_or_of_another_type_is_refused_by_name(tmp_path):
    np.savez_compressed(tmp_path / "small.npz", acts=X)
    eights = {"acts": entry("F8_E4M3", high=12), "token_id": entry("I32", (3,), 12, 24)}
    (tmp_path / "eight.safetensors").write_bytes(tensors_bytes(eights, b"\0" * 24))
    folder = tmp_path / "mixed"
    folder.mkdir()
    as_parquet(folder / "a", X.astype(np.float32))
    np.save(folder / "token_id.npy", np.arange(300))
    cases = {
        "small.npz": r"small\.npz: 'acts\.npy' is compressed\. Save it as it is, as by np\.savez",
        "eight.safetensors": r"eight\.safetensors has 0 candidates .*'acts' \(F8_E4M3, 2 axes\)",
        "mixed": r"a\.parquet has columns, and others lie in files beside it",
    }
    for name, message in cases.items():
        with pytest.raises(DataError, match=message):
            import_files(tmp_path / "s", [tmp_path / name], CONFIG)


def test_lists_of_other_lengths_and_missing_values_are_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    cases = {
        "ragged": ([[1.0, 2.0], [1.0, 2.0, 3.0]], None, "every list must hold 2"),
        "null list": ([[1.0, 2.0], None], None, "nothing may be missing"),
        "null value": ([[1.0, 2.0], [1.0, None]], None, "nothing may be missing"),
        "null id": ([[1.0, 2.0], [1.0, 2.0]], [1, None], "'token_id', rows 0 to 2: nothing may be missing"),
        "words": (["a", "b"], None, "0 candidates"),
    }
    for name, (values, ids, message) in cases.items():
        table = pa.table({"x": pa.array(values)} | ({"token_id": pa.array(ids)} if ids else {}))
        pq.write_table(table, tmp_path / f"{name}.parquet")
        with pytest.raises(DataError, match=message):
            import_files(tmp_path / name.replace(" ", "_"), [tmp_path / f"{name}.parquet"], CONFIG)


def test_a_damaged_parquet_file_is_refused_with_its_row(tmp_path):
    file = as_parquet(tmp_path / "x", X.astype(np.float32))
    raw = bytearray(file.read_bytes())
    middle = len(raw) // 2  # the third of four row groups begins about there
    raw[middle - 2000 : middle + 2000] = b"\xff" * 4000
    file.write_bytes(raw)
    with pytest.raises(DataError, match=r"x\.parquet is damaged at row \d+ or behind"):
        import_files(tmp_path / "s", [file], CONFIG)


@pytest.mark.parametrize("end", [2**30, -4])
def test_lists_of_arrow_that_lead_out_of_their_numbers_are_refused(tmp_path, end):
    (tmp_path / "x.arrow").write_bytes(arrow_bytes(offsets=(0, 4, end)))
    with pytest.raises(DataError, match=r"x\.arrow is damaged at row 0 or behind: .*ffset") as caught:
        import_files(tmp_path / "s", [tmp_path / "x.arrow"], CONFIG)
    assert "\n" not in str(caught.value)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs pyarrow: pip install 'datasets>="):
        import_files(tmp_path / "s", [tmp_path / "x.parquet"], CONFIG)


def test_files_that_claim_terabytes_cost_no_memory(tmp_path):
    store = write(tmp_path / "s")
    zarr = store / "arrays" / "blocks.0.resid_pre" / "zarr.json"
    honest = json.loads(zarr.read_bytes())
    claims = [json.dumps(honest | {"shape": [2**40, 6]}).encode(), b"[" * 60000, b'{"a":' * 12000]
    files = []
    for number, name in enumerate(("npy claims terabytes", "npy nested", "tensors claim terabytes", "tensors nested")):
        ending, raw, _ = HOSTILE[name]
        files.append(tmp_path / f"{number}{ending}")
        files[-1].write_bytes(raw)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for claim in claims:
        zarr.write_bytes(claim)
        with pytest.raises(DataError):
            StoreReader.open(store)
        assert any(str(zarr) in problem for problem in verify(store))
    for file in files:
        with pytest.raises(DataError):
            import_files(tmp_path / "i", [file], CONFIG)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB


# --- room on disk ---------------------------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(("rows", "width", "layout"), [(4096, 512, (1024, 64)), (5000, 100, (2048, 256))])
def test_the_predicted_size_is_the_size(tmp_path, rows, width, layout):
    with StoreWriter.open(
        tmp_path / "s", identity={}, hook_points={"h": width, "g": 64}, n_tokens=rows, layout=StoreLayout(*layout)
    ) as writer:
        tokens = {name: np.arange(rows) for name in ("token_id", "document", "position")}
        ones = {"h": np.ones((rows, width), np.float32), "g": np.ones((rows, 64), np.float32)}
        writer.append(ones, tokens, cursor={})
        writer.finish()
    size = sum(len(content) for content in contents(tmp_path / "s").values())
    predicted = predicted_bytes(Header({}, {"h": width, "g": 64}, rows, StoreLayout(*layout), 0))
    assert abs(predicted - size) < 0.01 * size


def test_a_store_that_does_not_fit_the_disk_is_refused_before_it_is_begun(tmp_path, monkeypatch):
    header = Header({}, HOOKS, 1000, LAYOUT, 0)
    needed = int(predicted_bytes(header) * 1.01)
    free = needed - 1
    monkeypatch.setattr(space_module.shutil, "disk_usage", lambda path: Usage(0, 0, free))
    with pytest.raises(DataError) as caught:
        write(tmp_path / "s")
    for part in (f"1,000 rows need {needed:,} bytes", f"only {free:,} bytes are free", "fewer tokens", str(tmp_path)):
        assert part in str(caught.value)
    assert contents(tmp_path / "s") == {}
    free = needed
    write(tmp_path / "s", finish=False)
    # What is there already need not fit again.
    free = needed - sum(len(content) for content in contents(tmp_path / "s").values())
    write(tmp_path / "s", finish=False)
    free -= 1
    with pytest.raises(DataError, match="bytes more on disk"):
        write(tmp_path / "s", finish=False)
    free = 0
    write("memory://space/s")  # only local disks are asked


def test_a_complete_store_opens_on_a_full_disk(tmp_path, monkeypatch):
    write(tmp_path / "s")
    monkeypatch.setattr(space_module.shutil, "disk_usage", lambda path: Usage(0, 0, 0))
    identity = StoreReader.open(tmp_path / "s").identity
    with StoreWriter.open(
        tmp_path / "s", identity=identity, hook_points=HOOKS, n_tokens=1000, layout=LAYOUT, seed=1
    ) as w:
        assert w.complete


# --- the commands ---------------------------------------------------------------------------------------------


def demo_store(path, ids, **lm):
    """Rows of a text in the demo's tokens, as a capture stores them, in documents of 40 tokens without their bos."""
    n = len(ids)
    identity = {"lm": {"model": "demo", "tokenizer_sha256": Tokenizer.from_folder(DEMO).sha256} | lm}
    with StoreWriter.open(path, identity=identity, hook_points={"h": 2}, n_tokens=n, layout=StoreLayout(64, 16)) as w:
        tokens = {"token_id": ids, "document": np.arange(n) // 40, "position": 1 + np.arange(n) % 40}
        w.append({"h": np.full((n, 2), 3.0, np.float32)}, tokens, cursor={})
        w.finish()
    return path


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    text = "import os\n\ndef main(path):\n    for name in os.listdir(path):\n        print(name)\n" * 8
    ids = np.asarray(Tokenizer.from_folder(DEMO).encode(text))[:150]
    return demo_store(tmp_path_factory.mktemp("demo") / "s", ids), ids


def test_the_context_of_a_token_is_what_stood_beside_it(demo):
    path, ids = demo
    reader = StoreReader.open(path)
    order = np.concatenate([s * 64 + reader.stream_places(s) for s in range(3)])
    for i, row in enumerate(order):
        before, own, after = token_context(reader, int(row), 5)
        low, high = max(i // 40 * 40, i - 5), min(len(ids), (i // 40 + 1) * 40, i + 6)
        assert (before, own, after) == (ids[low:i].tolist(), [ids[i]], ids[i + 1 : high].tolist())


def test_a_sampled_row_shows_its_ids_norm_and_text(demo, capsys):
    path, ids = demo
    reader, tokenizer = StoreReader.open(path), find_tokenizer(StoreReader.open(path).identity)[0]
    row = int(reader.stream_places(0)[20])
    line = sampled_row(reader, row, tokenizer)
    assert line.startswith(f"row {row}: token_id {ids[20]}, document 0, position 21, norm h 4.243, text ")
    assert f"[{tokenizer.decode([ids[20]])!r}]" in line and repr(tokenizer.decode(ids[14:20].tolist())) in line
    assert run_command("store", ["sample", str(path)], **{"rows": 3, "seed": 5}) == 0
    first = capsys.readouterr().out
    assert first.startswith(f"{path}: 3 of 150 rows\n") and first.count(", text ") == 3
    run_command("store", ["sample", str(path)], **{"rows": 3, "seed": 5})
    assert capsys.readouterr().out == first
    run_command("store", ["sample", str(path)], **{"rows": 3, "seed": 6})
    assert capsys.readouterr().out != first
    with pytest.raises(DataError, match="no hook point g"):
        run_command("store", ["sample", str(path)], **{"hook_point": "g"})


def test_a_sample_wants_a_seed_and_a_path(tmp_path):
    with pytest.raises(ConfigError, match=r"--seed=-1; of sample it must be 0 or more"):
        run_command("store", ["sample", str(tmp_path)], **{"seed": -1})
    for command in ("info", "sample"):
        with pytest.raises(ConfigError, match="path of a store is empty"):
            run_command("store", [command, ""])


def test_without_its_tokenizer_a_sample_shows_ids_and_says_why(tmp_path, capsys):
    ids = np.arange(20)
    cases = [
        ({"model": "someone/else"}, "ids only: the tokenizer of 'someone/else' is not here"),
        ({"model": ""}, "ids only: the store does not say of which model it is"),
        ({"tokenizer_sha256": "0" * 64}, "has another tokenizer than the one the store was made with"),
    ]
    for number, (lm, message) in enumerate(cases):
        path = demo_store(tmp_path / str(number), ids, **lm)
        run_command("store", ["sample", str(path)])
        out = capsys.readouterr().out
        assert message in out and out.count("token_id") == 5 and "text" not in out
    run_command("store", ["sample", str(tmp_path / "0")], **{"tokenizer": str(DEMO)})
    assert capsys.readouterr().out.count(", text ") == 5
    with pytest.raises(DataError, match=r"No tokenizer\.json"):
        run_command("store", ["sample", str(tmp_path / "0")], **{"tokenizer": str(tmp_path)})


def test_info_shows_complete_and_unfinished_stores(tmp_path, stores, capsys):
    half = write(tmp_path / "half", finish=False)
    assert run_command("store", ["info", str(stores[0]), str(half)]) == 0
    whole, unfinished = capsys.readouterr().out.split(f"\n{half}\n")
    size = sum(len(content) for content in contents(stores[0]).values())
    statistics = StoreReader.open(stores[0]).statistics["blocks.1.resid_pre"]
    for part in (
        "complete: 1,000 rows in 8 shards\n",
        "shards of 128 rows, chunks of 16, seed 1",
        f"hook point blocks.1.resid_pre: width 4, mean norm {statistics.mean_norm:.6g}",
        "lm.model: 'tiny'",
        "lm.revision: 'abc'",
        "text.source: 'a'",
        "split: 'train'",
        "counted seen: 1,000",
    ):
        assert part in whole
    (line,) = (line for line in whole.splitlines() if line.startswith("  bytes: "))
    assert int(line.split()[1].replace(",", "")) == size
    assert "unfinished: 384 of 1,000 rows (38.4%)" in unfinished and "mean norm" not in unfinished
    write("memory://info/s")
    run_command("store", ["info", "memory://info/s"])
    assert re.search(r"bytes: [\d,]+ when complete", capsys.readouterr().out)
    with pytest.raises(DataError, match="no store at"):
        run_command("store", ["info", str(tmp_path / "nothing")])


def test_verify_says_good_or_all_that_is_wrong(tmp_path, stores, capsys):
    assert run_command("store", ["verify", *map(str, stores)]) == 0
    assert capsys.readouterr().out == f"{stores[0]}: good\n{stores[1]}: good\n"
    broken = write(tmp_path / "s")
    (broken / "commits" / "000002.json").unlink()
    (broken / "arrays" / "document" / "c" / "0").unlink()
    assert run_command("store", ["verify", str(tmp_path / "none"), str(broken), str(stores[1])]) == 1
    out = capsys.readouterr().out
    assert f"{tmp_path}/none: 1 problems\n  There is no store" in out
    assert f"{broken}: 2 problems\n" in out and "commits/000002.json is missing" in out and f"{stores[1]}: good" in out


def test_merge_and_import_as_commands(tmp_path, stores, capsys):
    assert run_command("store", ["merge", str(tmp_path / "m"), *map(str, stores)], **{"seed": 3}) == 0
    assert f"{tmp_path}/m: 1,700 rows of 2 stores" in capsys.readouterr().out
    assert StoreReader.open(tmp_path / "m").seed == 3
    flags = {"hook_point": "h", "shard_rows": 64, "chunk_rows": 16, "d": 8, "non_finite": "drop"}
    assert run_command("store", ["import", str(tmp_path / "i"), str(as_npy(tmp_path / "x"))], **flags) == 0
    assert f"{tmp_path}/i: 300 rows of 1 files, 0 dropped" in capsys.readouterr().out
    assert StoreReader.open(tmp_path / "i").layout == StoreLayout(64, 16)
    np.savez(tmp_path / "y.npz", a=X, b=2 * X, c=X)
    assert run_command("store", ["import", str(tmp_path / "j"), str(tmp_path / "y.npz")], tensors=("a=h.1", "b")) == 0
    assert f"{tmp_path}/j: 300 rows of 1 files" in capsys.readouterr().out
    assert StoreReader.open(tmp_path / "j").hook_points == {"h.1": 8, "b": 8}


def test_wrong_commands_are_refused(tmp_path):
    cases = [
        ([], {}, r"Name a command: info, verify, merge, sample, import"),
        (["vrify", "x"], {}, "Did you mean 'verify'"),
        (["info"], {}, "info needs 1 paths or more, got 0"),
        (["merge", "a", "b"], {}, "merge needs 3 paths or more, got 2"),
        (["info", "x"], {"rows": 3}, "--rows does nothing for `saejax store info`"),
        (["import", str(tmp_path / "s"), "x.npy"], {}, "Give an import one of --hook_point"),
    ]
    for words, flags, message in cases:
        with pytest.raises(ConfigError, match=message):
            run_command("store", words, **flags)


def test_the_script_prints_one_line_and_exits_with_the_code(tmp_path, stores):
    damaged = Path(shutil.copytree(stores[0], tmp_path / "s"))
    (damaged / "arrays" / "position" / "c" / "1").unlink()
    cases = [
        (["verfy", "x"], 2, "error: There is no command 'verfy'. Did you mean 'verify'?\n"),
        (["sample", "--row=3", "x"], 2, "error: Unknown flag --row. Did you mean 'rows'?\n"),
        (["--rows=x", "sample", "x"], 2, "error: flag --rows=x"),
        (["verify", str(damaged)], 1, "arrays/position/c/1"),
        (["info", "nowhere"], 1, "error: There is no store at"),
        (["--help"], 1, "python -m launch.store merge OUT STORE STORE..."),
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "launch.store", *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for words, _, _ in cases
    ]
    for process, (words, code, part) in zip(processes, cases, strict=True):
        output, _ = process.communicate(timeout=120)
        assert process.returncode == code, (words, output)
        assert part in output and "Traceback" not in output
