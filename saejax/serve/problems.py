"""Errors that have a status of HTTP, and which status each error of saejax has."""

from saejax.core.errors import BusyError, ConfigError, SaejaxError

_STATUS = ((ConfigError, 400), (BusyError, 409), (SaejaxError, 422))


class Problem(SaejaxError):
    """A request that cannot be answered: `status` says to the browser why, the text to the reader."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


def status_of(error: SaejaxError) -> int:
    """400 for what was asked wrongly, 409 for what others hold, 422 for damaged or missing data, or its own."""
    if isinstance(error, Problem):
        return error.status
    return next(status for kind, status in _STATUS if isinstance(error, kind))
