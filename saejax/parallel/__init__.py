"""L2: the device mesh, and the one table that says which logical axis lies on which mesh axis."""

from saejax.parallel.mesh import (
    MESH_AXES,
    ParallelConfig,
    batch_sharding,
    check_divides,
    make_mesh,
    replicated,
    sharding_of,
    tree_shardings,
)

__all__ = [
    "MESH_AXES",
    "ParallelConfig",
    "batch_sharding",
    "check_divides",
    "make_mesh",
    "replicated",
    "sharding_of",
    "tree_shardings",
]
