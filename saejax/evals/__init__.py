"""L5: how good a trained coder is, on held-out text, and whether it may be used: metrics and gates."""

from saejax.evals.evaluate import EvalConfig, Evaluated, evaluate, evaluate_together
from saejax.evals.gates import OF_TRAINING, Gate, GateConfig, check_gates, check_warnings, ends_well
from saejax.evals.intervals import Difference, Documents, compare
from saejax.evals.reconstruction import Reconstruction, decoder_gram_rms
from saejax.evals.similarity import SAME, Stability, stability

__all__ = [
    "OF_TRAINING",
    "SAME",
    "Difference",
    "Documents",
    "EvalConfig",
    "Evaluated",
    "Gate",
    "GateConfig",
    "Reconstruction",
    "Stability",
    "check_gates",
    "check_warnings",
    "compare",
    "decoder_gram_rms",
    "ends_well",
    "evaluate",
    "evaluate_together",
    "stability",
]
