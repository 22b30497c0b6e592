"""Files for a paper beside a page: the rows as .csv, a table as .tex, the picture as .svg and .pdf."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saejax.core.figures import image_of
from saejax.core.files import write_bytes
from saejax.reports.table_page import Columns, Row, Table, cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEX = {letter: "\\" + letter for letter in "&%$#_{}"}
_TEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
# Between a mean and its standard deviation; ASCII, because a terminal may know no more.
_SPREAD = " +- "


def write_for_paper(path: Path, rows: Sequence[Row], table: Table, figure: "Figure") -> None:
    """Write the rows, the table and the picture beside the page at `path`.

    Raises:
        DataError: they cannot be written.
    """
    write_bytes(path.with_suffix(".csv"), csv_of(rows).encode())
    write_bytes(path.with_suffix(".tex"), tex_of(table).encode())
    for form in ("svg", "pdf"):
        write_bytes(path.with_suffix(f".{form}"), image_of(figure, form))


def csv_of(rows: Sequence[Row]) -> str:
    """A line for each row under the keys of all; numbers with every digit, lists with spaces, empty for None."""
    with io.StringIO(newline="") as text:
        keys = list(dict.fromkeys(key for row in rows for key in row))
        writer = csv.DictWriter(text, keys, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: " ".join(map(str, v)) if isinstance(v, list) else v for key, v in row.items()})
        return text.getvalue()


def tex_of(table: Table) -> str:
    """A tabular of the package booktabs; a paper puts it into its own `table` with \\input."""

    def line(words: Iterable[str]) -> str:
        escaped = ("".join(_TEX.get(letter, letter) for letter in " ".join(word.split())) for word in words)
        return " & ".join(cell.replace(_SPREAD, r" $\pm$ ") for cell in escaped) + r" \\"

    head, *body = table.lines
    columns = "".join("l" if i in table.words else "r" for i in range(len(head)))
    lines = ["% Needs the package booktabs.", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", line(head), r"\midrule"]
    return "\n".join([*lines, *map(line, body), r"\bottomrule", r"\end{tabular}", ""])


def seeds_table(settings: Sequence[Mapping[str, Any]], figures: Columns) -> Table | None:
    """Mean, spread and interval of each setting of `evals.seeds.over_seeds`; None where none has several seeds."""
    if all(len(setting["members"]) < 2 for setting in settings):
        return None
    columns = [("setting", "setting", ""), ("seeds", "seeds", "")]
    for heading, key, _ in figures:
        columns += [(heading, key, ""), ("95 %", f"{key}_interval", "")]
    rows = []
    for setting in settings:
        count, failed = len(setting["members"]), setting["failed"]
        row = {"setting": setting["setting"], "seeds": f"{count - failed} of {count}" if failed else str(count)}
        for _, key, form in figures:
            known = setting[key]
            if known["mean"] is not None:
                spread = "" if known["spread"] is None else f"{_SPREAD}{known['spread']:{form}}"
                row[key] = f"{known['mean']:{form}}{spread}"
            if known["interval"]:
                row[f"{key}_interval"] = " to ".join(f"{end:{form}}" for end in known["interval"])
        rows.append(row)
    lead = (
        "Mean +- standard deviation over the seeds, and the 95 % interval of the mean by Student's t: how it would "
        "move with other seeds, on the same text."
    )
    return Table(cells(columns, rows), title="Over seeds", lead=lead)
