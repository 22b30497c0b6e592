"""What is said is not the work: a log whose disk is full, a stream that is closed, a reader that has gone."""

import errno
import io
import os
import subprocess
import sys

import pytest

from saejax.app.cli import guarded
from saejax.core.streams import Spoken, spoken


class Full(io.StringIO):
    """A disk without room, for a while."""

    full = True

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_words_that_a_full_disk_does_not_take_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Full()
    monkeypatch.setattr("sys.stdout", full)
    monkeypatch.setattr("sys.stderr", full)
    with spoken() as out:
        print("lost", flush=True)
        print("lost", file=sys.stderr, flush=True)
        sys.stdout.writelines(["lost", "too"])
        full.full = False
        print("kept", flush=True)
        assert sys.stdout.isatty() is False and out.lost is not None and out.lost.errno == errno.ENOSPC
    assert full.getvalue() == "kept\n" and sys.stdout is full


def test_a_reader_that_has_gone_is_told() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        Spoken(Gone()).write("x")


@pytest.mark.parametrize(("answers", "code"), [(True, 1), (False, 0)])
def test_a_command_whose_words_are_lost_has_failed_where_they_are_its_work(
    answers: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", Full())
    with pytest.raises(SystemExit) as ended, guarded(answers=answers):
        print("a table", flush=True)
        sys.exit(0)
    assert (ended.value.code or 0) == code
    said = capsys.readouterr().err
    assert "What it says could not be written: No space left on device." in said and said.count("\n") == 1


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.ENOSPC])
def test_what_a_disk_refuses_is_one_line_wherever_it_comes(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, guarded():
        raise OSError(number, os.strerror(number), "some/folder")
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: some/folder: {os.strerror(number)}; ") and said.count("\n") == 1
    with pytest.raises(OSError, match="our own"), guarded():
        raise OSError(errno.EBADF, "our own mistake")


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("version > /dev/full", 1, "error: What it says could not be written: No space left on device.\n"),
        ("formats > /dev/full", 1, "error: What it says could not be written: No space left on device.\n"),
        ("formats >&-", 0, ""),
        ("formats > /dev/null 2>&- <&-", 0, ""),
    ],
)
def test_commands_on_a_full_disk_and_on_closed_streams(line: str, code: int, said: str) -> None:
    words = ["sh", "-c", f'"$0" -m saejax {line}', sys.executable]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (code, said)
