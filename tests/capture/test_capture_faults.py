"""launch.capture in real processes: killed, on a full disk, started twice, with NaN, without a hub.

The faults are those of benchmarks/faults/captures.py, which the table of `make faults` counts.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.faults import captures, stores
from benchmarks.faults.captures import Lab
from benchmarks.faults.outcome import Outcome


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("captures"))


FAULTS: dict[str, Callable[[Lab], Outcome]] = {
    "killed": lambda lab: captures.kills(lab, 1),
    "full disk": lambda lab: captures.full_disk(lab, mount=False),
    "no room": captures.no_room,
    "second capture": captures.second_capture,
    "NaN": captures.not_finite,
    "closed hub": lambda lab: captures.no_hub(lab, "closed"),
}


# Of those left to the soak, tests of the store's writer and of the pipeline have the same in little.
LONG = ("second capture", "NaN", "full disk", "killed")


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=pytest.mark.soak) if name in LONG else name for name in FAULTS]
)
def test_a_capture_outlives_or_refuses(fault: str, lab: Lab) -> None:
    outcome = FAULTS[fault](lab)
    assert outcome.held == outcome.tried > 0, outcome
    assert "Traceback" not in outcome.said and len(outcome.said.splitlines()) == 1, outcome


@pytest.mark.soak
def test_50_kills_of_a_capture(lab: Lab) -> None:
    outcome = captures.kills(lab, 50)
    print(outcome.row)
    assert outcome.held == outcome.tried == 50, outcome


@pytest.mark.soak
def test_50_kills_of_a_writer(tmp_path: Path) -> None:
    outcome = stores.kill_writer(tmp_path, 50)
    print(outcome.row)
    assert outcome.held == outcome.tried == 50, outcome


@pytest.mark.soak
def test_a_silent_hub_ends_a_capture_within_30_seconds(lab: Lab) -> None:
    outcome = captures.no_hub(lab, "silent")
    assert outcome.held == 1, outcome
