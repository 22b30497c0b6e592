"""PyTorch around the step, as a worker (see protocol.py): a model's forward pass, and files of tensors."""

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bench.protocol import serve

_there: dict[str, Any] = {}


class _Stop(Exception):
    """The hook point has been reached."""


def prepare_capture(model: str, block: int, given: str, read: int) -> dict[str, Any]:
    """The model up to the input of a block, as transformers runs it: one causal mask a row, no cache.

    A row counts as one document, which is less work than keeping documents apart.

    Raises:
        ValueError: in the rows' first documents its activations are others than those that were given.
    """
    import transformers

    lm = transformers.AutoModel.from_pretrained(model, attn_implementation="sdpa", dtype=torch.float32)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lm = lm.eval().to(device)

    def stop(module: Any, arguments: Any) -> None:
        _there["reached"] = arguments[0]
        raise _Stop

    lm.h[block].register_forward_pre_hook(stop)
    with np.load(given) as known:
        _there.update(lm=lm, batches=torch.from_numpy(known["tokens"]).to(device), read=read)
        _run(1)
        reached = _there["reached"].float().cpu().numpy().reshape(known["expected"].shape)
        apart = np.abs(reached - known["expected"])[known["first"]].max() / np.abs(known["expected"]).max()
    if apart > 0.01:  # the activations given are rounded to bfloat16
        raise ValueError(f"the activations differ by {apart:.1%} of the largest")
    return {"threads": torch.get_num_threads(), "apart": float(apart)}


def _run(count: int) -> None:
    with torch.inference_mode():
        for batch in _there["batches"][:count]:
            try:
                _there["lm"](batch, use_cache=False)
            except _Stop:
                continue
            raise RuntimeError("the block was not reached")
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forward() -> dict[str, Any]:
    started = time.perf_counter()
    _run(len(_there["batches"]))
    return {"tokens_per_second": _there["read"] / (time.perf_counter() - started)}


def prepare_checkpoint(shapes: list[list[int]], path: str) -> dict[str, Any]:
    torch.manual_seed(0)
    _there.update(state={str(i): torch.randn(*shape) for i, shape in enumerate(shapes)}, path=Path(path))
    return {}


def save() -> dict[str, Any]:
    """torch.save; and how long it takes until the file is durable and has a checksum, as our checkpoints are."""
    path = _there["path"]
    started = time.perf_counter()
    torch.save(_there["state"], path)
    seconds = time.perf_counter() - started
    with path.open("rb") as handle:
        os.fsync(handle.fileno())
        hashlib.file_digest(handle, "sha256")
    return {"seconds": seconds, "durable": time.perf_counter() - started}


def restore() -> dict[str, Any]:
    started = time.perf_counter()
    torch.load(_there["path"], weights_only=True)
    return {"seconds": time.perf_counter() - started}


if __name__ == "__main__":
    serve(
        {
            "prepare_capture": prepare_capture,
            "forward": forward,
            "prepare_checkpoint": prepare_checkpoint,
            "save": save,
            "restore": restore,
        }
    )
