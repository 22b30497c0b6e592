"""Slurm's word of jobs: squeue of those in the queue, of others sacct, or scontrol where sacct keeps no accounts."""

import dataclasses
import re
import subprocess
from collections.abc import Mapping, Sequence

from saejax.core.errors import DataError
from saejax.jobs.site import clock_seconds

_ANSWERS_WITHIN = 60
_MEMORY = re.compile(r"([\d.]+)([KMGTP]?)")
_FACTOR = {unit: 1024**power for power, unit in enumerate(("", "K", "M", "G", "T", "P"))}
_SACCT = ("JobID", "State", "ExitCode", "ElapsedRaw", "MaxRSS", "NodeList", "TotalCPU")


@dataclasses.dataclass(frozen=True)
class Seen:
    """State of one job, or of one task of an array, by Slurm.

    Attributes:
        state: in Slurm's words, as RUNNING.
        code: exit code, where it ended.
        reason: why it waits.
        seconds: of its last start; None where nobody says.
    """

    state: str
    code: int | None = None
    reason: str = ""
    seconds: float | None = None
    max_rss_bytes: int | None = None
    nodes: str = ""
    source: str = "squeue"


def seen(ids: Mapping[str, tuple[str, int]]) -> dict[str, Seen]:
    """{label: what is known} of {label: (id of the job, its number in the array or -1)}.

    Raises:
        DataError: squeue is not there, or does not answer.
    """
    numbers = list(dict.fromkeys(number for number, _ in ids.values()))
    if not numbers:
        return {}
    known = (_accounted(numbers) or _remembered(numbers)) | _queued(numbers)
    keys = {label: number if at < 0 else f"{number}_{at}" for label, (number, at) in ids.items()}
    return {label: known[key] for label, key in keys.items() if key in known}


def cancel(ids: Sequence[str]) -> None:
    """Cancel jobs; those that ended stay as they are.

    Raises:
        DataError: scancel is not there, or refuses.
    """
    code, answer = _ask("scancel", "--quiet", *ids)
    if code:
        raise DataError(f"scancel refuses: {answer.strip()}")


def accounting() -> str:
    """Empty where sacct answers, else what it says."""
    try:
        code, answer = _ask("sacct", "--noheader", "--format=JobID", "--starttime=now")
    except DataError as error:
        return str(error)
    return " ".join(answer.split()) or "sacct fails" if code else ""


def _queued(numbers: Sequence[str]) -> dict[str, Seen]:
    # -r: each task of an array in a line of its own. A job that ended and is forgotten makes squeue fail.
    code, answer = _ask("squeue", "-h", "-r", "-o", "%i|%T|%r|%N", "--me")
    if code:
        raise DataError(f"squeue does not answer: {answer.strip()}")
    queued = {}
    for line in answer.splitlines():
        key, state, reason, nodes = [*line.split("|"), "", "", ""][:4]
        if key.partition("_")[0] in numbers:
            queued[key] = Seen(state, reason="" if reason == "None" else reason, nodes=nodes)
    return queued


def _accounted(numbers: Sequence[str]) -> dict[str, Seen]:
    """Accounts of sacct; nothing where it keeps none."""
    code, answer = _ask("sacct", "-P", "-n", "-j", ",".join(numbers), f"--format={','.join(_SACCT)}")
    if code:
        return {}
    accounts: dict[str, Seen] = {}
    for line in answer.splitlines():
        fields = line.split("|")
        if len(fields) != len(_SACCT):
            continue
        key, step = fields[0].partition(".")[::2]
        if not step:
            state = fields[1].split(" ")[0]  # CANCELLED by 1000
            seconds = float(fields[3]) if fields[3].isdecimal() else None
            accounts[key] = Seen(state, _code(fields[2]), "", seconds, None, fields[5], "sacct")
        elif key in accounts and (memory := _MEMORY.fullmatch(fields[4])):
            most = max(int(float(memory[1]) * _FACTOR[memory[2]]), accounts[key].max_rss_bytes or 0)
            accounts[key] = dataclasses.replace(accounts[key], max_rss_bytes=most)
    return accounts


def _remembered(numbers: Sequence[str]) -> dict[str, Seen]:
    """Memory of the controller, which forgets jobs some minutes after their end."""
    remembered: dict[str, Seen] = {}
    for number in numbers:
        code, answer = _ask("scontrol", "-o", "show", "job", number)
        for line in answer.splitlines() if not code else ():
            fields: dict[str, str] = dict(re.findall(r"(\w+)=(\S*)", line))
            at = fields.get("ArrayTaskId", "")
            owner = fields.get("ArrayJobId") or fields.get("JobId", "")
            if fields.get("JobState") and (not at or at.isdecimal()):
                remembered[f"{owner}_{at}" if at else owner] = Seen(
                    fields["JobState"],
                    _code(fields.get("ExitCode", "")),
                    fields.get("Reason", "").replace("None", ""),
                    clock_seconds(fields.get("RunTime", "")),
                    nodes=fields.get("NodeList", "").replace("(null)", ""),
                    source="scontrol",
                )
    return remembered


def _ask(*words: str) -> tuple[int, str]:
    """(exit code, what it said)."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_ANSWERS_WITHIN, check=False)
    except FileNotFoundError:
        raise DataError(f"{words[0]} is not here: run this on a machine of the cluster.") from None
    except subprocess.TimeoutExpired:
        raise DataError(f"{words[0]} has not answered for {_ANSWERS_WITHIN} s; try again.") from None
    return done.returncode, done.stdout if not done.returncode else done.stderr or done.stdout


def _code(text: str) -> int | None:
    """Of code:signal, as a shell has it."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    return None if match is None else int(match[1]) or (128 + int(match[2]) if int(match[2]) else 0)
