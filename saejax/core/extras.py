"""The line that installs what an extra brings. It is true for a checkout, for a wheel and for a published version."""

import functools
import importlib.metadata
import re

_EXTRA = re.compile(r"""(.+?)\s*;\s*extra\s*==\s*['"](.+?)['"]""")


@functools.cache
def installing(extra: str) -> str:
    """`pip install` with the packages of an extra of pyproject.toml, as the installed saejax names them.

    A checkout that was installed before the extra came is told to be installed again.
    """
    rows = (_EXTRA.fullmatch(row) for row in importlib.metadata.requires("saejax") or ())
    packages = [f"'{row[1]}'" for row in rows if row and row[2] == extra]
    return "pip install " + (" ".join(packages) or f"-e '.[{extra}]'")
