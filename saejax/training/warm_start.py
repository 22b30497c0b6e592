"""The beginning of a training that starts from a trained coder: the first step's latents are the source's.

The source's parameters take raw activations. They are brought to the training's topology and sparsity where that can be
said without changing a latent, then to the scales of its sites: the inverse of `folded`. Latents keep their meaning but
may get another unit (`Sites.latent_scale`), so that weights have the size for which learning rates are made:

    unit decoder    decoder rows go to length 1, and encoder, biases and thresholds are multiplied by the row's length
    free decoder    a power of ten brings encoder columns and decoder rows near to one length

`folded` takes the unit out again. A selection of the k largest knows no length of rows: it needs rows that are all of
one length to begin with. An encoder that is centred has the data's mean as its centre, as a fresh one has, and b_enc
takes in what that changes. Nothing else of a fresh start is used: it would move what the source brings.

A coder with more latents than the source has fresh ones after those of the source:

    k are kept      their encoder starts at 1e-6 of what the preset gives, below every latent that matters, and they
                    count as dead, so that AuxK and resampling take them from the first step
    else            b_enc starts so that each fires on 1 / (number of new ones) of the tokens of a batch
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from saejax.coders import Coder, Sites
from saejax.coders.latents import Params
from saejax.coders.parts import SPARSITIES
from saejax.coders.sparsity.base import Sparsity
from saejax.coders.sparsity.batchtopk import BatchTopK
from saejax.coders.sparsity.gated import Gated
from saejax.coders.sparsity.jumprelu import JumpRelu
from saejax.coders.sparsity.relu import Relu
from saejax.coders.sparsity.topk import TopK
from saejax.coders.topologies import TOPOLOGIES, Autoencoder, SkipTranscoder
from saejax.coders.topology import Topology, Transcoder
from saejax.core.errors import ConfigError
from saejax.store import BatchSource
from saejax.trained import TrainedCoder, centred
from saejax.training.start import bias_for_rate, read_mean

# The encoder of new latents where k are kept, as a share of what the preset gives.
_SILENT = 1e-6
# Rows differ in length when one is further than this from their mean.
_ONE_LENGTH = 0.01


@flax.struct.dataclass
class WarmStart:
    """Parameters and statistics that a training has from its source.

    Attributes:
        params: all of the coder's, with zeros for the latents that the source has not.
        stats: of the sparsity, that do not start as always.
        sample: x of a batch, [B, *in], where biases of new latents need it; else None.
        n_known: latents (of each group) that the source has.
    """

    params: Params
    stats: dict[str, Any]
    sample: Any
    n_known: int = flax.struct.field(pytree_node=False)

    def applied(self, coder: Coder, fresh: Params, stats: dict[str, Any]) -> tuple[Params, dict[str, Any]]:
        """(parameters, statistics) that training begins with, from fresh ones. Pure."""
        topology, n = coder.topology, self.n_known
        stats = stats | self.stats
        if n == topology.d_sae:
            return jax.tree.map(jnp.asarray, self.params), stats
        known = jnp.broadcast_to(jnp.arange(topology.d_sae) < n, topology.latent_shape)
        with_latents = [name for name, axes in coder.logical_axes().items() if "latent" in axes and name in fresh]

        def beside(new: Params) -> Params:
            known_params = jax.tree.map(jnp.asarray, self.params)
            return known_params | {
                name: jnp.where(coder.along_latents(name, known), known_params[name], new[name])
                for name in with_latents
            }

        if coder.sparsity.kept:
            params = beside(fresh | {"W_enc": _SILENT * fresh["W_enc"]})
            since = jnp.where(known, 0, jnp.int32(coder.dead_after_tokens))
            return params, stats | {"tokens_since_fired": since}
        rare = bias_for_rate(coder, beside(fresh), self.sample, 1 / (topology.d_sae - n))["b_enc"]
        return beside(fresh | {"b_enc": rare}), stats

    def placed(self, like: Params) -> "WarmStart":
        """The same with parameters on the devices where `like` has them: none holds all of a coder that is split."""
        params = {
            name: jax.make_array_from_callback(value.shape, like[name].sharding, value.__getitem__)
            for name, value in self.params.items()
        }
        return self.replace(params=params)  # type: ignore[attr-defined,no-any-return]


def warm_start(source: TrainedCoder, coder: Coder, sites: Sites) -> tuple[Params, dict[str, Any], float, list[str]]:
    """(parameters, statistics, latent scale, what to know) of a training of `coder` that starts from `source`.

    The parameters are those of the source's latents alone, in the training's scales and without a centre.

    Raises:
        ConfigError: the coders have other widths, or nothing of one means anything in the other; names the remedy.
    """
    _check_widths(source, coder)
    source = _uncentred(source)
    known = dataclasses.replace(coder, topology=dataclasses.replace(coder.topology, d_sae=source.coder.topology.d_sae))
    params = _in_topology(source, known.topology, sites)
    for _, _, own in source.coder.lista.names(source.coder.sparsity.parameters()):
        params.pop(own, None)  # a training finds them anew
    params, threshold, notes = _in_sparsity(source.coder.sparsity, known.sparsity, params)
    if source.coder.lista.steps != coder.lista.steps:
        there, here = source.coder.lista.steps, coder.lista.steps
        notes = [*notes, f"the encoder looks {here} times at what it left over, the source's {there} times"]
    scales = (sites.read_scales, sites.write_scales)
    params = known.topology.fold(params, *(tuple(1 / scale for scale in side) for side in scales))
    factor, scale, more = _latent_unit(known, params)
    params = {name: np.asarray(value) for name, value in known.rescaled(params, factor).items()}
    stats = {} if threshold is None else {"threshold": np.float32(threshold * scale)}
    return params, stats, scale, [*notes, *more]


def begun_warm(
    source: TrainedCoder, coder: Coder, sites: Sites, batches: BatchSource, resamples: bool
) -> tuple[WarmStart, Sites, list[str]]:
    """(warm start, the sites with the latents' unit, what to know) of a training that starts from `source`.

    Args:
        resamples: the training resamples dead latents.

    Raises:
        ConfigError: as `warm_start`; or new latents that nothing would ever use.
    """
    params, stats, scale, notes = warm_start(source, coder, sites)
    n_known, width = source.coder.topology.d_sae, coder.topology.d_sae
    shapes, sample = jax.eval_shape(coder.init, jax.random.key(0)), None
    if "centre" in shapes:
        # With a centre, and the same latents: the inverse of `Coder.inference`.
        params = params | {"centre": jnp.asarray(read_mean(sites, batches.statistics), jnp.float32)}
        moved = coder.sparsity.biased(params, -coder.topology.uncentred(params)[1])
        params = {name: np.asarray(value) for name, value in moved.items()}
    if n_known < width:
        if coder.sparsity.kept:
            if not resamples and all(term.name != "auxk" for term in coder.terms):
                raise ConfigError(
                    f"train.init_from has {n_known:,} latents and coder.d_sae is {width:,}, but nothing would ever use "
                    "the new ones: set coder.auxk_coefficient or train.resample_every."
                )
        else:
            arrays = {name: jnp.asarray(rows) for name, rows in batches.whole_batch_at(0).items()}
            sample = np.asarray(sites.batch(arrays)["x"])
        axes = coder.logical_axes()
        params = {name: _widened(value, shapes[name].shape, axes[name]) for name, value in params.items()}
    return WarmStart(params, stats, sample, n_known), dataclasses.replace(sites, latent_scale=scale), notes


def _widened(value: np.ndarray, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> np.ndarray:
    """`value` with zeros after its latents."""
    more = [
        (0, wide - now) if axis == "latent" else (0, 0)
        for wide, now, axis in zip(shape, value.shape, axes, strict=True)
    ]
    return np.pad(value, more)


# --- widths and topologies -------------------------------------------------------------------------------------


def _check_widths(source: TrainedCoder, coder: Coder) -> None:
    there, here = source.coder.topology, coder.topology
    for what, a, b in (("reads", there.in_shape, here.in_shape), ("writes", there.out_shape, here.out_shape)):
        if type(there).stacked == type(here).stacked and a != b:
            sites = "[hook points, width] " if len(a) > 1 else "width "
            raise ConfigError(
                f"train.init_from {what} activations of {sites}{_shown(a)}, this training {_shown(b)}. Choose hook "
                "points of the same shape, or another source."
            )
    if there.d_sae > here.d_sae:
        raise ConfigError(
            f"train.init_from has {there.d_sae:,} latents and coder.d_sae is {here.d_sae:,}: a training drops none. "
            f"Set coder.d_sae={there.d_sae} or more."
        )


def _uncentred(source: TrainedCoder) -> TrainedCoder:
    """The source without a centre of its own, as `folded` leaves it: one that is made by hand may have one."""
    if "centre" not in source.params:
        return source
    coder, (params, gain) = source.coder, source.coder.topology.uncentred(dict(source.params))
    params = coder.sparsity.biased(params, gain)
    return dataclasses.replace(
        source,
        coder=dataclasses.replace(coder, topology=dataclasses.replace(coder.topology, centred=False)),
        params=params,
    )


def _shown(shape: tuple[int, ...]) -> str:
    return str(list(shape)) if len(shape) > 1 else str(shape[0])


def _topology_name(topology: Topology) -> str:
    return next(name for name, kind in TOPOLOGIES.items() if kind is type(topology))


def _in_topology(source: TrainedCoder, topology: Topology, sites: Sites) -> Params:
    """The source's raw parameters as those of `topology`, float32."""
    there, params = source.coder.topology, {name: np.asarray(v, np.float32) for name, v in source.params.items()}
    if type(there) is type(topology):
        return params
    a, b = _topology_name(there), _topology_name(topology)
    if not {type(there), type(topology)} <= {Autoencoder, Transcoder, SkipTranscoder}:
        raise ConfigError(f"train.init_from is a {a}, from which no {b} can start. Set coder.topology={a}.")
    for tied, other in ((there, sites), (topology, source.sites)):
        if isinstance(tied, Autoencoder) and other.reads != other.writes:
            raise ConfigError(
                f"train.init_from is of topology {a}, and coder.topology is {b}: they are one coder only where both "
                f"read and write the same hook point; here {other.reads[0]} -> {other.writes[0]}. Set "
                f"coder.topology={a}."
            )
    if isinstance(there, SkipTranscoder):
        if np.any(params.pop("W_skip")):
            raise ConfigError(
                f"train.init_from has a skip connection, for which a {b} has no place. Set "
                "coder.topology=skip_transcoder."
            )
    elif isinstance(topology, SkipTranscoder):
        params["W_skip"] = np.zeros((topology.d_in, topology.out_shape[-1]), np.float32)
    # An autoencoder encodes x - b_dec.
    sign = isinstance(topology, Autoencoder) - isinstance(there, Autoencoder)
    return centred(params, sign) if sign else params


# --- sparsities ------------------------------------------------------------------------------------------------


def _in_sparsity(there: Sparsity[Any], here: Sparsity[Any], params: Params) -> tuple[Params, float | None, list[str]]:
    """(parameters of the sparsity `here`, the start of its batch threshold if it has one, what to know)."""
    if type(there) is type(here):
        more = [f"{here.kept} latents are kept, {there.kept} by the source"] if here.kept != there.kept else []
        return params, None, more
    a, b = (next(name for name, kind in SPARSITIES.items() if kind is type(sparsity)) for sparsity in (there, here))
    alone, theta_F = _thresholds(there, params)
    if theta_F is None and type(here) in (Relu, JumpRelu, Gated):
        raise ConfigError(
            f"train.init_from keeps k latents of a token ({a}), and {b} needs thresholds. Start one with "
            "coder.sparsity=batchtopk from it, which finds a threshold, and then this one from that."
        )
    if type(here) is Relu and not np.any(theta_F):
        return alone, None, []
    if type(here) is JumpRelu:
        return alone | {"threshold": theta_F}, None, []
    if type(here) is Gated:
        b_enc = alone["b_enc"]
        return alone | {"r_mag": np.zeros_like(b_enc), "b_mag": b_enc, "b_enc": b_enc - theta_F}, None, []
    convertible = type(there) in (Relu, JumpRelu, Gated, TopK, BatchTopK)
    if type(here) is TopK and convertible:
        return alone, None, [f"training keeps the {here.kept} largest latents of a token, whatever the source kept"]
    if type(here) is BatchTopK and convertible:
        if theta_F is None:
            return alone, None, ["the threshold for single tokens follows from the first batches"]
        theta, equal = float(theta_F.mean()), np.ptp(theta_F) <= 1e-6 * theta_F.mean()
        note = f"batchtopk has one threshold: it starts at {theta:.3g}, the source's mean"
        return alone, theta, [] if equal else [note]
    raise ConfigError(f"train.init_from is a {a} coder, whose latents are none of {b}. Set coder.sparsity={a}.")


def _thresholds(there: Sparsity[Any], params: Params) -> tuple[Params, np.ndarray | None]:
    """(W_enc, b_enc, ... and nothing of the sparsity, theta >= 0 [F]) with f = pre where pre > theta; None of a k."""
    alone = {name: value for name, value in params.items() if name not in there.parameters()}
    if type(there) is Gated:
        # exp(r) (x' W) + b_mag > 0 where x' W + b_enc > 0: a JumpReLU. (Rajamanoharan et al. 2024, section 3.2)
        size_F = np.exp(params["r_mag"])
        alone |= {"W_enc": params["W_enc"] * np.expand_dims(size_F, -2), "b_enc": params["b_mag"]}
        return alone, np.maximum(params["b_mag"] - size_F * params["b_enc"], 0)
    if type(there) is JumpRelu:
        return alone, np.maximum(params["threshold"], 0)
    return alone, np.zeros_like(params["b_enc"]) if type(there) is Relu else None


# --- the latents' unit -----------------------------------------------------------------------------------------


def _latent_unit(coder: Coder, params: Params) -> tuple[Any, float, list[str]]:
    """(what each latent is multiplied by, one number or [F]; the unit that `folded` takes out again; what to know)."""
    rows_F = np.stack([np.linalg.norm(np.asarray(rows), axis=1) for rows in coder.topology.decoder_rows(params)])
    rows_F = rows_F.reshape(coder.topology.latent_shape)
    some = rows_F > 0
    if not some.any():
        return 1.0, 1.0, []
    mean = float(rows_F[some].mean())
    if not coder.unit_decoder_every:
        W_enc = np.asarray(params["W_enc"])
        columns = float(np.sqrt(np.square(W_enc).sum() / rows_F.size)) or mean
        scale = float(10.0 ** round(np.log10(mean / columns) / 2))
        return scale, scale, []
    apart = float(np.abs(rows_F[some] / mean - 1).max())
    if apart > _ONE_LENGTH and coder.sparsity.kept:
        raise ConfigError(
            f"The decoder rows of train.init_from differ in length by up to {apart:.0%}, and rows of length 1 "
            "(coder.unit_decoder_every) would change which latents are the largest. Set coder.unit_decoder_every=0."
        )
    notes = [f"decoder rows go to length 1, and latents are multiplied by their lengths (up to {apart:.0%} apart)"]
    return np.where(some, rows_F, mean), mean, notes if apart > _ONE_LENGTH else []
