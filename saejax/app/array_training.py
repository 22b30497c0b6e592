"""`saejax.train`: a coder from activations that are at hand, in a notebook or a program."""

import contextlib
import dataclasses
import functools
import inspect
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack, get_type_hints

import jax
from jax.sharding import Mesh

from saejax.app.console import keep_quiet, say
from saejax.app.experiment import Experiment, to_run_json
from saejax.app.extras import refuse_untrainable
from saejax.app.load import from_items, l0_in_training, load
from saejax.app.train_settings import TrainSettings
from saejax.app.training_folders import RunFolder
from saejax.checkpoints import Checkpoints
from saejax.coders import TOPOLOGIES, Coder, CoderConfig, Sites
from saejax.core.config import from_config_dict, nearest, plain, to_json, typed
from saejax.core.errors import EXIT_PREEMPTED, ConfigError, DataError
from saejax.core.host import keep_memory
from saejax.core.places import as_place
from saejax.core.wandb_runs import WandbRuns
from saejax.fit.coders import Coders
from saejax.fit.learner import Data, Held, Ready, Sides, Tell, Unsaved
from saejax.fit.train import train as fit_train
from saejax.fit.trainable import coder_of, refuse_unused
from saejax.parallel import ParallelConfig, Process, make_mesh, own_rows, together
from saejax.runs.provenance import Provenance, verify_provenance
from saejax.store import ArrayRows, Batches, BatchSource, IteratedBatches, RowSource, StoreReader
from saejax.store.norms import few_rows
from saejax.trained import Origin, TrainedCoder, check_widths
from saejax.training import Outcome, Setup, TrainConfig

_Function = TypeVar("_Function", bound=Callable[..., Any])
_OWN = ("preset", "init_from")  # keys that are arguments of `train`
_OF_THE_ROWS = ("tokens", "batch_size")


def keys_of_train() -> Iterator[tuple[str, Any, Any]]:
    """(key, type, field) of each key of `coder` and `train` that `saejax.train` takes besides its own arguments."""
    for section in (CoderConfig, TrainConfig):
        hints = get_type_hints(section)
        yield from ((f.name, hints[f.name], f) for f in dataclasses.fields(section) if f.name not in _OWN)


def _with_keys(function: _Function) -> _Function:
    """The function with the keys in its signature and its help: notebooks complete by the one and show the other."""
    signature, keys = inspect.signature(function), []
    lines = ["", "Keys of `coder` and `train`:", ""]
    for key, hint, field in keys_of_train():
        default = None if key in _OF_THE_ROWS else field.default
        keys.append(inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))
        text = f"* {key} ({hint if not isinstance(hint, type) else hint.__name__}): {field.metadata['setting'].doc}"
        lines += textwrap.wrap(text, 112, subsequent_indent="  ")
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    vars(function)["__signature__"] = signature.replace(parameters=[*own, *keys])
    function.__doc__ = inspect.cleandoc(function.__doc__ or "") + "\n".join(lines) + "\n"
    return function


@_with_keys
def train(
    x: Any,
    preset: str = "topk",
    *,
    run: str | Path | None = None,
    heldout: Any = None,
    hook_point: str = "",
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    seed: int = 0,
    mesh: Sequence[int] = (),
    mode: str = "jit",
    fsdp: bool = False,
    init_from: str | Path | TrainedCoder = "",
    progress: bool = True,
    **settings: Unpack[TrainSettings],
) -> TrainedCoder:
    """Train a sparse dictionary on activations: saejax.train(x, "topk", k=32, d_sae=6144) -> TrainedCoder.

    Args:
        x: activations [N, d] as a numpy or JAX array, a memory map or a tensor of PyTorch; {hook point: array},
            row-aligned; the path of a store, or an open StoreReader; or an iterable of arrays [n, d] or of such dicts,
            which then needs `tokens`.
        preset: a name of saejax.coders.RECIPES: topk, batchtopk, jumprelu, gated, matryoshka, transcoder, clt, ...
        run: a run folder with checkpoints. The same call continues it after a stop. None keeps nothing on disk.
        heldout: activations to validate on, of the kinds of x but no iterable. Validations stand in the run folder;
            without one, the last one in the coder's figures ("val/fve").
        hook_point: the name of activations that come without one ("x"); of several, the one that is read.
        reads, writes: hook points that a crosscoder, transcoder or clt reads and writes. Left out: a crosscoder reads
            all of them; a transcoder reads the first of two and writes the second.
        seed: of the order of the activations and of the coder's start.
        mesh: devices along ("data", "latent"); all along "data" if empty.
        mode: jit, or pmap.
        fsdp: spread the state over "data" too.
        init_from: a coder to start from, or what `saejax.load` reads: a run, a saved coder, another project's.
        progress: show what is done.
        settings: keys of `coder` and `train`, as k, d_sae, lr, tokens, batch_size; all stand below. Defaults that
            differ from those of experiments: tokens is ten times the rows, batch_size 4,096 or a quarter of the rows.
            What would do nothing is refused: what is written into a run folder without `run`, what needs held-out
            activations without `heldout`, how a store is read for an iterable.

    Returns:
        The coder as trained. Ctrl-C ends the training after the current step, and gives the coder as it is then
        (`finished` is False); SIGTERM and SIGUSR1 save it and exit with code 75.

    Raises:
        ConfigError: a setting that there is not, or that does not fit; a coder that cannot start from `init_from`.
        DataError: activations of another shape or kind, empty, with NaN or infinity; a path that holds no store; a run
            that was made with other settings or from other activations.
    """
    tell = say if progress else keep_quiet
    keep_memory()
    mesh, hook_point = typed(tuple[int, ...], mesh, "mesh"), typed(str, hook_point, "hook_point")
    reads, writes = typed(tuple[str, ...], reads, "reads"), typed(tuple[str, ...], writes, "writes")
    source = _rows_or_iterable(x, hook_point or "x")
    if not isinstance(init_from, TrainedCoder):
        init_from = as_place(init_from, "init_from", "a TrainedCoder or what saejax.load reads")
    run = None if run is None else as_place(run, "run", "a folder")
    named = f"sha256:{init_from.fingerprint()}" if isinstance(init_from, TrainedCoder) else init_from
    parallel = ParallelConfig(mesh=tuple(mesh), mode=mode, fsdp=fsdp)
    e = _experiment_of_call(source, preset, run, seed, parallel, {"init_from": named, **settings})
    refuse_unused(e, _lacks(source, run, heldout))
    materials = ArrayMaterials(e, source, heldout, hook_point, tuple(reads), tuple(writes), init_from)
    metrics = _Rows()
    unsaved = _Sent([metrics], e=e, tell=tell) if e.train.wandb else Unsaved([metrics])
    folder = unsaved if run is None else RunFolder(e, materials.made_from, tell)
    outcome = fit_train(Coders.alone(materials), folder, together(), tell, progress)
    # Ctrl-C is the user's, who wants what there is; another signal is a scheduler's.
    if outcome and outcome.signal not in (None, signal.SIGINT):
        sys.exit(EXIT_PREEMPTED)
    if run is not None:
        return load(run)
    assert outcome is not None and isinstance(folder, Unsaved) and folder.began is not None
    return _trained(e, folder.began, outcome, metrics)


def _lacks(source: "_Source", run: Any, heldout: Any) -> dict[str, str]:
    """The parts of `Setting.needs` that the arguments do not give (`refuse_unused`)."""
    lacks = {"text": "needs the language model and its text, as `saejax train --config=...` has them: "}
    if run is None:
        lacks["run"] = "is about a run folder: give run=..., or "
    if heldout is None:
        lacks |= dict.fromkeys(("heldout", "validations"), "needs held-out activations: give heldout=..., or ")
    if isinstance(source, Iterable):
        lacks["order"] = "needs a store or an array, and an iterable is read in its own order: "
        lacks |= dict.fromkeys(("rows", "epoch"), "needs a store or an array, and an iterable has no length: ")
    return lacks


@dataclasses.dataclass
class _Sent(Unsaved):
    """A training of which nothing is kept here, and whose rows Weights & Biases has."""

    e: Experiment = dataclasses.field(kw_only=True)
    tell: Tell = dataclasses.field(kw_only=True)

    @contextlib.contextmanager
    def held(self, process: Process) -> Iterator[Held]:
        refuse_untrainable(self.e, process)
        yield (), {}

    @contextlib.contextmanager
    def recorded(self, ready: Ready, process: Process, checkpoints: Sequence[Checkpoints]) -> Iterator[Setup]:
        runs, config = WandbRuns(self.tell), to_run_json(dataclasses.replace(self.e, train=ready.train))
        self.began, writers = ready, list(self.writers)
        with contextlib.ExitStack() as stack:
            if process.first:
                writers.append(stack.enter_context(contextlib.closing(runs.open(None, None, config=config))))
            with runs:
                yield dataclasses.replace(ready.setup, writers={"": writers})


class _Rows:
    """The rows of a training that has no metrics.jsonl: a `Writer`."""

    def __init__(self) -> None:
        self._by_step: dict[int, dict[str, Any]] = {}

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self._by_step.setdefault(step, {"step": step}).update(row)

    def close(self) -> None:
        """Nothing is open."""

    def rows(self) -> list[dict[str, Any]]:
        return list(self._by_step.values())

    def validation(self, step: int) -> dict[str, float]:
        """The figures of the validation of this step; {} without one."""
        return {key: value for key, value in self._by_step.get(step, {}).items() if key.startswith("val/")}


def _trained(e: Experiment, began: Ready, outcome: Outcome, metrics: _Rows) -> TrainedCoder:
    """The coder of a training that ended, from its state in memory."""
    e, state, (program,) = dataclasses.replace(e, train=began.train), outcome.states[0], began.setup.programs
    items = jax.device_get({"params": state.params, "averaged": state.averaged, "stats": state.stats})
    sae = from_items(e.coder, e.train.steps, items, dict(program.meta))
    origin = Origin(step=outcome.step, tokens=outcome.step * e.train.batch_size)
    settings = {key: value for key, value in to_json(e).items() if key in ("seed", "coder", "train")}
    figures = l0_in_training(outcome.memories[""].after) | metrics.validation(outcome.step)
    sae = dataclasses.replace(sae, origin=origin, figures=figures, settings=settings, metrics=metrics.rows)
    return dataclasses.replace(sae, finished=outcome.finished)


# Activations: rows that can be read by number, or an iterable.
_Source = RowSource | Iterable[Any]


def _rows_or_iterable(x: Any, name: str) -> _Source:
    """Rows that can be read by number, where x has such; else x, an iterable."""
    if isinstance(x, str | Path):
        return StoreReader.open(x)
    if isinstance(x, StoreReader | ArrayRows):
        return x
    if isinstance(x, Mapping):
        if not x:
            raise DataError("There are no activations: the dict is empty.")
        return ArrayRows(x)
    if hasattr(x, "__array__") or hasattr(x, "shape"):
        return ArrayRows({name: x})
    if isinstance(x, Iterable):
        return x
    raise DataError(
        f"Activations cannot be a {type(x).__name__}. Give an array [N, d], {{hook point: array}}, the path of a "
        "store, or an iterable of arrays."
    )


def _experiment_of_call(
    source: _Source, preset: str, run: str | Path | None, seed: int, parallel: ParallelConfig, settings: dict[str, Any]
) -> Experiment:
    """The experiment that a call of `train` stands for."""
    keys = {f.name: "train" for f in dataclasses.fields(TrainConfig)}
    keys |= {f.name: "coder" for f in dataclasses.fields(CoderConfig)}
    chosen: dict[str, dict[str, Any]] = {"coder": {"preset": preset}, "train": {}}
    for name, value in settings.items():
        if name not in keys:
            raise ConfigError(f"There is no setting {name!r}.{nearest(name, sorted(keys))}")
        chosen[keys[name]][name] = list(value) if isinstance(value, tuple) else value
    rows = None if isinstance(source, Iterable) else source.n_tokens
    if rows is None and "tokens" not in settings:
        raise ConfigError("An iterable has no length: say how many activations to train on (tokens=...).")
    along_data = next(iter(make_mesh(parallel).shape.values()))
    size = 4096 if rows is None else min(4096, max(2, rows // 4))
    train = {"batch_size": max(1, size // along_data) * along_data} | chosen["train"]
    train.setdefault("tokens", 10 * (rows or 0))
    tokens = plain(train["tokens"])
    train["tokens"] = int(tokens) if isinstance(tokens, float) and tokens.is_integer() else tokens
    place = Path(run) if run is not None else Path("run")
    config = {
        "name": place.name,
        "runs_dir": str(place.parent),
        "seed": seed,
        "lm": {"model": ""},
        "coder": chosen["coder"],
        "train": train,
    }
    return dataclasses.replace(from_config_dict(Experiment, config), parallel=parallel)


@dataclasses.dataclass(frozen=True)
class ArrayMaterials:
    """Activations that were handed over: `fit.Materials`."""

    experiment: Experiment
    source: _Source
    more: Any
    hook_point: str
    wanted_reads: tuple[str, ...]
    wanted_writes: tuple[str, ...]
    init_from: str | Path | TrainedCoder
    # An iterable is read once, whatever becomes of the settings.
    iterated: list[IteratedBatches] = dataclasses.field(default_factory=list)

    @property
    def activations(self) -> RowSource | IteratedBatches:
        """Those handed over, of which an iterable has been read as far as its statistics need."""
        if not isinstance(self.source, Iterable):
            return self.source
        if not self.iterated:
            size = self.experiment.train.batch_size
            self.iterated.append(IteratedBatches(self.source, self.hook_point or "x", size, first_rows=4 * size))
        return self.iterated[0]

    @functools.cached_property
    def heldout(self) -> RowSource | None:
        """Activations to validate on. Raises DataError: it is an iterable."""
        source = None if self.more is None else _rows_or_iterable(self.more, self.sites[0][0])
        if isinstance(source, Iterable):
            raise DataError("heldout must be an array, a dict of arrays or a store: it is read again and again.")
        return source

    def with_train(self, train: TrainConfig) -> "ArrayMaterials":
        return dataclasses.replace(self, experiment=dataclasses.replace(self.experiment, train=train))

    def rows(self) -> int:
        if isinstance(self.source, Iterable):
            raise ConfigError("batch_size=0 needs to know how many activations there are: set it for an iterable.")
        return min(self.source.n_tokens, self.experiment.train.max_rows or self.source.n_tokens)

    @functools.cached_property
    def sites(self) -> Sides:
        name, there = self.experiment.coder.resolved().topology, tuple(self.activations.hook_points)
        kind = TOPOLOGIES[name]
        reads = self.wanted_reads or ((self.hook_point,) if self.hook_point in there else ())
        if kind.tied:
            reads = reads or (there if kind.stacked else there[:1])
            if not kind.stacked and len(there) > 1 and not (self.wanted_reads or self.hook_point):
                raise ConfigError(
                    f"The topology {name} reads one hook point: choose hook_point= of {', '.join(there)}."
                )
            writes = self.wanted_writes or reads
        else:
            writes = self.wanted_writes
            if not kind.stacked and len(there) == 2:
                reads, writes = reads or there[:1], writes or there[1:]
            if not reads or not writes:
                raise ConfigError(
                    f"Say what the {name} reads and writes: reads=(...), writes=(...) of {', '.join(there)}."
                )
        for one in (*reads, *writes):
            if one not in there:
                raise ConfigError(f"There is no hook point {one!r}.{nearest(one, there)}")
        return reads, writes

    def build(self) -> Coder:
        """The coder of the experiment, for the widths of its hook points."""
        widths, (reads, writes) = self.activations.hook_points, self.sites
        return coder_of(self.experiment, *([widths[name] for name in side] for side in (reads, writes)))

    def beside(self, coder: Coder, sites: Sites, mesh: Mesh) -> None:
        """Without a language model there is none."""

    def made_from(self) -> Provenance:
        identity = self.activations.identity if isinstance(self.activations, StoreReader) else {}
        origins: Provenance = {
            "train": _origin_of(self.activations),
            "heldout": {} if self.heldout is None else _origin_of(self.heldout),
            "lm": {key: value for key, value in identity.get("lm", {}).items() if value},
            "text": identity.get("text", {}),
        }
        return verify_provenance(self.experiment.run, origins)

    def source_coder(self) -> TrainedCoder:
        return self.init_from if isinstance(self.init_from, TrainedCoder) else load(self.init_from)

    def data(self, hook_points: Sequence[str], mesh: Mesh | None, tell: Tell) -> Data:
        reads, writes = self.sites
        names = tuple(dict.fromkeys((*reads, *writes)))
        t, rows = self.experiment.train, self.activations
        assert mesh is not None, "arrays are for one coder"
        if isinstance(rows, IteratedBatches):
            if jax.process_count() > 1:
                raise ConfigError("An iterable is read by one process. Give an array or a store to several.")
            own_rows(mesh, t.batch_size, t.accumulate)
            batches: BatchSource = rows
        else:
            span = own_rows(mesh, t.batch_size, t.accumulate, t.neighbours)
            how = t.block_chunks, span, t.max_rows, t.shares, t.blocks_ahead, t.neighbours
            batches = Batches(rows.only(names), t.batch_size, self.experiment.seed, *how)
            for warning in few_rows(rows, names):
                tell(f"warning: {warning}")
        heldout = self.heldout
        if heldout is not None:
            if missing := [name for name in names if name not in heldout.hook_points]:
                there = ", ".join(heldout.hook_points)
                raise DataError(f"The held-out activations lack {', '.join(missing)}; they have {there}.")
            check_widths("heldout", {name: heldout.hook_points[name] for name in names}, "x", rows.hook_points)
        return Data(batches, heldout, (lambda: rows) if isinstance(rows, StoreReader) else None)


def _origin_of(rows: RowSource | IteratedBatches) -> dict[str, Any]:
    """The record of activations in a run's provenance."""
    place = rows.url if isinstance(rows, StoreReader) else "arrays"
    count = rows.epoch_rows if isinstance(rows, IteratedBatches) else rows.n_tokens
    return {"store": place, "rows": count, "fingerprint": rows.fingerprint}
