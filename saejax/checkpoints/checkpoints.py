"""Named trees of arrays to disk and back, knowing nothing of training.

A checkpoint is a folder `<directory>/<step, nine digits>/` in Orbax's Composite layout (any Orbax reads
it) plus `integrity.json` (`saejax.checkpoints.integrity`), which is written last. It is taken in the
background, restored onto any devices, and never trusted unverified.

Orbax's AsyncCheckpointer is used without its CheckpointManager: the manager counts a step as saved
before any manifest can be written (its post_finalization_callback runs before the final rename), keeps
its own list of steps, and deletes by it. Here the folder is the only record.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import threading
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from saejax.checkpoints import integrity, reading
from saejax.core.errors import ConfigError, DataError
from saejax.core.lease import lease
from saejax.parallel import any_of, from_first, together

_STEP = re.compile(r"\d{9,}")
_TMP = ".orbax-checkpoint-tmp"
_REMOVED = ".removed"


class Checkpoints:
    """Checkpoints of one run, in one local folder: `save` in the background, `restore` verified.

    One save is in flight at a time. After a kill at any moment every finished checkpoint is still there
    and at most the one in flight is lost. With several JAX processes all of them call `save`, `wait`, `close`,
    `restore` and `restore_latest` alike on a shared file system; process 0 does the bookkeeping and the verifying, and
    a save that failed in one fails in all.

    Args:
        directory: created by the first save.
        keep_last: how many of the newest checkpoints to keep, at least 1.
        keep_every: also keep every step that is a multiple of this.
        background: False makes `save` return only when all is durable.

    Raises:
        ConfigError: keep_last or keep_every below 1.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        keep_last: int = 3,
        keep_every: int | None = None,
        background: bool = True,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ConfigError(f"Checkpoints: {name} is {value}; it must be at least 1.")
        self.directory = Path(directory).absolute()
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._background = background
        self._writer: ocp.AsyncCheckpointer | None = None
        self._thread: threading.Thread | None = None
        self._error: DataError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # Finish what is in flight, but let the error under way be the one that is seen, in this process alone.
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            self._drop_writer()

    def close(self) -> None:
        """`wait`, then free Orbax's threads. The object can still be used afterwards."""
        try:
            self.wait()
        finally:
            self._drop_writer()

    # Saving

    def save(self, step: int, items: Mapping[str, Any], meta: Mapping[str, Any], keep: Collection[int] = ()) -> None:
        """Write `items` and `meta` as checkpoint `step`; returns when the arrays are copied to the host.

        The arrays may be donated and `meta` changed as soon as this returns. First waits for an earlier
        save that is still being written. A step that is already there and good is left alone; a damaged
        or unfinished one is replaced.

        Args:
            items: name -> pytree of arrays (jax, of any sharding, or numpy); a tree may be empty.
            meta: JSON values; comes back as JSON does (tuples as lists, keys as strings).
            keep: steps whose checkpoints stay, however old, when this one's being there makes others go.

        Raises:
            DataError: the earlier save failed; this one cannot be started; a leaf is no array; meta is
                not JSON. Errors of the background part come from the next `wait`, `save` or `close`.
            BusyError: another process is saving into the same folder at this moment.
        """
        self.wait()
        _check_names(items)
        described = {name: integrity.leaves(name, tree) for name, tree in items.items()}
        args = {name: ocp.args.StandardSave(items[name]) for name in items if described[name]}
        try:
            args[integrity.META] = ocp.args.JsonSave(json.loads(json.dumps(dict(meta))))
        except (TypeError, ValueError) as error:
            raise DataError(f"checkpoint {step}: the meta dict is not JSON: {error}.") from error
        held = contextlib.ExitStack()  # What lasts until the checkpoint is durable: the lease, the quiet.
        held.enter_context(reading.quiet_orbax())
        try:
            if self._prepare(step, held):
                held.close()
                return
            if self._writer is None:
                self._writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
            self._writer.save(self._folder(step), args=ocp.args.Composite(**args))
        except (OSError, ValueError, RuntimeError) as error:
            failure = self._failure(step, error)
            held.close()
            raise failure from error
        except BaseException:
            held.close()
            raise
        self._thread = threading.Thread(
            target=self._finish, args=(step, described, held, {step, *keep}), name="checkpoint"
        )
        self._thread.start()
        if not self._background:
            self.wait()

    def wait(self) -> None:
        """Return when everything saved so far is durable.

        Raises:
            DataError: a save in the background failed (once per failure): names the step, the cause, and
                the last good checkpoint, which is untouched.
        """
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _prepare(self, step: int, held: contextlib.ExitStack) -> bool:
        """Clear the way for `step`; True when it is already there and good."""

        def clear() -> bool:
            held.enter_context(lease(self.directory))
            done = self._folder(step).is_dir() and not self.verify(step)
            if not done:
                self._remove(self._folder(step))
                self._sweep()
            return done

        return bool(from_first(together(), clear))

    def _finish(
        self, step: int, described: Mapping[str, list], held: contextlib.ExitStack, keep: Collection[int]
    ) -> None:
        """Background: wait for Orbax's commit, write the manifest, and only then remove old checkpoints."""
        with held:
            try:
                assert self._writer is not None
                self._writer.wait_until_finished()
                if jax.process_index() == 0:
                    integrity.write(self._folder(step), step, described)
                    self._prune(step, keep)
            except Exception as error:
                self._error = self._failure(step, error)
                self._error.__cause__ = error

    def _prune(self, step: int, asked: Collection[int]) -> None:
        """Keep the last n up to `step`, every m-th, and those asked for; what is newer is not this run's to remove."""
        steps = [s for s in self.steps() if s <= step]
        keep = {*asked, *steps[-self._keep_last :]}
        for old in steps:
            if old not in keep and not (self._keep_every and old % self._keep_every == 0):
                self._remove(self._folder(old))

    def _remove(self, folder: Path) -> None:
        """Delete a step's folder; it stops being a checkpoint in one rename, whenever we are killed."""
        if folder.exists():
            doomed = folder.with_name(folder.name + _REMOVED)
            shutil.rmtree(doomed, ignore_errors=True)
            folder.rename(doomed)
            shutil.rmtree(doomed)

    def _sweep(self) -> None:
        """Delete what killed saves and killed deletions left behind; only while nothing is being written."""
        for path in self.directory.glob("*"):
            if _TMP in path.name or path.name.endswith(_REMOVED):
                shutil.rmtree(path)

    def _failure(self, step: int, error: BaseException) -> DataError:
        """Tidy up after a failed save (its half-written files may be what fills the disk) and word it."""
        self._drop_writer()
        with contextlib.suppress(OSError):
            if jax.process_index() == 0:
                if step not in self.steps():
                    self._remove(self._folder(step))
                self._sweep()
        last = self.latest()
        cause = (str(error) or type(error).__name__).split("\n")[0]
        if _disk_full(error):
            cause = "the disk is full"
        if step == last:
            return DataError(
                f"checkpoint {step} is saved, but an older one could not be removed: {cause}. "
                f"Look into {self.directory}."
            )
        kept = "there is no earlier one" if last is None else f"the last good one, step {last}, is kept"
        return DataError(
            f"checkpoint {step} could not be written to {self.directory}: {cause}; {kept}. "
            "Free some space or repair the cause, and save again."
        )

    def _join(self) -> None:
        """Wait for the save in flight, leaving its error to `wait`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            # Also: no process goes on before process 0 has written the manifest.
            if any_of(together(), self._error is not None) and self._error is None:
                self._error = DataError("A checkpoint could not be written by another process; its output says why.")

    def _drop_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(Exception):  # It failed before, and that error has been kept.
                writer.close()

    # Looking

    def _folder(self, step: int) -> Path:
        return self.directory / f"{step:09d}"

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending; finished is not verified."""
        return [step for step in self._folders() if (self._folder(step) / integrity.NAME).is_file()]

    def _folders(self) -> list[int]:
        """Steps that have a folder, finished or not, ascending."""
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if _STEP.fullmatch(path.name))

    def latest(self) -> int | None:
        """The newest finished step, or None."""
        return max(self.steps(), default=None)

    def verify(self, step: int, names: Sequence[str] | None = None) -> list[str]:
        """Read every file of a checkpoint (or of the items `names`): one line per problem, none when good."""
        return integrity.problems(self._folder(step), names)

    # Restoring

    def restore(self, step: int, abstract: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Verify checkpoint `step`, then restore the items named in `abstract` straight to their devices.

        Args:
            abstract: item name -> tree of `jax.ShapeDtypeStruct` (or arrays) with the shardings wanted;
                a leaf without sharding goes to the first device. Any subset of the saved items.

        Returns:
            items, as trees of the same structure, and the meta dict.

        Raises:
            DataError: no such checkpoint, damage (names the file), an item that was not saved, or a leaf
                that differs in path, dtype or shape (names the leaf; nothing is cast).
        """
        self._join()
        from_first(together(), lambda: self._require_good(step, list(abstract)))
        return reading.read_sharded(self._folder(step), abstract)

    def restore_latest(self, abstract: Mapping[str, Any]) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
        """(step, items, meta) of the newest good checkpoint, or None when there is no checkpoint at all.

        One that is damaged or unfinished is passed over with a warning that names its first bad file.

        Raises:
            DataError: there are checkpoints but none is good, or the good one does not fit `abstract`.
        """
        self._join()
        step = from_first(together(), lambda: self._latest_good(list(abstract)))
        return None if step < 0 else (step, *reading.read_sharded(self._folder(step), abstract))

    def _latest_good(self, names: list[str]) -> int:
        """The newest step whose items `names` are good; -1 where there is no checkpoint at all."""
        finished = self.steps()
        for step in reversed(self._folders()):
            problems = self.verify(step, names)
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

    def restore_numpy(self, step: int, names: Sequence[str] = ("params",)) -> tuple[dict[str, Any], dict[str, Any]]:
        """Verify `step`, then read items as nested dicts of `np.ndarray`, whatever machine saved them.

        Needs neither the tree nor the devices of the saving program: for analysis. Tuples and lists come
        back as dicts keyed "0", "1", ...; dtypes as saved.

        Returns:
            name -> nested dict, and the meta dict.

        Raises:
            DataError: no such checkpoint, damage (names the file), or an item that was not saved.
        """
        self._join()
        self._require_good(step, names)
        return reading.read_numpy(self._folder(step), names)

    def _require_good(self, step: int, names: Sequence[str]) -> int:
        problems = self.verify(step, names)
        if problems:
            raise DataError(f"checkpoint {step} cannot be restored: {_some(problems)}. Finished steps: {self.steps()}.")
        return step


def _check_names(items: Mapping[str, Any]) -> None:
    for name in items:
        if not name.isidentifier() or name == integrity.META:
            raise ConfigError(f"checkpoint item {name!r}: take a plain name other than {integrity.META!r}.")


def _some(problems: list[str]) -> str:
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return problems[0] + more


def _disk_full(error: BaseException | None) -> bool:
    """Whether a full disk (or quota) is behind an error, which Orbax and tensorstore wrap in others."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "RESOURCE_EXHAUSTED" in str(error) or "No space left" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
