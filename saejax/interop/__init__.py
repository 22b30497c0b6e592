"""L6: dictionaries of other projects, in and out; one file a format, and where they are found.

A format says how its files look (`here`), reads them into a `TrainedCoder`, and writes one, or says by name what it
cannot say. `saejax.load`, `TrainedCoder.save(format=)`, `saejax convert` and `saejax formats` work through the table.
"""

from saejax.interop.finding import found, read
from saejax.interop.table import format_table
from saejax.trained import FORMATS, Format, register_format

FORMATS.look_in("saejax.interop.formats")

__all__ = ["FORMATS", "Format", "format_table", "found", "read", "register_format"]
