"""The pipeline whole, of the tiny experiment: from text to the report, with no compiled programs kept and with all."""

import json
import sys

from benchmarks.bench.frame import Result, Told
from benchmarks.bench.markdown import table
from benchmarks.bench.system_rows import Row, of_caches, timed

ROWS = (Row("pipeline-tiny", quick=False),)


def run(row: Row, told: Told) -> Result:
    found = {}
    for name in ("cold", "warm"):
        folder = told.folder / f"pipeline-{name}"
        command = [sys.executable, "-m", "launch.pipeline", "--config=configs/quickstart.py:tiny"]
        command += [f"--config.runs_dir={folder / 'runs'}", f"--config.stores_dir={folder / 'stores'}"]
        # 1: a gate failed, as a pace that was predicted on a busy machine; the work is done all the same.
        use = timed(command, of_caches(told.folder, str(told.folder / "pipeline-compiled")), codes=(0, 1))
        stages = json.loads((folder / "runs/quickstart-tiny/stages.json").read_text())
        found[name] = use | {"stages": {stage: of["seconds"] for stage, of in stages.items()}}
    return {"found": found}


def lines(results: list[Result]) -> list[str]:
    rows = []
    for r in results:
        for name, use in r["found"].items():
            work = use["user"] + use["system"]
            stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in use["stages"].items())
            cores, system = f"{work / use['real']:.2f}", f"{use['system'] / work:.1%}"
            rows.append([name, f"{use['real']:.1f}", f"{work:.1f}", cores, system, stages])
    return [
        "pipeline-tiny: `python -m launch.pipeline --config=configs/quickstart.py:tiny`. A stage's seconds are",
        "those of its own clock: without imports and compiling. Warm: the programs of the run before are read back.",
        "",
        *table(("", "seconds", "of all cores", "cores busy", "system", "seconds of the stages"), rows),
    ]
