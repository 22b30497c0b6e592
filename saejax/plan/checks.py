"""The table of a preflight: each check with what is there, what is needed, and the remedy where that is too little."""

import dataclasses
from collections.abc import Sequence

from saejax.core.errors import SaejaxError


@dataclasses.dataclass(frozen=True)
class Check:
    """A line of the table.

    Attributes:
        passed: None where it was not tried, because something before it failed.
        needed: what it must be, in words.
        planned: what the plan says, in words.
        remedy: what to do, as a sentence, where it failed.
    """

    name: str
    found: str
    passed: bool | None
    needed: str = ""
    planned: str = ""
    remedy: str = ""


def failed(name: str, error: Exception) -> Check:
    """The line of a check that an error ended."""
    text = str(error).partition("\n")[0] if not isinstance(error, SaejaxError) else str(error)
    return Check(name, "refused", False, remedy=text[:600])


def is_out_of_memory(error: BaseException) -> bool:
    """A device or the host had no memory left: JAX, PyTorch and Python each say it in their own way."""
    text = str(error)
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()


def checks_table(checks: Sequence[Check]) -> str:
    """The checks as columns that line up; below each that failed, its remedy."""
    heads = ["check", "found", "needed", *(["plan"] if any(check.planned for check in checks) else []), "result"]
    verdicts = {True: "pass", False: "FAIL", None: "not tried"}
    lines = [[c.name, c.found, c.needed, *([c.planned] if "plan" in heads else []), verdicts[c.passed]] for c in checks]
    widths = [max(len(line[i]) for line in (heads, *lines)) for i in range(len(heads))]

    def drawn(line: Sequence[str]) -> str:
        return "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()

    out = [drawn(heads), "  " + "  ".join("-" * width for width in widths)]
    for check, line in zip(checks, lines, strict=True):
        out.append(drawn(line))
        if check.passed is False and check.remedy:
            out += [f"      {part}" for part in check.remedy.splitlines()]
    return "\n".join(out)
