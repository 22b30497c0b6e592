"""The Hugging Face hub, asked with a deadline: a network that swallows packets must not hold a process for ever."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from saejax.core.errors import DataError

ANSWER_SECONDS = 10.0  # of silence on one connection
COMMIT_SECONDS = 120.0  # of silence after an upload, which the hub works on before it answers
DEADLINE_SECONDS = 25.0  # for the whole question, names and proxies included

Answer = TypeVar("Answer")


def check_hub(kind: str, repo: str, revision: str, remedy: str) -> None:
    """Returns once the hub has answered that it has `revision` of `repo`; at once where HF_HUB_OFFLINE is set.

    Args:
        kind: model or dataset.
        revision: a branch, tag or commit; empty for the main one.
        remedy: the end of the message, for a hub that cannot be had.

    Raises:
        DataError: no such repository or revision, no right to it, or no answer within DEADLINE_SECONDS; names it.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return  # the library refuses every question by itself, and at once

    def question() -> Any:
        return HfApi().repo_info(repo, repo_type=kind, revision=revision or None, timeout=ANSWER_SECONDS)

    ask(kind, repo, question, remedy)


def ask(kind: str, repo: str, question: Callable[[], Answer], remedy: str) -> Answer:
    """Ask the hub's client a question about a repository.

    The client waits without end for a server that takes the connection and says nothing (seen with huggingface_hub
    2.4.0). So every question from here on has a timeout: each is tried six times by the client, which then gives up.

    Raises:
        DataError: as `unreachable`, also without an answer within DEADLINE_SECONDS.
    """
    be_patient()
    try:
        return _within(DEADLINE_SECONDS, question)
    except Exception as error:  # the library raises many kinds; all mean that the repository cannot be had
        raise unreachable(kind, repo, error, remedy) from None


def be_patient() -> None:
    """Give every later request of the hub's client a limit of silence, which it has not by itself."""
    from huggingface_hub.utils import get_session

    hooks = get_session().event_hooks["request"]
    if _with_patience not in hooks:
        hooks.append(_with_patience)


def unreachable(kind: str, repo: str, error: Exception, remedy: str) -> DataError:
    """The error for a repository that cannot be had: what it is, what the library says of it, what to do."""
    reason = (str(error).strip() or "no answer").splitlines()[0][:200].rstrip(".")
    return DataError(f"The {kind} {repo!r} cannot be had from the hub ({type(error).__name__}: {reason}). {remedy}")


def _with_patience(request: Any) -> None:
    """A hook of the client: no wait of a request is without end."""
    waits = request.extensions.get("timeout") or {}
    for what in ("connect", "read", "write", "pool"):
        if waits.get(what) is None:
            waits[what] = COMMIT_SECONDS if what == "read" and request.method == "POST" else ANSWER_SECONDS
    request.extensions["timeout"] = waits


def _within(seconds: float, ask: Callable[[], Answer]) -> Answer:
    """The answer of `ask`, or TimeoutError; a question that never ends is left behind and does not outlive us."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(ask())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="hub-question", daemon=True).start()
    if not wait([future], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return future.result()
