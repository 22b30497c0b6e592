"""Standard output and error of a command: what cannot be written there does not end the work.

A log fills its disk, and a training goes on; a shell closes a stream, and no file that is opened next takes its number.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class Spoken:
    """A text stream that drops what its disk does not take. A pipe whose reader has gone is raised as ever.

    Attributes:
        lost: the first error by which something was dropped; None where nothing was.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: OSError | None = None

    def write(self, text: str) -> int:
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._dropping():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            self.lost = self.lost or error


@contextlib.contextmanager
def spoken() -> Iterator[Spoken]:
    """Within the block sys.stdout and sys.stderr are `Spoken`; gives the first. A stream that is closed is devnull."""
    for number in range(3):
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        out, err = (stream if isinstance(stream, Spoken) else Spoken(stream or nowhere) for stream in before)
        # What print and tqdm use of a stream is all there.
        sys.stdout, sys.stderr = out, err  # type: ignore[assignment]
        try:
            yield out
        finally:
            sys.stdout, sys.stderr = before
