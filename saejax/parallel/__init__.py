"""L2: the device mesh, the one table that says which logical axis lies on which mesh axis, which process this is."""

from saejax.parallel.mesh import (
    MESH_AXES,
    ParallelConfig,
    batch_sharding,
    check_divides,
    make_mesh,
    on_mesh,
    replicated,
    sharding_of,
    tree_shardings,
)
from saejax.parallel.processes import Process, local_mesh, refuse_many, this_process

__all__ = [
    "MESH_AXES",
    "ParallelConfig",
    "Process",
    "batch_sharding",
    "check_divides",
    "local_mesh",
    "make_mesh",
    "on_mesh",
    "refuse_many",
    "replicated",
    "sharding_of",
    "this_process",
    "tree_shardings",
]
