"""Named trees of arrays to disk and back, knowing nothing of training.

A checkpoint is a folder `<directory>/<step, nine digits>/` in Orbax's Composite layout (docs/checkpoints.md says how
Orbax reads it) plus `integrity.json` (`saejax.checkpoints.integrity`), which is written last. It is taken in the
background, restored onto any devices, and never trusted unverified.

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
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from saejax.checkpoints import integrity
from saejax.checkpoints.steps import Steps
from saejax.core.errors import ConfigError, DataError
from saejax.core.host import give_way
from saejax.core.lease import lease
from saejax.parallel import any_of, from_first, together


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

    Raises:
        ConfigError: keep_last or keep_every below 1.
    """

    def __init__(self, directory: str | os.PathLike, *, keep_last: int = 3, keep_every: int | None = None) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ConfigError(f"Checkpoints: {name} is {value}; it must be at least 1.")
        self.directory = Path(directory).absolute()
        self._steps, self._keep_last, self._keep_every = Steps(self.directory), keep_last, keep_every
        self._writer: ocp.AsyncCheckpointer | None = None
        self._thread: threading.Thread | None = None
        self._error: DataError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # The error under way is to be the one that is seen; the other processes may not come here.
            self._join_thread()
            self._drop_writer()

    def close(self) -> None:
        """`wait`, then free Orbax's threads. The object can still be used afterwards."""
        try:
            self.wait()
        finally:
            self._drop_writer()

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
            ConfigError: a name that no item can have.
            DataError: the earlier save failed; this one cannot be started; a leaf is no array; meta is
                not JSON. Errors of the background part come from the next `wait`, `save` or `close`.
            BusyError: another process is saving into the same folder at this moment.
        """
        self.wait()
        for name in items:
            if not name.isidentifier() or name == integrity.META:
                raise ConfigError(f"checkpoint item {name!r}: take a plain name other than {integrity.META!r}.")
        leaves = {name: integrity.leaves(name, tree) for name, tree in items.items()}
        try:
            arguments: dict[str, Any] = {integrity.META: ocp.args.JsonSave(json.loads(json.dumps(dict(meta))))}
        except (TypeError, ValueError) as error:
            raise DataError(f"checkpoint {step}: the meta dict is not JSON: {error}.") from error
        # Orbax stores no empty tree.
        arguments |= {name: ocp.args.StandardSave(tree) for name, tree in items.items() if leaves[name]}
        with contextlib.ExitStack() as held:  # What lasts until the checkpoint is durable: the lease, the quiet.
            held.enter_context(_quiet_orbax())
            try:
                if self._is_there(step, held):
                    return
                if self._writer is None:
                    self._writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
                self._writer.save(self._steps.folder(step), args=ocp.args.Composite(**arguments))
            except (OSError, ValueError, RuntimeError) as error:
                raise self._failure(step, error) from error
            self._thread = threading.Thread(
                target=self._finish, args=(step, leaves, held.pop_all(), {step, *keep}), name="checkpoint"
            )
        self._thread.start()

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

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending; finished is not verified."""
        return self._steps.finished()

    def latest(self) -> int | None:
        return self._steps.latest()

    def verify(self, step: int, names: Sequence[str] | None = None) -> list[str]:
        """Read every file of a checkpoint (or of the items `names`): one line per problem, none when good."""
        return self._steps.problems(step, names)

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
        from_first(together(), lambda: self._steps.require_good(step, list(abstract)))
        return _read_sharded(self._steps.folder(step), abstract)

    def restore_latest(self, abstract: Mapping[str, Any]) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
        """(step, items, meta) of the newest good checkpoint, or None when there is no checkpoint at all.

        One that is damaged or unfinished is passed over with a warning that names its first bad file.

        Raises:
            DataError: there are checkpoints but none is good, or the good one does not fit `abstract`.
        """
        self._join()
        step = from_first(together(), lambda: self._steps.latest_good(list(abstract)))
        return None if step < 0 else (step, *_read_sharded(self._steps.folder(step), abstract))

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
        self._steps.require_good(step, names)
        return _read_numpy(self._steps.folder(step), names)

    def _join(self) -> None:
        """Return when nothing is in flight in any process, leaving its error to `wait`."""
        # Asking also keeps every process here until process 0 has written the manifest.
        if self._join_thread() and any_of(together(), self._error is not None) and self._error is None:
            self._error = DataError("A checkpoint could not be written by another process; its output says why.")

    def _join_thread(self) -> bool:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        return thread is not None

    def _drop_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(Exception):  # It failed before, and that error has been kept.
                writer.close()

    def _is_there(self, step: int, held: contextlib.ExitStack) -> bool:
        """Take the lease and clear the way for `step`; True when it is already there and good."""

        def clear() -> bool:
            held.enter_context(lease(self.directory))
            done = self._steps.folder(step).is_dir() and not self._steps.problems(step)
            if not done:
                self._steps.remove(step)
                self._steps.sweep()
            return done

        return bool(from_first(together(), clear))

    def _finish(
        self, step: int, leaves: Mapping[str, list[integrity.Leaf]], held: contextlib.ExitStack, keep: Collection[int]
    ) -> None:
        """In the thread: wait for Orbax's commit, write the manifest, and only then remove old checkpoints."""
        give_way()  # to the steps: hashing would take a core from them
        with held:
            try:
                assert self._writer is not None
                self._writer.wait_until_finished()
                if jax.process_index() == 0:
                    integrity.write_integrity(self._steps.folder(step), step, leaves)
                    self._steps.prune(step, self._keep_last, self._keep_every, keep)
            except Exception as error:
                self._error = self._failure(step, error)
                self._error.__cause__ = error

    def _failure(self, step: int, error: BaseException) -> DataError:
        """Tidy up after a failed save (its half-written files may be what fills the disk) and word it."""
        self._drop_writer()
        with contextlib.suppress(OSError):
            if jax.process_index() == 0:
                if step not in self.steps():
                    self._steps.remove(step)
                self._steps.sweep()
        last = self.latest()
        cause = "the disk is full" if _disk_full(error) else (str(error) or type(error).__name__).split("\n")[0]
        if step == last:
            return DataError(
                f"checkpoint {step} is saved, but an older one could not be removed: {cause}. "
                f"Look into {self.directory}."
            )
        remains = "there is no earlier one" if last is None else f"the last good one, step {last}, is kept"
        return DataError(
            f"checkpoint {step} could not be written to {self.directory}: {cause}; {remains}. "
            "Free some space or repair the cause, and save again."
        )


def _read_sharded(folder: Path, abstract: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    saved = _saved(folder, list(abstract))
    args: dict[str, Any] = {integrity.META: ocp.args.JsonRestore()}
    for name, tree in abstract.items():
        integrity.check_leaves(name, saved[name], integrity.leaves(name, tree), folder)
        if saved[name]:  # Orbax stores no empty tree; the abstract one is then the tree itself.
            args[name] = ocp.args.StandardRestore(jax.tree.map(_placed, tree))
    with _quiet_orbax(), ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        restored = reader.restore(folder, args=ocp.args.Composite(**args))
    items = {name: restored[name] if saved[name] else tree for name, tree in abstract.items()}
    return items, restored[integrity.META]


def _read_numpy(folder: Path, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    saved = _saved(folder, names)
    handler = ocp.PyTreeCheckpointHandler()
    items: dict[str, Any] = {}
    for name in names:
        items[name] = {}
        if saved[name]:
            with _quiet_orbax():
                tree = handler.metadata(folder / name).tree
                as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
                args = ocp.args.PyTreeRestore(restore_args=as_numpy)
                items[name] = _nested_dicts(handler.restore(folder / name, args=args))
    return items, _read_sharded(folder, {})[1]


def _saved(folder: Path, names: Sequence[str]) -> dict[str, list[integrity.Leaf]]:
    """The leaves of every saved item, among which are `names`."""
    saved = integrity.read_integrity(folder)["items"]
    for name in names:
        if name not in saved:
            raise DataError(f"{folder} has no item {name!r}; it has {sorted(saved)}.")
    return saved


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    """The leaf's shape, dtype and sharding, on the first device when it has no sharding."""
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _nested_dicts(tree: Any) -> dict[str, Any]:
    """The same leaves in dicts only, keyed by the text of each path element."""
    out: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        *parents, last = (jax.tree_util.keystr((key,), simple=True) for key in path)
        branch = out
        for key in parents:
            branch = branch.setdefault(key, {})
        branch[last] = leaf
    return out


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
def _quiet_orbax() -> Iterator[None]:
    """Keep Orbax's own log off the console: what fails is raised, once, instead of logged with 200 lines."""
    logger = logging.getLogger("absl")
    logger.addFilter(_not_from_orbax)
    try:
        yield
    finally:
        logger.removeFilter(_not_from_orbax)


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/" not in record.pathname.replace(os.sep, "/")
