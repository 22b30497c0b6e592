"""`saejax convert`: dictionaries from one project's files into another's."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from saejax.app.dictionaries import distinct
from saejax.app.load import load
from saejax.app.run_coders import refuse_several_models
from saejax.coders import PerLayerTranscoder
from saejax.core.errors import ConfigError, DataError
from saejax.interop import FORMATS, dictionaries_below
from saejax.runs import Run
from saejax.trained import Format, TrainedCoder, format_named, layers

# Tokens on which a written coder is compared with its source, and the latents that each is made to fire.
_TOKENS, _FIRING = 64, 8
_EQUAL = 1e-5


@dataclasses.dataclass(frozen=True, repr=False)
class Converted:
    """A dictionary that was written in a format.

    Attributes:
        source: the place that it was read from.
        folder: the place that it was written to.
        form: the format.
        coder: the dictionary, in words.
        notes: what changed on the way, and how far it does what its source does.
    """

    source: str
    folder: Path
    form: str
    coder: str
    notes: Sequence[str]

    def __repr__(self) -> str:
        lines = [f"{self.source} -> {self.folder} ({self.form}): {self.coder}", *(f"  {note}" for note in self.notes)]
        return "\n".join(lines)


def convert(
    source: str | Path | Sequence[str | Path],
    folder: str | Path,
    to: str,
    *,
    hook_points: Sequence[str] = (),
    step: int | str | None = None,
) -> list[Converted]:
    """Write dictionaries in another format, and read each back: convert("runs/quickstart", "out", to="saelens")

    What is written must do what its source does. A dictionary in memory has `sae.save(folder, format=...)`.

    Args:
        source: a run, a saved folder, a foreign dictionary, a hub id, or a folder of several; one or more.
        folder: where it is written.
        to: saejax, or a format that `saejax formats` names.
        hook_points: what the dictionary reads, or reads and writes, where its files do not say.
        step: of a run: a checkpoint's number, or "best"; None for the newest.

    Raises:
        ConfigError: an unknown format, or a dictionary that it cannot say; nothing is written then.
        DataError: a source that cannot be read, or a folder that holds something else.
    """
    return list(conversions([source] if isinstance(source, str | Path) else source, folder, to, hook_points, step))


def conversions(
    sources: Sequence[str | Path],
    target: str | Path,
    to: str,
    hook_points: Sequence[str] = (),
    step: int | str | None = None,
) -> Iterator[Converted]:
    """`convert`, one after the other: one in memory at a time, because a set of layers is larger than a machine."""
    if not to:
        written = [name for name, form in FORMATS.items() if type(form).write is not Format.write]
        raise ConfigError(f"Say into which format: {', '.join(f'--to={name}' for name in ['saejax', *written])}.")
    destination, places = Path(target), list[str]()
    for source in map(str, sources):  # a run, a hub id, or a folder of several coders
        places += (
            [source] if Run(Path(source)).exists else [str(place) for place in dictionaries_below(source)] or [source]
        )
    if twice := [place for place in places if places.count(place) > 1]:
        raise ConfigError(f"{twice[0]} is given twice.")
    models: dict[str, str] = {}
    if to != "saejax":
        form = format_named(to)
        for place in places:
            sae = load(place, step, hook_points)
            for part, _ in _one_by_one(sae, destination, to):
                refuse(place, part, form)
            models[place] = sae.origin.model
    together = len(places) == 1 or (to != "saejax" and form.sets)
    if together:
        refuse_several_models(models)
    for place, name in zip(places, _own_names(places), strict=True):
        whole, folder = load(place, step, hook_points), destination if together else destination / name
        for sae, within in _one_by_one(whole, folder, to):
            notes = [*sae.origin.notes, *sae.save(within, format=to)]
            yield Converted(place, within, to, repr(sae), [*notes, compared(sae, within, to, hook_points)])


def _one_by_one(sae: TrainedCoder, folder: Path, to: str) -> list[tuple[TrainedCoder, Path]]:
    """(dictionary, its folder): of a per-layer topology each by itself, since no other project has them in one."""
    if to == "saejax" or not isinstance(sae.coder.topology, PerLayerTranscoder):
        return [(sae, folder)]
    sets = format_named(to).sets
    return [(one, folder if sets else folder / one.hook_point) for one in layers(sae)]


def refuse(place: str, sae: TrainedCoder, to: Format) -> None:
    """Raises ConfigError for a coder that the format cannot say, with those that can."""
    if why := to.refuses(sae):
        others = ", ".join(["saejax", *(name for name, form in FORMATS.items() if not form.refuses(sae))])
        raise ConfigError(f"{place} cannot be written for {to.title}: {why}. It can be for: {others}.")


def _own_names(places: Sequence[str]) -> list[str]:
    """A folder's name for each: the last parts of its path that tell it from the others."""
    parts = [[part for part in re.split(r"[/@:]", place) if part] for place in places]
    names = []
    for path in parts:
        depth = 1
        while sum(other[-depth:] == path[-depth:] for other in parts) > 1:
            depth += 1
        names.append(re.sub(r"\.(safetensors|npz|pt)$", "", "-".join(path[-depth:])))
    return distinct(names)


def compared(sae: TrainedCoder, folder: Path, to: str, hook_points: Sequence[str]) -> str:
    """One sentence about what was read back. Raises DataError where it does something else than its source."""
    place = folder
    if to != "saejax":
        format = format_named(to)
        if not format.reads:
            return "Not read back: saejax does not read this format."
        place = format.place_of(sae, folder)
    back = load(place, hook_points=hook_points)
    x = _activations(sae)
    latents, again = sae.encode(x), back.encode(x)
    pairs = [(latents, again), (sae.decode(latents, x), back.decode(again, x))]
    worst = [float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-30)) for a, b in pairs]
    if max(worst) > _EQUAL:
        raise DataError(
            f"{place} was read back and differs from its source: latents by {worst[0]:.1e}, reconstructions by "
            f"{worst[1]:.1e} of the largest entry. Please report it; do not use the files."
        )
    return f"Read back: latents differ by {worst[0]:.0e}, reconstructions by {worst[1]:.0e} of the largest, at most."


def _activations(sae: TrainedCoder) -> np.ndarray:
    """Activations [64, ...] for which some latents fire: sums of encoder directions, each beyond its threshold."""
    rng = np.random.default_rng(0)
    encoders = np.moveaxis(np.asarray(sae.params["W_enc"]), -1, 0)  # [F, *in], or [F, L, D] of a cross-layer transcoder
    flat = encoders.reshape(len(encoders), -1)
    size = np.abs(np.asarray(sae.params["b_enc"])).max() + np.abs(np.asarray(sae.params.get("threshold", 0))).max() + 1
    directions = flat / np.maximum(np.square(flat).sum(-1, keepdims=True), 1e-12) * size
    chosen = rng.integers(len(flat), size=(_TOKENS, _FIRING))
    x = (rng.uniform(0, 2, (_TOKENS, _FIRING, 1)) * directions[chosen]).sum(1)
    return x.reshape(_TOKENS, *sae.coder.topology.in_shape).astype(np.float32)
