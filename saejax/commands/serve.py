"""Show runs, stores, features and jobs live on one local page, with the API behind it.

    saejax serve                                   runs/ and stores/ of the current folder
    saejax serve --runs=/big/runs --stores=/big/stores --data=/big/activations
    saejax serve --dictionaries=gemma=downloads/layer_20 --experiments=mine.py

Prints the address of the page. It can be reached from this machine alone; elsewhere use an SSH tunnel, or --host with
the token that the printed link carries. Trainings that are started from the page are processes of their own: they go
on when the server ends. Needs the extra serve.
"""

import contextlib
import ipaddress
import os
import resource
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from saejax.app.command import Command, Line
from saejax.core.errors import ConfigError
from saejax.core.extras import installing
from saejax.core.files import write_json, writing
from saejax.core.lease import lease
from saejax.core.settings import setting

_PORT = 8765
_PORTS = 20
# Told to JAX in this process and not to its jobs: a model that answers questions leaves the accelerator to trainings.
_OWN_ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


class Serve(Command, takes="words"):
    runs: str = setting("runs", "The folder of all runs.")
    stores: str = setting("stores", "The folder of all stores.")
    data: tuple[str, ...] = setting((), "More folders whose activations and texts a training may read.")
    dictionaries: tuple[str, ...] = setting((), "Other dictionaries to show: folder, or label=folder.")
    experiments: tuple[str, ...] = setting((), "Experiment files to offer besides the shipped ones.")
    host: str = setting("127.0.0.1", "The address to listen on.")
    port: int = setting(0, "The port; 0 takes the first free one from 8765.", low=0, high=65535)
    names: tuple[str, ...] = setting((), "Other names by which browsers may call this server.")
    token: bool = setting(False, "Ask for the token on this machine too, as others share it.")
    jobs: int = setting(1, "Jobs that run at a time; others wait.", low=1)

    def run(self, line: Line) -> int:
        from saejax.app.console import say
        from saejax.core.stopping import until_ctrl_c

        line.refuse_words("folders are named by flags, as in --runs=runs.")
        site = self.site()
        try:
            from saejax.serve.server import serve
        except ImportError as error:
            raise ConfigError(f"The page needs {error.name}: {installing('serve')}") from None
        with lease(site.folders.own), _listening(self.host, self.port) as (listener, loopback):
            token = "" if loopback and not self.token else _server_token(site.folders.own)
            url = _url(listener, self.host)
            write_json(site.folders.own / "server.json", {"url": url, "pid": os.getpid()})
            _raise_limit()
            say(f"saejax serve: {url}" + (f"?token={token}" if token else ""))
            say(f"  runs {site.folders.runs}, stores {site.folders.stores}; Ctrl-C ends it, jobs go on")
            environment = dict(os.environ)
            os.environ.update(_OWN_ENVIRONMENT)
            with until_ctrl_c():
                serve(site, listener, self.names, token, everywhere=not loopback, environment=environment)
        say("serve: ended; jobs that run go on, and the next `saejax serve` finds them")
        return 0

    def site(self) -> Any:
        """The `Site` that the server may show.

        Raises:
            ConfigError: a folder or an experiment that is not there.
        """
        from saejax.app import experiments
        from saejax.commands import COMMANDS
        from saejax.serve.site import Folders, Site

        if "://" in self.stores:
            raise ConfigError(f"--stores={self.stores}: the page shows stores of local folders; mount the bucket.")
        runs = Path(self.runs)
        with writing(runs):
            runs.mkdir(parents=True, exist_ok=True)
        dictionaries = {}
        for word in self.dictionaries:
            label, labelled, place = word.partition("=")
            path = Path(place if labelled else label)
            if not path.exists():
                raise ConfigError(f"--dictionaries={word}: there is nothing at {path}.")
            dictionaries[label if labelled else path.resolve().name] = path
        for word in self.data:
            if not Path(word).is_dir():
                raise ConfigError(f"--data={word}: there is no such folder.")
        for word in self.experiments:
            if not Path(word).is_file():
                raise ConfigError(f"--experiments={word}: there is no such file.")
        shipped = {name: experiments.folder() / f"{name}.py" for name in experiments.names()}
        listed = {Path(word).stem: Path(word).resolve() for word in self.experiments}
        folders = Folders(runs, Path(self.stores), tuple(map(Path, self.data)), dictionaries)
        offered = {name: command.summary() for name, command in COMMANDS.items() if command.on_page}
        return Site(folders, shipped | listed, offered, self.jobs)


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[tuple[socket.socket, bool]]:
    """(a socket that listens, whether only this machine can reach it); without a port the first free one from 8765.

    Raises:
        ConfigError: no such address here, or the port is taken.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host={host} is no address of this machine ({error}).") from None
    with contextlib.ExitStack() as held:
        listener = held.enter_context(contextlib.closing(socket.socket(family, socket.SOCK_STREAM)))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        ports = [port] if port else range(_PORT, _PORT + _PORTS)
        for candidate in ports:
            try:
                listener.bind((address[0], candidate))
                break
            except OSError as error:
                why = error
        else:
            raise ConfigError(f"--host={host}: port {ports[0]} cannot be had ({why.strerror}). Give another --port.")
        yield listener, ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback


def _url(listener: socket.socket, host: str) -> str:
    port = listener.getsockname()[1]
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/"


def _server_token(folder: Path) -> str:
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
