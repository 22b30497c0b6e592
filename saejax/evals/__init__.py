"""L5: how good a trained coder is, on held-out text, and whether it may be used: metrics and gates."""

from saejax.evals.evaluate import EvalConfig, Evaluated, evaluate, evaluate_together
from saejax.evals.gates import OF_TRAINING, Gate, GateConfig, check_gates
from saejax.evals.reconstruction import Reconstruction, decoder_gram_rms

__all__ = [
    "OF_TRAINING",
    "EvalConfig",
    "Evaluated",
    "Gate",
    "GateConfig",
    "Reconstruction",
    "check_gates",
    "decoder_gram_rms",
    "evaluate",
    "evaluate_together",
]
