"""A command's flags as its function gets them."""

from typing import Any

from absl import flags

from saejax.commands import COMMANDS


def asked(command: str, **given: Any) -> dict[str, Any]:
    """The flags' defaults, and what is given instead."""
    own = flags.FlagValues()
    names = [make(flag_values=own).name for make in COMMANDS[command].flags]
    own.mark_as_parsed()
    return {name: own[name].value for name in names} | given
