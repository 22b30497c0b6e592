"""What an experiment will take before it runs: bytes, seconds, disk and money, on machines that are not there."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saejax.plan.estimate import Estimate, StageEstimate, estimates

__all__ = ["Estimate", "StageEstimate", "estimates"]


def __getattr__(name: str) -> Any:
    """Imported when first used: a job's record (saejax.plan.jobs.task) is kept by a process that needs no JAX."""
    if name not in __all__:
        raise AttributeError(f"module 'saejax.plan' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("saejax.plan.estimate"), name)
