"""A language model behind an OpenAI-compatible address: POST {url}/chat/completions, with the standard library.

What comes back is not trusted: it is read to a limit of bytes and seconds, no redirect is followed, and the key is
taken out of every text that leaves this file.
"""

import dataclasses
import http.client
import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from saejax.core.errors import ConfigError, DataError

Messages = list[dict[str, str]]

_LARGEST_ANSWER = 4 << 20
_LONGEST_WAIT = 60.0
# Busy, or broken for a moment.
_TRY_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


class EndpointError(DataError):
    """A request that got no usable answer."""


class EndpointRefusal(EndpointError):
    """An answer that every other request would get too: a wrong key, model or address."""


@dataclasses.dataclass
class Usage:
    """The number of requests, and the tokens that the endpoint says it read and wrote."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Endpoint:
    """`endpoint(messages) -> text`, at temperature 0; any number of threads may call it at once.

    A request is repeated up to `retries` times with a doubling wait (or as long as Retry-After says, at most a minute)
    when the endpoint is busy or broken, or out of reach after it once answered. A model that takes no temperature, or
    wants its limit as max_completion_tokens, is asked in its own way after it has said so.

    Args:
        url: as http://localhost:8000/v1; /chat/completions is added.
        model: the name that the endpoint knows.
        key: sent as "Authorization: Bearer"; none where it is empty.
        max_tokens: the longest answer; models that think aloud need room for it.
        timeout: seconds for one answer.

    Raises:
        ConfigError: an address or a key that cannot be used.
        EndpointError: no usable answer.
    """

    def __init__(
        self,
        url: str,
        model: str,
        key: str = "",
        max_tokens: int = 1000,
        timeout: float = 120.0,
        retries: int = 5,
        wait: float = 1.0,
    ):
        self.url, self.model = checked_url(url), model
        self.usage = Usage()
        self.stopped = threading.Event()
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError("The key holds a space, a line break or a letter that no key has: set its variable anew.")
        self._key, self._max_tokens, self._timeout, self._retries, self._wait = key, max_tokens, timeout, retries, wait
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._lock = threading.Lock()
        self._answered = False
        self._length_name, self._sampling = "max_tokens", {"temperature": 0}

    def __call__(self, messages: Messages) -> str:
        for attempt in range(self._retries + 1):
            try:
                return self._text(self._answer(messages))
            except _Again as again:
                if attempt == self._retries or self.stopped.is_set():
                    raise EndpointError(f"{self.url} {again} ({attempt + 1} attempts).") from None
                self.stopped.wait(again.seconds or min(_LONGEST_WAIT, self._wait * 2**attempt))
        raise AssertionError("unreachable")

    def _answer(self, messages: Messages) -> Any:
        """The answer's JSON; learns once each what the model does not take."""
        while True:
            length, sampling = self._length_name, self._sampling
            body = {"model": self.model, "messages": messages, length: self._max_tokens, **sampling}
            try:
                return self._json(self._post(json.dumps(body).encode()))
            except urllib.error.HTTPError as error:
                with error:
                    message = self._said(error)
                if error.code == 400 and length == "max_tokens" and "max_completion_tokens" in message:
                    self._length_name = "max_completion_tokens"
                elif error.code == 400 and sampling and "temperature" in message:
                    self._sampling = {}
                else:
                    raise self._fault(error, message) from None

    def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json", "User-Agent": "saejax"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.url, body, headers, method="POST")
        with self._lock:
            self.usage.requests += 1
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                self._answered = True
                return self._bounded(response, _LARGEST_ANSWER)
        except urllib.error.HTTPError:
            self._answered = True
            raise
        except (OSError, http.client.HTTPException) as error:  # a URLError is an OSError
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, TimeoutError):
                raise _Again(f"did not answer within {self._timeout:g} s") from None
            what = f"cannot be reached: {self._clean(str(reason) or type(reason).__name__)}"
            raise (_Again(what) if self._answered else EndpointRefusal(f"{self.url} {what}.")) from None

    def _bounded(self, response: Any, limit: int) -> bytes:
        """The body. A server that sends for ever, or a byte a minute, is left after the limit of bytes or seconds."""
        deadline, pieces, size = time.monotonic() + self._timeout, [], 0
        while piece := response.read1(1 << 16):
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                raise EndpointError(f"{self.url} sent an answer of more than {limit:,} bytes.")
            if time.monotonic() > deadline:
                raise _Again(f"did not end its answer within {self._timeout:g} s")
        announced = response.headers.get("Content-Length") or ""
        if announced.isdecimal() and size < int(announced[:20]):
            raise _Again("broke off in the middle of an answer")
        return b"".join(pieces)

    def _json(self, raw: bytes) -> Any:
        try:
            return json.loads(raw.decode())
        except (ValueError, RecursionError):
            begins = self._clean(raw[:80].decode(errors="replace"))
            raise EndpointError(
                f"{self.url} answered with something that is not JSON: {begins!r}. Is it the address of an "
                "OpenAI-compatible API, as http://localhost:8000/v1?"
            ) from None

    def _text(self, answer: Any) -> str:
        """choices[0].message.content, with the tokens counted."""
        try:
            choice = answer["choices"][0]
            content = choice["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise EndpointError(f"{self.url} answered without choices[0].message.content.") from None
        usage = answer.get("usage")
        with self._lock:
            for name in ("prompt_tokens", "completion_tokens"):
                tokens = usage.get(name) if isinstance(usage, dict) else None
                if type(tokens) is int and 0 <= tokens < 2**31:
                    setattr(self.usage, name, getattr(self.usage, name) + tokens)
        if content is not None and not isinstance(content, str):
            raise EndpointError(f"{self.url} answered with a content that is a {type(content).__name__}, not a text.")
        if not content or not content.strip():
            long = choice.get("finish_reason") == "length"
            more = ": the model used up max_tokens before it answered; allow more" if long else ""
            raise EndpointError(f"{self.url} answered with an empty text{more}.")
        return self._without_key(content)

    def _said(self, error: urllib.error.HTTPError) -> str:
        """The message in an error's body, on one line and short."""
        try:
            raw = self._bounded(error, 1 << 16)
        except (OSError, http.client.HTTPException, EndpointError, _Again):
            return "(no readable message)"
        try:
            inside = json.loads(raw.decode())
            inside = inside.get("error", inside) if isinstance(inside, dict) else inside
            message = inside.get("message", inside) if isinstance(inside, dict) else inside
        except (ValueError, RecursionError):
            message = raw.decode(errors="replace")
        return self._clean(str(message))

    def _fault(self, error: urllib.error.HTTPError, message: str) -> Exception:
        if error.code in _TRY_AGAIN:
            return _Again(f"answered with {error.code}: {message}", _seconds(error.headers.get("Retry-After")))
        if 300 <= error.code < 400:
            return EndpointRefusal(
                f"{self.url} redirects to another address ({error.code}). That is not followed, because the key would "
                "go along: give the address itself."
            )
        remedies = {
            401: " Set the key in the environment; --key_env names its variable.",
            403: " The key does not allow this.",
            404: " Check the address and the model's name.",
        }
        kind = EndpointRefusal if error.code in remedies else EndpointError
        return kind(f"{self.url} answered with {error.code}: {message}.{remedies.get(error.code, '')}")

    def _clean(self, text: str) -> str:
        """For a terminal: without the key, line breaks and control characters, at most 200 letters."""
        text = " ".join(self._without_key(text).split())
        return "".join(letter for letter in text if letter.isprintable())[:200]

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "[key]") if self._key else text


class _Again(Exception):
    """A failure that may pass; `seconds` to wait where the endpoint says how long."""

    def __init__(self, what: str, seconds: float = 0.0):
        super().__init__(what)
        self.seconds = seconds


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def checked_url(url: str) -> str:
    """`url` with /chat/completions.

    Raises:
        ConfigError: no http address, or one that may hold a secret: a password, or what stands behind "?" or "#".
    """
    parts = urllib.parse.urlsplit(url)
    try:
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is none
        whole = False
    if not whole or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError("--url must be an http or https address, as http://localhost:8000/v1.")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ConfigError(
            "--url holds a user, a password or a query. It is written into the run's folder, so give the plain address "
            "and put the key into an environment variable (--key_env)."
        )
    plain = url.rstrip("/?#")
    return plain if plain.endswith("/chat/completions") else f"{plain}/chat/completions"


def _seconds(retry_after: str | None) -> float:
    """Retry-After in seconds, 0 where it says none; a date is not read."""
    try:
        return min(max(float(retry_after or 0), 0.0), _LONGEST_WAIT)
    except ValueError:
        return 0.0
