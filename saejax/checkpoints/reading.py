"""From the folder of one intact checkpoint to arrays; who calls has verified it."""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from saejax.checkpoints import integrity
from saejax.core.errors import DataError


def read_sharded(folder: Path, abstract: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The items named in `abstract`, straight to its shardings, and the meta dict.

    Raises:
        DataError: an item that was not saved, or a leaf that differs in path, dtype or shape.
    """
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


def read_numpy(folder: Path, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The items `names` as nested dicts of `np.ndarray`, and the meta dict.

    Raises:
        DataError: an item that was not saved.
    """
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
    return items, read_sharded(folder, {})[1]


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
