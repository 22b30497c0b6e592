"""Weights & Biases beside metrics.jsonl: one of its runs for a training, and for each member of a sweep."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from saejax.core.errors import ConfigError

T = TypeVar("T")

_PROJECT = "saejax"
# Seconds that the end of a training waits for the last rows to go out; WANDB_FINISH_TIMEOUT sets others.
_FINISH_SECONDS = 30.0


def refuse_no_login() -> None:
    """Raise ConfigError where wandb would have to ask for an API key; offline it needs none."""
    import wandb

    try:
        offline = wandb.setup().settings.mode in ("offline", "disabled", "dryrun")
        known = offline or wandb.run is not None or wandb.login(prompt=False)
    except Exception:  # no network, say; the training tells it and goes on
        return
    if not known:
        raise ConfigError(
            "train.wandb=True needs an API key: run `wandb login`, or set WANDB_API_KEY; or set WANDB_MODE=offline."
        )


class WandbRuns:
    """The runs of one training or sweep. The first failure is told in one line, and then nothing more is sent.

    As a context: what is raised within makes them runs that failed. Writers are closed after it.
    """

    def __init__(self, tell: Callable[[str], None]):
        self._tell, self._failed, self._opened = tell, False, False
        self.exit_code = 0

    def __enter__(self) -> None:
        """Nothing is opened here."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.exit_code = int(kind is not None)

    def open(self, folder: Path | None, identity: str | None, **about: Any) -> "WandbWriter":
        """A writer into the run of this id, begun or continued; without one into a new run.

        Args:
            folder: in which wandb makes its own; None for the current one.
            about: name, group, config of `wandb.init`.
        """

        def begin() -> Any:
            import wandb

            finish = {} if "WANDB_FINISH_TIMEOUT" in os.environ else {"finish_timeout": _FINISH_SECONDS}
            settings = wandb.Settings(console="off", silent=True, finish_timeout_raises=True, **finish)
            project = os.environ.get("WANDB_PROJECT", _PROJECT)
            about.update(project=project, dir=folder and str(folder), id=identity, resume="allow", settings=settings)
            return wandb.init(reinit="create_new", **about)

        run = self.tried(begin)
        if run is not None and not run.disabled and not self._opened:
            self._opened = True
            place = f"offline; `wandb sync {Path(run.dir).parent}` sends it" if run.offline else run.url
            self._tell(f"train: Weights & Biases: {place}")
        return WandbWriter(self, run)

    def tried(self, action: Callable[[], T]) -> T | None:
        """The result of `action`; None where it fails, or one before it did."""
        if self._failed:
            return None
        try:
            return action()
        except Exception as error:
            self._failed = True
            why = " ".join(str(error).split())[:300] or type(error).__name__
            self._tell(f"warning: Weights & Biases has failed and gets no more rows, metrics.jsonl has them all: {why}")
            return None


class WandbWriter:
    """Rows of metrics.jsonl, as one run of Weights & Biases takes them."""

    def __init__(self, runs: WandbRuns, run: Any):
        self._runs, self._run = runs, run

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self._runs.tried(lambda: self._run.log(dict(row), step=step))

    def close(self) -> None:
        self._runs.tried(lambda: self._run.finish(exit_code=self._runs.exit_code))
