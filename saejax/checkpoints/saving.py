"""One save in the background: Orbax writes, a thread waits for it, adds the manifest, and then removes old checkpoints.

Orbax's AsyncCheckpointer is used without its CheckpointManager: the manager counts a step as saved
before any manifest can be written (its post_finalization_callback runs before the final rename), keeps
its own list of steps, and deletes by it.
"""

import contextlib
import errno
import json
import logging
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from saejax.checkpoints import integrity
from saejax.checkpoints.steps import Retention, Steps
from saejax.core.errors import ConfigError, DataError
from saejax.core.host import give_way
from saejax.core.lease import lease
from saejax.parallel import any_of, from_first, together


class Saving:
    """At most one save is in flight; what fails in the background is raised by the next `wait`.

    Args:
        steps: where it is written.
        retention: which older checkpoints stay.
    """

    def __init__(self, steps: Steps, retention: Retention) -> None:
        self._steps, self._retention = steps, retention
        self._writer: ocp.AsyncCheckpointer | None = None
        self._thread: threading.Thread | None = None
        self._error: DataError | None = None

    def start(self, step: int, items: Mapping[str, Any], meta: Mapping[str, Any], keep: Collection[int]) -> None:
        """Copy the arrays to the host and begin to write; nothing to do where `step` is there and good.

        Raises:
            ConfigError: a name that no item can have.
            DataError: a leaf that is no array, meta that is not JSON, or a save that cannot be started.
            BusyError: another process is saving into the same directory.
        """
        for name in items:
            if not name.isidentifier() or name == integrity.META:
                raise ConfigError(f"checkpoint item {name!r}: take a plain name other than {integrity.META!r}.")
        leaves = {name: integrity.leaves(name, tree) for name, tree in items.items()}
        arguments = _arguments(step, {name: tree for name, tree in items.items() if leaves[name]}, meta)
        with contextlib.ExitStack() as held:  # What lasts until the checkpoint is durable: the lease, the quiet.
            held.enter_context(quiet_orbax())
            try:
                if self._is_there(step, held):
                    return
                if self._writer is None:
                    self._writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
                self._writer.save(self._steps.folder(step), args=arguments)
            except (OSError, ValueError, RuntimeError) as error:
                raise self._failure(step, error) from error
            self._thread = threading.Thread(
                target=self._finish, args=(step, leaves, held.pop_all(), {step, *keep}), name="checkpoint"
            )
        self._thread.start()

    def join(self) -> None:
        """Return when nothing is in flight, leaving its error to `wait`."""
        # Asking also keeps every process here until process 0 has written the manifest.
        if self._join() and any_of(together(), self._error is not None) and self._error is None:
            self._error = DataError("A checkpoint could not be written by another process; its output says why.")

    def wait(self) -> None:
        """Return when nothing is in flight; raises the DataError of a save that failed, once."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def abandon(self) -> None:
        """Finish what is in flight and free Orbax's threads, in this process alone; raises nothing."""
        self._join()
        self.drop_writer()

    def drop_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(Exception):  # It failed before, and that error has been kept.
                writer.close()

    def _join(self) -> bool:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        return thread is not None

    def _is_there(self, step: int, held: contextlib.ExitStack) -> bool:
        """Clear the way for `step`; True when it is already there and good."""

        def clear() -> bool:
            held.enter_context(lease(self._steps.directory))
            done = self._steps.folder(step).is_dir() and not self._steps.problems(step)
            if not done:
                self._steps.remove(step)
                self._steps.sweep()
            return done

        return bool(from_first(together(), clear))

    def _finish(
        self,
        step: int,
        leaves: Mapping[str, list[integrity.Leaf]],
        held: contextlib.ExitStack,
        keep: Collection[int],
    ) -> None:
        """In the thread: wait for Orbax's commit, write the manifest, and only then remove old checkpoints."""
        give_way()  # to the steps: hashing would take a core from them
        with held:
            try:
                assert self._writer is not None
                self._writer.wait_until_finished()
                if jax.process_index() == 0:
                    integrity.write_integrity(self._steps.folder(step), step, leaves)
                    self._retention.prune(self._steps, step, keep)
            except Exception as error:
                self._error = self._failure(step, error)
                self._error.__cause__ = error

    def _failure(self, step: int, error: BaseException) -> DataError:
        """Tidy up after a failed save (its half-written files may be what fills the disk) and word it."""
        self.drop_writer()
        with contextlib.suppress(OSError):
            if jax.process_index() == 0:
                if step not in self._steps.finished():
                    self._steps.remove(step)
                self._steps.sweep()
        directory, last = self._steps.directory, self._steps.latest()
        cause = "the disk is full" if _disk_full(error) else (str(error) or type(error).__name__).split("\n")[0]
        if step == last:
            return DataError(
                f"checkpoint {step} is saved, but an older one could not be removed: {cause}. Look into {directory}."
            )
        remains = "there is no earlier one" if last is None else f"the last good one, step {last}, is kept"
        return DataError(
            f"checkpoint {step} could not be written to {directory}: {cause}; {remains}. "
            "Free some space or repair the cause, and save again."
        )


def _arguments(step: int, items: Mapping[str, Any], meta: Mapping[str, Any]) -> ocp.args.Composite:
    """Arguments of Orbax's save. It stores no empty tree: `items` has none."""
    try:
        described = ocp.args.JsonSave(json.loads(json.dumps(dict(meta))))
    except (TypeError, ValueError) as error:
        raise DataError(f"checkpoint {step}: the meta dict is not JSON: {error}.") from error
    arrays = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
    return ocp.args.Composite(**arrays, **{integrity.META: described})


def _disk_full(error: BaseException | None) -> bool:
    """True if a full disk (or quota) is behind an error, which Orbax and tensorstore wrap in others."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "RESOURCE_EXHAUSTED" in str(error) or "No space left" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Keep Orbax's own log off the console: what fails is raised, once, instead of logged with 200 lines."""
    logger = logging.getLogger("absl")
    logger.addFilter(_not_from_orbax)
    try:
        yield
    finally:
        logger.removeFilter(_not_from_orbax)


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/" not in record.pathname.replace(os.sep, "/")
