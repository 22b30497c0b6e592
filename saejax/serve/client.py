"""A typed client of `saejax serve` in Python.

client = Client("http://127.0.0.1:8765")
job = client.train(layer_idx=6, activation_data_path="activations.parquet", latent_dim=4096)
for row in client.follow_run(job["name"]):
    print(row["step"], row.get("train/fve"))
"""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict
from urllib.parse import quote, urlencode

from saejax.core.errors import BusyError, ConfigError, DataError
from saejax.jobs.job import ENDED

_ANSWER_SECONDS = 120.0
_AGAIN = 1.0
_LARGEST_MESSAGE = 1 << 23
_DONE, _REFUSED = 1000, 1008


class JobState(TypedDict):
    """A job as it is now; the state is queued, starting, running, done, failed or stopped."""

    id: str
    command: str
    name: str
    state: str
    code: int | None
    run: str | None
    can_continue: bool
    last: str


class RunFigures(TypedDict):
    """A run in a few figures."""

    name: str
    state: str
    step: int | None
    steps: int | None
    l0: float | None
    fve: float | None


class FeatureNote(TypedDict):
    """A label and a note that somebody wrote about a feature."""

    id: int
    label: str
    note: str
    time: float


class Client:
    """A server's API: what is wrong with a request is a ConfigError, what another holds a BusyError, else DataError.

    Args:
        url: as the server printed it, without the token.
        token: of the printed link, where there is one.
    """

    def __init__(self, url: str = "http://127.0.0.1:8765", token: str = ""):
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def runs(self) -> list[RunFigures]:
        """All runs."""
        return list(self._ask("/api/runs")["runs"])

    def run(self, name: str) -> dict[str, Any]:
        """One run: {"run", "summary": figures, gates, curves, settings, ...}."""
        return self._ask(f"/api/runs/{quote(name)}")

    def features(self, dictionary: str, **query: Any) -> dict[str, Any]:
        """Rows of features: q, scope, sort, down, low, high, live, offset, limit."""
        return self._ask(f"/api/features/{quote(dictionary)}", query=query)

    def feature(self, dictionary: str, id: int) -> dict[str, Any]:
        """One feature with its examples, logits and note."""
        return self._ask(f"/api/feature/{quote(dictionary)}", query={"id": id})

    def encode(self, dictionary: str, text: str, **how: Any) -> dict[str, Any]:
        """The features of a text: {"tokens", "top", "activations", ...}."""
        return self._ask("/api/encode", {"dictionary": dictionary, "text": text, **how})

    def steer(self, dictionary: str, features: Sequence[int | str], prompt: str, **how: Any) -> dict[str, Any]:
        """A text with and without the features changed: operation, scale, tokens, temperature, top_p, seed."""
        return self._ask("/api/steer", {"dictionary": dictionary, "features": list(features), "prompt": prompt, **how})

    def train(self, fast: bool = False, **fields: Any) -> JobState:
        """Train on activations: layer_idx, activation_data_path, latent_dim, ...; `config` holds any other key."""
        return self._ask("/api/sae/train-fast" if fast else "/api/sae/train", fields)

    def start(self, command: str, **asked: Any) -> JobState:
        """Start a command: experiment or run, preset, config."""
        return self._ask("/api/jobs", {"command": command, **asked})

    def jobs(self) -> list[JobState]:
        """The jobs, newest first."""
        return list(self._ask("/api/jobs")["jobs"])

    def job(self, job: str) -> JobState:
        """One job, by its id."""
        return self._ask(f"/api/jobs/{job}")

    def cancel(self, job: str) -> JobState:
        """Tell a job to save and end."""
        return self._ask(f"/api/jobs/{job}/cancel", {})

    def resume(self, job: str) -> JobState:
        """Go on with a job that was stopped or failed."""
        return self._ask(f"/api/jobs/{job}/continue", {})

    def wait(self, job: str, seconds: float = float("inf")) -> JobState:
        """The job once it has ended. Raises TimeoutError after `seconds`."""
        until = time.monotonic() + seconds
        while (state := self.job(job))["state"] not in ENDED:
            if time.monotonic() > until:
                raise TimeoutError(f"The job {job} is {state['state']} after {seconds:g} s.")
            time.sleep(0.5)
        return state

    def note(self, dictionary: str, id: int, label: str, note: str = "") -> FeatureNote:
        """Write a feature's label and note; both empty remove it."""
        body = {"id": id, "label": label, "note": note}
        return self._ask(f"/api/notes/{quote(dictionary)}", body, "PUT")

    def follow_run(self, name: str, at: int = 0) -> Iterator[dict[str, Any]]:
        """The rows of a run's metrics, those that are there and each new one, without end; reconnects by itself.

        Raises:
            DataError: there is no such run, or no server.
        """
        for message in self._follow(f"/ws/runs/{quote(name)}", {"at": at}):
            yield from message.get("rows", [])

    def follow_job(self, job: str) -> Iterator[dict[str, Any]]:
        """The messages about a job until it has ended: {"kind": "rows" | "log" | "job", ...}; reconnects by itself.

        Raises:
            DataError: there is no such job, or no server.
        """
        yield from self._follow(f"/ws/jobs/{job}", {"at": 0, "log": 0})

    def _follow(self, path: str, places: dict[str, int]) -> Iterator[dict[str, Any]]:
        from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
        from websockets.sync.client import connect

        url = "ws" + self._url.removeprefix("http") + path
        reached = False
        while True:
            try:
                with connect(
                    f"{url}?{urlencode(places)}", additional_headers=self._headers, max_size=_LARGEST_MESSAGE
                ) as socket:
                    reached = True
                    for raw in socket:
                        message = json.loads(raw)
                        # Where this client goes on from after a break: nothing comes twice, nothing is missing.
                        places |= {key: message[key] for key in places if key in message}
                        if message["kind"] == "reset":
                            places["at"] = 0
                        yield message
                    if socket.close_code == _DONE:
                        return
            except ConnectionClosed as closed:
                if closed.rcvd is not None and closed.rcvd.code == _REFUSED:
                    raise DataError(closed.rcvd.reason) from None
            except InvalidStatus as error:
                raise DataError(f"The server refused: {error}") from None
            except (InvalidHandshake, OSError) as error:
                if not reached:
                    raise self._silent(error) from None
                # The server is gone, perhaps for a moment.
            time.sleep(_AGAIN)

    def _ask(self, path: str, body: Any = None, method: str = "", query: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | ({} if data is None else {"Content-Type": "application/json"})
        address = self._url + path + (f"?{urlencode(query)}" if query else "")
        request = urllib.request.Request(address, data, headers, method=method or ("GET" if data is None else "POST"))
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raw = error.read()
            try:
                text = str(json.loads(raw)["error"])
            except (ValueError, KeyError, TypeError):
                text = f"The server answered {error.code}."
            raise {400: ConfigError, 409: BusyError}.get(error.code, DataError)(text) from None
        except (urllib.error.URLError, ValueError) as error:
            raise self._silent(error) from None

    def _silent(self, error: Exception) -> DataError:
        return DataError(f"{self._url} does not answer: {error}")
