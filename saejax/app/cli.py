"""The part that every command shares: `--config` and its overrides checked, errors as one line, help, exit codes."""

import ast
import contextlib
import errno
import itertools
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import config_dict, config_flags

from saejax.app import experiments
from saejax.app.command import Command, Line, define_flags, from_flags
from saejax.core.compiled import keep_programs
from saejax.core.config import nearest
from saejax.core.errors import EXIT_PREEMPTED, ConfigError, DataError, SaejaxError
from saejax.core.host import keep_memory
from saejax.core.stopping import Stopped, Stopping
from saejax.core.streams import Spoken, spoken

_FLAG = "config"
_DEFAULT = "configs/quickstart.py"
_CONFIG_HELP = (
    "Experiment file, or the name of a shipped experiment, with an optional :preset (quickstart if not given); "
    "--config.a.b=value overrides."
)


def run(command: type[Command], argv: Sequence[str], help_code: int = 0, text: str = "") -> None:
    """Parse argv[1:], run the command and exit with what it returns; --help prints `text` where there is one.

    A `SaejaxError` is printed without a traceback and exits with its own code (2 for configuration), --help with
    `help_code`. Outside training Ctrl-C exits with 130; SIGTERM and SIGUSR1 with 75, as they do in it.
    """
    # jax announces missing TPU libraries, Orbax each of its steps; neither is news to the user.
    absl_logging.set_verbosity(absl_logging.ERROR)
    for name in ("jax", "orbax", "httpx", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    keep_memory()
    with Stopping() as stopping, guarded(stopping, command.answers):
        _parse_and_run(command, list(argv), help_code, text)


@contextlib.contextmanager
def guarded(stopping: Stopping | None = None, answers: bool = True) -> Iterator[None]:
    """Errors, signals, a closed pipe and a disk that takes nothing end the process as `run` says, without a traceback.

    Args:
        answers: of `Command`.
    """
    with spoken() as out, _without_traceback(stopping):
        try:
            yield
        except SystemExit as ended:
            _heard(out, answers and not ended.code)
            raise
        else:
            _heard(out, answers)
        finally:
            sys.stdout.flush()


def _heard(out: Spoken, needed: bool) -> None:
    """Raise DataError where words were needed and lost; where they were lost alone, say so."""
    out.flush()
    if out.lost is not None:
        message = f"What it says could not be written: {out.lost.strerror}."
        if needed:
            raise DataError(message)
        print(f"{message} Its work went on.", file=sys.stderr)


@contextlib.contextmanager
def _without_traceback(stopping: Stopping | None) -> Iterator[None]:
    try:
        yield
    except SaejaxError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt as error:
        _end(error.number if isinstance(error, Stopped) else signal.SIGINT)
    except BrokenPipeError:  # its reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if stopping is not None and stopping.number is not None:  # a library made this of the signal's exception
            _end(stopping.number)
        if isinstance(error, OSError) and error.filename is not None and error.errno in _OF_THE_DISK:
            remedy = "free some space, mend its rights or choose another place"
            print(f"error: {error.filename}: {error.strerror}; {remedy}.", file=sys.stderr)
            sys.exit(DataError.exit_code)
        raise


# What a disk or its rights refuse is no mistake of ours, wherever it comes.
_OF_THE_DISK = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG),
)


def _end(number: int) -> NoReturn:
    """End the process at once, after a signal that came at any moment; the contexts have put everything away.

    At the interpreter's own end JAX takes down devices that still compute: three of four ended with SIGSEGV (0.10.2).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    by_user = number == signal.SIGINT
    reason = "interrupted" if by_user else f"stopped by {signal.Signals(number).name}"
    print(f"\n{reason}; the same command continues where it was", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130 if by_user else EXIT_PREEMPTED)


def _parse_and_run(command: type[Command], argv: list[str], help_code: int, text: str) -> None:
    made = define_flags(command)
    arguments = _arguments(argv)
    wants_help = bool(_HELP & arguments.keys())
    takes_config = command.takes == "config"
    takes_config |= command.takes == "either" and any(name.partition(".")[0] == _FLAG for name in arguments)
    if takes_config and not wants_help:
        argv = _with_config_file(argv)
    config = None
    if command.takes != "words":
        config = config_flags.DEFINE_config_file(_FLAG, None, _CONFIG_HELP, lock_config=True, sys_argv=argv)
    if wants_help:
        print(command.help(text or command.text(), _CONFIG_HELP))
        sys.exit(help_code)

    def main(argv: list[str]) -> int:
        words = argv[1:]
        if words and command.takes == "config":
            raise ConfigError(
                f"Unexpected argument {words[0]!r}; the experiment is --config=<name or file>, overrides are "
                "--config.a.b=value."
            )
        present = frozenset(flag.name for flag in made if flag.present)
        keep_programs()
        line = Line(None if config is None else config.value, words, present)
        return from_flags(command, made).run(line) or 0

    def parse(argv: list[str]) -> list[str]:
        names = [flag.name for flag in made]
        try:
            return list(flags.FLAGS(argv))
        except Exception as error:  # absl, ml_collections and the config file each raise their own kinds
            if takes_config:
                raise _explained(_arguments(argv), error, [_FLAG, *names]) from error
            if isinstance(error, flags.UnrecognizedFlagError):
                hint = nearest(error.flagname, names) if names else " There are none."
                raise ConfigError(f"Unknown flag --{error.flagname}.{hint}") from error
            raise ConfigError(str(error)) from error

    app.run(main, argv=argv, flags_parser=parse)


_HELP = {"help", "helpshort", "h"}


def _explained(arguments: dict[str, str], error: Exception, names: Sequence[str]) -> Exception:
    """The ConfigError that says what is wrong with the command line. Raises what the experiment's own file raises."""
    if isinstance(error, SaejaxError):
        return error
    if isinstance(error, flags.UnrecognizedFlagError) and not error.flagname.startswith(f"{_FLAG}."):
        return ConfigError(f"Unknown flag --{error.flagname}.{nearest(error.flagname, names)}")
    path, _, preset = arguments[_FLAG].partition(":")
    config = experiments.settings(experiments.load(path), preset)
    for key, value in arguments.items():
        if key.startswith(f"{_FLAG}.") and "[" not in key:
            _check_override(config, key, value)
    return ConfigError(str(error))


def _arguments(argv: Sequence[str]) -> dict[str, str]:
    """{flag: value} of `--flag=value` and `--flag value`, with one dash or two; "" for a flag without value."""
    values: dict[str, str] = {}
    waiting = None
    for word in itertools.takewhile(lambda word: word != "--", argv[1:]):
        # A letter behind the dashes: -1 is a value.
        if match := re.fullmatch(r"--?([A-Za-z_][\w.\[\]]*)(?:(=)(.*))?", word, re.DOTALL):
            values[match[1]] = match[3] or ""
            waiting = None if match[2] else match[1]
        elif waiting is not None:
            values[waiting], waiting = word, None
    return values


def _with_config_file(argv: Sequence[str]) -> list[str]:
    """argv with the path of the experiment's file for what --config names; with the default's where it is not given.

    On the line, since ml_collections reads a flag's default when the flag is made, where a mistake becomes no message.
    """
    out = list(argv)
    has_config = False
    for i, word in enumerate(itertools.takewhile(lambda word: word != "--", argv)):
        match = re.fullmatch(rf"(--?{_FLAG})(=.*)?", word, re.DOTALL)
        if i and match and match[2]:
            out[i] = f"{match[1]}={experiments.find(match[2][1:])}"
        elif i and match:
            if i + 1 == len(argv):
                raise ConfigError(f"--{_FLAG} has no value; name an experiment, as in --{_FLAG}=quickstart.")
            out[i + 1] = experiments.find(argv[i + 1])
        has_config |= bool(i and match)
    return out if has_config else [*out[:1], f"--{_FLAG}={experiments.find(_DEFAULT)}", *out[1:]]


def _check_override(config: config_dict.ConfigDict, key: str, value: str) -> None:
    node: Any = config
    *sections, leaf = key.split(".")[1:]
    for i, name in enumerate([*sections, leaf]):
        if not isinstance(node, config_dict.ConfigDict) or name not in node:
            above = ".".join([_FLAG, *key.split(".")[1 : i + 1]])
            there = list(node) if isinstance(node, config_dict.ConfigDict) else []
            raise ConfigError(f"Unknown key {above}.{name}.{nearest(name, there)}")
        if name is not leaf:
            node = node[name]
    if isinstance(node[leaf], config_dict.ConfigDict):
        raise ConfigError(f"{key} is a section; set one of its keys: {', '.join(node[leaf])}.")
    kind = node.get_type(leaf).__name__
    if kind == "tuple" and value.endswith(","):
        try:
            ast.literal_eval(value)
        except (ValueError, SyntaxError):
            quoted = ",".join(repr(word) for word in value.split(",") if word)
            raise ConfigError(f'{key} is {value!r}; write each element in quotes, as in --{key}="{quoted},".') from None
    fits = kind != "bool" or value.lower() in ("", "true", "false", "1", "0")  # "": a flag without value means true
    try:
        {"int": int, "float": float}.get(kind, str)(value)
    except ValueError:
        fits = False
    if not fits:
        raise ConfigError(f"{key} is {value!r}; it must be {kind} (for example {node[leaf]!r}).")
