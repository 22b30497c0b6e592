"""The stages of an experiment: each reads what the stage before left on disk, and can be stopped and continued.

capture -> stores/<store>/{train,heldout}
train   -> runs/<name>/{config.json, environment.json, provenance.json, metrics.jsonl, checkpoints}
evaluate-> runs/<name>/eval.json
report  -> runs/<name>/{features.sqlite, report.html}
both, of dictionaries from anywhere -> runs/<name>/evaluated/
"""

from saejax.app.stages.capture import run_capture
from saejax.app.stages.dictionaries import run_dictionaries
from saejax.app.stages.evaluate import run_evaluate
from saejax.app.stages.pipeline import run_pipeline
from saejax.app.stages.report import run_report
from saejax.app.stages.train import run_train

__all__ = ["run_capture", "run_dictionaries", "run_evaluate", "run_pipeline", "run_report", "run_train"]
