"""PyTorch where it is installed, and the mark of tests that need it: on Python 3.12 and newer the tests have none."""

import importlib
import importlib.util
from typing import Any

import pytest

torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
