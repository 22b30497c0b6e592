"""Small files of a run's folder: what a stage took, and whether the folder is this experiment's."""

from typing import Any

from saejax.app.experiment import Experiment, deciding, read_experiment, to_run_json
from saejax.core.config import differences
from saejax.core.errors import DataError
from saejax.core.files import read_object, write_json

# Of a sweep's folder: what its members are, and the experiment that they were made from.
SWEEP, SWEEP_EXPERIMENT = "sweep_config.json", "sweep_experiment.json"


def record_stage(e: Experiment, stage: str, tokens: int, seconds: float, **last: float) -> None:
    """Add a session's tokens and seconds to a stage's totals in stages.json; `last` replaces what is there."""
    stages = read_stages(e)
    before = stages.get(stage, {"tokens": 0, "seconds": 0.0})
    tokens, seconds = before["tokens"] + tokens, before["seconds"] + seconds
    total = {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / max(seconds, 1e-9)}
    write_json(e.run_dir / "stages.json", stages | {stage: before | total | last})


def read_stages(e: Experiment) -> dict[str, Any]:
    """{stage: its totals}; empty where no stage was run."""
    path = e.run_dir / "stages.json"
    return read_object(path) if path.is_file() else {}


def refuse_other_run(e: Experiment) -> None:
    """Raise DataError if the run's folder holds another experiment's run, or a sweep."""
    if (e.run_dir / SWEEP).is_file():
        raise DataError(f"{e.run_dir} holds a sweep. Choose another folder (--config.name) for a single run.")
    path = e.run_dir / "config.json"
    if path.is_file():
        before, now = (deciding(to_run_json(one)) for one in (read_experiment(path), e))
        if not before["lm"].get("model"):
            # A model decided nothing yet. Which one it is now, with its weights, is compared by provenance.json.
            before, now = before | {"lm": None}, now | {"lm": None}
        if changed := differences(before, now):
            raise DataError(
                f"{e.run_dir} holds a run with another configuration:\n  " + "\n  ".join(changed) + "\n"
                "Choose another run folder (--config.name), restore these settings, or delete the folder."
            )
