"""Where a run begins: with fresh parameters, with those of another dictionary (`train.init_from`), or where it was."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from saejax.app.experiment import Experiment
from saejax.checkpoints import Checkpoints
from saejax.coders import Coder, CoderConfig, Sites
from saejax.core.errors import ConfigError, DataError
from saejax.runs.provenance import Provenance, verify_provenance
from saejax.store import BatchSource
from saejax.trained import TrainedCoder, make_sites
from saejax.training.start import make_prepare, read_spread
from saejax.training.warm_start import WarmStart, begun_warm, warm_start

Source = Callable[[], TrainedCoder]

# Settings of the coder's start that a warm start has no place for, and what they move.
_FRESH = {"b_dec_init": "b_dec", "firing_rate_init": "b_enc", "target_l0_start": "b_enc"}


@dataclasses.dataclass(frozen=True)
class Beginning:
    """What a training begins with.

    Attributes:
        sites: with the unit of the latents.
        prepare: fresh parameters -> those of step 0, where there is no warm start.
        warm: the warm start, where there is one.
        spread: of what the encoder reads, by which b_enc learns; empty for runs that began before it counted.
        identity: of the dictionary that it is from, for the run's record; empty without one.
    """

    sites: Sites
    prepare: Callable[[Any], Any]
    spread: tuple[float, ...]
    warm: WarmStart | None = None
    identity: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_meta(self) -> dict[str, Any]:
        """What a checkpoint must say for the training to go on as it began."""
        return {"b_enc_spread": list(self.spread)} if self.spread else {}

    def recorded(self, e: Experiment, made_from: Provenance) -> Provenance:
        """`made_from` with the dictionary that the run starts from.

        Raises:
            DataError: it began with another one, and was stopped before its first checkpoint.
        """
        if not self.identity:
            return made_from
        found = {"init": dict(self.identity)}
        verify_provenance(e.run, found, lambda: made_from)
        return made_from | found


def begin(
    e: Experiment,
    coder: Coder,
    names: tuple[tuple[str, ...], tuple[str, ...]],
    batches: BatchSource,
    source: Source,
    checkpoints: Sequence[Checkpoints],
    tell: Callable[[str], None],
    stage: str = "train",
    at: int = 0,
) -> Beginning:
    """Where a training begins. One that has checkpoints goes on from them, and asks for no source any more.

    Args:
        names: the hook points that it reads and writes.
        source: what train.init_from names.
        checkpoints: of all the programs that train together.
        at: which of them it is.

    Raises:
        ConfigError, DataError: the source cannot be read, or this coder cannot start from it; activations that have
            nothing to learn.
    """
    sites = make_sites(e.coder, coder.topology, *names, batches.statistics)
    meta = newest_meta(checkpoints[at]) if is_begun(checkpoints) else {}
    spread = tuple(meta.get("b_enc_spread", ())) if meta else read_spread(coder, sites, batches.statistics)
    if not e.train.init_from:
        return Beginning(sites, make_prepare(e.coder, coder, sites, batches), spread)
    if is_begun(checkpoints):
        own = dataclasses.replace(sites, latent_scale=float(meta.get("latent_scale", 1.0)))
        return Beginning(own, lambda params: params, spread)
    refuse_fresh(e)
    sae = source()
    warm, own, notes = begun_warm(sae, coder, sites, batches, bool(e.train.resample_every))
    new = coder.topology.d_sae - warm.n_known
    points = " and ".join(sae.sites.reads)
    more = f" and {new:,} new ones" if new else ""
    tell(f"{stage}: starts from {e.train.init_from} ({warm.n_known:,} latents of {points}){more}")
    for note in notes:
        tell(f"{stage}: {note}")
    identity = {"source": e.train.init_from, "sha256": sae.fingerprint()}
    return Beginning(own, lambda params: params, spread, warm, identity)


def refuse_fresh(e: Experiment) -> None:
    """Raise ConfigError where settings of a fresh start are to move what the source of a warm one brings."""
    own, usual = e.coder.resolved(), CoderConfig(preset=e.coder.preset).resolved()
    for key, what in _FRESH.items():
        if getattr(own, key) != (value := getattr(usual, key)):
            raise ConfigError(
                f"coder.{key}={getattr(own, key)} moves {what}, and train.init_from brings its own. Leave coder.{key} "
                f"at {value}."
            )


def check(e: Experiment, coder: Coder, sides: tuple[tuple[str, ...], tuple[str, ...]], source: Source) -> None:
    """Refuse early what `begin` would refuse: before anything is captured, so that scales are not known yet.

    Args:
        sides: hook points (read, written).
    """
    if e.train.init_from:
        refuse_fresh(e)
        reads, writes = sides
        ones = (1.0,) * len(reads)
        warm_start(source(), coder, Sites(reads, writes, ones, ones, coder.topology.stacked))


def is_begun(checkpoints: Sequence[Checkpoints]) -> bool:
    """Whether there is a step of which all have a checkpoint."""
    return bool(checkpoints) and bool(set.intersection(*(set(one.steps()) for one in checkpoints)))


def newest_meta(checkpoints: Checkpoints) -> Mapping[str, Any]:
    """What a run's checkpoints say besides arrays: the newest whose word is intact; {} where there is none."""
    for step in reversed(checkpoints.steps()):
        try:
            return checkpoints.restore_numpy(step, names=())[1]
        except DataError:
            continue  # restoring says which are damaged
    return {}
