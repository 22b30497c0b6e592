"""The split of a batch's tokens and latents over devices, as a kernel sees it.

    with split(mesh): ...           what is traced inside knows the mesh: tokens lie along DATA, latents along LATENT.
                                    Outside, over other people's meshes, and where sizes do not divide, kernels treat
                                    arrays as whole.
    shards = shards_of(n_tokens, n_latents)
    shards.run(local, "BK FD", "BD")(values, W)

In a layout each letter is a dimension: B is split over the devices' rows, F over their latents, P (a list of which
every device has its own part) over all devices; every other letter is whole on every device. `local` runs on each
device with its own blocks and says itself what crosses devices.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from saejax.kernels.batch import DATA, LATENT, MESH_AXES, device_axis


@dataclasses.dataclass(frozen=True)
class Shards:
    """Names of the mesh axes that tokens and latents lie on; empty where the arrays are whole.

    Without a mesh they are those of a program that every device runs for itself.
    """

    rows: str = ""
    latents: str = ""
    mesh: AbstractMesh | None = None

    @property
    def n_along_rows(self) -> int:
        return self.mesh.shape[self.rows] if self.mesh else 1

    @property
    def n_along_latents(self) -> int:
        return self.mesh.shape[self.latents] if self.mesh else 1

    def over_rows(self, value: jax.Array) -> jax.Array:
        return jax.lax.psum(value, self.rows) if self.rows else value

    def over_latents(self, value: jax.Array) -> jax.Array:
        return jax.lax.psum(value, self.latents) if self.latents else value

    def over_all(self, value: jax.Array) -> jax.Array:
        axes = tuple(axis for axis in (self.rows, self.latents) if axis)
        return jax.lax.psum(value, axes) if axes else value

    def first_row(self, n_own: int) -> jax.Array | int:
        """Number, in the batch, of this device's first token."""
        return jax.lax.axis_index(self.rows) * n_own if self.rows else 0

    def first_latent(self, n_own: int) -> jax.Array | int:
        return jax.lax.axis_index(self.latents) * n_own if self.latents else 0

    def beside(self, value: jax.Array) -> jax.Array:
        """The blocks [..., K] of all devices along latents side by side, in their order: [..., n K]."""
        return jax.lax.all_gather(value, self.latents, axis=value.ndim - 1, tiled=True) if self.latents else value

    def run(self, local: Callable[..., Any], into: str, out: str) -> Callable[..., Any]:
        """`local` on every device's blocks: layouts of its arguments, and of its results, with spaces between."""
        if self.mesh is None:
            return local
        specs = [tuple(self._spec(layout) for layout in layouts.split(" ")) for layouts in (into, out)]
        out_specs = specs[1] if len(specs[1]) > 1 else specs[1][0]
        # Sums over devices are written out by `local`, and nothing here is differentiated: jax need not track them.
        return jax.shard_map(local, mesh=self.mesh, in_specs=specs[0], out_specs=out_specs, check_vma=False)

    def _spec(self, layout: str) -> PartitionSpec:
        on = {"B": self.rows, "F": self.latents, "P": (self.rows, self.latents)}
        return PartitionSpec(*[on.get(letter) for letter in layout.strip("-")])


WHOLE = Shards()


def shards_of(n_tokens: int, n_latents: int) -> Shards:
    """The layout of so many tokens and latents on the mesh of the program that is being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names != MESH_AXES or mesh.size == 1 or n_tokens % mesh.shape[DATA] or n_latents % mesh.shape[LATENT]:
        return WHOLE
    return Shards(DATA, LATENT, mesh)


def shards_of_batch(n_tokens: int, n_latents: int) -> Shards:
    """`shards_of`, for what is chosen from a whole batch; a device that has its own tokens asks the others too."""
    return Shards(rows=device_axis()) if device_axis() else shards_of(n_tokens, n_latents)


@contextlib.contextmanager
def split(mesh: Mesh) -> Iterator[None]:
    """Context manager: programs traced inside are for `mesh`, one of saejax's."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield
