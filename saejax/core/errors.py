"""Errors a user can act on: each names the thing, the value and the remedy.

The commands print the message alone (no traceback) and exit with `exit_code`.
"""

# sysexits' EX_TEMPFAIL: told to stop, nothing lost, run the same command again.
EXIT_PREEMPTED = 75


class SaejaxError(Exception):
    """Base of every error that is the fault of input, disk or configuration, not of the code."""

    exit_code = 1


class ConfigError(SaejaxError):
    """A configuration that cannot be run: unknown key, wrong type, impossible combination."""

    exit_code = 2


class DataError(SaejaxError):
    """Text, tokens, a store or a checkpoint that is missing, damaged or belongs to something else."""


class BusyError(SaejaxError):
    """Another process is writing to the same store or run."""
