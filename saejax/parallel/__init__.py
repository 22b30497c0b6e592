"""L2: the device mesh, the one table that says which logical axis lies on which mesh axis, which process this is."""

from saejax.parallel.mesh import (
    MESH_AXES,
    MODES,
    ParallelConfig,
    batch_sharding,
    check_divides,
    make_mesh,
    on_mesh,
    own_rows,
    replicated,
    sharding_of,
    tree_shardings,
)
from saejax.parallel.processes import (
    Process,
    any_of,
    from_first,
    joined,
    local_mesh,
    refuse_many,
    this_process,
    together,
)

__all__ = [
    "MESH_AXES",
    "MODES",
    "ParallelConfig",
    "Process",
    "any_of",
    "batch_sharding",
    "check_divides",
    "from_first",
    "joined",
    "local_mesh",
    "make_mesh",
    "on_mesh",
    "own_rows",
    "refuse_many",
    "replicated",
    "sharding_of",
    "this_process",
    "together",
    "tree_shardings",
]
