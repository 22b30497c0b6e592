"""`saejax explain`: ask a language model what a run's features stand for, and how well that predicts them.

Results are appended to the run's explanations.jsonl as they come. What stands there under the same model, wording and
settings is not asked again.
"""

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from saejax.analysis import scan_latents
from saejax.analysis.endpoint import Endpoint, EndpointError, EndpointRefusal
from saejax.analysis.explaining import explain, explanation_request, wording
from saejax.analysis.passages import FeaturePassages, feature_passages
from saejax.analysis.scoring import KINDS, batches, judge_request, judge_wording, score
from saejax.app import console
from saejax.app.run_coders import coder_at, verify_made_from
from saejax.app.stages.evaluate import finished_run
from saejax.app.stages.report import run_report, show_again
from saejax.app.workspace import Workspace
from saejax.core.errors import ConfigError
from saejax.core.files import writing
from saejax.core.lease import lease
from saejax.core.metrics import mend_last_line
from saejax.core.progress import Progress
from saejax.parallel import refuse_many
from saejax.reports.explanations import EXPLANATIONS, read_explanations
from saejax.runs.made import differing

# With fewer passages there is nothing to compare: two to explain by and two to judge by.
_FEWEST = 4
# So many failures in a row, and none before that succeeded since: the endpoint is at fault, not a feature.
_GIVE_UP = 10
_LETTERS_PER_TOKEN = 4

_Passages = Callable[[int], FeaturePassages]


def run_explain(
    work: Workspace,
    endpoint: Endpoint,
    features: str,
    examples: int,
    judged: int,
    parallel: int,
    redo: bool = False,
    dry_run: bool = False,
) -> int:
    """Explain and score features of a finished run, or of an evaluated dictionary.

    Args:
        endpoint: the model that explains and judges.
        features: as --features names them.
        examples: passages that the explainer sees.
        judged: other active passages, and as many random ones, for the judge; 0 for no scores.
        parallel: features asked about at once.
        redo: ask again although there is an answer.
        dry_run: say what it would take, and stop.

    Returns:
        0, or 1 where some got no answer.
    """
    e = work.experiment
    refuse_many(e.parallel, "saejax explain")
    alone = e.run.is_dictionary
    sae = coder_at(e.run_dir) if alone else finished_run(e)
    prompt = wording(*(judge_wording() if judged else ()))
    # What decides the passages, and so whether a row answers the same question.
    settings = {"step": sae.step, "prompt": prompt, "examples": examples, "judged": judged}
    settings |= {name: getattr(e.report, name) for name in ("tokens", "before", "after")}
    settings |= {"sha256": sae.fingerprint()}
    wanted = _numbers(features, sae.n_latents)
    done = set() if redo else _done(e.run_dir, endpoint.model, settings)
    left = [feature for feature in wanted if feature not in done]
    if len(left) < len(wanted):
        console.say(f"explain: {len(wanted) - len(left):,} of {len(wanted):,} features are already explained")
    failed = 0
    if left:
        named = sae.at(work.lm)
        verify_made_from(work)
        scan = scan_latents(named, work.lm, work.packer, e.report.tokens, e.report.batch_rows, e.capture.sinks)
        how = work.lm.tokenizer.token_strings, examples, judged, e.report.before, e.report.after
        passages, kinds = (lambda feature: feature_passages(scan, feature, *how)), tuple(KINDS) if judged else ()
        enough = [feature for feature in left if len(scan.peaks(feature)) >= _FEWEST]
        if few := len(left) - len(enough):
            console.say(f"explain: {few:,} features are active in fewer than {_FEWEST} passages and are left out")
        _say_cost(enough, passages, kinds, endpoint)
        if dry_run:
            return 0
        with lease(e.run_dir), _rows(e.run_dir, {"by": endpoint.model, "url": endpoint.url, **settings}) as write:
            for feature in sorted(set(left) - set(enough)):
                write({"feature": feature, "text": None, "scores": {}})
            failed = _explain(enough, passages, kinds, endpoint, parallel, write)
    if e.run.features.is_file() and not dry_run:
        show_again(e.run_dir) if alone else run_report(work)
    elif not dry_run:
        console.say(f"explain: {e.run_dir / EXPLANATIONS}; saejax report shows them beside the passages")
    return 1 if failed else 0


def _say_cost(features: list[int], passages: _Passages, kinds: Sequence[str], endpoint: Endpoint) -> None:
    """Say what the features will cost, by the passages of a few of them."""
    sample = features[:: max(1, len(features) // 20)]
    asked = [messages for feature in sample for messages in _all_requests(passages(feature), kinds)]
    letters = sum(len(message["content"]) for messages in asked for message in messages)
    share = len(features) / max(1, len(sample))
    console.say(
        f"explain: {len(features):,} features, about {len(asked) * share:,.0f} requests and "
        f"{letters * share / _LETTERS_PER_TOKEN:,.0f} tokens to read for {endpoint.model} at {endpoint.url}"
    )


def _explain(
    features: list[int],
    passages: _Passages,
    kinds: Sequence[str],
    endpoint: Endpoint,
    parallel: int,
    write: Callable[[dict[str, Any]], None],
) -> int:
    """Explain features, and write each row as it comes, with scores of these kinds. Returns how many got no answer."""
    scores = dict[str, list[float | None]]()

    def row(feature: int) -> dict[str, Any]:
        its = passages(feature)
        text = explain(its, endpoint)
        details = {kind: score(kind, text, its, endpoint).to_json() for kind in kinds}
        balanced = {kind: detail["balanced_accuracy"] for kind, detail in details.items()}
        return {"feature": feature, "text": text, "scores": balanced, "details": details}

    failures = in_a_row = 0
    try:
        with Progress("explain", len(features), unit="features") as progress:
            for feature, answer in _in_threads(row, features, parallel):
                if not isinstance(answer, Exception):
                    in_a_row = 0
                    write(answer)
                    for kind, value in answer["scores"].items():
                        scores.setdefault(kind, []).append(value)
                elif isinstance(answer, EndpointRefusal) or not isinstance(answer, EndpointError):
                    raise answer
                else:
                    failures, in_a_row = failures + 1, in_a_row + 1
                    console.say(f"explain: feature {feature} is left for another time: {answer}")
                    if in_a_row >= _GIVE_UP:
                        raise EndpointError(f"{in_a_row} features in a row got no answer. The last one: {answer}")
                progress.advance(1)
    finally:
        endpoint.stopped.set()
    usage = endpoint.usage
    tokens = f"{usage.prompt_tokens:,} tokens read and {usage.completion_tokens:,} written, as the endpoint counts"
    console.say(f"explain: {len(features) - failures:,} features explained; {usage.requests:,} requests, {tokens}")
    for kind, values in scores.items():
        known = [value for value in values if value is not None]
        mean = f"mean {sum(known) / len(known):.3f}" if known else "none could be measured"
        unknown = f", {len(values) - len(known):,} not measured" if known and len(known) < len(values) else ""
        console.say(f"  {kind}: {mean}{unknown}")
    return failures


@contextlib.contextmanager
def _rows(run_dir: Path, common: Mapping[str, Any]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Append rows to explanations.jsonl; every one has what is common to all of this session."""
    path = run_dir / EXPLANATIONS
    with writing(path):
        mend_last_line(path)
        file = path.open("a", encoding="utf-8")

    def write(row: dict[str, Any]) -> None:
        with writing(path):
            file.write(json.dumps({**row, **common}) + "\n")
            file.flush()

    with file:
        yield write


def _in_threads(
    work: Callable[[int], dict[str, Any]], items: list[int], threads: int
) -> Iterator[tuple[int, dict[str, Any] | Exception]]:
    """(item, its row or error) as they are done, by at most `threads` at once.

    The threads are daemons: whoever stops waiting, by Ctrl-C or an error, leaves without the requests under way.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    done: queue.SimpleQueue[tuple[int, dict[str, Any] | Exception]] = queue.SimpleQueue()
    left = threading.Event()

    def worker() -> None:
        while not left.is_set():
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((item, work(item)))
            except Exception as error:
                done.put((item, error))

    try:
        for _ in range(min(threads, len(items))):
            threading.Thread(target=worker, daemon=True).start()
        for _ in items:
            yield done.get()
    finally:
        left.set()


def _all_requests(passages: FeaturePassages, kinds: Sequence[str]) -> Iterator[list[dict[str, str]]]:
    """Every request that a feature takes, with a phrase of usual length where the explanation will stand."""
    yield explanation_request(passages)
    for kind in kinds:
        for batch in batches(kind, passages):
            yield judge_request(kind, "x" * 60, [text for text, _ in batch])


def _done(run_dir: Path, model: str, settings: Mapping[str, Any]) -> set[int]:
    """The features whose newest row of this model answers the same question."""
    newest = {row["feature"]: row for row in read_explanations(run_dir) if row["by"] == model}
    return {feature for feature, row in newest.items() if not differing(row, settings)}


def _numbers(text: str, n_latents: int) -> list[int]:
    """The features that --features names: all, 7, 0:50 (without 50), or several of these with commas."""
    if text == "all":
        return list(range(n_latents))
    numbers: dict[int, None] = {}
    for part in text.split(","):
        first, colon, stop = part.strip().partition(":")
        try:
            start = int(first or 0) if colon else int(first)
            end = (int(stop) if stop else n_latents) if colon else start + 1
        except ValueError:
            raise ConfigError(f"--features is {text!r}; give all, a number, or a range as 0:50.") from None
        # A range may reach beyond the end, as in Python; a single number may not.
        if start < 0 or end <= start or start >= n_latents or (not colon and end > n_latents):
            raise ConfigError(f"--features names {part.strip()!r}; the coder has the features 0 to {n_latents - 1:,}.")
        numbers |= dict.fromkeys(range(start, min(end, n_latents)))
    return list(numbers)
