"""L6: features changed inside the language model, and what follows from it."""

from saejax.interventions.change import Change, added, change, clamped, patched, scaled, set_to, stacked, zero
from saejax.interventions.checks import padded
from saejax.interventions.controls import first_draws, matched, only, without
from saejax.interventions.inside import Inside, together
from saejax.interventions.metrics import both, interval, kl_from, logit_difference, loss, probability, share
from saejax.interventions.patching import Effects, estimated
from saejax.interventions.runs import Interventions, Run
from saejax.interventions.steering import steered

__all__ = [
    "Change",
    "Effects",
    "Inside",
    "Interventions",
    "Run",
    "added",
    "both",
    "change",
    "clamped",
    "estimated",
    "first_draws",
    "interval",
    "kl_from",
    "logit_difference",
    "loss",
    "matched",
    "only",
    "padded",
    "patched",
    "probability",
    "scaled",
    "set_to",
    "share",
    "stacked",
    "steered",
    "together",
    "without",
    "zero",
]
