"""A server ends by each signal that ends any command, and says so by its exit code."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from tiny.commands import run_command
from tiny.signalled import late

from saejax.core.stopping import SIGNALS, Stopped, Stopping
from saejax.serve import server


@pytest.mark.parametrize("number", SIGNALS)
def test_it_answers_to_its_end_and_the_signal_goes_on(number: signal.Signals) -> None:
    """Raised among the callbacks of the event loop, a signal's exception was a traceback."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        os.kill(os.getpid(), number)
        await receive()

    answering = server.Server(uvicorn.Config(application, lifespan="on", port=0, log_level="critical"))
    with pytest.raises(Stopped) as caught, Stopping(), answering.capture_signals():
        asyncio.run(application({}, lambda: asyncio.sleep(0), None))
        assert answering.should_exit
    assert caught.value.number == number


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)])
def test_ctrl_c_is_its_end_and_other_signals_end_the_command(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serving(*_: Any, **__: Any) -> None:
        late(number)  # lost in a finalizer
        while True:
            pass

    monkeypatch.setattr(server, "serve", serving)
    monkeypatch.setattr("saejax.core.stopping._LOOK_SECONDS", 0.01)
    monkeypatch.setattr("os.environ", dict(os.environ))
    ended = 75
    try:
        with Stopping():
            ended = run_command("serve", runs=str(tmp_path / "runs"), stores=str(tmp_path / "stores"))
    except Stopped as stopped:
        assert stopped.number == number
    assert ended == code
