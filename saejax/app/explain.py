"""`saejax explain`: ask a language model what a run's features stand for, and how well that predicts them.

Results are appended to the run's explanations.jsonl as they come. What stands there under the same model, wording and
settings is not asked again.
"""

import dataclasses
import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from saejax.analysis import scan_latents
from saejax.analysis.endpoint import Endpoint, EndpointError, EndpointRefusal
from saejax.analysis.explaining import ChatExplainer, Explainer, explanation_request, wording
from saejax.analysis.passages import FeaturePassages, feature_passages, peaks_of
from saejax.analysis.scan import Scan
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
from saejax.report.explanations import EXPLANATIONS, read_explanations
from saejax.runs.made import differing

# With fewer passages there is nothing to compare: two to explain by and two to judge by.
_FEWEST = 4
# So many failures in a row, and none before that succeeded since: the endpoint is at fault, not a feature.
_GIVE_UP = 10
_LETTERS_PER_TOKEN = 4


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
        scan = scan_latents(named, work.lm, work.packer, e.report.tokens, e.report.batch_rows, e.capture.max_norm_ratio)
        explainer = ChatExplainer(endpoint, endpoint.model)
        shape = examples, judged, e.report.before, e.report.after
        explaining = _Explaining(scan, work.lm.tokenizer.token_strings, explainer, endpoint, shape)
        enough = explaining.estimate(left)
        if dry_run:
            return 0
        with lease(e.run_dir):
            common = {"by": endpoint.model, "url": endpoint.url, **settings}
            failed = explaining.run(left, enough, parallel, _Rows(e.run_dir, common))
    if e.run.features.is_file() and not dry_run:
        show_again(e.run_dir) if alone else run_report(work)
    elif not dry_run:
        console.say(f"explain: {e.run_dir / EXPLANATIONS}; saejax report shows them beside the passages")
    return 1 if failed else 0


@dataclasses.dataclass
class _Explaining:
    """The features of one scan, explained by several threads and written by one.

    Attributes:
        shape: passages for the explainer and for the judge, tokens before and after each peak.
    """

    scan: Scan
    strings: Callable[[list[int]], Any]
    explainer: Explainer
    endpoint: Endpoint
    shape: tuple[int, int, int, int]

    def passages(self, feature: int) -> FeaturePassages:
        return feature_passages(self.scan, feature, self.strings, *self.shape)

    @property
    def kinds(self) -> Sequence[str]:
        """The scores that the judge gives."""
        return tuple(KINDS) if self.shape[1] else ()

    def estimate(self, features: list[int]) -> list[int]:
        """Say what it will cost, by the passages of a few of them. Returns the features that have enough."""
        enough = [feature for feature in features if len(peaks_of(self.scan, feature)) >= _FEWEST]
        few = len(features) - len(enough)
        if few:
            console.say(f"explain: {few:,} features are active in fewer than {_FEWEST} passages and are left out")
        sample = enough[:: max(1, len(enough) // 20)]
        requests = letters = 0
        for feature in sample:
            for messages in _all_requests(self.passages(feature), self.kinds):
                requests += 1
                letters += sum(len(message["content"]) for message in messages)
        share = len(enough) / max(1, len(sample))
        console.say(
            f"explain: {len(enough):,} features, about {requests * share:,.0f} requests and "
            f"{letters * share / _LETTERS_PER_TOKEN:,.0f} tokens to read for {self.endpoint.model} "
            f"at {self.endpoint.url}"
        )
        return enough

    def run(self, features: list[int], enough: list[int], parallel: int, rows: "_Rows") -> int:
        """Explain those that have enough passages, note the others. Returns how many got no answer."""
        with rows:
            for feature in sorted(set(features) - set(enough)):
                rows.write({"feature": feature, "text": None, "scores": {}})
            failures = self._ask(enough, parallel, rows)
        usage = self.endpoint.usage
        tokens = f"{usage.prompt_tokens:,} tokens read and {usage.completion_tokens:,} written, as the endpoint counts"
        console.say(f"explain: {len(enough) - failures:,} features explained; {usage.requests:,} requests, {tokens}")
        for kind, values in rows.scores.items():
            known = [value for value in values if value is not None]
            mean = f"mean {sum(known) / len(known):.3f}" if known else "none could be measured"
            unknown = f", {len(values) - len(known):,} not measured" if known and len(known) < len(values) else ""
            console.say(f"  {kind}: {mean}{unknown}")
        return failures

    def _row(self, feature: int) -> dict[str, Any]:
        passages = self.passages(feature)
        text = self.explainer.explain(passages)
        results = {kind: score(kind, text, passages, self.endpoint) for kind in self.kinds}
        return {
            "feature": feature,
            "text": text,
            "scores": {kind: result.to_json()["balanced_accuracy"] for kind, result in results.items()},
            "details": {kind: result.to_json() for kind, result in results.items()},
        }

    def _ask(self, features: list[int], parallel: int, rows: "_Rows") -> int:
        """Write each row as it comes. Returns how many features failed.

        Raises:
            EndpointError: what every other request would get as well, or failures alone.
        """
        failures = in_a_row = 0
        try:
            with Progress("explain", len(features), unit="features") as progress:
                for feature, answer in _in_threads(self._row, features, parallel):
                    if isinstance(answer, Exception):
                        if isinstance(answer, EndpointRefusal) or not isinstance(answer, EndpointError):
                            raise answer
                        failures, in_a_row = failures + 1, in_a_row + 1
                        console.say(f"explain: feature {feature} is left for another time: {answer}")
                        if in_a_row >= _GIVE_UP:
                            raise EndpointError(f"{in_a_row} features in a row got no answer. The last one: {answer}")
                    else:
                        in_a_row = 0
                        rows.write(answer)
                    progress.advance(1)
        finally:
            self.endpoint.stopped.set()
        return failures


class _Rows:
    """Appends to explanations.jsonl; every row has what is common to all of this session.

    Attributes:
        scores: {kind: of each row that has it}, for the summary.
    """

    def __init__(self, run_dir: Path, common: Mapping[str, Any]):
        self._path, self._common = run_dir / EXPLANATIONS, dict(common)
        self.scores: dict[str, list[float | None]] = {}

    def __enter__(self) -> "_Rows":
        with writing(self._path):
            mend_last_line(self._path)
            self._file = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def write(self, row: dict[str, Any]) -> None:
        with writing(self._path):
            self._file.write(json.dumps(row | self._common) + "\n")
            self._file.flush()
        for kind, value in row["scores"].items():
            self.scores.setdefault(kind, []).append(value)


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
    """The features that --features names: all, 7, 0:50 (without 50), or several of these with commas.

    Raises:
        ConfigError: none of these, or a feature that the coder does not have.
    """
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
