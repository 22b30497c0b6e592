"""Dictionaries inside the language model: their latents are read, changed and written back within one forward pass.

    y' = y + Dec(f') - Dec(f)      errors "own": what the dictionary does not explain stays as it is in this run
    y' = Dec(f')                   errors "none"
    y' = Dec(f') + e               errors given: of a clean run, or of another prompt

y is what stands where the dictionary writes, f its latents of what stands where it reads, both after all that was
changed before. For an autoencoder the two places are one; a transcoder reads mlp_in and writes mlp_out; latents of layer
l of a cross-layer transcoder write from layer l on. Latents are computed anew behind a change; with `frozen` the norms'
scales and attention patterns of a clean run stay, and what is left is linear between dictionaries: direct effects.

(handle_errors of Marks et al. 2024, feature-circuits; constrained_layers of circuit-tracer.)
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from saejax.coders import Latents
from saejax.coders.config import LONG_AGO
from saejax.core.errors import ConfigError
from saejax.interventions.change import Change
from saejax.kernels.sparse import entries
from saejax.lm.decoder import Edit
from saejax.trained import TrainedCoder

Params = Mapping[str, Any]
# Of one dictionary; given: {hook point that it writes: e [R, S, D]}.
Errors = Literal["own", "none"] | Mapping[str, jax.Array]


@dataclasses.dataclass
class Inside:
    """One dictionary in one forward pass: its edits, and what they saw. Made anew for each pass.

    Attributes:
        sae: with the model's own names of hook points (`TrainedCoder.at`).
        params: its parameters, as arrays of the program that runs.
        changes: of its latents, one after the other.
        errors: see above.
        latents: {group: [R, S, F]} before the changes, once the pass has come there.
        written: {hook point: [R, S, D]} that it explains there, before the changes.
    """

    sae: TrainedCoder
    params: Params
    changes: Sequence[Change] = ()
    errors: Errors = "own"
    latents: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    inputs: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    changed: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    _added: dict[int, list[tuple[jax.Array, jax.Array]]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.n_groups == 1 and len(self.sae.sites.reads) > 1:
            raise ConfigError(
                f"{self.sae!r} reads {len(self.sae.sites.reads)} hook points for one latent: what it writes at the first "
                "would depend on the last, which the model has not computed by then."
            )

    @property
    def n_groups(self) -> int:
        shape = self.sae.coder.topology.latent_shape
        return shape[0] if len(shape) == 2 else 1

    def edits(self) -> dict[str, Edit]:
        """{hook point: edit}. One that it only reads is left as it is."""
        reads, writes = self.sae.sites.reads, self.sae.sites.writes

        def of(name: str) -> Edit:
            def edit(value_RSD: jax.Array) -> jax.Array:
                if name in reads:
                    self.read(reads.index(name), value_RSD)
                return self.write(writes.index(name), value_RSD) if name in writes else value_RSD

            return edit

        return {name: of(name) for name in self.sae.sites.hook_points}

    def read(self, site: int, x_RSD: jax.Array) -> None:
        """Latents of what stands at a site, and the changes of them."""
        f_RSF = self._encode(site, x_RSD)
        self.inputs[site], self.latents[site] = x_RSD, f_RSF
        d_sae = f_RSF.shape[-1]
        for change in self.changes:
            own_K, at_K = change.latents // d_sae == site, change.latents % d_sae
            old_RSK = f_RSF[..., at_K]
            delta_RSK = jnp.where(own_K, change(old_RSK) - old_RSK, 0)
            self._added.setdefault(site, []).append((at_K, delta_RSK))
            f_RSF = f_RSF.at[..., at_K].add(delta_RSK)
        self.changed[site] = f_RSF

    def write(self, site: int, y_RSD: jax.Array) -> jax.Array:
        """y' at a site, in y's type."""
        if self.errors == "own":
            return y_RSD + self._delta(site, y_RSD.shape).astype(y_RSD.dtype)
        new_RSD = self.decoded(site, self.changed)
        if not isinstance(self.errors, str):
            new_RSD = new_RSD + self.errors[self.sae.sites.writes[site]]
        return new_RSD.astype(y_RSD.dtype)

    def decoded(self, site: int, f: Mapping[int, jax.Array]) -> jax.Array:
        """Dec(f) at a site, float32 [R, S, D]."""
        outer = f[0].shape[:2]
        topology = self.sae.coder.topology
        if self.n_groups == 1:
            x = self.inputs[0].reshape(-1, self.inputs[0].shape[-1])
            y = topology.decode(self.params, Latents(f[0].reshape(-1, f[0].shape[-1]), None, topology.d_sae), x)
            return y.reshape(*outer, -1)
        y = sum(f[g] @ self.params[f"W_dec_{g}"][:, site - g] for g in range(site + 1)) + self.params["b_dec"][site]
        if "W_skip" in self.params:
            y = y + self.inputs[site].astype(jnp.float32) @ self.params["W_skip"][site]
        return y

    def error(self, site: int, y_RSD: jax.Array) -> jax.Array:
        """y - Dec(f): what stands at a site that the dictionary writes, and it does not explain."""
        return y_RSD.astype(jnp.float32) - self.decoded(site, self.latents)

    def _delta(self, site: int, shape: tuple[int, ...]) -> jax.Array:
        """Dec(f') - Dec(f) at a site, of the changed latents alone."""
        topology = self.sae.coder.topology
        rows = topology.decoder_rows(self.params)
        total = jnp.zeros(shape, jnp.float32)
        for group in range(site + 1 if self.n_groups > 1 else 1):
            for at_K, delta_RSK in self._added.get(group, []):
                rows_KR = rows[group][at_K]
                if self.n_groups > 1:
                    first = (site - group) * shape[-1]
                    total = total + delta_RSK @ rows_KR[:, first : first + shape[-1]]
                else:
                    x = self.inputs[0].reshape(-1, self.inputs[0].shape[-1])
                    out = topology.written_by(self.params, delta_RSK.reshape(-1, delta_RSK.shape[-1]) @ rows_KR, x)
                    total = total + out.reshape(shape)
        return total

    def _encode(self, site: int, x_RSD: jax.Array) -> jax.Array:
        """The latents that read a site, float32 [R, S, F]."""
        coder, outer = self.sae.coder, x_RSD.shape[:2]
        x_BD = x_RSD.reshape(-1, x_RSD.shape[-1])
        if self.n_groups == 1:
            return coder.encode(dict(self.params), x_BD).dense().reshape(*outer, -1)
        own = {name: self.params[name][site : site + 1] for name in coder.sparsity.parameters()}
        pre_B1F = (x_BD.astype(jnp.float32) @ self.params["W_enc"][site] + self.params["b_enc"][site][None])[:, None]
        latents = coder.sparsity(pre_B1F, lambda at: entries(pre_B1F, at), dict(self.params) | own, LONG_AGO)
        return latents.dense()[:, 0].reshape(*outer, -1)


def frozen(captured: Mapping[str, jax.Array]) -> dict[str, Edit]:
    """Edits that put values of a clean run in place: attention patterns and norms' scales, for direct effects."""

    def instead(value: jax.Array) -> Edit:
        return lambda _: value

    return {name: instead(value) for name, value in captured.items()}


def together(*edits: Mapping[str, Edit]) -> dict[str, Edit]:
    """The edits of several dictionaries in one pass; at one hook point the first given acts first."""
    joined: dict[str, Edit] = {}
    for mapping in edits:
        for name, edit in mapping.items():
            joined[name] = _after(joined[name], edit) if name in joined else edit
    return joined


def _after(first: Edit, second: Edit) -> Edit:
    return lambda value: second(first(value))
