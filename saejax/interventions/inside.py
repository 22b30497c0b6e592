"""Dictionaries inside the language model: their latents are read, changed and written back within one forward pass.

    y' = y + Dec(f') - Dec(f)      errors "own": what the dictionary does not explain stays as it is in this run
    y' = Dec(f')                   errors "none"
    y' = Dec(f') + e               errors given: of a clean run, or of another prompt

y is what stands where the dictionary writes, f its latents of what stands where it reads, both behind all that was
changed before them. An autoencoder reads and writes at one place; a transcoder reads mlp_in and writes mlp_out; latents
of layer l of a cross-layer transcoder write from layer l on. A crosscoder's latents read places that come after those
it writes, so they are given: those of a clean run.

(`handle_errors` of Marks et al. 2024, feature-circuits; Lindsey et al. 2025.)

Shape letters: R rows, S tokens, D width of a site, F latents of a group, K changed latents.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from saejax.interventions.change import Change
from saejax.lm.forward import Edit
from saejax.trained import TrainedCoder
from saejax.trained.coder import ParamMap

# Of one dictionary; given: {hook point that it writes: e [R, S, D]}.
Errors = Literal["own", "none"] | Mapping[str, jax.Array]


@dataclasses.dataclass
class Inside:
    """One dictionary in one forward pass: its edits, and the latents it saw. Made anew for each pass.

    Attributes:
        sae: with the model's own names of hook points (`TrainedCoder.at`).
        params: arrays of the program that runs.
        latents: {group: [R, S, F]} before the changes, once the pass has come there; for a crosscoder, given.
    """

    sae: TrainedCoder
    params: ParamMap
    changes: Sequence[Change] = ()
    errors: Errors = "own"
    latents: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    _inputs: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    _changed: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    _deltas: dict[int, list[tuple[jax.Array, jax.Array]]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for group, f_RSF in self.latents.items():
            self._change(group, f_RSF)

    def edits(self) -> dict[str, Edit]:
        return {name: functools.partial(self._visit, name) for name in self.sae.sites.hook_points}

    def _visit(self, name: str, value_RSD: jax.Array) -> jax.Array:
        reads, writes = self.sae.sites.reads, self.sae.sites.writes
        if name in reads:
            self._read(reads.index(name), value_RSD)
        return self._write(writes.index(name), value_RSD) if name in writes else value_RSD

    def _read(self, site: int, x_RSD: jax.Array) -> None:
        self._inputs[site] = x_RSD
        if site in self.latents or reads_all(self.sae):
            return
        coder, params = self.sae.coder.group(dict(self.params), site)
        f_BF = coder.encode(params, _flat_tokens(x_RSD)).dense()
        self.latents[site] = f_BF.reshape(*x_RSD.shape[:2], -1)
        self._change(site, self.latents[site])

    def _change(self, group: int, f_RSF: jax.Array) -> None:
        d_sae = f_RSF.shape[-1]
        for change in self.changes:
            at_K = jnp.asarray(change.latents) % d_sae
            old_RSK = f_RSF[..., at_K]
            own_11K = (change.latents // d_sae == group)[None, None]
            delta_RSK = jnp.where(own_11K, change(old_RSK) - old_RSK, 0)
            self._deltas.setdefault(group, []).append((at_K, delta_RSK))
            f_RSF = f_RSF.at[..., at_K].add(delta_RSK)
        self._changed[group] = f_RSF

    def _write(self, site: int, y_RSD: jax.Array) -> jax.Array:
        if self.errors == "own":
            return y_RSD + self._delta(site, y_RSD).astype(y_RSD.dtype) if self.changes else y_RSD
        new_RSD = self._decoded(site, self._changed, y_RSD)
        if not isinstance(self.errors, str):
            new_RSD = new_RSD + self.errors[self.sae.sites.writes[site]]
        return new_RSD.astype(y_RSD.dtype)

    def error(self, site: int, y_RSD: jax.Array) -> jax.Array:
        """y - Dec(f): what stands at a site that the dictionary writes, and it does not explain. float32 [R, S, D]"""
        return y_RSD.astype(jnp.float32) - self._decoded(site, self.latents, y_RSD)

    def _decoded(self, site: int, f: Mapping[int, jax.Array], y_RSD: jax.Array) -> jax.Array:
        total_RSD = sum(f[g] @ self._rows(g, site, y_RSD.shape[-1]) for g in self._writers(site))
        return self._added(total_RSD) + self._at_rest(site, y_RSD)

    def _delta(self, site: int, y_RSD: jax.Array) -> jax.Array:
        """Dec(f') - Dec(f) at a site, from the changed latents alone."""
        deltas = [(g, *delta) for g in self._writers(site) for delta in self._deltas.get(g, [])]
        total_RSD = sum(delta_RSK @ self._rows(g, site, y_RSD.shape[-1])[at_K] for g, at_K, delta_RSK in deltas)
        return self._added(total_RSD)

    def _writers(self, site: int) -> list[int]:
        """The groups that write a site: of a cross-layer transcoder those of its layer and before."""
        return [g for g in range(n_groups(self.sae)) if site in self.sae.coder.topology.targets(g)]

    def _rows(self, group: int, site: int, width: int) -> jax.Array:
        """[F, D]: the part of a group's decoder rows that goes to a site."""
        first = self.sae.coder.topology.targets(group).index(site)
        return self.sae.coder.topology.decoder_rows(dict(self.params))[group][:, first * width : (first + 1) * width]

    def _added(self, total_RSD: Any) -> jax.Array:
        """The effect of a sum of decoder rows: with layer normalisation as many times as the token is large."""
        topology = self.sae.coder.topology
        if topology.stacked:
            return total_RSD
        added_BD = topology.written_by(dict(self.params), _flat_tokens(total_RSD), _flat_tokens(self._inputs[0]))
        return added_BD.reshape(total_RSD.shape)

    def _at_rest(self, site: int, y_RSD: jax.Array) -> jax.Array:
        """Dec(0) at a site: the bias, and what a skip connection adds."""
        topology = self.sae.coder.topology
        x: jax.Array | None = None
        if self._inputs:  # of the sites that the pass has come to
            some = next(iter(self._inputs.values()))
            inputs = [_flat_tokens(self._inputs.get(i, jnp.zeros_like(some))) for i in range(len(self.sae.sites.reads))]
            x = jnp.stack(inputs, axis=1) if topology.stacked else inputs[0]
        rest_B = topology.at_rest(dict(self.params), x, y_RSD.shape[0] * y_RSD.shape[1])
        return (rest_B[:, site] if topology.stacked else rest_B).reshape(y_RSD.shape)


def n_groups(sae: TrainedCoder) -> int:
    """Groups of latents, each of which reads one site: the layers of a cross-layer transcoder."""
    shape = sae.coder.topology.latent_shape
    return shape[0] if len(shape) == 2 else 1


def reads_all(sae: TrainedCoder) -> bool:
    """True where a latent reads several hook points: its value is not known where the first is written."""
    return n_groups(sae) == 1 and len(sae.sites.reads) > 1


def together(*edits: Mapping[str, Edit]) -> dict[str, Edit]:
    """The edits of several in one pass; at one hook point the first given acts first."""
    in_turn: dict[str, list[Edit]] = {}
    for mapping in edits:
        for name, edit in mapping.items():
            in_turn.setdefault(name, []).append(edit)

    def all_of(name: str, value: jax.Array) -> jax.Array:
        return functools.reduce(lambda before, edit: edit(before), in_turn[name], value)

    return {name: functools.partial(all_of, name) for name in in_turn}


def _flat_tokens(x_RSD: jax.Array) -> jax.Array:
    """[R S, D], float32."""
    return x_RSD.astype(jnp.float32).reshape(-1, x_RSD.shape[-1])
