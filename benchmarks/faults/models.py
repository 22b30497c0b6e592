"""Hostile model folders, and a process that opens each of them under a limit on its memory.

    python -m benchmarks.faults.models FOLDER     # a line of JSON for each case

A case is a change of a good small folder. The process may take EXTRA_BYTES of address space beyond what it has after
loading the good one: a size that is believed before it is compared ends in a MemoryError, not in a slow machine.
"""

import contextlib
import json
import os
import resource
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

EXTRA_BYTES = 768 << 20
SECONDS = 20
CANARY = "canary-of-a-pickle"
CONFIG: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 97,
    "n_positions": 48,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 95,
}

LARGEST_GROWTH = 64 << 20  # bytes of memory that a refusal may cost
_NAMED = ("spoilt", "config.json", "tokenizer.json", "model.safetensors", "cannot be captured")

Spoil = Callable[[Path], Any]


def good_folder(folder: Path) -> None:
    """A GPT-2 of two blocks with zero weights, and a tokenizer of words."""
    import jax
    import numpy as np
    import tokenizers
    from tokenizers import models, pre_tokenizers

    from saejax.lm import checkpoint, decoder

    config = checkpoint.architecture(CONFIG, "").read_config(CONFIG)
    shapes = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))
    checkpoint.write(folder, CONFIG, jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes))
    backend = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(95)}, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<bos>", "<mask>"])
    backend.save(str(folder / "tokenizer.json"))


# --- what is done to the folder -------------------------------------------------------------------


def _write(name: str, content: bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(content)


def _config(**changes: Any) -> Spoil:
    return lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def _sparse(name: str, size: int = 1 << 30) -> Spoil:
    """A file that says it is long and takes no room."""

    def spoil(folder: Path) -> None:
        with (folder / name).open("wb") as handle:
            handle.truncate(size)

    return spoil


def _header(change: Callable[[dict[str, Any]], Any] | bytes, length: int | None = None) -> Spoil:
    """model.safetensors with its header changed, or replaced, or with another length before it."""

    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + size])
        text = change if isinstance(change, bytes) else json.dumps(change(header) or header).encode()
        path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + raw[8 + size :])

    return spoil


def _tensor(**values: Any) -> Spoil:
    return _header(lambda header: header["transformer.wte.weight"].update(values))


def _overlap(header: dict[str, Any]) -> None:
    header["transformer.h.0.ln_1.weight"]["data_offsets"] = header["transformer.h.0.ln_1.bias"]["data_offsets"]


def _index(name: str) -> Spoil:
    """The weights by an index alone, all in the file `name`."""

    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").unlink(missing_ok=True)
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"transformer.wte.weight": name}})
        )

    return spoil


def _link(name: str, target: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return spoil


def _pipe(name: str) -> Spoil:
    """A file that a reader would wait on for ever."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return spoil


def _all(*spoils: Spoil) -> Spoil:
    return lambda folder: [spoil(folder) for spoil in spoils]


# What a pickle of os.system("touch ...") looks like; written by hand, because nothing here imports pickle.
_PICKLE = f"cos\nsystem\n(S'touch {CANARY}'\ntR.".encode()
_CODE = f"import pathlib\npathlib.Path({CANARY!r}).touch()\n".encode()


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


_DEEP = b'{"a":' * 100_000

CASES: dict[str, Spoil] = {
    "10^9 layers": _config(n_layer=10**9),
    "2^20 layers": _config(n_layer=2**20),
    "width 10^12": _config(n_embd=10**12, n_head=1),
    "width 2^20, vocabulary 2^20": _config(n_embd=2**20, vocab_size=2**20),
    "width 40,000": _config(n_embd=40_000),
    "vocabulary 2^63": _config(vocab_size=2**63),
    "vocabulary 4,000,000": _config(vocab_size=4_000_000),
    "context 10^12": _config(n_positions=10**12),
    "context 8,000,000": _config(n_positions=8_000_000),
    "MLP 10^15": _config(n_inner=10**15),
    "heads 10^9": _config(n_head=10**9),
    "negative width": _config(n_embd=-32),
    "negative vocabulary": _config(vocab_size=-1),
    "a width of text": _config(n_embd="32; rm -rf"),
    "a width that formats a text of 4 GB": _config(n_embd="%4294967296d"),
    "a part of a head that repeats a text": _config(
        model_type="phi",
        num_hidden_layers=2,
        hidden_size=1 << 20,
        num_attention_heads=1,
        partial_rotary_factor="x" * 9999,
    ),
    "a width of true": _config(n_embd=True),
    "a width of NaN": _config(n_embd=float("nan")),
    "infinite layers": _config(n_layer=float("inf")),
    "layers a list": _config(n_layer=[2]),
    "an epsilon of NaN": _config(layer_norm_epsilon=float("nan")),
    "a number of 5,000 digits": _write("config.json", b'{"model_type": "gpt2", "n_layer": ' + b"9" * 5000 + b"}"),
    "10^5 levels of config.json": _write("config.json", _DEEP),
    "config.json of 1 GB": _sparse("config.json"),
    "a model_type of 8 MB": _config(model_type="x" * (8 << 20)),
    "a model_type of a list": _config(model_type=["gpt2"]),
    "an activation of 8 MB": _config(activation_function="x" * (8 << 20)),
    "config.json a pipe": _pipe("config.json"),
    "config.json a link to zeros without end": _link("config.json", "/dev/zero"),
    "config.json a link to itself": _link("config.json", "config.json"),
    "header longer than the file": _header(lambda h: None, 1 << 40),
    "header of 2^64 - 1 bytes": _header(lambda h: None, 2**64 - 1),
    "header of no bytes": _header(lambda h: None, 0),
    "header no JSON": _header(b"\xff" * 64),
    "10^5 levels of header": _header(_DEEP),
    "header a list": _header(b"[1, 2]"),
    "offsets beyond the file": _tensor(data_offsets=[0, 1 << 50]),
    "offsets backwards": _tensor(data_offsets=[100, 0]),
    "offsets negative": _tensor(data_offsets=[-4, 0]),
    "tensors that overlap": _header(_overlap),
    "an unknown dtype": _tensor(dtype="Q8"),
    "a dtype of another size": _tensor(dtype="F64"),
    "a shape beyond 64 bits": _tensor(shape=[2**33, 2**33]),
    "a shape of 10^5 axes": _tensor(shape=[1] * 100_000),
    "a negative shape": _tensor(shape=[-97, 32]),
    "another shape": _tensor(shape=[32, 97]),
    "the weights a pipe": _pipe("model.safetensors"),
    "the weights a link to a folder": _link("model.safetensors", "."),
    "the weights a link to zeros without end": _link("model.safetensors", "/dev/zero"),
    "the weights a link to a file of the system": _link("model.safetensors", "/etc/passwd"),
    "the weights 256 MB of zeros": _sparse("model.safetensors", 256 << 20),
    "an index to ../../etc/passwd": _index("../../etc/passwd"),
    "an index to /etc/passwd": _index("/etc/passwd"),
    "an index to a folder": _index("."),
    "an index to nothing": _index(""),
    "an index to a name with a zero byte": _index("model\0.safetensors"),
    "an index to a name of 10^5 letters": _index("x" * 100_000),
    "an index of 1 GB": _all(_no_weights, _sparse("model.safetensors.index.json")),
    "10^5 levels of index": _all(_no_weights, _write("model.safetensors.index.json", _DEEP)),
    "a pickle alone": _all(_no_weights, _write("pytorch_model.bin", _PICKLE)),
    "a pickle as safetensors": _write("model.safetensors", _PICKLE),
    "an index to a pickle": _all(_write("p.bin", _PICKLE), _index("p.bin")),
    "code of its own": _all(
        _config(model_type="own", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}),
        _write("own.py", _CODE),
    ),
    "code of its own, with a word for it": _all(
        _write("config.json", b'{"model_type": "own", "trust_remote_code": true, "auto_map": {"AutoModel": "own.M"}}'),
        _write("own.py", _CODE),
    ),
    "tokenizer.json of 1 GB": _sparse("tokenizer.json"),
    "10^5 levels of tokenizer.json": _write("tokenizer.json", _DEEP),
    "tokenizer.json a pickle": _write("tokenizer.json", _PICKLE),
    "tokenizer.json a pipe": _pipe("tokenizer.json"),
    "a bos beyond the vocabulary": _config(bos_token_id=10**12),
}


# --- the process ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _at_most(extra: int, seconds: int) -> Iterator[None]:
    """No more than `extra` bytes of address space above what is taken, and an exception after `seconds`."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (taken + extra, most))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def attempt(good: Path, folder: Path, spoil: Spoil, backend: str) -> dict[str, Any]:
    """What `load_lm` says of the spoilt copy of `good`, how long it took and what it added to the peak memory."""
    from saejax.lm import load_lm

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    spoil(folder)
    peak, started = _resident(), time.monotonic()
    try:
        with _at_most(EXTRA_BYTES, SECONDS):
            load_lm(str(folder), backend=backend)
        kind, said = "", "loaded"
    except BaseException as error:  # whatever comes is the result
        kind, said = type(error).__name__, str(error)
    return {"kind": kind, "said": said, "seconds": time.monotonic() - started, "bytes": _resident() - peak}


def refused(result: dict[str, Any]) -> bool:
    """Whether `attempt` ended as it should: a message that names the thing, soon, no memory taken, no code run."""
    return (
        result["kind"] in ("DataError", "ConfigError")
        and len(result["said"]) < 1500
        and any(name in result["said"] for name in _NAMED)
        and result["seconds"] < SECONDS / 2
        and result["bytes"] < LARGEST_GROWTH
        and not result["canary"]
    )


def main(folder: Path, *backends: str) -> None:
    from saejax.lm import load_lm

    os.chdir(folder)  # the canary would appear here
    good = folder / "good"
    good_folder(good)
    for backend in backends:
        load_lm(str(good), backend=backend)
        for name, spoil in CASES.items():
            result = attempt(good, folder / "spoilt", spoil, backend)
            canary = (folder / CANARY).exists()
            print(json.dumps({"case": name, "backend": backend, "canary": canary} | result), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), *(sys.argv[2:] or ["jax"]))
