"""What the trainings of these tests read."""

from pathlib import Path

import pytest
from tiny import planted_store


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planted") / "store"
    planted_store(path)
    return path
