"""circuit-tracer: config.yaml with a transcoder for each layer, or a cross-layer transcoder. (circuit-tracer 0.5.0:
transcoder/single_layer_transcoder.py, transcoder/cross_layer_transcoder.py, utils/hf_utils.py)

A set has layer_<i>.safetensors for the layers 0, 1, ...: W_enc [F, D], W_dec [F, D], b_enc, b_dec, and perhaps
activation_function.threshold and W_skip [D, D], which adds x W_skip^T. A cross-layer transcoder has W_enc_<i> [F, D],
b_enc_<i>, b_dec_<i>, perhaps threshold_<i>, in W_enc_<i>.safetensors, and W_dec_<i> [F, L - i, D] beside it. All are
ReLU, or JumpReLU where there is a threshold: its TopK is in no file. The same is in its cache of what it downloads.

Its JumpReLU has no ReLU: below a threshold that is negative it would let negative numbers through. We refuse those.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from saejax.core.errors import DataError
from saejax.core.files import replacing, writing
from saejax.interop.assemble import Layout, NamedArrays, assemble, check_free, coder_kind
from saejax.interop.hooks import from_transformer_lens, norm_notes, to_transformer_lens
from saejax.interop.tensors import (
    half_precision_notes,
    mentions,
    only_name,
    read_safetensors,
    read_yaml,
    write_safetensors,
)
from saejax.trained import Format, TrainedCoder, register_format

_CONFIG, _KIND = "config.yaml", "model_kind"
_SET, _CLT = "transcoder_set", "cross_layer_transcoder"
_THRESHOLD = "activation_function.threshold"
_SET_LAYER = Layout({_THRESHOLD: "threshold"}, transposed=("W_enc", "W_skip"))  # of a layer of a set
_UNKNOWN = "unknown"  # model_name of a set whose layers do not say it
_MOST_LAYERS = 1024
_TOPOLOGIES = {"transcoder": _SET, "skip_transcoder": _SET, "clt": _CLT}


@register_format
class CircuitTracer(Format):
    """A set is several coders, one file a layer; a cross-layer transcoder is one coder, a folder."""

    name = "circuit_tracer"
    title = "circuit-tracer"
    files = f"{_CONFIG}; layer_<i>.safetensors, or W_enc_<i>.safetensors and W_dec_<i>.safetensors"
    sets = True
    reads = frozenset((topology, sparsity) for topology in _TOPOLOGIES for sparsity in ("relu", "jumprelu"))

    def here(self, path: Path) -> list[Path]:
        if path.suffix == ".safetensors":
            return [path] if path.is_file() and _layer(path) is not None and (path.parent / _CONFIG).is_file() else []
        if (path / "W_enc_0.safetensors").is_file() or (path / "W_dec_0.safetensors").is_file():
            return [path]
        if not mentions(path / _CONFIG, _KIND):
            return []
        # Without a layer it is still this format, and `read` says what is missing.
        return _layer_files(path) or [path]

    def among(self, names: Collection[str]) -> dict[str, list[str]]:
        config = [_CONFIG] if _CONFIG in names else []
        if cross := [name for name in names if re.fullmatch(r"W_(enc|dec)_\d+\.safetensors", name)]:
            return {"": [*config, *cross]}
        layers = [name for name in names if config and "/" not in name and _layer(Path(name)) is not None]
        return {name: [*config, name] for name in layers}

    def read(self, path: Path, hook_points: Sequence[str] = ()) -> TrainedCoder:
        folder = path.parent if path.suffix == ".safetensors" else path
        config = read_yaml(folder / _CONFIG) if (folder / _CONFIG).exists() else {}
        if folder == path and (path / "W_enc_0.safetensors").exists():
            return _cross_layer(path, config, hook_points)
        if folder == path:
            raise _elsewhere(path, config)
        arrays = _SET_LAYER.read(path, read_safetensors(path))
        if (theta := arrays.get("threshold")) is not None and theta.size == 1:  # one for all
            arrays["threshold"] = np.broadcast_to(theta, arrays["b_enc"].shape)
        topology = "skip_transcoder" if "W_skip" in arrays else "transcoder"
        return _coder(path, topology, arrays, config, (_layer(path) or 0,), hook_points)

    def refuses(self, sae: TrainedCoder) -> str:
        kind, (reads, writes) = coder_kind(sae), (sae.sites.reads, sae.sites.writes)
        if kind not in self.reads:
            return f"circuit-tracer's files have no {kind[0]} with {kind[1]}"
        if sae.coder.topology.in_shape != sae.coder.topology.out_shape:
            return "circuit-tracer's coders are as wide where they write as where they read"
        layers, names = zip(*map(_layer_and_hook, (*reads, *writes)), strict=True)
        wanted = tuple(range(len(reads))) if _TOPOLOGIES[kind[0]] == _CLT else layers[:1]
        if (
            None in layers
            or layers != wanted * 2
            or any(len(set(n)) > 1 for n in (names[: len(reads)], names[len(reads) :]))
        ):
            return (
                "circuit-tracer's coders read one name in each layer and write another there, from layer 0 on where "
                f"there are several; this one reads {', '.join(reads)} and writes {', '.join(writes)}"
            )
        return ""

    def place_of(self, sae: TrainedCoder, folder: Path) -> Path:
        layer, _ = _layer_and_hook(sae.hook_point)
        return folder if _TOPOLOGIES[coder_kind(sae)[0]] == _CLT else folder / f"layer_{layer}.safetensors"

    def write(self, sae: TrainedCoder, folder: Path) -> list[str]:
        kind = _TOPOLOGIES[coder_kind(sae)[0]]
        there = read_yaml(folder / _CONFIG) if mentions(folder / _CONFIG, _KIND) else {}
        check_free(folder, there.get(_KIND) == kind, f"{kind} of circuit-tracer")
        arrays = {name: np.asarray(value) for name, value in sae.params.items()}
        if "threshold" in arrays:  # a negative one acts as 0 here
            arrays["threshold"] = np.maximum(arrays["threshold"], 0)
        if kind == _CLT:
            with replacing(folder) as beside:
                for i in range(len(arrays["W_enc"])):
                    of_layer = {n: arrays[n][i].T for n in ("W_enc", "b_enc", "b_dec", "threshold") if n in arrays}
                    write_safetensors(beside / f"W_enc_{i}.safetensors", {f"{n}_{i}": a for n, a in of_layer.items()})
                    write_safetensors(beside / f"W_dec_{i}.safetensors", {f"W_dec_{i}": arrays[f"W_dec_{i}"]})
                _write_config(beside, _config_of(sae, kind))
            return []
        return self._add(sae, folder, there, arrays)

    def _add(self, sae: TrainedCoder, folder: Path, there: Mapping[str, Any], arrays: NamedArrays) -> list[str]:
        """One layer more of a set; its config.yaml is that of all."""
        place, config = self.place_of(sae, folder), _config_of(sae, _SET)
        others = [layer for layer in _layer_files(folder) if layer != place]
        shapes = {_shape(other) for other in others}
        mine = (sae.coder.topology.d_sae, sae.coder.topology.d_in, "W_skip" in arrays)
        hooks = ("feature_input_hook", "feature_output_hook")
        known = [from_transformer_lens(f"blocks.0.{(there or config).get(hook)}") for hook in hooks]
        if others and (shapes != {mine} or known != [from_transformer_lens(f"blocks.0.{config[h]}") for h in hooks]):
            raise DataError(
                f"{folder} holds transcoders of {sorted(shapes)} (latents, width, skip) from {known}; circuit-tracer "
                f"loads only layers that agree, and this one is {mine} from {config[hooks[0]]}. Choose another folder."
            )
        notes = _of_one_model(folder, there, sae) if others else []
        beside = place.with_name(f".{place.name}.saving")
        with writing(place):
            folder.mkdir(parents=True, exist_ok=True)
            write_safetensors(beside, _SET_LAYER.write(arrays))
            beside.replace(place)
            if not others:
                _write_config(folder, config)
        layers = [layer for path in (*others, place) if (layer := _layer(path)) is not None]
        missing = ", ".join(str(layer) for layer in range(max(layers)) if layer not in layers)
        return notes + (
            [f"circuit-tracer loads a set of all layers from 0 on; missing are {missing}."] if missing else []
        )


# --- where things are ----------------------------------------------------------------------------------------------


def _layer(path: Path) -> int | None:
    """3 of layer_3.safetensors."""
    match = re.fullmatch(r"layer_(0|[1-9]\d{0,3})\.safetensors", path.name)
    return int(match[1]) if match else None


def _layer_files(folder: Path) -> list[Path]:
    """The files of a set's layers, from 0 on."""
    try:
        files = [(_layer(path), path) for path in folder.glob("layer_*.safetensors") if path.is_file()]
    except OSError:
        return []
    return [path for _, path in sorted((layer, path) for layer, path in files if layer is not None)]


def _elsewhere(path: Path, config: Mapping[str, Any]) -> DataError:
    """The error of a folder with a config.yaml alone."""
    listed = config.get("transcoders")
    if not isinstance(listed, list) or not listed:
        return DataError(
            f"{path} has a {_CONFIG} and no layer_0.safetensors or W_enc_0.safetensors: download the rest."
        )
    if isinstance(listed[0], str) and listed[0].startswith("hf://"):
        return DataError(
            f"{path / _CONFIG} lists {len(listed)} files of other repositories, {listed[0][:200]!r} first. Load those, "
            "or let circuit-tracer save the set to its cache and load it from there."
        )
    name = only_name(path / _CONFIG, listed[0])
    return DataError(f"{path / _CONFIG} lists {name!r}; saejax reads files that are called layer_<i>.safetensors.")


def _layer_and_hook(name: str) -> tuple[int | None, str]:
    """(6, "hook_resid_mid") of blocks.6.resid_mid."""
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", to_transformer_lens(name))
    return (int(match[1]), match[2]) if match else (None, name)


def _shape(path: Path) -> tuple[int, int, bool]:
    """(F, D, whether it has a skip) by the header. Raises DataError."""
    try:
        with safetensors.safe_open(path, framework="numpy") as handle:
            F, D = handle.get_slice("W_enc").get_shape()
            return F, D, "W_skip" in set(handle.keys())
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise DataError(f"{path} is not a layer of circuit-tracer ({error}). Remove it, or restore it.") from None


def _of_one_model(folder: Path, there: Mapping[str, Any], sae: TrainedCoder) -> list[str]:
    """The remark on a layer that joins a set, whose config.yaml names one model for all."""
    known, model = there.get("model_name"), sae.origin.model
    if model == known or known == _UNKNOWN:
        return []
    if not model:
        return [f"This layer does not say of which model it is; {folder / _CONFIG} says {known} for all of the set."]
    raise DataError(
        f"{folder} holds transcoders of {known}, and this one is of {model}: a set is of one model. Choose another "
        f"folder; if both names mean one model, write {model} as model_name into {folder / _CONFIG}."
    )


def _config_of(sae: TrainedCoder, kind: str) -> dict[str, Any]:
    """Without a list of files: circuit-tracer takes the layer_<i>.safetensors of the repository, or of its cache."""
    (_, reads), (_, writes) = (_layer_and_hook(names[0]) for names in (sae.sites.reads, sae.sites.writes))
    model = sae.origin.model or _UNKNOWN
    hooks = {"feature_input_hook": reads, "feature_output_hook": writes}
    return {"model_name": model, _KIND: kind, **hooks, "scan": f"saejax/{Path(model).name}"}


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    import yaml

    (folder / _CONFIG).write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")


# --- arrays --------------------------------------------------------------------------------------------------------


def _coder(
    path: Path,
    topology: str,
    arrays: NamedArrays,
    config: Mapping[str, Any],
    layers: Sequence[int],
    hook_points: Sequence[str],
) -> TrainedCoder:
    theta = arrays.get("threshold", np.zeros(1))
    if (below := int((theta < 0).sum())) > 0:
        raise DataError(
            f"{path}: {below} thresholds are below 0, where circuit-tracer's JumpReLU lets negative pre-activations "
            "through. saejax has no such coder; set the thresholds to 0 if that is what was meant."
        )
    reads, writes = (
        tuple(from_transformer_lens(f"blocks.{i}.{hook}") for i in layers) if isinstance(hook, str) else ()
        for hook in (config.get("feature_input_hook"), config.get("feature_output_hook"))
    )
    model, sparsity = config.get("model_name"), "jumprelu" if "threshold" in arrays else "relu"
    model = model if isinstance(model, str) else ""
    notes = half_precision_notes(*(path.glob("W_*.safetensors") if path.is_dir() else [path]))
    notes += norm_notes(str(config.get("feature_output_hook")), model)
    return assemble(path, topology, sparsity, arrays, hook_points, reads=reads, writes=writes, model=model, notes=notes)


def _cross_layer(path: Path, config: Mapping[str, Any], hook_points: Sequence[str]) -> TrainedCoder:
    n = len([entry for entry in path.glob("W_enc_*.safetensors") if entry.is_file()])
    if n > _MOST_LAYERS:
        raise DataError(f"{path} has {n:,} files for layers; a cross-layer transcoder has at most {_MOST_LAYERS:,}.")
    parts: NamedArrays = {}
    for i in range(n):
        parts |= read_safetensors(path / f"W_enc_{i}.safetensors") | read_safetensors(path / f"W_dec_{i}.safetensors")
    arrays: NamedArrays = {}
    for name in ("W_enc", "b_enc", "b_dec", "threshold"):
        layers = [parts.pop(f"{name}_{i}", np.zeros(0)) for i in range(n)]
        if any(value.shape != layers[0].shape for value in layers):
            raise DataError(f"{path}: {name} has other shapes in other layers: {sorted({v.shape for v in layers})}.")
        if layers[0].size:
            arrays[name] = np.stack([value.T for value in layers])
    return _coder(path, "clt", arrays | parts, config, range(n), hook_points)
