"""Studies of seconds: the demo model's brackets with a small random cross-layer transcoder."""

from pathlib import Path
from typing import Any

from saejax.experiment import default_config
from saejax.studies.behaviours import Pair, as_jsonl
from saejax.trained import Origin, TrainedCoder
from tiny.by_hand import coder_of, random_params, sites_of

READS, WRITES = ("blocks.0.mlp_in", "blocks.1.mlp_in"), ("blocks.0.mlp_out", "blocks.1.mlp_out")


def small(folder: Path, **changes: Any) -> Any:
    """The settings of a study below `folder`, with the dictionary that `dictionary` saves there."""
    c = default_config()
    c.name, c.runs_dir = "mine", str(folder / "runs")
    c.study.dictionaries = (str(folder / "clt"),)
    c.study.behaviours = ("bracket",)
    c.study.train_pairs, c.study.test_pairs, c.study.graphs = 4, 4, 2
    c.study.groups, c.study.group_size, c.study.controls = 2, 2, 2
    c.study.positions, c.study.resamples, c.study.singles, c.study.every = 2, 1, 3, 8
    c.attribution.max_features = 40
    c.study.update(changes)
    return c


def dictionary(
    folder: Path,
    topology: str = "clt",
    reads: tuple[str, ...] = READS,
    writes: tuple[str, ...] = WRITES,
    model: str = "demo",
) -> TrainedCoder:
    coder = coder_of(topology, "topk", reads, writes, 40, 128)
    sae = TrainedCoder(coder, random_params(coder), sites_of(coder, reads, writes), Origin(model=model))
    sae.save(folder)
    return sae


def brackets(folder: Path) -> str:
    """A behaviour that the demo model has, as study.behaviours names it; prompts of one length, so of one program."""
    pairs = [Pair(f"{name}[x", f"{name}(x", "]", ")") for name in ("data", "name", "value", "items", "args", "result",
                                                                   "path", "key", "index", "line")]  # fmt: skip
    (folder / "own.jsonl").write_text(as_jsonl(pairs))
    return f"own={folder}/own.jsonl"


def never(folder: Path, count: int = 8) -> str:
    """A behaviour that no model has: pairs whose answers are the wrong way round."""
    pairs = [Pair(f"data{i}[x", f"data{i}(x", ")", "]") for i in range(count)]
    (folder / "never.jsonl").write_text(as_jsonl(pairs))
    return f"never={folder}/never.jsonl"


def tables(folder: Path) -> dict[str, bytes]:
    """Every file of the study below `folder` that is the same after any stop, by name."""
    kinds = (".csv", ".html", ".json", ".jsonl")
    found = (folder / "runs" / "mine" / "study").rglob("*")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if path.suffix in kinds}
