"""A Slurm of its own: munged, slurmctld and two slurmd on this machine, over loopback, in one folder.

Needs root and Debian's packages slurm-wlm and munge. Nothing of the system's own Slurm or munge is touched: keys,
sockets, ports, logs and state are in the folder. Stopping ends the daemons that were started, by their ids.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
NODES = ("n1", "n2")

_CONF = """\
ClusterName=saejax
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
# A job that goes back into the queue waits for its credential to end: two minutes, if nothing is said.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
# A node that does not answer for so long is down, and its jobs go back into the queue.
SlurmdTimeout=10
SchedulerParameters=sched_interval=5,bf_interval=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=4000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why no Slurm can be started here; empty where it can."""
    absent = [name for name in NEEDED if not shutil.which(name, path=_path())]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "its daemons need root"


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


class Cluster:
    """Two nodes that run. `environment` is what a command of Slurm needs to find it."""

    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Raises RuntimeError when the nodes are not idle in half a minute."""
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(1024))
        conf = _CONF.format(folder=self.folder, host=socket.gethostname().split(".")[0], ports=free_ports(3))
        (self.folder / "slurm.conf").write_text(conf)
        own = {name: self.folder / f"munge.{name}" for name in ("socket", "log", "seed", "pid")}
        self._run(
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={own['socket']}"),
            *(f"--pid-file={own['pid']}", f"--log-file={own['log']}", f"--seed-file={own['seed']}"),
        )
        self._wait(own["socket"].exists)
        self._run("slurmctld", "-D")
        for node in NODES:
            self._run("slurmd", "-D", "-N", node)
        self._wait(lambda: self.ask("sinfo", "-h", "-N", "-o", "%T").split() == ["idle", "idle"])

    def stop(self) -> None:
        """End the daemons, the newest first."""
        for name in reversed(list(self._daemons)):
            process = self._daemons.pop(name)
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill_node(self, node: str) -> None:
        """A node goes at once: its daemon, its jobs' steps and all that they run."""
        daemon = self._daemons.pop(f"slurmd {node}")
        steps = _steps(node)
        inside = _below(daemon.pid) | {pid for step in steps for pid in _below(step)}
        # Nothing on it may tell of another's end: all stand still before any of them goes.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in (daemon.pid, *steps, *inside):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        daemon.wait()

    def ask(self, *words: str) -> str:
        """What a command says; empty where it fails."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        return "" if done.returncode else done.stdout

    def _run(self, *words: str) -> None:
        name = f"{words[0]} {words[-1]}" if words[0] == "slurmd" else words[0]
        with (self.folder / f"{name.replace(' ', '.')}.out").open("wb") as out:
            self._daemons[name] = subprocess.Popen(
                words, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )

    def _wait(self, true: Callable[[], object], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                raise RuntimeError(f"Slurm does not come up; its logs are in {self.folder}.")
            time.sleep(0.2)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A cluster in a folder, stopped at the end."""
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        # The steps of jobs are no children of the daemons, and would stay.
        cluster.ask("scancel", "--quiet", "--user=root")
        with contextlib.suppress(RuntimeError):
            cluster._wait(lambda: not cluster.ask("squeue", "-h"), 45)
        cluster.stop()


def free_ports(n: int) -> list[int]:
    """Ports of loopback that nobody has now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _steps(node: str) -> set[int]:
    """The step daemons of a node: they are no children of its slurmd."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(b"slurmstepd:") and f"SLURMD_NODENAME={node}" in _variables(path.parent):
                found.add(int(path.parent.name))
    return found


def _variables(process: Path) -> str:
    with contextlib.suppress(OSError):
        own = (process / "environ").read_bytes()
        children = [(Path("/proc") / str(pid) / "environ").read_bytes() for pid in _below(int(process.name))]
        return b"\0".join([own, *children]).decode(errors="replace")
    return ""


def _below(pid: int) -> set[int]:
    """All descendants of a process."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}
