"""Reading that goes on past a damaged file: the file's error is the run's, never the page's."""

from collections.abc import Callable
from typing import TypeVar

from saejax.core.errors import SaejaxError

T = TypeVar("T")


class Reading:
    """Reads the files of one run: of one that is damaged the error is kept in `errors`, and the others are read."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def of(self, read: Callable[[], T], otherwise: T) -> T:
        """The result of `read`, or `otherwise` where a file is damaged or may not be read."""
        try:
            return read()
        except (SaejaxError, OSError) as error:
            self.errors.append(str(error))
            return otherwise

    def error(self, before: str | None = None) -> str | None:
        """The errors in one line; None without any."""
        return " ".join(dict.fromkeys(filter(None, (before, *self.errors)))) or None
