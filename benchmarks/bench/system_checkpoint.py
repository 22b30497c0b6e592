"""Checkpoints of a large coder's state: how long they take, and how long they hold a step; beside torch's files."""

from benchmarks.bench.frame import LeftOut, Result, Told
from benchmarks.bench.markdown import table
from benchmarks.bench.protocol import free_bytes
from benchmarks.bench.system_rows import Row, ours, spread, torch

ROWS = (Row("checkpoint-24576", quick=False),)

_D_IN, _D_SAE, _K = 768, 24_576, 32
_HELD, _SAVE, _RESTORE = "saejax: save, the step is held", "saejax: save until durable", "saejax: verify and restore"


def run(row: Row, told: Told) -> Result:
    """Seconds in turn, of random numbers: parameters and both moments of topk."""
    if (free := free_bytes()) is not None and free < 5e9:
        raise LeftOut(f"it needs about 5 GB, {free / 1e9:.0f} GB are free")
    seconds: dict[str, list[float]] = {}
    beside = torch(told)
    with ours(told) as own:
        try:
            folder = str(told.folder / "checkpoints")
            about = own.ask("prepare_checkpoint", d_in=_D_IN, d_sae=_D_SAE, k=_K, folder=folder)
            if beside:
                beside.ask("prepare_checkpoint", shapes=about["shapes"], path=str(told.folder / "state.pt"))
            for _ in range(told.rounds):
                saved = own.ask("save")
                found = {_HELD: saved["held"], _SAVE: saved["seconds"], _RESTORE: own.ask("restore")["seconds"]}
                if beside:
                    saved = beside.ask("save")
                    found |= {"torch.save": saved["seconds"], "torch.save, fsync, sha256": saved["durable"]}
                    found["torch.load"] = beside.ask("restore")["seconds"]
                for name, value in found.items():
                    seconds.setdefault(name, []).append(value)
        finally:
            if beside:
                beside.close()
    return {"bytes": about["bytes"], "seconds": seconds}


def lines(results: list[Result]) -> list[str]:
    found: list[str] = []
    for r in results:
        found += [
            f"{r['row']}: parameters and moments of topk {_D_IN} -> {_D_SAE:,}, {r['bytes'] / 1e6:,.0f} MB. A save of",
            "saejax is durable and has a sha256 of every file, which a restore checks; the page cache is warm.",
            "",
            *table(("", "seconds, median (range)"), [[name, spread(of, ".2f")] for name, of in r["seconds"].items()]),
        ]
    return found
