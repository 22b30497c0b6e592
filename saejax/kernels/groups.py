"""Decoder rows of groups of latents, and the columns to which each adds.

Groups are the layers of a cross-layer transcoder, or dictionaries side by side.

Shape letters: B tokens, F latents, D width of all that is written, R of what one group writes.
"""

from collections.abc import Iterator, Sequence
from typing import Self

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Groups:
    """Decoder rows of each group, and the columns of [B, D] to which it adds.

    Attributes:
        tables: [F, R] of each group; R may differ.
        starts: the first column of each.
    """

    tables: tuple[jax.Array, ...]
    starts: tuple[int, ...] = flax.struct.field(pytree_node=False)

    @classmethod
    def one(cls, W_FD: jax.Array) -> Self:
        return cls((W_FD,), (0,))

    def __len__(self) -> int:
        return len(self.tables)

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.tables)

    def __getitem__(self, group: int) -> jax.Array:
        return self.tables[group]

    @property
    def width(self) -> int:
        """D"""
        return max(where.stop for where in self.columns)

    @property
    def columns(self) -> list[slice]:
        return [slice(a, a + W_FR.shape[1]) for a, W_FR in zip(self.starts, self.tables, strict=True)]

    def of(self, out_BD: jax.Array) -> list[jax.Array]:
        """[B, R] of each group: its columns."""
        return [out_BD[:, where] for where in self.columns]

    def added_up(self, parts: Sequence[jax.Array]) -> jax.Array:
        """[B, R] of each group -> [B, D], each added at its columns."""
        first, *others = zip(parts, self.columns, strict=True)
        out_BD = first[0] if first[1] == slice(0, self.width) else self._alone(*first)
        for part_BR, where in others:
            out_BD = out_BD.at[:, where].add(part_BR)
        return out_BD

    def _alone(self, part_BR: jax.Array, where: slice) -> jax.Array:
        return jnp.pad(part_BR, ((0, 0), (where.start, self.width - where.stop)))
