"""A run folder by its owner: what makes it one, which attempt counts, what was made from what, one damaged file."""

import json
from pathlib import Path
from typing import Any

import pytest

from saejax.core.errors import DataError
from saejax.core.files import write_json
from saejax.core.lease import lease
from saejax.runs import Reading, Run, Sweep
from saejax.runs.provenance import read_provenance, record_provenance, verify_provenance
from saejax.runs.state import state_of


@pytest.fixture
def run(tmp_path: Path) -> Run:
    write_json(tmp_path / "r" / Run.config, {"name": "r", "store": "", "runs_dir": "runs"})
    return Run(tmp_path / "r")


@pytest.mark.parametrize(
    ("files", "exists"),
    [
        ({Run.config: '{"runs_dir": "runs"}'}, True),
        ({Run.config: "{", Run.metrics: ""}, True),
        ({Run.config: '{"model_type": "gpt2"}'}, False),
        ({Run.config: '{"dict_class": "AutoEncoder"}', Run.evaluation: "{}"}, False),
        ({Run.metrics: ""}, False),
        ({}, False),
    ],
)
def test_a_run_is_known_by_its_own_config(tmp_path: Path, files: dict[str, str], exists: bool) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert Run(tmp_path).exists is exists and not Run(tmp_path / "nowhere").exists
    assert Run(tmp_path).is_dictionary is (Run.evaluation in files and not exists)


def attempts(*begins_from: str, kept: str = "attempt-0") -> dict[str, Any]:
    rows: list[dict[str, Any]] = [
        {"name": f"attempt-{i}", "begins_from": other, "changes": [], "gates": None, "metrics": {"fve": 0.5}}
        for i, other in enumerate(begins_from)
    ]
    return {"kept": kept, "why": "it is best", "attempts": rows}


def test_the_attempt_that_is_kept_counts(run: Run) -> None:
    assert run.counted() == run and run.read_attempts() is None
    write_json(run.attempts, attempts("", "attempt-0", kept="attempt-1"))
    with pytest.raises(DataError, match=r"keeps attempt-1, and .*attempt-1 holds no run"):
        run.counted()
    write_json(run.attempt("attempt-1").config, {})
    assert run.counted().path == run.path / "attempt-1" and run.counted().is_attempt and not run.is_attempt


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], "it is not an object"),
        (attempts("", kept="attempt-3"), "keeps 'attempt-3'"),
        (attempts("", "attempt-1"), "begins from 'attempt-1'"),
        ({**attempts(""), "why": None}, "the why 'None'"),
    ],
)
def test_attempts_that_do_not_fit_are_refused_in_a_line(run: Run, content: Any, says: str) -> None:
    run.attempts.write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"{Run.attempts} is damaged: .*{says}.*delete it") as caught:
        run.read_attempts()
    assert len(str(caught.value).splitlines()) == 1


def test_a_run_is_made_from_one_content_wherever_it_lies(run: Run) -> None:
    store = {"store": "here", "rows": 9, "fingerprint": "a" * 64}
    record_provenance(run, verify_provenance(run, {"train": store, "lm": {}}))
    assert verify_provenance(run, {"train": store | {"store": "there"}})["train"]["store"] == "there"
    with pytest.raises(DataError, match=r"made from something else:\n  train: here \(9 rows, fingerprint aaaa.*bbbb"):
        verify_provenance(run, {"train": store | {"fingerprint": "b" * 64}})
    # What was not known is added, and must agree from then on.
    record_provenance(run, verify_provenance(run, {"lm": {"model": "demo"}}))
    assert read_provenance(run)["lm"] == {"model": "demo"}
    with pytest.raises(DataError, match=r"lm\.model: 'demo' -> 'gpt2'"):
        verify_provenance(run, {"lm": {"model": "gpt2"}})


def test_a_damaged_file_is_an_error_and_the_others_are_read(run: Run) -> None:
    run.metrics.write_text('{"step": 1, "loss": 2.0}\n{"step": 1, "val/fve": 0.5}\n')
    run.stages.write_text("{")
    reading, nothing, no_rows = Reading(), dict[str, Any](), list[dict[str, Any]]()
    rows = [{"step": 1, "loss": 2.0, "val/fve": 0.5}]
    assert reading.of(run.read_stages, nothing) == {} and reading.of(run.rows, no_rows) == rows
    error = reading.error("first")
    assert error is not None and error.startswith("first ") and Run.stages in error


def test_totals_of_a_stage_are_of_all_its_sessions(run: Run) -> None:
    run.record_stage("train", 10, 2.0)
    run.record_stage("train", 30, 2.0, overhead=0.1)
    total = {"tokens": 40, "seconds": 4.0, "tokens_per_second": 10.0, "overhead": 0.1}
    assert run.read_stages() == {"train": total}


def test_the_state_is_that_of_files_and_leases(run: Run) -> None:
    done: dict[str, Any] = {"gates_total": None, "failed_gates": [], "updated": 0.0}
    done |= {"step": None, "finished": False, "has_checkpoint": False}
    assert state_of(run, done) == "waiting" and state_of(run, done | {"step": 3}) == "stopped"
    assert state_of(run, done | {"finished": True}) == "trained"
    evaluated = done | {"gates_total": 2}
    assert state_of(run, evaluated) == "evaluated" and state_of(run, evaluated | {"failed_gates": ["r2"]}) == "failed"
    with lease(run.path.parent):
        assert state_of(run, done, Sweep(run.path.parent)) == "running"
        assert state_of(run, evaluated, Sweep(run.path.parent)) == "evaluated"
