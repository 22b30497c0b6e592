"""One line of the table: what was done to saejax, how often, how often it held, what the user saw."""

import dataclasses
import re

MACHINE = "2 CPU cores, 24 GB"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one fault.

    Attributes:
        fault: what was done.
        tried, held: how often, and how often it ended as it should.
        seconds: of all tries together.
        said: the first line of what the user sees; of many tries, of one.
        note: how the tries were spread, or what was compared.
    """

    fault: str
    tried: int
    held: int
    seconds: float
    said: str
    note: str = ""

    @property
    def row(self) -> str:
        """A row of the table in Markdown."""
        said = re.sub(r"\(pid (\d+) on \S+\)", r"(pid \1 on HOST)", " ".join(self.said.split())).replace("|", "\\|")
        cut = said if len(said) <= 240 else f"{said[:235]} ..."
        what = f"{self.fault} ({self.note})" if self.note else self.fault
        return f"| {what} | {self.tried:,} | {self.held:,} | {self.seconds:.1f} | {cut} |"
