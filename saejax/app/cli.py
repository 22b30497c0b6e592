"""What every launch script shares: `--config` overrides checked, errors as one line, exit codes."""

import importlib.util
import itertools
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import config_dict, config_flags

from saejax.core.config import nearest
from saejax.core.errors import EXIT_PREEMPTED, ConfigError, SaejaxError

_FLAG = "config"
_DEFAULT = "configs/quickstart.py"


def define_config() -> Any:
    """The `--config=configs/<experiment>.py[:preset]` flag; call it at import time of a launch script.

    Without the flag, `run` puts the default on the command line: ml_collections would read a default, and the
    overrides of it, here already, where nothing turns a mistake into a message.
    """
    text = f"Experiment file, with an optional :preset ({_DEFAULT} if not given); --config.a.b=value overrides."
    holder = config_flags.DEFINE_config_file(_FLAG, None, text, lock_config=True)
    # --help shows the flags of the script alone, and this one is defined here.
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[_FLAG])
    return holder


def run(main: Callable[[], int | None]) -> None:
    """Parse flags, call `main`, exit with its return value.

    A `SaejaxError` is printed without a traceback and exits with its own code (2 for configuration).
    Outside training Ctrl-C exits with 130; SIGTERM and SIGUSR1 with 75, as they do in it.
    """

    def without_words(words: list[str]) -> int | None:
        if words:
            raise ConfigError(f"Unexpected argument {words[0]!r}; overrides are --config.a.b=value.")
        return main()

    if _FLAG not in _arguments(sys.argv):
        sys.argv.insert(1, f"--{_FLAG}={_DEFAULT}")
    _run(without_words, _parse)


def run_words(main: Callable[[list[str]], int | None]) -> None:
    """As `run`, for a script without --config: `main` gets the words of the command line that are no flags."""
    _run(main, _parse_words)


def run_words_or_config(main: Callable[[list[str]], int | None]) -> None:
    """As `run_words`, for a script that takes --config too; the default is for overrides without a --config alone."""
    given = _arguments(sys.argv)
    if not any(name.partition(".")[0] == _FLAG for name in given):
        return run_words(main)
    if _FLAG not in given:
        sys.argv.insert(1, f"--{_FLAG}={_DEFAULT}")
    return _run(main, _parse)


def _run(main: Callable[[list[str]], int | None], parse: Callable[[list[str]], list[str]]) -> None:
    def guarded(argv: list[str]) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, _stop)
        try:
            code = main(argv[1:])
        except SaejaxError as error:
            _fail(error)
        except KeyboardInterrupt:
            print("\ninterrupted; the same command continues where it was", file=sys.stderr)
            sys.exit(130)
        except _Stopped as stopped:
            print(f"\nstopped by {stopped}; the same command continues where it was", file=sys.stderr)
            sys.exit(EXIT_PREEMPTED)
        sys.exit(code or 0)

    # jax announces missing TPU libraries, Orbax each of its steps; neither is news to the user.
    absl_logging.set_verbosity(absl_logging.ERROR)
    for name in ("jax", "orbax", "httpx", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    app.run(guarded, flags_parser=parse)


class _Stopped(BaseException):
    """A scheduler's signal, outside training, which has its own way to end. Not an Exception: nobody handles it."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped(signal.Signals(number).name)


def _fail(error: SaejaxError) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)


def _parse(argv: list[str]) -> list[str]:
    arguments = _arguments(argv)
    try:
        rest = flags.FLAGS(argv)
    except Exception as error:  # absl, ml_collections and the config file each raise their own kinds
        try:
            _explain(arguments, error)
        except SaejaxError as explained:
            _fail(explained)
        raise
    # A missing file is no error to ml_collections until its content is asked for.
    path = arguments[_FLAG].partition(":")[0]
    if not Path(path).is_file():
        _fail(_no_config_file(path))
    return rest


def _parse_words(argv: list[str]) -> list[str]:
    try:
        return list(flags.FLAGS(argv))
    except flags.UnrecognizedFlagError as error:
        own = [flag.name for flag in flags.FLAGS.get_key_flags_for_module(argv[0])]
        _fail(ConfigError(f"Unknown flag --{error.flagname}.{nearest(error.flagname, own)}"))
    except flags.Error as error:
        _fail(ConfigError(str(error)))


def _explain(arguments: dict[str, str], error: Exception) -> None:
    """Raise the ConfigError that says what is wrong with the command line."""
    if isinstance(error, SaejaxError):
        raise error
    if isinstance(error, flags.UnrecognizedFlagError) and not error.flagname.startswith(f"{_FLAG}."):
        known = [name for name in flags.FLAGS if len(name) > 1]
        raise ConfigError(f"Unknown flag --{error.flagname}.{nearest(error.flagname, known)}")
    path, _, preset = arguments[_FLAG].partition(":")
    config = _load_config_file(path, preset)
    for key, value in arguments.items():
        if key.startswith(f"{_FLAG}.") and "[" not in key:
            _check_override(config, key, value)
    raise ConfigError(str(error))


def _arguments(argv: list[str]) -> dict[str, str]:
    """{flag: value} of `--flag=value` and `--flag value`, with one dash or two; "" for a flag without value."""
    found: dict[str, str] = {}
    waiting = None
    for word in itertools.takewhile(lambda word: word != "--", argv[1:]):
        # A letter behind the dashes: -1 is a value.
        if match := re.fullmatch(r"--?([A-Za-z_][\w.\[\]]*)(?:(=)(.*))?", word, re.DOTALL):
            found[match[1]] = match[3] or ""
            waiting = None if match[2] else match[1]
        elif waiting is not None:
            found[waiting], waiting = word, None
    return found


def _load_config_file(path: str, preset: str) -> config_dict.ConfigDict:
    if not Path(path).is_file():
        raise _no_config_file(path)
    spec = importlib.util.spec_from_file_location("_saejax_config", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file; give one such as {_DEFAULT}.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(preset) if preset else module.get_config()


def _no_config_file(path: str) -> ConfigError:
    there = sorted(str(p) for p in Path("configs").glob("*.py") if not p.name.startswith("_"))
    hint = nearest(path, there) if there else " Run this in the folder that holds configs/, or give --config=<file>."
    return ConfigError(f"No config file {path!r}.{hint}")


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
    try:
        fits = _parses(kind, value)
    except ValueError:
        fits = False
    if not fits:
        raise ConfigError(f"{key} is {value!r}; it must be {kind} (for example {node[leaf]!r}).")


def _parses(kind: str, value: str) -> bool:
    if kind == "bool":
        return value.lower() in ("", "true", "false", "1", "0")  # "": a flag without value means true
    if kind in ("int", "float"):
        {"int": int, "float": float}[kind](value)
    return True
