"""List the formats of dictionaries: which coders each can say, what is read and what is written.

    saejax formats                 the table
    saejax formats saelens         one format, with the reason where a coder is not written

The names are those of `saejax convert --to` and `saejax push --format`.
"""

import dataclasses

from saejax.app.command import Command, Line


@dataclasses.dataclass(frozen=True)
class Formats(Command, takes="words", answers=True):
    def run(self, line: Line) -> None:
        from saejax.app.convert import print_formats

        print_formats(line.words)
