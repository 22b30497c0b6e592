"""L6: dictionaries of other projects, in and out; one file a format, and where they are found.

A format says how its files look (`here`), reads them into a `TrainedCoder`, and writes one, or says by name what it
cannot say. `saejax.load`, `TrainedCoder.save(format=)`, `saejax convert` and `saejax formats` work through the table.
"""

from saejax.interop.search import dictionaries_below, load_dictionary
from saejax.interop.table import format_table
from saejax.trained import FORMATS, Format, register_format

FORMATS.look_in("saejax.interop.formats")

__all__ = ["FORMATS", "Format", "dictionaries_below", "format_table", "load_dictionary", "register_format"]
