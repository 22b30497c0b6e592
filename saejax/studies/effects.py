"""Phase 5: what groups of features cause. Each is changed in the test pairs' clean prompts, and the model runs on.

    ablate      f' = 0 at every token but the first
    control     the same for random features of the layer that fire as much
    patch       f' = f after the corrupt prompt, at one token: the last, the last but one, ...
    resample    f' = f in another clean prompt, token by token from the end

The value of a row is z_right - z_wrong at the last token with the change; `clean` is what it is without.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from saejax.app.study_config import StudyConfig
from saejax.core.progress import Progress
from saejax.interventions import Change, Interventions, Run, first_draws, matched, set_to, zero
from saejax.interventions.metrics import Measure
from saejax.studies.baseline import Prompts
from saejax.studies.table import Table

EFFECT_COLUMNS = ("behaviour", "group", "kind", "number", "pair", "clean", "value")
Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Group:
    """Features of one layer of one dictionary: `layer` is its place among all that graphs have, `latents` are numbers
    in the dictionary, g F + f of a cross-layer transcoder.
    """

    name: str
    dictionary: str
    layer: int
    latents: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class GroupChange:
    """One change, of all test prompts."""

    group: Group
    kind: str
    number: int
    latents: tuple[int, ...]


def jobs(
    groups: Sequence[Group], mean_of: Callable[[Group], np.ndarray], c: StudyConfig, seed: int
) -> list[GroupChange]:
    """Every change of every group, in one order: dictionary by dictionary, so that neighbours run together.

    `mean_of` gives a group's mean activations on the test prompts, 0 outside of its layer.
    """
    jobs = []
    for group in sorted(groups, key=lambda group: group.dictionary):
        jobs.append(GroupChange(group, "ablate", 0, group.latents))
        controls = matched(group.latents, mean_of(group), c.controls, seed)
        jobs += [GroupChange(group, "control", i, tuple(latents.tolist())) for i, latents in enumerate(controls)]
        jobs += [GroupChange(group, "patch", i, group.latents) for i in range(c.positions)]
        jobs += [GroupChange(group, "resample", i, group.latents) for i in range(c.resamples)]
    return jobs


def measure_groups(
    inside: Interventions,
    behaviour: str,
    prompts: Prompts,
    groups: Sequence[Group],
    table: Table,
    c: StudyConfig,
    seed: int,
) -> dict[str, np.ndarray]:
    """Fill the table: R rows for each job. A block that is there whole is not computed again.

    Returns {group: bool [controls], True for those that are no repetition}.
    """
    n_rows = len(prompts.pairs)
    size = max(1, math.ceil(c.every / n_rows))
    clean = inside.run(prompts.clean)
    todo = jobs(groups, _means(inside, prompts, clean, groups), c, seed)
    blocks = in_blocks(todo, size, _program)
    controls = [job for job in todo if job.kind == "control"]
    new = {
        group.name: first_draws(np.array([job.latents for job in controls if job.group.name == group.name]))
        for group in groups
    }
    whole = table.keep([len(block) * n_rows for block in blocks])
    if whole == len(blocks):
        return new
    corrupt = inside.run(prompts.corrupt)
    before = np.asarray(prompts.difference(clean.logits))
    done = sum(map(len, blocks[:whole]))
    with Progress(f"interventions of {behaviour}", len(todo), done, unit="interventions") as progress:
        change_of = functools.partial(_change, prompts=prompts, clean=clean, corrupt=corrupt, seed=seed)
        results = run_blocks(inside, prompts.clean, blocks[whole:], _program, change_of, prompts.difference, size)
        for block, values in results:
            table.extend(
                (behaviour, job.group.name, job.kind, job.number, pair, before[pair], value[pair])
                for job, value in zip(block, values, strict=False)
                for pair in range(n_rows)
            )
            progress.advance(len(block), group=block[-1].group.name)
    return new


def in_blocks(items: Iterable[Item], size: int, program: Callable[[Item], Any]) -> list[list[Item]]:
    """Neighbours of one `program`, at most `size` in a block."""
    runs = [list(neighbours) for _, neighbours in itertools.groupby(items, program)]
    return [run[i : i + size] for run in runs for i in range(0, len(run), size)]


def run_blocks(
    inside: Interventions,
    tokens_RS: np.ndarray,
    blocks: Iterable[list[Item]],
    program: Callable[[Item], Any],
    change_of: Callable[[Item], dict[str, Change]],
    measure: Measure,
    size: int,
) -> Iterator[tuple[list[Item], np.ndarray]]:
    """(block, what it measures [size, R]): blocks of one program run together, each filled up to `size` changes."""
    for _, following in itertools.groupby(blocks, lambda block: program(block[0])):
        same = list(following)
        changes = []
        for block in same:
            some = [change_of(item) for item in block]
            changes += some + [some[-1]] * (size - len(some))
        yield from zip(same, inside.blocks(tokens_RS, changes, measure, at_once=size), strict=True)


def _means(
    inside: Interventions, prompts: Prompts, clean: Run, groups: Sequence[Group]
) -> Callable[[Group], np.ndarray]:
    """A group -> mean activations of latents that no other group holds: a control is no group in disguise."""
    place_RS = np.arange(prompts.clean.shape[1])[None]
    inner_RS = (place_RS >= 1) & (place_RS <= prompts.last[:, None])
    grouped = {(group.dictionary, latent) for group in groups for latent in group.latents}

    def mean_of(group: Group) -> np.ndarray:
        latents = np.asarray(clean.latents[group.dictionary])
        mean_F = latents.reshape(*latents.shape[:2], -1)[inner_RS].mean(0)
        d_sae = inside.dictionaries[group.dictionary].coder.topology.d_sae
        mean_F = np.where(np.arange(len(mean_F)) // d_sae == group.latents[0] // d_sae, mean_F, 0)
        others = [f for name, f in grouped if name == group.dictionary and f not in group.latents]
        mean_F[others] = 0
        return mean_F

    return mean_of


def _program(job: GroupChange) -> tuple[str, int]:
    return job.group.dictionary, len(job.latents)


def _change(job: GroupChange, prompts: Prompts, clean: Run, corrupt: Run, seed: int) -> dict[str, Change]:
    """{dictionary: the job's change}, every number of it [R, S, K] so that all have one shape."""
    rows, length = prompts.clean.shape
    place_RS = np.broadcast_to(np.arange(length)[None], (rows, length))

    def latents_of(run: Run) -> np.ndarray:
        latents = np.asarray(run.latents[job.group.dictionary]).reshape(rows, length, -1)
        return latents[..., np.asarray(job.latents)]

    if job.kind in ("ablate", "control"):
        change = zero(job.latents, place_RS >= 1)
    elif job.kind == "patch":
        at = (place_RS == (prompts.last - job.number)[:, None]) & (place_RS >= 1)
        change = set_to(job.latents, latents_of(corrupt), at)
    else:
        rng = np.random.default_rng([seed, job.number])
        source_R = (np.arange(rows) + rng.integers(1, rows)) % rows  # never the row itself
        from_end = prompts.last[:, None] - place_RS
        there = prompts.last[source_R][:, None] - from_end
        at = (place_RS >= 1) & (from_end >= 0) & (there >= 1)
        values = latents_of(clean)[source_R[:, None], np.clip(there, 0, length - 1)]
        change = set_to(job.latents, values, at)
    shape = (rows, length, len(job.latents))
    # Arrays of the host: `many` stacks them there, although the fields are declared as JAX's.
    arrays: Any = {name: np.broadcast_to(getattr(change, name), shape) for name in ("scale", "shift", "low", "high")}
    arrays["at"] = np.broadcast_to(change.at, shape[:2])
    return {job.group.dictionary: dataclasses.replace(change, **arrays)}
