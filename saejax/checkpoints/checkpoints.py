"""Named trees of arrays to disk and back, knowing nothing of training.

A checkpoint is a folder `<directory>/<step, nine digits>/` in Orbax's Composite layout (docs/checkpoints.md says how
Orbax reads it) plus `integrity.json` (`saejax.checkpoints.integrity`), which is written last. It is taken in the
background, restored onto any devices, and never trusted unverified.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from saejax.checkpoints import integrity
from saejax.checkpoints.saving import Saving, quiet_orbax
from saejax.checkpoints.steps import Retention, Steps
from saejax.core.errors import DataError
from saejax.parallel import from_first, together


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

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        keep_last: int = 3,
        keep_every: int | None = None,
    ) -> None:
        self.directory = Path(directory).absolute()
        self._steps = Steps(self.directory)
        self._saving = Saving(self._steps, Retention(keep_last, keep_every))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # The error under way is to be the one that is seen.
            self._saving.abandon()

    def close(self) -> None:
        """`wait`, then free Orbax's threads. The object can still be used afterwards."""
        try:
            self.wait()
        finally:
            self._saving.drop_writer()

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
        self._saving.start(step, items, meta, keep)

    def wait(self) -> None:
        """Return when everything saved so far is durable.

        Raises:
            DataError: a save in the background failed (once per failure): names the step, the cause, and
                the last good checkpoint, which is untouched.
        """
        self._saving.wait()

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
        self._saving.join()
        from_first(together(), lambda: self._steps.require_good(step, list(abstract)))
        return _read_sharded(self._steps.folder(step), abstract)

    def restore_latest(self, abstract: Mapping[str, Any]) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
        """(step, items, meta) of the newest good checkpoint, or None when there is no checkpoint at all.

        One that is damaged or unfinished is passed over with a warning that names its first bad file.

        Raises:
            DataError: there are checkpoints but none is good, or the good one does not fit `abstract`.
        """
        self._saving.join()
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
        self._saving.join()
        self._steps.require_good(step, names)
        return _read_numpy(self._steps.folder(step), names)


# --- from the folder of one verified checkpoint to arrays ---------------------------------------------------------


def _read_sharded(folder: Path, abstract: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    saved = _saved(folder, list(abstract))
    args: dict[str, Any] = {integrity.META: ocp.args.JsonRestore()}
    for name, tree in abstract.items():
        integrity.check_leaves(name, saved[name], integrity.leaves(name, tree), folder)
        if saved[name]:  # Orbax stores no empty tree; the abstract one is then the tree itself.
            args[name] = ocp.args.StandardRestore(jax.tree.map(_placed, tree))
    with quiet_orbax(), ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
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
            with quiet_orbax():
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
