"""A run whose gates fail is trained again with other settings: attempt-1, attempt-2, and the best is kept.

runs/<name>/attempt-1/     a whole run, made from the same stores
runs/<name>/attempts.json  what each attempt changed and reached, and which is kept
runs/<name>/escalation.md  where the last one fails too: what was tried, for those who look at it next

The record is written before an attempt trains, so that the same command goes on where it was stopped.
"""

import contextlib
import dataclasses
from collections.abc import Mapping

from saejax.app import console
from saejax.app.experiment import Experiment, to_run_json, with_settings
from saejax.app.stages.evaluate import run_evaluate, stale
from saejax.app.stages.train import run_train
from saejax.app.workspace import Workspace
from saejax.core.errors import EXIT_PREEMPTED, ConfigError
from saejax.core.files import read_json
from saejax.evals.attempts import Attempt, Attempts, Changed, best, next_changes
from saejax.evals.gates import CHANGES, Gate
from saejax.fit.resolve import check
from saejax.reports import render
from saejax.reports.escalation import remove_escalation, write_escalation
from saejax.runs.folder import FIRST, attempt_name

_SETTLED = (
    "Nothing more can be changed: each change that the failed gates name was tried, does nothing to this coder, or is "
    "beyond its range."
)


def check_retries(e: Experiment) -> None:
    """Raise ConfigError where there is nothing to train again from."""
    if e.gates.retries and e.capture.into == "training":
        raise ConfigError(
            f"gates.retries={e.gates.retries} trains again from stored activations, and capture.into=training stores "
            "none. Set capture.into=store, or gates.retries=0."
        )


def run_retries(work: Workspace, code: int) -> tuple[Workspace, int]:
    """Try again as long as a gate fails that a setting can help, and `gates.retries` allows.

    Args:
        work: of the run, which is trained and evaluated.
        code: what its evaluation returned.

    Returns:
        The workspace of the attempt that is kept, and its evaluation's code; or EXIT_PREEMPTED when a signal stopped
        a training (all is saved).
    """
    e, record = work.experiment, Attempts.read(work.experiment.run)
    if record is None and not (code and e.gates.retries):
        return work, code
    first = _with_evaluation(Attempt(FIRST), work)
    if record is None and not first.failed:
        console.say("retry: no setting helps the gates that failed, so nothing is tried again")
        return work, code
    record = dataclasses.replace(record or Attempts(()), attempts=(first, *(record.attempts[1:] if record else ())))
    codes, at, settled = {FIRST: code}, 1, ""
    while at < len(record.attempts) or (at <= e.gates.retries and best(record.attempts).failed):
        if at == len(record.attempts):
            kept = best(record.attempts)
            if not (changes := _changes(work, kept, record)):
                settled = _SETTLED
                console.say(f"retry: {settled}")
                break
            begun = Attempt(attempt_name(at), kept.name, changes)
            record = dataclasses.replace(record, attempts=(*record.attempts, begun))
            record.write(e.run)
        attempt = record.attempts[at]
        console.say(f"\nretry: {attempt.name} (of {max(at, e.gates.retries)}), from {attempt.begins_from}:")
        for change in attempt.changes:
            console.say(f"  {change}")
        own = attempt_work(work, record, attempt.name)
        if run_train(own):
            return own, EXIT_PREEMPTED
        codes[attempt.name] = run_evaluate(own, redo=stale(own.experiment))
        render(own.experiment.run_dir)
        done = (*record.attempts[:at], _with_evaluation(attempt, own), *record.attempts[at + 1 :])
        record = dataclasses.replace(record, attempts=done)
        _with_best(record).write(e.run)
        at += 1
    record = _with_best(record)
    record.write(e.run)
    console.say(f"retry: {record.kept} is kept. {record.why}")
    _escalate(work, record, settled)
    return attempt_work(work, record, record.kept), codes[record.kept]


def attempt_work(work: Workspace, record: Attempts, name: str) -> Workspace:
    """The workspace of an attempt: the run's with all changes on the way to it, in a folder of its own."""
    if name == FIRST:
        return work
    attempt = next(attempt for attempt in record.attempts if attempt.name == name)
    before = attempt_work(work, record, attempt.begins_from).experiment
    changed = with_settings(before, {change.key: change.after for change in attempt.changes})
    return work.of(work.experiment.within(changed, name, gates=dataclasses.replace(work.experiment.gates, retries=0)))


def _changes(work: Workspace, kept: Attempt, record: Attempts) -> tuple[Changed, ...]:
    """The changes of the next attempt to the one that is kept."""
    own = attempt_work(work, record, kept.name)
    e, config = own.experiment, to_run_json(own.experiment)
    keys = [key for row in CHANGES.values() for change in row for key in change.keys]
    values = {key: config[key.partition(".")[0]][key.partition(".")[2]] for key in keys}

    def possible(settings: Mapping[str, float]) -> bool:
        """A run can have them: nothing that could refuse it does."""
        with contextlib.suppress(ConfigError):
            check(own.of(with_settings(e, settings)), {}, (), console.keep_quiet)
            return True
        return False

    return next_changes(kept, record.attempts, e.coder.resolved(), values, possible)


def _with_evaluation(attempt: Attempt, work: Workspace) -> Attempt:
    """The attempt with what its eval.json says."""
    result = read_json(work.experiment.run.evaluation)
    gates = tuple(Gate.from_json(gate) for gate in result["gates"])
    shown = ("fve", "l0", "relative_error", "dead_fraction", "loss_recovered")
    metrics = {name: result["metrics"].get(name) for name in shown}
    return dataclasses.replace(attempt, gates=gates, metrics=metrics)


def _with_best(record: Attempts) -> Attempts:
    """The record with the attempt that is kept, and why."""
    kept = best(record.attempts)
    passed, judged = sum(gate.passed for gate in kept.judged), len(kept.judged)
    equal = [one for one in record.attempts if one.gates is not None and one.rank[0] == kept.rank[0]]
    why = f"It passes {passed} of the {judged} gates that settings can help"
    if len(equal) == 1:
        why += ", more than any other."
    elif any(one.rank[1] != kept.rank[1] for one in equal):
        why += f"; of {len(equal)} that do, its worst miss is the smallest ({-kept.rank[1]:.1%} of the bar)."
    elif any(one.rank[2] != kept.rank[2] for one in equal):
        why += f"; of {len(equal)} that are as near, its FVE is the largest ({kept.rank[2]:.4f})."
    else:
        why += "; no other is better."
    return dataclasses.replace(record, kept=kept.name, why=why)


def _escalate(work: Workspace, record: Attempts, settled: str) -> None:
    """escalation.md where the best still fails; what an earlier command wrote goes where it does not."""
    e = work.experiment
    if not best(record.attempts).failed:
        remove_escalation(e.run)
        return
    tokens = {one.name: e.run.attempt(one.name).read_stages().get("train", {}) for one in record.attempts}
    about = {"model": e.lm.model, "store": e.store_dir("train"), "coder": e.coder.preset, "seed": e.seed}
    path = write_escalation(e.run, record.to_json() | {"settled": settled, "stages": tokens, "about": about})
    console.say(f"retry: gates still fail; {path} says what was tried")
