"""`saejax explain`: ask a language model what a run's features stand for, and how well that predicts them.

Results are appended to the run's explanations.jsonl as they come. What stands there under the same model, wording and
settings is not asked again.
"""

import dataclasses
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from saejax.analysis import scan_latents
from saejax.analysis.endpoint import Endpoint, EndpointError, EndpointRefusal
from saejax.analysis.explaining import ChatExplainer, Explainer, explanation_request, wording
from saejax.analysis.passages import FeaturePassages, feature_passages, peaks_of
from saejax.analysis.scan import Scan
from saejax.analysis.scoring import KINDS, batches, judge_request, judge_wording, score
from saejax.app import console
from saejax.app.evaluated import agree, coder_of
from saejax.app.experiment import Experiment
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
_USUAL_KEY = "OPENAI_API_KEY"
_LETTERS_PER_TOKEN = 4

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Asked:
    """The command's flags; commands.py says what each means."""

    url: str
    model: str
    key_env: str
    features: str
    examples: int
    score: bool
    judged: int
    parallel: int
    max_tokens: int
    timeout: float
    redo: bool
    dry_run: bool

    def __post_init__(self) -> None:
        for name, example in (("url", "http://localhost:8000/v1"), ("model", "the name that the endpoint knows")):
            if not getattr(self, name):
                raise ConfigError(f"--{name} is missing, as in --{name}={example}.")

    @property
    def key(self) -> str:
        """From the environment. The usual variable goes to https addresses alone: a local server needs no key of
        another one's, and http would show it to the network. A variable that is named goes anywhere.
        """
        if self.key_env:
            if not (key := os.environ.get(self.key_env, "").strip()):
                raise ConfigError(f"--key_env={self.key_env}: the environment has no such variable, or it is empty.")
            return key
        return os.environ.get(_USUAL_KEY, "").strip() if self.url.startswith("https://") else ""

    @property
    def n_judged(self) -> int:
        return self.judged if self.score else 0

    def settings(self, e: Experiment, step: int) -> dict[str, Any]:
        """What decides the passages, and so whether a row answers the same question."""
        report = {name: getattr(e.report, name) for name in ("tokens", "before", "after")}
        prompt = wording(*(judge_wording() if self.score else ()))
        return {"step": step, "prompt": prompt, "examples": self.examples, "judged": self.n_judged, **report}


def run_explain(work: Workspace, asked: Asked) -> int:
    """Explain and score features of a finished run, or of an evaluated dictionary.

    Returns:
        0, or 1 where some got no answer.
    """
    e = work.experiment
    refuse_many(e.parallel, "saejax explain")
    alone = e.run.is_dictionary
    sae = coder_of(e.run_dir) if alone else finished_run(e)
    endpoint = Endpoint(asked.url, asked.model, asked.key, asked.max_tokens, asked.timeout)
    settings = asked.settings(e, sae.step) | {"sha256": sae.fingerprint()}
    wanted = _numbers(asked.features, sae.n_latents)
    done = set() if asked.redo else _done(e.run_dir, asked.model, settings)
    left = [feature for feature in wanted if feature not in done]
    if len(left) < len(wanted):
        console.say(f"explain: {len(wanted) - len(left):,} of {len(wanted):,} features are already explained")
    failed = 0
    if left:
        named = sae.at(work.lm)
        agree(work)
        scan = scan_latents(named, work.lm, work.packer, e.report.tokens, e.report.batch_rows, e.capture.max_norm_ratio)
        explaining = _Explaining(scan, work.lm.tokenizer.token_strings, ChatExplainer(endpoint, asked.model), endpoint)
        enough = explaining.estimate(left, asked, e)
        if asked.dry_run:
            return 0
        with lease(e.run_dir):
            common = {"by": asked.model, "url": endpoint.url, **settings}
            failed = explaining.run(left, enough, asked, e, _Rows(e.run_dir, common))
    if (e.run.report if alone else e.run.features).is_file() and not asked.dry_run:
        show_again(e.run_dir) if alone else run_report(work)
    elif not asked.dry_run:
        console.say(f"explain: {e.run_dir / EXPLANATIONS}; saejax report shows them beside the passages")
    return 1 if failed else 0


@dataclasses.dataclass
class _Explaining:
    """The features of one scan, explained by several threads and written by one."""

    scan: Scan
    strings: Callable[[list[int]], Any]
    explainer: Explainer
    endpoint: Endpoint

    def passages(self, feature: int, asked: Asked, e: Experiment) -> FeaturePassages:
        numbers = asked.examples, asked.n_judged, e.report.before, e.report.after
        return feature_passages(self.scan, feature, self.strings, *numbers)

    def estimate(self, features: list[int], asked: Asked, e: Experiment) -> list[int]:
        """Say what it will cost, by the passages of a few of them. Returns the features that have enough."""
        enough = [feature for feature in features if len(peaks_of(self.scan, feature)) >= _FEWEST]
        few = len(features) - len(enough)
        if few:
            console.say(f"explain: {few:,} features are active in fewer than {_FEWEST} passages and are left out")
        sample = enough[:: max(1, len(enough) // 20)]
        requests = letters = 0
        for feature in sample:
            for messages in _all_requests(self.passages(feature, asked, e), asked.score):
                requests += 1
                letters += sum(len(message["content"]) for message in messages)
        share = len(enough) / max(1, len(sample))
        console.say(
            f"explain: {len(enough):,} features, about {requests * share:,.0f} requests and "
            f"{letters * share / _LETTERS_PER_TOKEN:,.0f} tokens to read for {asked.model} at {self.endpoint.url}"
        )
        return enough

    def run(self, features: list[int], enough: list[int], asked: Asked, e: Experiment, rows: "_Rows") -> int:
        """Explain those that have enough passages, note the others. Returns how many got no answer."""
        with rows:
            for feature in sorted(set(features) - set(enough)):
                rows.write({"feature": feature, "text": None, "scores": {}})
            failures = self._ask(enough, asked, lambda feature: self._row(feature, asked, e), rows)
        usage = self.endpoint.usage
        tokens = f"{usage.prompt_tokens:,} tokens read and {usage.completion_tokens:,} written, as the endpoint counts"
        console.say(f"explain: {len(enough) - failures:,} features explained; {usage.requests:,} requests, {tokens}")
        for kind, found in rows.scores.items():
            known = [value for value in found if value is not None]
            mean = f"mean {sum(known) / len(known):.3f}" if known else "none could be measured"
            unknown = f", {len(found) - len(known):,} not measured" if known and len(known) < len(found) else ""
            console.say(f"  {kind}: {mean}{unknown}")
        return failures

    def _row(self, feature: int, asked: Asked, e: Experiment) -> Row:
        passages = self.passages(feature, asked, e)
        text = self.explainer.explain(passages)
        results = {kind: score(kind, text, passages, self.endpoint) for kind in KINDS if asked.score}
        return {
            "feature": feature,
            "text": text,
            "scores": {kind: result.to_json()["balanced_accuracy"] for kind, result in results.items()},
            "details": {kind: result.to_json() for kind, result in results.items()},
        }

    def _ask(self, features: list[int], asked: Asked, row: Callable[[int], Row], rows: "_Rows") -> int:
        """Write each row as it comes. Returns how many features failed.

        Raises:
            EndpointError: what every other request would get as well, or failures alone.
        """
        failures = in_a_row = 0
        try:
            with Progress("explain", len(features), unit="features") as progress:
                for feature, answer in _in_threads(row, features, asked.parallel):
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

    def write(self, row: Row) -> None:
        with writing(self._path):
            self._file.write(json.dumps(row | self._common) + "\n")
            self._file.flush()
        for kind, value in row["scores"].items():
            self.scores.setdefault(kind, []).append(value)


def _in_threads(work: Callable[[int], Row], items: list[int], threads: int) -> Iterator[tuple[int, Row | Exception]]:
    """(item, its row or error) as they are done, by at most `threads` at once.

    The threads are daemons: whoever stops waiting, by Ctrl-C or an error, leaves without the requests under way.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    done: queue.SimpleQueue[tuple[int, Row | Exception]] = queue.SimpleQueue()
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


def _all_requests(passages: FeaturePassages, scored: bool) -> Iterator[list[dict[str, str]]]:
    """Every request that a feature takes, with a phrase of usual length where the explanation will stand."""
    yield explanation_request(passages)
    for kind in KINDS if scored else ():
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
    found: dict[int, None] = {}
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
        found |= dict.fromkeys(range(start, min(end, n_latents)))
    return list(found)
