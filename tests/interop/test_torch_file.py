"""PyTorch's files: torch.save's are read, torch.load reads what is written, nothing in a file is executed."""

import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saejax.core.errors import DataError
from saejax.core.torch_file import names_in, read_torch, write_torch
from tests.tiny.limits import at_once

ARRAYS = {
    "W": np.arange(12, dtype=np.float32).reshape(3, 4),
    "W.T": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    "k": np.asarray(5, np.int32),
    "sizes": np.arange(4),
    "empty": np.zeros((0, 3), np.float32),
}


def test_torch_reads_what_is_written_and_so_does_saejax(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    write_torch(tmp_path / "a.pt", ARRAYS)
    write_torch(tmp_path / "b.pt", ARRAYS)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()
    theirs = torch.load(tmp_path / "a.pt", weights_only=True)
    mine = read_torch(tmp_path / "a.pt")
    for name, value in ARRAYS.items():
        for there in (theirs[name].numpy(), mine[name]):
            assert (there.shape, there.dtype) == (value.shape, value.dtype)
            np.testing.assert_array_equal(there, value)


def test_views_types_and_what_stands_beside_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(6, 5)
    state = {
        "view": x[1:, ::2],
        "transposed": x.T,
        "parameter": torch.nn.Parameter(x),
        "bf16": x.bfloat16(),
        "half": x.half(),
        "double": x.double(),
        "flags": x > 0,
        "activation": "TopK",
        "more": {"k": 3, "scale": 1.5, "sizes": [1, 2], "on": True, "none": None, "big": 2**40, "pair": (1,)},
    }
    torch.save(state, tmp_path / "a.pt")
    read = read_torch(tmp_path / "a.pt")
    assert read["activation"] == "TopK" and read["more"] == state["more"]
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            exact = value.detach().numpy() if name == "flags" else value.detach().float().numpy()
            np.testing.assert_array_equal(read[name], exact, err_msg=name)
            assert read[name].dtype == exact.dtype
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "b.pt")  # an OrderedDict with attributes
    assert read_torch(tmp_path / "b.pt").keys() == {"weight", "bias"}


# --- hostile files ----------------------------------------------------------------------------------------------

TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"


def text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word)) + word.encode()


def number(n: int) -> bytes:
    return b"J" + struct.pack("<i", n) if abs(n) < 2**31 else b"\x8a\x09" + n.to_bytes(9, "little", signed=True)


def numbers(*given: int) -> bytes:
    return b"(" + b"".join(map(number, given)) + b"t"


def storage(count: int = 12, key: str = "0", kind: str = "FloatStorage") -> bytes:
    return b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + number(count) + b"tQ"


def tensor(shape: bytes, strides: bytes, offset: bytes = number(0), of: bytes | None = None) -> bytes:
    return TENSOR + b"(" + (storage() if of is None else of) + offset + shape + strides + b"\x89)tR"


def state(value: bytes) -> bytes:
    """The pickle of {"W": value}."""
    return b"\x80\x02}" + text("W") + value + b"s."


def written(path: Path, pickled: bytes, more: dict[str, bytes] | None = None, how: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", how) as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/byteorder", "little")
        for name, raw in ({"a/data/0": bytes(48)} if more is None else more).items():
            archive.writestr(name, raw)
    return path


def test_the_hand_made_file_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "a.pt", state(tensor(numbers(3, 4), numbers(4, 1))))
    np.testing.assert_array_equal(read_torch(path)["W"], np.zeros((3, 4)))
    assert names_in(path, "W") and not names_in(path, "W", "nowhere")


# t = (t, t), sixty times; and numbers that a dict takes for ever to tell apart.
DOUBLED = b")q\x00" + b"".join(bytes([ord("h"), i, 0x86, ord("q"), i + 1]) for i in range(60))
SAME_HASH = b"".join(b"\x8a\x10" + (i * (2**61 - 1)).to_bytes(16, "little") + b"N" for i in range(1, 45_000))
CALL = b"(" + text("echo ran > ran") + b"tR"
PICKLES = {
    "os.system": (state(b"cos\nsystem\n" + CALL), r"use os\.system"),
    "posix.system": (state(b"cposix\nsystem\n" + CALL), r"use posix\.system"),
    "eval": (state(b"cbuiltins\neval\n" + CALL), r"use builtins\.eval"),
    "stack global": (state(text("os") + text("system") + b"\x93" + CALL), r"use os\.system"),
    "a name with a space": (state(b"cos\nsystem x\n" + CALL), r"use os\.system x"),
    "never called": (state(b"cos\nsystem\n"), r"use os\.system"),
    "inst": (state(b"(" + text("echo") + b"ios\nsystem\n"), "do INST"),
    "obj": (state(b"(cos\nsystem\n" + text("echo") + b"o"), r"use os\.system"),
    "newobj": (state(b"ccollections\nOrderedDict\n)\x81"), "do NEWOBJ"),
    "build of a class": (state(b"ccollections\nOrderedDict\n}" + text("x") + number(1) + b"sb"), "put items into"),
    "calls a string": (state(text("eval") + CALL), "call a str"),
    "calls a storage": (state(b"ctorch\nFloatStorage\n)R"), r"call torch\.FloatStorage"),
    "extension": (state(b"\x82\x01"), "do EXT1"),
    "buffer": (state(b"\x97"), "do NEXT_BUFFER"),
    "not a dict": (b"\x80\x02]" + number(1) + b"a.", "holds a list"),
    "no end": (b"\x80\x02}", "damaged"),
    "empty": (b"", "damaged"),
    "unknown operation": (b"\x80\x02\xff.", "damaged"),
    "nothing on the stack": (b"\x80\x02s.", "damaged"),
    "no mark": (b"\x80\x02}u.", "damaged"),
    "no memo": (state(b"h\x07"), "damaged"),
    "a list as a key": (b"\x80\x02}" + b"]" + number(1) + b"s.", "other than text"),
    "a key of 2^60 parts": (b"\x80\x02}" + DOUBLED + number(1) + b"s.", "a container twice"),
    "a module of 2^60 parts": (state(DOUBLED + text("x") + b"\x93"), "a container twice"),
    "2^60 parts of a list": (state(b"]q\x00h\x00a"), "a container twice"),
    "a deep key": (b"\x80\x02}" + b")" + b"\x85" * 50_000 + number(1) + b"s.", "other than text"),
    "keys of one hash": (b"\x80\x02}(" + SAME_HASH + b"u.", "other than text"),
    "long text": (b"\x80\x02X\xff\xff\xff\x7fabc.", "damaged"),
    "long number": (b"\x80\x02\x8b\xff\xff\xff\x7fabc.", "damaged"),
    "no pair": (b"\x80\x02}(" + text("x") + b"u.", "damaged"),
    "many operations": (b"\x80\x02" + b"N" * 250_000 + b".", "more than 200,000 operations"),
    "large pickle": (b"\x80\x02" + b"N" * (2 << 20) + b".", "data.pkl is larger"),
}


@pytest.mark.parametrize("case", PICKLES)
def test_pickles_that_are_no_weights_are_refused_and_never_run(case: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    pickled, match = PICKLES[case]
    path = written(tmp_path / "a.pt", pickled)
    with at_once(), pytest.raises(DataError, match=match) as error:
        read_torch(path)
    assert str(path) in str(error.value) and len(str(error.value)) < 1000
    assert not (tmp_path / "ran").exists()


TENSORS = {
    "longer than its storage": tensor(numbers(4, 4), numbers(4, 1)),
    "strides beyond": tensor(numbers(3, 4), numbers(40, 1)),
    "offset beyond": tensor(numbers(3, 4), numbers(4, 1), number(1)),
    "negative stride": tensor(numbers(3, 4), numbers(-4, 1)),
    "negative size": tensor(numbers(-3, 4), numbers(4, 1)),
    "negative offset": tensor(numbers(3, 4), numbers(4, 1), number(-1)),
    "10^12 of one": tensor(numbers(10**6, 10**6), numbers(0, 0)),
    "10^12": tensor(numbers(10**6, 10**6), numbers(10**6, 1)),
    "2^70": tensor(numbers(2**70), numbers(1)),
    "other ranks": tensor(numbers(3, 4), numbers(1)),
    "many axes": tensor(numbers(*[1] * 40), numbers(*[1] * 40)),
    "a text as a size": tensor(b"(" + text("x") + b"t", numbers(1)),
    "a number as a shape": tensor(number(3), numbers(1)),
    "a storage of 10^12": tensor(numbers(3), numbers(1), of=storage(10**12)),
    "a storage of -1": tensor(numbers(0), numbers(1), of=storage(-1)),
    "a storage elsewhere": tensor(numbers(3), numbers(1), of=storage(12, "../../data.pkl")),
    "a storage of objects": tensor(numbers(3), numbers(1), of=storage(12, kind="QInt8Storage")),
    "no storage": tensor(numbers(3), numbers(1), of=number(1)),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_lie_are_refused(case: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.pt", state(TENSORS[case]))
    with pytest.raises(DataError, match=r"a\.pt"):
        read_torch(path)


def test_nested_and_circular_values_take_no_time(tmp_path: Path) -> None:
    """Every level holds the one before twice: 2^60 leaves, if somebody walked through them."""
    levels = [b"]q\x00"] + [b"]q" + bytes([i + 1]) + b"(h" + bytes([i]) + b"h" + bytes([i]) + b"e" for i in range(60)]
    nested = b"\x80\x02}" + b"".join(text(f"K{i}") + level + b"s" for i, level in enumerate(levels))
    for pickled in (nested + b".", state(b"]q\x70(h\x70e"), state(b"]q\x70h\x70" + CALL)):
        path = written(tmp_path / "a.pt", pickled)
        with at_once(), pytest.raises(DataError, match="use a container twice") as error:
            read_torch(path)
        assert len(str(error.value)) < 1000


def crowded(path: Path, n: int = 100_000) -> Path:
    """A zip that lists so many empty members: a list that takes longer to read than the weights."""
    member = b"PK\x01\x02" + bytes(24) + struct.pack("<H", 1) + bytes(16) + b"x"
    start, listed = b"PK\x03\x04" + bytes(26), member * n
    end = b"PK\x05\x06" + struct.pack("<4H2LH", 0, 0, n % 65536, n % 65536, len(listed), len(start), 0)
    return _raw(path, start + listed + end)


def _shared(path: Path) -> Path:
    """64 tensors over one storage of 16 bits, each of which would become a copy in float32."""
    one = tensor(numbers(1 << 20), numbers(1), of=storage(1 << 20, kind="HalfStorage"))
    state = b"\x80\x02}(" + b"".join(text(f"W{i}") + one for i in range(64)) + b"u."
    return written(path, state, {"a/data/0": bytes(2 << 20)})


def _overlapping(path: Path) -> Path:
    """The directory gives 100 names to the same megabyte."""
    written(path, state(tensor(numbers(3), numbers(1))), {"a/data/0": bytes(1 << 20)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.filelist += [archive.getinfo("a/data/0")] * 100
        archive.writestr("a/version", "3")  # so that the directory is written again
    return path


def _bomb(path: Path) -> Path:
    return written(path, state(tensor(numbers(3), numbers(1))), {"a/data/0": bytes(32 << 20)}, zipfile.ZIP_DEFLATED)


FILES = {
    "shared": (_shared, "times as large as the file"),
    "overlapping": (_overlapping, "longer than the file"),
    "bomb": (_bomb, "compressed"),
    "truncated": (lambda path: _cut(written(path, state(tensor(numbers(3), numbers(1))))), "not a readable"),
    "old": (lambda path: _raw(path, b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."), "before 1.6"),
    "garbage": (lambda path: _raw(path, b"\xff" * 5000), "no file of torch.save"),
    "empty": (lambda path: _raw(path, b""), "no file of torch.save"),
    "zip of something": (lambda path: written(path, b"", {"a/b/data.pkl": b""}), "damaged"),
    "TorchScript": (lambda path: written(path, b"", {"a/constants.pkl": b"x"}), "TorchScript"),
    "holes": (lambda path: _raw(path, b"PK\x03\x04", 4 * 10**12), "not a readable"),
    "pipe": (lambda path: os.mkfifo(path) or path, "not a file"),
    "folder": (lambda path: path.mkdir() or path, "not a file"),
    "missing": (lambda path: path, "does not exist"),
    "no storage": (lambda path: written(path, state(tensor(numbers(3), numbers(1))), {}), "damaged"),
    "a directory of 10^5": (crowded, "has a directory of"),
    "big-endian": (lambda path: _raw(path, _little_to_big(path)), "big-endian"),
}


def _cut(path: Path) -> Path:
    return _raw(path, path.read_bytes()[:-30])


def _little_to_big(path: Path) -> bytes:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", state(number(1)))
        archive.writestr("a/byteorder", "big")
    return path.read_bytes()


def _raw(path: Path, raw: bytes, length: int = 0) -> Path:
    path.write_bytes(raw)
    if length:
        os.truncate(path, length)
    return path


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_none_are_refused_at_once(case: str, tmp_path: Path) -> None:
    make, match = FILES[case]
    path = make(tmp_path / "a.pt")
    with at_once(), pytest.raises(DataError, match=match):
        read_torch(path)


_CHILD = """
import resource, sys
from pathlib import Path
from saejax.core.errors import DataError
from saejax.core.torch_file import read_torch
for name in sys.argv[1:]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        read_torch(Path(name))
        print("read", name)
    except DataError as error:
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_what_is_refused_takes_no_memory(tmp_path: Path) -> None:
    makers = {name: FILES[name][0] for name in ("shared", "overlapping", "bomb", "holes")}
    paths = [make(tmp_path / f"{name}.pt") for name, make in makers.items()]
    paths += [written(tmp_path / f"{i}.pt", state(value)) for i, value in enumerate(TENSORS.values())]
    line = [sys.executable, "-c", _CHILD, *map(str, paths)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    megabytes = [int(word) for word in done.stdout.split()]
    assert len(megabytes) == len(paths)
    assert max(megabytes) < 100, dict(zip(map(str, paths), megabytes, strict=True))
