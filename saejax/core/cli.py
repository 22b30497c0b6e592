"""What every launch script shares: `--config` overrides checked, errors as one line, exit codes."""

import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import config_dict, config_flags

from saejax.core.config import nearest
from saejax.core.errors import ConfigError, SaejaxError

_FLAG = "config"


def define_config(default: str = "configs/quickstart.py") -> Any:
    """The `--config=configs/<experiment>.py[:preset]` flag; call it at import time of a launch script."""
    return config_flags.DEFINE_config_file(
        _FLAG, default, "Experiment file, with an optional :preset; --config.a.b=value overrides.", lock_config=True
    )


def run(main: Callable[[], int | None]) -> None:
    """Parse flags, call `main`, exit with its return value.

    A `SaejaxError` is printed without a traceback and exits with its own code (2 for configuration).
    Ctrl-C outside training exits with 130.
    """

    def guarded(argv: list[str]) -> None:
        if len(argv) > 1:
            _fail(ConfigError(f"Unexpected argument {argv[1]!r}; overrides are --config.a.b=value."))
        try:
            code = main()
        except SaejaxError as error:
            _fail(error)
        except KeyboardInterrupt:
            print("\ninterrupted; the same command continues where it was", file=sys.stderr)
            sys.exit(130)
        sys.exit(code or 0)

    # jax announces missing TPU libraries, Orbax each of its steps; neither is news to the user.
    absl_logging.set_verbosity(absl_logging.ERROR)
    for name in ("jax", "orbax", "httpx", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    app.run(guarded, flags_parser=_parse)


def _fail(error: SaejaxError) -> None:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except Exception as error:  # absl, ml_collections and the config file each raise their own kinds
        try:
            _explain(argv, error)
        except SaejaxError as explained:
            _fail(explained)
        raise


def _explain(argv: list[str], error: Exception) -> None:
    """Raise the ConfigError that says what is wrong with the command line."""
    if isinstance(error, SaejaxError):
        raise error
    arguments = dict(_split(a) for a in argv[1:] if a.startswith("--"))
    path, _, preset = arguments.get(_FLAG, flags.FLAGS[_FLAG].default).partition(":")
    config = _load_config_file(Path(path), preset)
    for key, value in arguments.items():
        if key.startswith(f"{_FLAG}."):
            _check_override(config, key, value)
    if isinstance(error, flags.UnrecognizedFlagError):
        known = [name for name in flags.FLAGS if len(name) > 1]
        raise ConfigError(f"Unknown flag --{error.flagname}.{nearest(error.flagname, known)}")
    raise ConfigError(str(error))


def _split(argument: str) -> tuple[str, str]:
    key, _, value = argument[2:].partition("=")
    return key, value


def _load_config_file(path: Path, preset: str) -> config_dict.ConfigDict:
    if not path.is_file():
        there = sorted(str(p) for p in Path("configs").glob("*.py") if not p.name.startswith("_"))
        raise ConfigError(f"No config file {str(path)!r}.{nearest(str(path), there)}")
    spec = importlib.util.spec_from_file_location("_saejax_config", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(preset) if preset else module.get_config()


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
    kind = node.get_type(leaf).__name__
    try:
        fits = _parses(kind, value)
    except ValueError:
        fits = False
    if not fits:
        raise ConfigError(f"{key} is {value!r}; it must be {kind} (for example {node[leaf]!r}).")


def _parses(kind: str, value: str) -> bool:
    if kind == "bool":
        return value.lower() in ("true", "false", "1", "0")
    if kind in ("int", "float"):
        {"int": int, "float": float}[kind](value)
    return kind != "ConfigDict"
