"""Commands, run in this process."""

from collections.abc import Sequence
from typing import Any

from saejax.app.command import Line
from saejax.commands import COMMANDS


def on_page() -> dict[str, str]:
    """The commands that the page starts, as a `Site` has them."""
    return {name: command.summary() for name, command in COMMANDS.items() if command.on_page}


def run_command(name: str, /, words: Sequence[str] = (), config: Any = None, **settings: Any) -> int:
    """What `saejax <name> <words> --<setting>=<value>` does and returns."""
    line = Line(config, [str(word) for word in words], frozenset(settings))
    return COMMANDS[name](**settings).run(line) or 0
