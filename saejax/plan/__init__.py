"""What an experiment will take before it runs: bytes, seconds, disk and money, on machines that are not there."""

from saejax.plan.estimate import Estimate, StageEstimate, estimate, estimates

__all__ = ["Estimate", "StageEstimate", "estimate", "estimates"]
