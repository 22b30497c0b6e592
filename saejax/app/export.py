"""`saejax export`: a run or an evaluated dictionary as the files that other tools show, explain or score it from."""

import dataclasses
import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from saejax.analysis import scan_latents
from saejax.app import console
from saejax.app.experiment import Experiment
from saejax.app.run_coders import coder_at, experiment_of, refuse_several_models, verify_made_from
from saejax.app.workspace import Workspace
from saejax.core.config import nearest
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_json, replacing, write_json
from saejax.interop import circuit_tracer_features, delphi, neuronpedia, saedashboard
from saejax.interop.hooks import layer_of, to_transformer_lens
from saejax.reports.feature_table import read_features
from saejax.reports.read import REPORT
from saejax.runs import Run
from saejax.trained import TrainedCoder

_RECORD = "export.json"  # in the folder that an export wrote: it may be replaced


def run_export(words: Sequence[str], step: int | str | None, flags: Mapping[str, Any]) -> None:
    """`saejax export TARGET RUN... OUT`: write the files whole or not at all, and say what to do with them.

    Raises:
        ConfigError: too few words, no such target, or something that the target's format cannot say.
        DataError: no such run, no report of it, or a destination that holds something else.
    """
    if not words or words[0] not in TARGETS:
        raise ConfigError(f"Say for which tool.{nearest(words[0] if words else '', TARGETS, listed=True)}")
    target, *places, out = [words[0], *map(Path, words[1:-1]), Path(words[-1])]
    if len(words) < 3 or (len(places) > 1 and target != "circuit-tracer"):
        several = " RUN..." if target == "circuit-tracer" else ""
        raise ConfigError(f"Give a run and a destination: saejax export {target} runs/quickstart{several} out")
    runs = [_Source.of(place, step) for place in places]
    with _destination(out, target, places) as folder:
        lines = list(TARGETS[target](runs, folder, out, flags))
    for line in lines:
        console.say(line)


@dataclasses.dataclass(frozen=True)
class _Source:
    """A run, or an evaluated dictionary: its folder, its experiment and its coder."""

    folder: Path
    experiment: Experiment
    sae: TrainedCoder

    @classmethod
    def of(cls, folder: Path, step: int | str | None) -> "_Source":
        e = experiment_of(folder)
        return cls(e.run_dir, e, coder_at(e.run_dir, step))

    @property
    def groups(self) -> tuple[str, ...]:
        """The hook point of each group of latents: those read by a cross-layer transcoder, else the last one."""
        reads, shape = self.sae.sites.reads, self.sae.coder.topology.latent_shape
        return reads if len(shape) > 1 else reads[-1:]

    def layers(self, layer: int) -> tuple[int, ...]:
        """The layer of each group. Raises ConfigError where the names do not say and none is given."""
        layers = [layer] if layer >= 0 and len(self.groups) == 1 else [layer_of(name) for name in self.groups]
        if len(set(map(layer_of, self.sae.sites.reads))) > 1 and len(self.groups) == 1 and layer < 0:
            raise ConfigError(f"{self.folder} reads {', '.join(self.sae.sites.reads)}: say its layer there, --layer=6.")
        if None in layers:
            raise ConfigError(f"{', '.join(self.groups)} does not say of which layer it is: --layer=6.")
        return tuple(layer for layer in layers if layer is not None)

    def features(self) -> dict[str, Any]:
        """features.sqlite, of the step that is exported."""
        content = read_features(self.folder)
        if not self._shows(content):
            raise DataError(
                f"The report of {self.folder} is of another dictionary or step ({content['step']}) than what is to be "
                f"exported ({self.sae.step}). Make it again ({REPORT}) and export without --step."
            )
        return content

    def _shows(self, content: Mapping[str, Any]) -> bool:
        return (content["step"], content["sha256"]) == (self.sae.step, self.sae.fingerprint())

    def explanations(self) -> dict[int, str]:
        """{latent: its first explanation}, where the report of this step has any."""
        content = read_features(self.folder) if Run(self.folder).features.is_file() else None
        features = content["features"] if content and self._shows(content) else []
        return {feature["id"]: texts[0]["text"] for feature in features if (texts := feature.get("explanations"))}

    @property
    def dataset(self) -> str:
        text = self.experiment.text
        return ", ".join(part.dataset or ", ".join(part.paths) or part.source for part in text.parts)


def _to_neuronpedia(runs: Sequence[_Source], folder: Path, out: Path, flags: Mapping[str, Any]) -> Iterator[str]:
    (run,), content = runs, runs[0].features()
    names = neuronpedia.Names(
        model=flags["model"] or _as_id(run.sae.origin.model or content["model"]),
        set=flags["set"] or _as_id(run.folder.resolve().name),
        layers=run.layers(flags["layer"]),
        hook_points=tuple(map(to_transformer_lens, run.groups)),
        creator=flags["creator"],
        creator_id=flags["creator_id"] or neuronpedia.CREATOR_ID,
        release=flags["release"],
        dataset=run.dataset,
        context=run.experiment.text.context_length,
    )
    written = neuronpedia.write_neuronpedia(folder, content, names)
    left = len(content["features"]) - sum(written.values())
    yield f"{out}: {sum(written.values()):,} latents as {', '.join(written)}; {left:,} without a passage left out"
    yield (
        f"Make the source set {names.set} of {names.model} (package neuronpedia: SourceSetRequest().new), then POST "
        f"each file of {out}/upload to https://neuronpedia.org/api/feature/upload-batch, your key as X-Api-Key."
    )
    yield f"An instance of your own imports all in {out}/bulk/{names.model} from v1/{names.model} of its bucket."


def _to_delphi(runs: Sequence[_Source], folder: Path, out: Path, flags: Mapping[str, Any]) -> Iterator[str]:
    (run,) = runs
    e, work, model = run.experiment, Workspace(run.experiment), run.experiment.lm.model
    verify_made_from(work)
    text = (work.lm, work.packer, e.report.tokens, e.report.batch_rows, e.capture.sinks)
    scan = scan_latents(run.sae.at(work.lm), *text)
    rows = int((scan.segments >= 0).any(1).sum())  # those of padding are the last ones
    written = delphi.write_delphi(
        folder,
        scan.tokens[:rows],
        {name: getattr(scan, name) for name in ("row", "position", "latent", "value")},
        run.groups if len(run.groups) > 1 else [" ".join(run.sae.sites.reads)],
        run.sae.coder.topology.d_sae,
        # What `AutoTokenizer.from_pretrained` finds: the hub id, or the folder of a model that is none.
        model if "/" in model and not Path(model).exists() else str(work.lm.tokenizer.folder),
        run.dataset,
        flags["splits"],
        run.explanations(),
    )
    entries, length = sum(written.values()), scan.tokens.shape[1]
    yield f"{out}: {entries:,} activations of {', '.join(written)} on {rows:,} rows of {length} tokens"
    yield f'LatentDataset(raw_dir="{out}/latents", ...) reads them; delphi explains and scores from there.'
    if length % delphi.WINDOW:
        yield f"Rows are {length} long: give ConstructorConfig an example_ctx_len that divides it, in place of 32."


def _to_circuit_tracer(runs: Sequence[_Source], folder: Path, out: Path, flags: Mapping[str, Any]) -> Iterator[str]:
    layers: dict[int, tuple[dict[str, Any], int, int]] = {}
    models: dict[str, str] = {}
    for run in runs:
        content = run.features()
        models[str(run.folder)] = content["model"]
        refuse_several_models(models)
        for group, layer in enumerate(run.layers(flags["layer"] if len(runs) == 1 else -1)):
            if layer in layers:
                raise ConfigError(f"Two of the runs are of layer {layer}; a set of transcoders has one a layer.")
            layers[layer] = (content, group, len(run.groups))
    written = circuit_tracer_features.write_circuit_tracer_features(folder, layers)
    yield f"{out}: {written:,} latents of layers {', '.join(map(str, sorted(layers)))}"
    yield f'serve(data_dir=..., features_dir="{out}") shows them for graphs whose scan is a local path of transcoders.'


def _to_saedashboard(runs: Sequence[_Source], folder: Path, out: Path, flags: Mapping[str, Any]) -> Iterator[str]:
    (run,) = runs
    if why := saedashboard.refuses(run.sae):
        raise ConfigError(f"{run.folder} cannot be written for SAEDashboard: {why}.")
    notes = saedashboard.write_saedashboard(folder, run.sae)
    yield f"{out}: {run.sae!r}"
    yield from notes
    yield f"neuronpedia-runner {saedashboard.flags(run.sae)} --sae-path={out} --sae-set=... --np-set-name=..."


TARGETS: dict[str, Callable[[Sequence[_Source], Path, Path, Mapping[str, Any]], Iterator[str]]] = {
    "neuronpedia": _to_neuronpedia,
    "delphi": _to_delphi,
    "saedashboard": _to_saedashboard,
    "circuit-tracer": _to_circuit_tracer,
}


def _as_id(name: str) -> str:
    """A name as ids are written: openai-community/gpt2 -> gpt2-small, as TransformerLens calls it; My_Run -> my_run."""
    last = re.sub(r"[^a-z0-9._-]+", "-", name.rstrip("/").rpartition("/")[2].lower()).strip("._-")
    return "gpt2-small" if last == "gpt2" else last or "unnamed"


@contextmanager
def _destination(out: Path, target: str, places: Sequence[Path]) -> Iterator[Path]:
    """A folder to fill, which becomes `out`. An earlier export for the same tool is replaced, nothing else."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise DataError(f"{out} is not a folder. Choose another.")
    if out.is_dir() and any(out.iterdir()):
        before = read_json(out / _RECORD) if (out / _RECORD).is_file() else {}
        if not isinstance(before, dict) or before.get("export") != target:
            raise DataError(f"{out} holds something other than an export for {target}. Choose another folder.")
    with replacing(out) as folder:
        yield folder
        version = importlib.metadata.version("saejax")
        write_json(folder / _RECORD, {"export": target, "runs": [str(place) for place in places], "saejax": version})
