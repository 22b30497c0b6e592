"""Trees over the features, and their effect on a draw of magnitudes.

The shape is that of SAELens' `generate_hierarchy` for the same settings and seed: roots are the first features, the
next are their children, breadth first, and exclusive parents are drawn by Python's `random`.
"""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np

from saejax.evals.truth.world import World

# SAELens draws each part of a world from a seed of its own; this is that of the hierarchy.
_SEED = 3


@dataclasses.dataclass(frozen=True)
class Generation:
    """Neighbouring features [start, stop) that are the children of the first ones of the generation before.

    Attributes:
        first_parent: the parents are features [first_parent, first_parent + P).
        exclusive: bool [P]; of whose children at most one fires.
    """

    start: int
    stop: int
    first_parent: int
    exclusive: np.ndarray


@dataclasses.dataclass(frozen=True)
class Hierarchy:
    """The trees of a world.

    Attributes:
        roots: features [0, roots).
        branching: children of a parent; the last one may have fewer.
        generations: below the roots, in order; none without a hierarchy.
        scaled: children are scaled by their parents, not only silenced.
    """

    roots: int
    branching: int
    generations: tuple[Generation, ...]
    scaled: bool

    def pairs(self) -> np.ndarray:
        """int64 [P, 2]: parent and child, of every child."""
        pairs = [np.zeros((0, 2), np.int64)]
        for g in self.generations:
            child_C = np.arange(g.start, g.stop)
            pairs.append(np.stack([g.first_parent + (child_C - g.start) // self.branching, child_C], 1))
        return np.concatenate(pairs)

    def factors(self, p_N: np.ndarray) -> np.ndarray:
        """Factors on probabilities so that features fire about as often as p in spite of the hierarchy.

        1 / p_parent, and for children of an exclusive parent times 1 + sum of the siblings' p / p_parent. It is
        exact but for who competes with whom: after SAELens' `compute_probability_correction_factors`.
        """
        factors_N = np.ones(len(p_N))
        for g in self.generations:
            group_C = np.arange(g.stop - g.start) // self.branching
            own_C, parent_C = p_N[g.start : g.stop], p_N[g.first_parent + group_C]
            others_C = np.maximum(np.bincount(group_C, own_C)[group_C] - own_C, 0)
            factors_N[g.start : g.stop] = (1 + g.exclusive[group_C] * others_C / parent_C) / parent_C
        return factors_N

    def apply(self, key: jax.Array, a_BN: jax.Array, mean_N: jax.Array) -> jax.Array:
        """The magnitudes that are left, [B, N]: generation by generation, and pure.

        Of several children that fire below an exclusive parent one is kept, each with the same chance. A child of a
        silent parent is silent.
        """
        parts, above_BP = [a_BN[:, : self.roots]], a_BN[:, : self.roots]
        for number, g in enumerate(self.generations):
            n, count = len(g.exclusive), g.stop - g.start
            own_BC = jnp.pad(a_BN[:, g.start : g.stop], ((0, 0), (0, n * self.branching - count)))
            own_BPC = own_BC.reshape(-1, n, self.branching)
            u_BP = jax.random.uniform(jax.random.fold_in(key, number), own_BPC.shape[:2])
            own_BPC = jnp.where(g.exclusive[None, :, None], _one_of(u_BP, own_BPC), own_BPC)
            parent_BP = above_BP[:, :n]
            if self.scaled:
                gate_BP = parent_BP / mean_N[None, g.first_parent : g.first_parent + n]
            else:
                gate_BP = (parent_BP > 0).astype(a_BN.dtype)
            above_BP = (own_BPC * gate_BP[..., None]).reshape(len(a_BN), -1)[:, :count]
            parts.append(above_BP)
        in_trees = sum(part.shape[1] for part in parts)
        return jnp.concatenate([*parts, a_BN[:, in_trees:]], axis=1)


def _one_of(u_BP: jax.Array, a_BPC: jax.Array) -> jax.Array:
    """Of the entries of each group that are not 0 the floor(u count)-th; 0 for the others."""
    fires_BPC = a_BPC > 0
    count_BP = fires_BPC.sum(-1)
    chosen_BP = jnp.minimum(jnp.floor(u_BP * count_BP).astype(count_BP.dtype), count_BP - 1)
    place_BPC = jnp.cumsum(fires_BPC, axis=-1) - 1
    return jnp.where(fires_BPC & (place_BPC == chosen_BP[..., None]), a_BPC, 0)


def make_hierarchy(world: World) -> Hierarchy:
    """The trees of a world, by its seed."""
    roots = min(world.roots, world.n_features)
    above, spans = (0, roots), []
    for _ in range(world.depth if roots else 0):
        count = min((above[1] - above[0]) * world.branching, world.n_features - above[1])
        if count:
            spans.append((above[0], above[1], above[1] + count))
        above = (above[1], above[1] + count)
    # The children of each parent; a last one with a single child competes with nobody.
    sizes = [np.diff(np.append(np.arange(0, stop - start, world.branching), stop - start)) for _, start, stop in spans]
    eligible = np.concatenate([np.zeros(0, np.int64), *sizes]) >= 2
    chosen = random.Random(world.seed + _SEED).sample(range(int(eligible.sum())), int(eligible.sum() * world.exclusive))
    flags = np.zeros(len(eligible), bool)
    flags[np.flatnonzero(eligible)[chosen]] = True
    ends = np.cumsum([len(size) for size in sizes])
    generations = tuple(
        Generation(start, stop, parent, exclusive)
        for (parent, start, stop), exclusive in zip(spans, np.split(flags, ends[:-1] if spans else []), strict=False)
    )
    return Hierarchy(roots, world.branching, generations, world.scale_by_parent)
