"""The beginning of a coder's training: fresh, from the dictionary of `train.init_from`, or from a checkpoint."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from saejax.checkpoints import Checkpoints
from saejax.coders import Coder, CoderConfig, Sites
from saejax.core.errors import ConfigError, DataError
from saejax.fit.learner import Sides, Tell
from saejax.fit.trainable import Trainable
from saejax.store import BatchSource
from saejax.trained import TrainedCoder, make_sites, sites_to_meta
from saejax.training.start import make_prepare, read_spread
from saejax.training.warm_start import WarmStart, begun_warm, warm_start

# Settings of the coder's start that a warm start has no place for, and the parameter they move.
_FRESH = {"b_dec_init": "b_dec", "firing_rate_init": "b_enc", "target_l0_start": "b_enc"}


@dataclasses.dataclass(frozen=True)
class Beginning:
    """Sites, parameters and rates that a training begins with.

    Attributes:
        sites: with the unit of the latents.
        spread: of what the encoder reads, by which b_enc learns.
        prepare: fresh parameters -> those of step 0, where there is no warm start.
        warm: the warm start, where there is one.
        identity: of the dictionary that it is from, for the run's record; empty without one.
    """

    sites: Sites
    spread: tuple[float, ...]
    prepare: Callable[[Any], Any] = lambda params: params
    warm: WarmStart | None = None
    identity: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_meta(self, coder: Coder, **more: Any) -> dict[str, Any]:
        """The part of a checkpoint's meta by which the coder is read and the training goes on as it began."""
        return sites_to_meta(self.sites, coder.topology) | more | {"b_enc_spread": list(self.spread)}


def begin(
    e: Trainable,
    coder: Coder,
    sides: Sides,
    batches: BatchSource,
    source: Callable[[], TrainedCoder],
    checkpoints: Sequence[Checkpoints],
    tell: Tell,
    stage: str,
    at: int,
) -> Beginning:
    """The beginning of a training. One that has checkpoints goes on from them, and asks for no source any more.

    Args:
        source: what train.init_from names.
        checkpoints: of all the programs that train together.
        at: which of them it is.

    Raises:
        ConfigError, DataError: the source cannot be read, or this coder cannot start from it; activations that have
            nothing to learn.
    """
    sites, begun = make_sites(e.coder, coder.topology, *sides, batches.statistics), is_begun(checkpoints)
    meta = newest_meta(checkpoints[at]) if begun else {}
    spread = tuple(meta.get("b_enc_spread") or read_spread(coder, sites, batches.statistics))
    if not e.train.init_from:
        return Beginning(sites, spread, make_prepare(e.coder, coder, sites, batches))
    if begun:
        return Beginning(dataclasses.replace(sites, latent_scale=float(meta.get("latent_scale", 1.0))), spread)
    _refuse_fresh(e)
    sae = source()
    warm, scaled, notes = begun_warm(sae, coder, sites, batches, bool(e.train.resample_every))
    new = coder.topology.d_sae - warm.n_known
    points = " and ".join(sae.sites.reads)
    more = f" and {new:,} new ones" if new else ""
    tell(f"{stage}: starts from {e.train.init_from} ({warm.n_known:,} latents of {points}){more}")
    for note in notes:
        tell(f"{stage}: {note}")
    identity = {"source": e.train.init_from, "sha256": sae.fingerprint()}
    return Beginning(scaled, spread, warm=warm, identity=identity)


def _refuse_fresh(e: Trainable) -> None:
    """Raise ConfigError where settings of a fresh start are to move what the source of a warm one brings."""
    now, usual = e.coder.resolved(), CoderConfig(preset=e.coder.preset).resolved()
    for key, what in _FRESH.items():
        if getattr(now, key) != (value := getattr(usual, key)):
            raise ConfigError(
                f"coder.{key}={getattr(now, key)} moves {what}, and train.init_from brings its own. Leave coder.{key} "
                f"at {value}."
            )


def refuse_start(e: Trainable, coder: Coder, sides: Sides, source: Callable[[], TrainedCoder]) -> None:
    """Refuse early what `begin` would refuse: before anything is captured, so that scales are not known yet."""
    if e.train.init_from:
        _refuse_fresh(e)
        warm_start(source(), coder, unscaled_sites(coder, sides))


def unscaled_sites(coder: Coder, sides: Sides) -> Sites:
    """The sites of a coder as long as the activations' scales are not known."""
    reads, writes = (tuple(side) for side in sides)
    return Sites(reads, writes, (1.0,) * len(reads), (1.0,) * len(writes), coder.topology.stacked)


def is_begun(checkpoints: Sequence[Checkpoints]) -> bool:
    """There is a step of which all have a checkpoint."""
    return bool(checkpoints) and bool(set.intersection(*(set(folder.steps()) for folder in checkpoints)))


def newest_meta(checkpoints: Checkpoints) -> Mapping[str, Any]:
    """The meta of a run's newest checkpoint that is intact; {} where there is none."""
    for step in reversed(checkpoints.steps()):
        try:
            return checkpoints.restore_numpy(step, names=())[1]
        except DataError:
            continue  # restoring says which are damaged
    return {}
