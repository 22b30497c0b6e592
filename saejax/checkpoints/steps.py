"""The checkpoints in a directory: which steps are there, which are good, and which have to go.

The folders are the only record. A step counts from its manifest on, and stops to count in one rename.
"""

import re
import shutil
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from saejax.checkpoints import integrity
from saejax.core.errors import DataError

_STEP = re.compile(r"\d{9,}")
_TMP = ".orbax-checkpoint-tmp"
_REMOVED = ".removed"


@dataclass(frozen=True)
class Steps:
    """The step folders of `directory`, which need not be there yet."""

    directory: Path

    def folder(self, step: int) -> Path:
        return self.directory / f"{step:09d}"

    def begun(self) -> list[int]:
        """Steps that have a folder, finished or not, ascending."""
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if _STEP.fullmatch(path.name))

    def finished(self) -> list[int]:
        """Steps that have their manifest, ascending; finished is not verified."""
        return [step for step in self.begun() if (self.folder(step) / integrity.INTEGRITY).is_file()]

    def latest(self) -> int | None:
        return max(self.finished(), default=None)

    def problems(self, step: int, names: Sequence[str] | None = None) -> list[str]:
        """Read every file of a checkpoint (or of the items `names`): one line per problem, none when good."""
        return integrity.problems(self.folder(step), names)

    def require_good(self, step: int, names: Sequence[str]) -> int:
        """`step`, if its items `names` are good; DataError, which names the file, if they are not."""
        problems = self.problems(step, names)
        if problems:
            raise DataError(
                f"checkpoint {step} cannot be restored: {_some(problems)}. Finished steps: {self.finished()}."
            )
        return step

    def latest_good(self, names: Sequence[str]) -> int:
        """The newest step whose items `names` are good, with a warning for each newer one; -1 where there is none.

        Raises DataError where there are checkpoints, but none is good.
        """
        finished = self.finished()
        for step in reversed(self.begun()):
            problems = self.problems(step, names)
            if not problems:
                return step
            earlier = max((s for s in finished if s < step), default=None)
            then = "there is no earlier one" if earlier is None else f"falling back to step {earlier}"
            warnings.warn(f"checkpoint {step} is not usable: {_some(problems)}; {then}.", stacklevel=4)
        if not finished:
            return -1
        raise DataError(
            f"none of the checkpoints in {self.directory} is good (steps {finished}; see the warnings). "
            "Copy one back from elsewhere, or remove the folder to start anew."
        )

    def remove(self, step: int) -> None:
        """Delete a step's folder; it stops being a checkpoint in one rename, whenever we are killed."""
        folder = self.folder(step)
        if folder.exists():
            doomed = folder.with_name(folder.name + _REMOVED)
            shutil.rmtree(doomed, ignore_errors=True)
            folder.rename(doomed)
            shutil.rmtree(doomed)

    def sweep(self) -> None:
        """Delete what killed saves and killed deletions left behind; only while nothing is being written."""
        for path in self.directory.glob("*"):
            if _TMP in path.name or path.name.endswith(_REMOVED):
                shutil.rmtree(path)

    def prune(self, newest: int, last: int, every: int | None, keep: Collection[int]) -> None:
        """Remove steps up to `newest`, but not its `last` ones, multiples of `every` and those of `keep`.

        What is newer is not this run's to remove.
        """
        finished = [step for step in self.finished() if step <= newest]
        for step in finished:
            if step not in {*keep, *finished[-last:]} and not (every and step % every == 0):
                self.remove(step)


def _some(problems: list[str]) -> str:
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return problems[0] + more
