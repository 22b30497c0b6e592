"""All that a dictionary writes, replaced in turn: each layer reads what the replaced ones before it have left.

    y_hat_m = sum_{l <= m} f_l(x'_l) W_dec,l->m + b_dec,m  (+ x'_m W_skip,m)

x'_l is what layer l reads in that very forward pass. `splice` puts in reconstructions of what the model computes by
itself; here errors of early layers reach the latents of later ones, as they do in a model that runs on the dictionary.
(The replacement model of Ameisen et al. 2025, "Circuit Tracing", without error terms)
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from saejax.coders import Coder, Sites
from saejax.coders.latents import Params
from saejax.kernels.dense import product
from saejax.lm.forward import Edit, Model

# (function of [B, D], x [B, D]) -> what it gives: in one go, or in blocks of tokens.
Apply = Callable[[Callable[[jax.Array], jax.Array], jax.Array], jax.Array]


def several_groups(coder: Coder) -> bool:
    """True for what may have turns, whatever the hook points are: several groups of latents."""
    shape = coder.topology.latent_shape
    return len(shape) > 1 and shape[0] > 1


def has_turns(coder: Coder, sites: Sites, lm: Model) -> bool:
    """Tell whether groups of latents read one place each, all before the model has computed what they write."""
    if not several_groups(coder):
        return False
    order = {name: i for i, name in enumerate(lm.hook_points())}
    targets = coder.topology.targets
    return all(order[read] <= order[sites.writes[to]] for i, read in enumerate(sites.reads) for to in targets(i))


def edits_in_turn(coder: Coder, params: Params, sites: Sites, apply: Apply | None = None) -> dict[str, Edit]:
    """{hook point: edit} of one forward pass of a model; made anew for each.

    Args:
        coder: for after training, one that `has_turns`.
        apply: how to apply it to all tokens.
    """
    pass_ = _Pass(coder, params, sites, apply or (lambda function, x: function(x)))
    return {name: functools.partial(pass_.visit, name) for name in sites.hook_points}


@dataclasses.dataclass
class _Pass:
    coder: Coder
    params: Params
    sites: Sites
    apply: Apply
    _inputs: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    _written: dict[int, jax.Array] = dataclasses.field(default_factory=dict)

    def visit(self, name: str, value_RSD: jax.Array) -> jax.Array:
        if name in self.sites.reads:
            self._read(self.sites.reads.index(name), value_RSD)
        return self._write(self.sites.writes.index(name), value_RSD) if name in self.sites.writes else value_RSD

    def _read(self, site: int, value_RSD: jax.Array) -> None:
        """Add what the group writes to its targets."""
        x_BD = value_RSD.astype(jnp.float32).reshape(-1, value_RSD.shape[-1]) * self.sites.read_scales[site]
        alone, params = self.coder.group(self.params, site)
        rows_FR = self.coder.topology.decoder_rows(self.params)[site]
        topology = dataclasses.replace(alone.topology, d_out=rows_FR.shape[1])
        wide = dataclasses.replace(alone, topology=topology)
        params = params | {"W_dec": rows_FR, "b_dec": jnp.zeros(rows_FR.shape[1])}
        y_BR = self.apply(functools.partial(wide.reconstruct, params), x_BD)
        targets = self.coder.topology.targets(site)
        for to, part_BD in zip(targets, jnp.split(y_BR, len(targets), axis=1), strict=True):
            self._written[to] = self._written.get(to, 0) + part_BD
        self._inputs[site] = x_BD

    def _write(self, site: int, value_RSD: jax.Array) -> jax.Array:
        y_BD = self._written[site] + self.params["b_dec"][site][None]
        if "W_skip" in self.params:
            skip_DD, dtype = self.params["W_skip"][site], self.coder.topology.matmul_dtype
            y_BD = y_BD + product(self._inputs[site], skip_DD, dtype)
        return (y_BD / self.sites.write_scales[site]).reshape(value_RSD.shape).astype(value_RSD.dtype)
