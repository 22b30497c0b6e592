"""`saejax serve`: the page of a laboratory's runs, on this machine."""

import contextlib
import ipaddress
import os
import resource
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from saejax.app import experiments
from saejax.app.console import say
from saejax.core.errors import ConfigError
from saejax.core.files import write_json, writing
from saejax.core.lease import lease
from saejax.core.stopping import until_ctrl_c
from saejax.serve.folders import Folders
from saejax.serve.site import Site

PORT = 8765
_PORTS = 20
_MISSING = "The page needs FastAPI, uvicorn and websockets: pip install 'saejax[serve]'"
# Told to JAX in this process and not to its jobs: a model that answers questions leaves the accelerator to trainings.
OWN_ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def run_serve(words: Sequence[str], flags: Mapping[str, Any]) -> int:
    """Serve until a signal comes. Returns 0 after Ctrl-C.

    Raises:
        ConfigError: folders, experiments, a port or an address that cannot be; or the extra is not installed.
        BusyError: another server shows this folder.
    """
    if words:
        raise ConfigError(f"Unexpected argument {words[0]!r}; folders are named by flags, as in --runs=runs.")
    site = site_of(flags)
    try:
        from saejax.serve.server import serve
    except ImportError as error:
        raise ConfigError(f"{_MISSING} ({error.name} is missing)") from None
    names = tuple(flags["names"])
    with lease(site.folders.own), _listening(flags["host"], flags["port"]) as (listener, loopback):
        token = "" if loopback and not flags["token"] else _token(site.folders.own)
        url = _url(listener, flags["host"]) + (f"?token={token}" if token else "")
        write_json(site.folders.own / "server.json", {"url": _url(listener, flags["host"]), "pid": os.getpid()})
        _raise_limit()
        say(f"saejax serve: {url}")
        say(f"  runs {site.folders.runs}, stores {site.folders.stores}; Ctrl-C ends it, jobs go on")
        environment = dict(os.environ)
        os.environ.update(OWN_ENVIRONMENT)
        with until_ctrl_c():
            serve(site, listener, names, token, everywhere=not loopback, environment=environment)
    say("serve: ended; jobs that run go on, and the next `saejax serve` finds them")
    return 0


def site_of(flags: Mapping[str, Any]) -> Site:
    """What the flags let the server show.

    Raises:
        ConfigError: a folder or an experiment that is not there.
    """
    if "://" in flags["stores"]:
        raise ConfigError(f"--stores={flags['stores']}: the page shows stores of local folders; mount the bucket.")
    runs, stores = Path(flags["runs"]), Path(flags["stores"])
    with writing(runs):
        runs.mkdir(parents=True, exist_ok=True)
    dictionaries = {}
    for word in flags["dictionaries"]:
        label, given, place = word.partition("=")
        path = Path(place if given else label)
        if not path.exists():
            raise ConfigError(f"--dictionaries={word}: there is nothing at {path}.")
        dictionaries[label if given else path.resolve().name] = path
    for word in flags["data"]:
        if not Path(word).is_dir():
            raise ConfigError(f"--data={word}: there is no such folder.")
    folders = Folders(runs, stores, tuple(map(Path, flags["data"])), dictionaries)
    return Site(folders, _experiments(flags["experiments"]), flags["jobs"])


def _experiments(files: Sequence[str]) -> dict[str, Path]:
    shipped = {name: experiments.folder() / f"{name}.py" for name in experiments.names()}
    for word in files:
        if not Path(word).is_file():
            raise ConfigError(f"--experiments={word}: there is no such file.")
    return shipped | {Path(word).stem: Path(word).resolve() for word in files}


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[tuple[socket.socket, bool]]:
    """(a socket that listens, whether only this machine can reach it); without a port the first free one from PORT.

    Raises:
        ConfigError: no such address here, or the port is taken.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host={host} is no address of this machine ({error}).") from None
    family, address = found[0], found[4][0]
    with contextlib.ExitStack() as held:
        listener = held.enter_context(contextlib.closing(socket.socket(family, socket.SOCK_STREAM)))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        ports = [port] if port else range(PORT, PORT + _PORTS)
        for one in ports:
            try:
                listener.bind((address, one))
                break
            except OSError as error:
                why = error
        else:
            raise ConfigError(f"--host={host}: port {ports[0]} cannot be had ({why.strerror}). Give another --port.")
        yield listener, ipaddress.ip_address(str(address).partition("%")[0]).is_loopback


def _url(listener: socket.socket, host: str) -> str:
    port = listener.getsockname()[1]
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/"


def _token(folder: Path) -> str:
    """The same for every server of this folder, so that a link stays good; readable by its owner alone."""
    path = folder / "token"
    if path.is_file() and (known := path.read_text().strip()):
        return known
    token = secrets.token_urlsafe(24)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    path.write_text(token)
    return token


def _raise_limit() -> None:
    """As many open files as the system allows: pages of a whole group are open all day."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
