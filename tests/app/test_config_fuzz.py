"""Random valid configurations: presets x keys at their bounds, trained for a few steps and interrupted once.

What a configuration accepts must train: to finite numbers, and to the same ones to the bit when it was interrupted; or
it is refused in one line, before anything is written. Keys and the values at their bounds come from the dataclasses, so
that a new key takes part without a word here.
"""

import dataclasses
import functools
import itertools
import os
import random
import re
import signal
import tempfile
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from tiny import train_alone
from tiny.covering import rest_in

from saejax.checkpoints import Checkpoints
from saejax.coders import RECIPES, TOPOLOGIES, Coder, CoderConfig, build
from saejax.core.errors import SaejaxError
from saejax.core.metrics import JsonlWriter, read_metrics
from saejax.core.settings import settings_of
from saejax.evals import Reconstruction
from saejax.evals.heldout import VALIDATED, make_sums
from saejax.fit.resolve import with_rate
from saejax.parallel import ParallelConfig, check_divides, make_mesh, on_mesh, own_rows
from saejax.store import Statistics
from saejax.trained import make_sites
from saejax.training import Outcome, TrainConfig
from saejax.training.start import make_prepare
from saejax.training.step import compile_step

D, BATCH, STEPS = 8, 8, 6

# Values at the bounds of a key, by its type; those that a key refuses alone are no values of it. Beyond what float32
# and int32 hold, within them, and what fractions and counts end at.
LADDER: dict[Any, tuple[Any, ...]] = {
    bool: (False, True),
    int: (0, 1, 2, 3, 16, 2**31 - 1, 2**40),
    float: (0.0, 1e-300, 1e-6, 0.25, 1 - 1e-6, 1 - 1e-9, 1.0, 2.0, 100.0, 1e300),
    tuple[float, ...]: ((), (1.0,), (0.5, 1.0), (0.25, 0.5, 1.0), (2, 4, 16)),
    tuple[int, ...]: ((), (1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 2)),
}
# What decides how large or long all is, and no more.
SIZES: dict[str, tuple[Any, ...]] = {
    "tokens": (STEPS * BATCH, STEPS * BATCH + 3),
    "batch_size": (BATCH, 2 * BATCH),
    "expansion": (1, 2),
    "d_sae": (0, 16, 32),
}
# Not of one training in one process: presets are dealt out in turn.
ELSEWHERE = ("preset", "tensorboard", "wandb", "processes", "coordinator", "heartbeat", "init_from")

BASE: dict[str, dict[str, Any]] = {
    "coder": {"d_sae": 16, "k": 2, "dead_after_tokens": 2 * BATCH, "matmul_dtype": "float32", "target_l0": 2.0},
    "train": {"tokens": STEPS * BATCH, "batch_size": BATCH, "validate_every": 3, "log_every": 1, "lr": 1e-2},
    "parallel": {"mesh": (1, 1)},
}
KINDS: dict[str, type] = {"coder": CoderConfig, "train": TrainConfig, "parallel": ParallelConfig}

Settings = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration that nothing refuses."""

    settings: Settings
    coder_config: CoderConfig
    train: TrainConfig
    parallel: ParallelConfig
    coder: Coder
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def bounds(section: str, key: str) -> tuple[Any, ...]:
    """The values of a key that its section accepts when all else is as in BASE."""
    kind = KINDS[section]
    hint = typing.get_type_hints(kind)[key]
    if isinstance(hint, types.UnionType):
        (hint,) = (arm for arm in typing.get_args(hint) if arm is not types.NoneType)
    values = SIZES.get(key, LADDER.get(hint, ()))
    if hint is str:
        values = tuple(settings_of(kind)[key].choices or ())
    assert values, f"{section}.{key} is of a kind that is not fuzzed"
    return tuple(value for value in values if not refused(functools.partial(kind, **BASE[section] | {key: value})))


def refused(make: Callable[[], object]) -> str:
    """What a configuration is refused with, in one line; empty where it is not."""
    try:
        make()
    except SaejaxError as error:
        assert str(error) and "\n" not in str(error), error
        return str(error)
    return ""


@functools.cache
def deck(sections: tuple[str, ...]) -> tuple[tuple[str, str, Any], ...]:
    """(section, key, value) of all keys at all their bounds."""
    keys = [(s, field.name) for s in sections for field in dataclasses.fields(KINDS[s]) if field.name not in ELSEWHERE]
    return tuple((section, key, value) for section, key in keys for value in bounds(section, key))


def legal(settings: Settings) -> Case:
    """The configuration of these settings, refused as a run would be before it writes."""
    coder_config, config, parallel = (KINDS[name](**settings[name]) for name in ("coder", "train", "parallel"))
    topology = TOPOLOGIES[coder_config.resolved().topology]
    reads = ("a", "b") if topology.stacked else ("a",)
    writes = reads if topology.tied else ("c", "d")[: len(reads)]
    coder = build(coder_config, [D] * len(reads), config.steps, [D] * len(writes), config.neighbours)
    mesh = make_mesh(parallel)
    check_divides(mesh, coder.topology.d_sae)
    own_rows(mesh, config.batch_size, 1, config.neighbours)
    return Case(settings, coder_config, with_rate(config, coder), parallel, coder, reads, writes)


def deal(seed: int, sections: tuple[str, ...], hand: int) -> Iterator[Case]:
    """All presets, each with those of `hand` random settings that go together."""
    rng = random.Random(seed)
    cards: list[tuple[str, str, Any]] = []
    for preset in rng.sample(sorted(RECIPES), len(RECIPES)):
        settings: Settings = BASE | {"coder": BASE["coder"] | {"preset": preset}}
        if RECIPES[preset].settings.get("contrastive_coefficient"):
            settings["train"] = BASE["train"] | {"neighbours": 2}
        if "parallel" in sections:  # so that the mode is one of several devices
            settings["parallel"] = {"mesh": (2, 1)}
        for _ in range(hand):
            cards = cards or rng.sample(deck(sections), len(deck(sections)))
            section, key, value = cards.pop()
            wanted = settings | {section: settings[section] | {key: value}}
            if not refused(functools.partial(legal, wanted)):
                settings = wanted
        yield legal(settings)


# --- a training ------------------------------------------------------------------------------------------------


class Rows:
    """Batches in memory, in the place of a store's: sparse combinations of a few directions, and a mean."""

    def __init__(self, names: tuple[str, ...], batch_size: int, seed: int):
        rng = np.random.default_rng(seed)
        count = STEPS * BATCH * 4
        self.rows, self.statistics, self.batch_size = {}, {}, batch_size
        for name in names:
            codes = (rng.random((count, 12)) < 0.2) * rng.exponential(2.0, (count, 12))
            x = (codes @ rng.normal(size=(12, D)) + rng.normal(size=D)).astype(ml_dtypes.bfloat16)
            norm = np.linalg.norm(x.astype(np.float64), axis=1)
            self.rows[name] = x
            self.statistics[name] = Statistics(count, x.astype(np.float64).mean(0), norm.mean(), np.square(norm).mean())

    def whole_batch_at(self, step: int) -> dict[str, np.ndarray]:
        at = (step * self.batch_size + np.arange(self.batch_size)) % len(next(iter(self.rows.values())))
        return {name: rows[at] for name, rows in self.rows.items()}

    def iterate(self, start: int, stop: int | None = None) -> Iterator[dict[str, np.ndarray]]:
        """Endless batches from `start` on; a signal arrives while batch `stop` is read."""
        step = start
        while True:
            if step == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            yield self.whole_batch_at(step)
            step += 1


def trained(case: Case, folder: Path, seed: int) -> Callable[[str, int | None], Outcome]:
    """(name of the run's folder, step before which a signal arrives) -> a session of training there."""
    batches: Any = Rows(tuple(dict.fromkeys((*case.reads, *case.writes))), case.train.batch_size, seed)
    sites = make_sites(case.coder_config, case.coder.topology, case.reads, case.writes, batches.statistics)
    mesh = make_mesh(case.parallel)
    sums = jax.jit(on_mesh(make_sums(case.coder, sites), mesh))

    def validate(params: Any, stats: Any) -> dict[str, float]:
        total = Reconstruction()
        total.add(sums(params, stats, batches.rows, np.ones(len(batches.rows["a"]), bool)))
        return {name: value for name, value in total.metrics().items() if name in VALIDATED}

    def session(name: str, stop: int | None) -> Outcome:
        (folder / name).mkdir(exist_ok=True)
        writer = JsonlWriter(folder / name / "metrics.jsonl")
        try:
            with Checkpoints(folder / name / "checkpoints", keep_last=2) as checkpoints:
                return train_alone(
                    case.train,
                    coder=case.coder,
                    mesh=mesh,
                    batches=lambda start: batches.iterate(start, stop),
                    sites=sites,
                    prepare=make_prepare(case.coder_config, case.coder, sites, batches),
                    epoch_rows=len(batches.rows["a"]),
                    seed=seed,
                    validate=validate,
                    writers=[writer],
                    checkpoints=checkpoints,
                    meta={},
                    fsdp=case.parallel.fsdp,
                    mode=case.parallel.mode,
                )
        finally:
            writer.close()

    return session


class Once:
    """`compile_step`, which traces and compiles for the first session alone: that is most of a case's time."""

    def __init__(self) -> None:
        self.made: Any = None
        self.compiled: Any = None

    def __call__(self, *arguments: Any) -> "Once":
        self.made = self.made or compile_step(*arguments)
        return self

    def lower(self, *arguments: Any) -> "Once":
        self.compiled = self.compiled or self.made.lower(*arguments).compile()
        return self

    def compile(self) -> Any:
        return self.compiled


def final(folder: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, by name."""
    with Checkpoints(folder / "checkpoints") as checkpoints:
        items, _ = checkpoints.restore_numpy(step, names=("params", "averaged", "opt_state", "stats", "step"))
    return {jax.tree_util.keystr(at): np.asarray(leaf) for at, leaf in jax.tree_util.tree_leaves_with_path(items)}


def curve(folder: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl, without what a clock says."""
    rows = read_metrics(folder / "metrics.jsonl")
    kept = [{name: v for name, v in row.items() if not re.search("time|second|wait", name)} for row in rows]
    # A session that goes on validates once more before its first step, if none has predicted the length yet.
    return [dict(items) for items in dict.fromkeys(tuple(row.items()) for row in kept if len(row) > 1)]


def check(case: Case, seed: int) -> None:
    """Finite, and the same to the bit where it was interrupted."""
    shm = Path("/dev/shm")
    where = tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None)
    with where as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr("saejax.training.program.compile_step", Once())
        folder = Path(made)
        session = trained(case, folder, seed)
        whole = session("whole", None)
        stop = seed % max(1, whole.step - 1)
        first = session("parts", stop)
        assert (first.step, first.finished) == (stop + 1, False) or whole.step == 1
        parts = session("parts", None)
        assert whole.finished and (whole.step, whole.finished) == (parts.step, parts.finished)
        arrays, others = (final(folder / name, whole.step) for name in ("whole", "parts"))
        rows, again = (curve(folder / name) for name in ("whole", "parts"))
    # Without a memory of squares a latent that just stopped firing moves by lr m / eps: it may overflow and is skipped.
    wild = case.train.b2 == 0 and case.train.lr >= 1
    for row in rows:
        broken = [name for name, value in row.items() if value is None]
        skipped = row.get("train/skipped") and not wild
        assert (not broken or wild) and not skipped, f"step {row['step']}: {broken or 'skipped'}"
    for name, value in arrays.items():
        # The window of losses and single numbers of optimizers begin at infinity.
        assert "losses" in name or np.isfinite(value).all() if value.ndim else not np.isnan(value), (
            f"{name} is not finite"
        )
    assert arrays.keys() == others.keys()
    assert [name for name in arrays if arrays[name].tobytes() != others[name].tobytes()] == []
    assert [row for row in rows if row not in again] == []


def test_every_key_has_values_at_its_bounds() -> None:
    """A new key of a kind that is not known here fails; one of a known kind takes part."""
    dealt = {(section, key) for section, key, _ in deck(("coder", "train", "parallel"))}
    keys = {(name, field.name) for name, kind in KINDS.items() for field in dataclasses.fields(kind)}
    assert keys - dealt == {(name, key) for name, key in keys if key in ELSEWHERE}
    assert {("train", "lr"), ("coder", "threshold_init"), ("coder", "prefixes"), ("parallel", "fsdp")} <= dealt
    assert ("coder", "sparsity", "abs_topk") in deck(("coder",)) and ("train", "optimizer", "muon") in deck(("train",))
    # Refused alone: what float32 has no number for, and what is beyond the bounds.
    taken = [value for _, key, value in deck(("train",)) if key == "b2"]
    assert taken == [0.0, 1e-300, 1e-6, 0.25, 1 - 1e-6]


@pytest.mark.parametrize("number", rest_in("ci", range(2), [0]))
def test_a_random_configuration_trains_the_same_whatever_interrupts(number: int) -> None:
    """A part of the test below, always the same."""
    check(next(itertools.islice(deal(0, ("coder", "train"), 35), number, None)), seed=number)


@pytest.mark.soak
@pytest.mark.parametrize("seed", (1, 2))
def test_random_configurations_train_the_same_whatever_interrupts(seed: int) -> None:
    """All presets, the odd seeds also over several devices; every card of the deck is dealt once a seed."""
    sections = ("coder", "train", "parallel")[: 2 + seed % 2]
    for case in deal(seed, sections, hand=35):
        try:
            check(case, seed)
        except Exception as error:
            changed = {
                name: {k: v for k, v in own.items() if BASE[name].get(k) != v} for name, own in case.settings.items()
            }
            raise AssertionError(f"seed {seed}, {changed}: {error}") from error
