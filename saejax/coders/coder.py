"""A coder = topology x sparsity x losses, as pure functions of (params, batch, stats, step)."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from saejax.coders.config import LONG_AGO
from saejax.coders.latents import Latents, Params
from saejax.coders.lista import LINEAR, Lista
from saejax.coders.sparsity.base import Keep, Sparsity
from saejax.coders.term import Context, Term, squared_error
from saejax.coders.topology import Axes, Declared, Topology
from saejax.kernels.batch import n_tokens
from saejax.kernels.dense import computed_once
from saejax.kernels.norms import unit_rows
from saejax.kernels.sparse import entries

Stats = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Coder:
    """A sparse dictionary.

    Attributes:
        topology: which hook points it reads and writes, and its parameters.
        sparsity: pre-activations -> latents.
        terms: the loss is the sum of weight x term.
        unit_decoder_every: decoder rows go back to length 1 after every so many steps; 0 leaves them free.
        dead_after_tokens: a latent is dead when it has not fired for this many tokens.
        lista: how often the encoder looks again at what it left over.
    """

    topology: Topology
    sparsity: Sparsity
    terms: tuple[Term, ...]
    unit_decoder_every: int
    dead_after_tokens: int
    lista: Lista = LINEAR

    def init(self, key: jax.Array) -> Params:
        params = nn.meta.unbox(Declared(self.topology).init(key)["params"])
        shape = self.topology.latent_shape
        learned = {name: jnp.full(shape, value, jnp.float32) for name, value in self.selecting().items()}
        return params | learned

    def selecting(self) -> dict[str, float]:
        """Numbers of each latent that the selection learns, those of each step of the encoder too where it has them."""
        learned = self.sparsity.parameters()
        return learned | {own: learned[name] for _, name, own in self.lista.names(learned) if self.lista.own}

    def init_stats(self) -> Stats:
        """tokens_since_fired, int32 of the latents' shape, and what sparsity and terms follow."""
        followed = self.sparsity.statistics()
        followed = followed | {own: followed[name] for _, name, own in self.lista.names(followed)}
        for term in self.terms:
            followed = followed | term.statistics()
        scalars = {name: jnp.float32(value) for name, value in followed.items()}
        return {"tokens_since_fired": jnp.zeros(self.topology.latent_shape, jnp.int32)} | scalars

    def logical_axes(self) -> dict[str, Axes]:
        """{name of a parameter or statistic: logical axis of each of its dimensions}."""
        of_latents = ("tokens_since_fired", *self.selecting())
        scalars = [name for name in self.init_stats() if name not in of_latents]
        of_sparsity = dict.fromkeys(of_latents, self.topology.latent_axes) | dict.fromkeys(scalars, ())
        return _axes(self.topology) | of_sparsity

    def along_latents(self, name: str, of_latent: jax.Array) -> jax.Array:
        """`of_latent` ([F] or [G, F]) with the axes of parameter `name`, whose other dimensions become 1."""
        axes = self.logical_axes()[name]
        shape = [1] * len(axes)
        shape[axes.index("latent")] = of_latent.shape[-1]
        if of_latent.ndim == 2 and axes[0] == "site":
            shape[0] = of_latent.shape[0]
        elif of_latent.ndim == 2:  # a decoder matrix of its own for each group: W_dec_3 belongs to group 3
            of_latent = of_latent[self.topology.decoders.index(name)]
        return of_latent.reshape(shape)

    def rescaled(self, params: Params, factor: Any) -> Params:
        """Parameters whose latents are `factor` > 0 times as large (one number, or one a latent), with the same output.

        A selection of the k largest stays the same where all latents have one factor.
        """
        factor_F = jnp.broadcast_to(jnp.asarray(factor, jnp.float32), self.topology.latent_shape)
        along = functools.partial(self.along_latents, of_latent=factor_F)
        like = self.sparsity.like_latents
        like += tuple(own for _, _, own in self.lista.names(like) if self.lista.own)
        grown = ("W_enc", "b_enc", *like)
        return (
            params
            | {name: params[name] * along(name) for name in grown}
            | {name: params[name] / along(name) for name in self.topology.decoders}
        )

    @property
    def few_tokens(self) -> int:
        """Tokens whose dense latents take 64 MB: so many at once are no burden beside a training."""
        return max(1, 2**26 // (4 * math.prod(self.topology.latent_shape)))

    def encode(self, params: Params, x: jax.Array) -> Latents:
        """Latents of x, as at the end of training; differentiable in params and x.

        Selection over a batch takes x as the batch: for single tokens use the coder that `inference` gives.
        """
        into, _ = self._encoder_reads(params, x, LONG_AGO, self.sparsity, _dense)
        pre = self.topology.pre_activations(params, into)
        return self.sparsity(pre, functools.partial(entries, pre), params, LONG_AGO)

    def _encoder_reads(
        self,
        params: Params,
        x: jax.Array,
        step: jax.Array | int,
        sparsity: Sparsity,
        take: Callable[[Params, jax.Array, jax.Array, jax.Array], Keep],
    ) -> tuple[jax.Array, tuple[Latents, ...]]:
        """(u [B, *in] of `lista`, which the encoder reads in place of x, the latents of the steps before the last)."""
        if not self.lista.steps:
            return x, ()
        into, earlier = x, []
        nothing = x - self.topology.at_rest(params, x, len(x))
        for t in range(self.lista.steps):
            own = self.lista.at(t, params, sparsity.parameters())
            pre = self.topology.pre_activations(params, into)
            latents = sparsity(pre, take(params, self.topology.encoder_rows(params), into, pre), own, step)
            error = x - self.topology.decode(params, latents, x)
            into = into + self.lista.share(error, nothing) * error
            earlier.append(latents)
        return into, tuple(earlier)

    def _sparse(self, params: Params, rows: jax.Array, into: jax.Array, pre: jax.Array) -> Keep:
        """Called by a selection, whose gradient is then the encoder's."""
        return jax.named_scope("encode")(functools.partial(self.topology.kept, params, rows, into, pre))

    def group(self, params: Params, g: int) -> tuple["Coder", Params]:
        """(coder, params) of one group of latents by itself, as the layers of a cross-layer transcoder are.

        What it decodes is the group's part of the site that it reads.
        """
        topology, params_of_group = self.topology.group(params, g)
        return dataclasses.replace(self, topology=topology), params_of_group

    def decode(self, params: Params, latents: Latents, x: jax.Array | None = None) -> jax.Array:
        """Reconstruction of latents; a skip connection and layer normalisation need x as well."""
        return self.topology.decode(params, latents, x)

    def reconstruct(self, params: Params, x: jax.Array) -> jax.Array:
        """decode(encode(x))"""
        return self.decode(params, self.encode(params, x), x)

    def inference(self, params: Params, stats: Stats) -> tuple["Coder", Params]:
        """The coder for after training, which takes every token alone, and its parameters."""
        topology = self.topology
        if "centre" in params:
            params, gain = topology.uncentred(params)
            params, topology = self.sparsity.biased(params, gain), dataclasses.replace(topology, centred=False)
        sparsity, alone = self.sparsity.inference(params, stats, topology.latent_shape)
        # What follows the batches has followed those of each step.
        lista = dataclasses.replace(self.lista, own=bool(self.sparsity.statistics() and self.lista.steps))
        for t, name, own in lista.names(sparsity.parameters() if lista.own else ()):
            at_t = stats | {of: stats[f"{of}_{t}"] for of in self.sparsity.statistics()}
            alone = alone | {own: self.sparsity.inference(params, at_t, topology.latent_shape)[1][name]}
        return dataclasses.replace(self, topology=topology, sparsity=sparsity, terms=(), lista=lista), alone

    def loss(
        self,
        params: Params,
        batch: dict[str, jax.Array],
        stats: Stats,
        step: jax.Array,
        sparsity_scale: jax.Array | float = 1.0,
    ) -> tuple[jax.Array, tuple[Metrics, Stats]]:
        """(loss, (metrics, new stats)) of a batch {x, y}; y is x for an autoencoder.

        Pure: statistics come in and go out. Dead latents are those dead before this batch. `sparsity_scale`
        multiplies the weight of the terms that are about sparsity.
        """
        loss, (metrics, seen) = self.loss_of_part(params, batch, stats, step, sparsity_scale, None)
        return loss, (metrics, self.follow(stats, seen, step))

    def loss_of_part(
        self,
        params: Params,
        part: dict[str, jax.Array],
        stats: Stats,
        step: jax.Array,
        sparsity_scale: jax.Array | float,
        whole_variance: jax.Array | None,
    ) -> tuple[jax.Array, tuple[Metrics, Stats]]:
        """(loss, (metrics, what was seen)) of a part of a batch, for the statistics from before the whole batch.

        Losses and metrics are means over the parts (of one size), what was seen is a sum over them, for `follow`.
        `whole_variance` is the `total_variance` of all parts' targets; None where the part is the batch.
        """
        c = self._context(params, part, stats, step, whole_variance)
        values = {term.name: jax.named_scope(f"loss/{term.name}")(term)(c) for term in self.terms}
        loss = jnp.float32(0)
        for term in self.terms:
            scale = sparsity_scale if term.is_sparsity_weight() else 1.0
            loss = loss + term.coefficient(step) * scale * values[term.name]

        with jax.named_scope("statistics"):
            seen = {"tokens": jnp.int32(n_tokens(c.x.shape[0])), "fired": c.latents.fired().astype(jnp.int32)}
            seen |= self.sparsity.seen(c.latents)
            for t, latents in enumerate(c.earlier):
                seen |= {f"{name}_{t}": value for name, value in self.sparsity.seen(latents).items()}
            for term in self.terms:
                seen |= term.seen(c)
            metrics = values | {
                "loss": loss,
                "fve": 1 - squared_error(c.y, c.y_hat) / c.variance,
                "l0": c.latents.l0(),
                "dead": c.dead.sum(),
            }
        return loss, (metrics, seen)

    def follow(self, stats: Stats, seen: Stats, step: jax.Array) -> Stats:
        """The statistics after a batch, once for all of it, from what was `seen` of its parts together."""
        since = jnp.minimum(stats["tokens_since_fired"] + seen["tokens"], LONG_AGO)
        new = stats | {"tokens_since_fired": jnp.where(seen["fired"] > 0, 0, since)}
        new = new | self.sparsity.follow(stats, seen, step)
        for t in range(self.lista.steps):
            followed, names = self.sparsity.statistics(), [name for name in seen if f"{name}_{t}" in seen]
            at_t = stats | {name: stats[f"{name}_{t}"] for name in followed}
            seen_t = seen | {name: seen[f"{name}_{t}"] for name in names}
            after = self.sparsity.follow(at_t, seen_t, step)
            new = new | {f"{name}_{t}": after[name] for name in followed}
        for term in self.terms:
            new = new | term.follow(stats, seen)
        return new

    def _context(
        self, params: Params, part: dict[str, jax.Array], stats: Stats, step: jax.Array, variance: jax.Array | None
    ) -> Context:
        x, y = (part[name].astype(jnp.float32) for name in ("x", "y"))
        dead = stats["tokens_since_fired"] >= self.dead_after_tokens
        sparsity = self.sparsity.for_loss(frozenset().union(*(term.needs for term in self.terms)))
        # Of constants: no gradient flows through what the encoder reads.
        constants, take = jax.lax.stop_gradient(params), self._sparse if sparsity.sparse else _dense
        with jax.named_scope("lista"):
            into, earlier = self._encoder_reads(constants, x, step, sparsity, take)
        with jax.named_scope("encode"):
            pre = self.topology.pre_activations(params, into)
            if sparsity.sparse:  # no dense gradient
                pre = computed_once(jax.lax.stop_gradient(pre), step)
            rows = self.topology.encoder_rows(params)
            keep = take(params, rows, into, pre)
        with jax.named_scope("select"):
            latents = sparsity(pre, keep, params, step)
        with jax.named_scope("decode"):
            y_hat = self.topology.decode(params, latents, x)
        about = (self.topology, sparsity, params, x, y, y_hat, pre, keep, latents, dead, stats, step, variance)
        return Context(*about, into=into, rows=rows, earlier=earlier)

    def project_gradients(self, params: Params, grads: Params) -> Params:
        """With a unit decoder: removes from each decoder row's gradient its part along the row."""
        if not self.unit_decoder_every:
            return grads

        def across(name: str) -> jax.Array:
            unit = unit_rows(params[name])
            return grads[name] - (unit * grads[name]).sum(tuple(range(1, unit.ndim)), keepdims=True) * unit

        return grads | {name: across(name) for name in self.topology.decoders}

    def constrain(self, params: Params, step: jax.Array) -> Params:
        """With a unit decoder: every decoder row back to length 1, when step + 1 steps call for it.

        Called after each update, with the number of steps finished before it.
        """
        if not self.unit_decoder_every:
            return params
        rows = {name: params[name] for name in self.topology.decoders}
        if self.unit_decoder_every == 1:
            return params | jax.tree.map(unit_rows, rows)
        due = (step + 1) % self.unit_decoder_every == 0
        return params | jax.lax.cond(due, lambda: jax.tree.map(unit_rows, rows), lambda: rows)


def _dense(params: Params, rows: jax.Array, into: jax.Array, pre: jax.Array) -> Keep:
    return functools.partial(entries, pre)


@functools.lru_cache(maxsize=64)
def _axes(topology: Topology) -> dict[str, Axes]:
    """{parameter: logical axis of each of its dimensions}. To ask Flax takes tens of milliseconds."""
    boxed = jax.eval_shape(Declared(topology).init, jax.random.key(0))["params"]
    return {name: tuple(leaf.names) for name, leaf in boxed.items()}
