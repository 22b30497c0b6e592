"""Gemma Scope 1 (params.npz) and 2 (params.safetensors), in the folders of the hub's repositories google/gemma-scope-*.

    f = relu(pre) 1[pre > threshold],   pre = x W_enc + b_enc,   x_hat = f W_dec + b_dec (+ x W_skip)

The encoder sees x itself, not x - b_dec. Version 1 says nothing of models and places: they are in the folders' names
(gemma-scope-2b-pt-res/layer_20/width_16k/average_l0_71). Version 2 has a config.json and dictionaries of several layers
in params_layer_0.safetensors, ...: layer l's latents see layer l and write to all of them, in a cross-layer transcoder
and in a weakly causal crosscoder (Gemma Scope 2, section 2.6) to their own layer and those above: 0 to those below.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saejax.core.archives import check_size
from saejax.core.errors import DataError
from saejax.core.files import replacing
from saejax.interop.assemble import UNCENTRED, Layout, NamedArrays, assemble, check_free, coder_kind, write_files
from saejax.interop.hooks import UNKNOWN, from_module
from saejax.interop.tensors import half_precision_notes, mentions, read_config, read_npz, read_safetensors
from saejax.trained import Format, Kind, TrainedCoder, centred, register_format

_NPZ, _CONFIG, _WEIGHTS = "params.npz", "config.json", "params.safetensors"
_MOST_LAYERS = 1024
_JUMPRELU = Layout(
    {"w_enc": "W_enc", "w_dec": "W_dec", "affine_skip_connection": "W_skip"},
    required=("W_enc", "W_dec", "b_enc", "b_dec", "threshold"),
)
_SITES = {"res": "resid_post", "mlp": "mlp_out", "att": "attn_z"}
_NORMALIZED = (
    "It reads ln2.hook_normalized, which is taken before the norm's own gain: saejax's language models have no such "
    "hook point. It is what stands at mlp_in, divided by 1 + the norm's weight."
)
# The sites of version 2, by the names of its folders.
_FOLDERS = {
    "resid_post": ("output", ""),
    "attn_out": ("self_attn.o_proj.input", ""),
    "mlp_out": ("post_feedforward_layernorm.output", ""),
    "transcoder": ("pre_feedforward_layernorm.output", "post_feedforward_layernorm.output"),
    "crosscoder": ("output", ""),
    "clt": ("pre_feedforward_layernorm.output", "post_feedforward_layernorm.output"),
}
_MODULE_OF = {
    "resid_pre": "input",
    "resid_post": "output",
    "attn_z": "self_attn.o_proj.input",
    "attn_out": "post_attention_layernorm.output",  # in Gemma 3 behind attention; elsewhere before the MLP
    "mlp_in": "pre_feedforward_layernorm.output",
    "mlp_out": "post_feedforward_layernorm.output",
}
# Dictionaries of several layers, and what config.json calls a dictionary: (of several layers, of what it reads).
_SEVERAL = ("causal_crosscoder", "clt", "skip_clt")
_TYPES = {(False, True): "sae", (False, False): "transcoder", (True, True): "crosscoder", (True, False): "clt"}


@register_format
class GemmaScope(Format):
    """Version 1: one folder a coder."""

    name = "gemma_scope"
    title = "Gemma Scope 1"
    files = _NPZ
    needs = ((_NPZ,),)
    reads = frozenset({(UNCENTRED, "jumprelu"), ("transcoder", "jumprelu")})

    def here(self, path: Path) -> list[Path]:
        return [path] if (path / _NPZ).is_file() else []

    def read(self, path: Path, hook_points: Sequence[str] = ()) -> TrainedCoder:
        arrays = _JUMPRELU.read(path / _NPZ, read_npz(path / _NPZ))
        if (scale := arrays.pop("scaling_factor", None)) is not None and not np.allclose(scale, 1):
            raise DataError(f"{path / _NPZ} has a scaling_factor other than 1; multiply W_dec by it.")
        model, reads, writes = _model_and_sites(path)
        if not reads:
            reads, writes = tuple(hook_points[:1]), tuple(hook_points[1:2] or hook_points[:1])
        notes: tuple[str, ...] = (_NORMALIZED,) if reads and reads[0].endswith("ln2.hook_normalized") else ()
        if reads == ("hook_embed",) and arrays["W_enc"].ndim == 2:
            root = np.sqrt(np.float32(arrays["W_enc"].shape[0]))
            arrays |= {"W_enc": arrays["W_enc"] / root, "W_dec": arrays["W_dec"] * root}
            notes = ("It was trained on embeddings / sqrt(d_in); the weights are scaled for what the model adds up.",)
        return assemble(
            path, "transcoder", "jumprelu", arrays, hook_points, reads=reads, writes=writes, model=model, notes=notes
        )

    def refuses(self, sae: TrainedCoder) -> str:
        kind = coder_kind(sae)
        if kind in _with_threshold(("autoencoder", UNCENTRED)):
            return ""
        if kind in _with_threshold(("transcoder",)):
            return "its files do not say that a coder writes elsewhere than it reads (gemma_scope_2 does)"
        return f"Gemma Scope has no {kind[0]} with {kind[1]}"

    def write(self, sae: TrainedCoder, folder: Path) -> list[str]:
        check_free(folder, bool(self.here(folder)), f"dictionary of {self.title}")
        arrays = _arrays(sae)
        model, reads, _ = _model_and_sites(folder)
        if reads == ("hook_embed",):
            root = np.sqrt(np.float32(arrays["W_enc"].shape[0]))
            arrays |= {"W_enc": arrays["W_enc"] * root, "W_dec": arrays["W_dec"] / root}
        with replacing(folder) as beside:
            np.savez(beside / _NPZ, **arrays)  # type: ignore[arg-type]  # its stubs say bool
        if reads == sae.sites.reads and model.endswith(sae.origin.model.removeprefix("google/") or "?"):
            return []
        return [
            f"The file does not say {sae.origin.model or 'the model'} and {sae.hook_point}: name its folder as the hub "
            "does (gemma-scope-2b-pt-res/layer_20/width_16k/average_l0_71), or give hook_points when you load it."
        ]


@register_format
class GemmaScope2(Format):
    """Version 2: one folder a coder."""

    name = "gemma_scope_2"
    title = "Gemma Scope 2"
    files = f"{_CONFIG}, {_WEIGHTS} or params_layer_0.safetensors, ..."
    needs = ((_CONFIG, _WEIGHTS), (_CONFIG, "params_layer_*.safetensors"))
    reads = frozenset(
        (topology, "jumprelu") for topology in (UNCENTRED, "transcoder", "skip_transcoder", "crosscoder", *_SEVERAL)
    )

    def here(self, path: Path) -> list[Path]:
        there = (path / _WEIGHTS).exists() or (path / _layer(0)).is_file()
        return [path] if there or mentions(path / _CONFIG, '"hf_hook_point_in"') else []

    def read(self, path: Path, hook_points: Sequence[str] = ()) -> TrainedCoder:
        config = read_config(path / _CONFIG) if (path / _CONFIG).exists() else {}
        if (kind := config.get("architecture", "jump_relu")) != "jump_relu":
            raise DataError(f"{path / _CONFIG}: architecture is {kind!r}; Gemma Scope 2 has jump_relu.")
        if not (path / _layer(0)).is_file():
            arrays = _JUMPRELU.read(path / _WEIGHTS, read_safetensors(path / _WEIGHTS))
            notes, layers = half_precision_notes(path / _WEIGHTS), 1
            topology = "skip_transcoder" if "W_skip" in arrays else "transcoder"
        else:
            arrays, notes, layers, topology = _stacked(path)
        sides = [_hooks(path, config, side, layers) for side in ("in", "out")]
        reads = sides[0] or tuple(hook_points[:layers])
        writes = sides[1] or (reads if sides[0] else tuple(hook_points[layers:]) or reads)
        if layers > 1:
            arrays, topology, remarks = _triangular(path, arrays, topology, reads == writes)
            notes += remarks
        model = _model_name(path, config)
        return assemble(path, topology, "jumprelu", arrays, reads=reads, writes=writes, model=model, notes=notes)

    def refuses(self, sae: TrainedCoder) -> str:
        kind = coder_kind(sae)
        if kind in _with_threshold(("autoencoder", UNCENTRED, "transcoder", "skip_transcoder")):
            return ""
        if kind in _with_threshold(_SEVERAL):
            sides = [_one_name(side) for side in (sae.sites.reads, sae.sites.writes)]
            return "" if all(sides) else "its files name one module of several layers, as blocks.{3,5}.resid_post"
        if kind[0] == "crosscoder":
            return "a latent of its crosscoders reads one layer, and writes that layer and those above"
        return f"Gemma Scope has no {kind[0]} with {kind[1]}"

    def write(self, sae: TrainedCoder, folder: Path) -> list[str]:
        check_free(folder, bool(self.here(folder)), f"dictionary of {self.title}")
        arrays, t = _arrays(sae), sae.coder.topology
        several, same = coder_kind(sae)[0] in _SEVERAL, sae.sites.reads == sae.sites.writes
        config = {
            "architecture": "jump_relu",
            "model_name": sae.origin.model,
            "hf_hook_point_in": _module(_one_name(sae.sites.reads) if several else sae.sites.reads[0]),
            "hf_hook_point_out": _module(_one_name(sae.sites.writes) if several else sae.sites.writes[0]),
            "width": t.d_sae * t.sites if several else t.d_sae,
            "l0": round(sae.figures["l0"]) if "l0" in sae.figures else None,
            "affine_connection": "W_skip" in arrays,
            "type": _TYPES[several, same],
        }
        files = _by_layer(arrays) if several else {_WEIGHTS: arrays}
        stored = {file: _JUMPRELU.write(tensors) for file, tensors in files.items()}
        write_files(folder, stored | {_CONFIG: config}, indent=2)
        return []


# --- what both versions share --------------------------------------------------------------------------------------


def _with_threshold(topologies: Sequence[str]) -> set[Kind]:
    return {(topology, sparsity) for topology in topologies for sparsity in ("relu", "jumprelu")}


def _arrays(sae: TrainedCoder) -> NamedArrays:
    """Parameters for an encoder of x itself, with a threshold; relu has 0."""
    arrays: NamedArrays = {name: np.asarray(value, np.float32) for name, value in sae.params.items()}
    if coder_kind(sae)[0] == "autoencoder":
        arrays = centred(arrays, -1)
    return {"threshold": np.zeros_like(arrays["b_enc"])} | arrays


# --- version 1: names of folders -------------------------------------------------------------------------------------


def _model_and_sites(path: Path) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """(model, (what is read,), (what is written,)) from the folders' names; empty where they do not say."""
    parts = Path(os.path.abspath(path)).parts
    repo = next((m for p in reversed(parts) if (m := re.search(r"gemma-scope-(\d+b)-(pt|it)-(\w+)$", p))), None)
    layer = next((m[1] for p in reversed(parts) if (m := re.fullmatch(r"layer_(\d+)", p))), None)
    if repo is None:
        return "", (), ()
    model = f"google/gemma-2-{repo[1]}" + ("-it" if repo[2] == "it" else "")
    if repo[3] == "res" and "embedding" in parts:
        return model, ("hook_embed",), ("hook_embed",)
    if layer is not None and repo[3] in _SITES:
        return model, (site := (f"blocks.{layer}.{_SITES[repo[3]]}",)), site
    if layer is not None and repo[3] == "transcoders":
        return model, (f"blocks.{layer}.ln2.hook_normalized",), (f"blocks.{layer}.mlp_out",)
    return model, (), ()


# --- version 2: config.json, several layers --------------------------------------------------------------------------


def _layer(index: int) -> str:
    return f"params_layer_{index}.safetensors"


def _module(hook_point: str) -> str | None:
    """blocks.6.mlp_out -> model.layers.6.post_feedforward_layernorm.output; other names stay."""
    match = re.fullmatch(r"blocks\.(\d+|\{[\d,]+\})\.(\w+)", hook_point)
    if match and match[2] in _MODULE_OF:
        return f"model.layers.{match[1]}.{_MODULE_OF[match[2]]}"
    return None if hook_point == UNKNOWN else hook_point


def _one_name(hook_points: Sequence[str]) -> str:
    """blocks.3.resid_post, blocks.5.resid_post -> blocks.{3,5}.resid_post; empty where they are of several kinds."""
    parts = [re.fullmatch(r"blocks\.(\d+)\.(\w+)", name) for name in hook_points]
    known = [part for part in parts if part is not None]
    if len(known) != len(parts) or len({part[2] for part in known}) != 1:
        return ""
    return f"blocks.{{{','.join(part[1] for part in known)}}}.{known[0][2]}"


def _hooks(path: Path, config: Mapping[str, Any], side: str, layers: int) -> tuple[str, ...]:
    """The hook points of a side in saejax's names, one a layer; () where neither config.json nor the folder says."""
    name = config.get(f"hf_hook_point_{side}")
    if not isinstance(name, str) or not name:
        name = _by_folder(path, side)
    match = re.fullmatch(r"(.*)\{([\w,]+)\}(.*)", name)
    each = [name]
    if match:
        numbers = range(layers) if match[2] == "all" else match[2].split(",")
        each = [f"{match[1]}{number}{match[3]}" for number in numbers]
    if name and len(each) != layers:
        raise DataError(f"{path} has weights of {layers} layers, and says that it stands at {name}.")
    points = []
    for module in each if name else []:
        attn = re.fullmatch(r".*\.layers\.(\d+)\.post_attention_layernorm\.output", module)
        ours = module if module.startswith("blocks.") else from_module(module)
        points.append(f"blocks.{attn[1]}.attn_out" if attn else ours)
    return tuple(points)


def _by_folder(path: Path, side: str) -> str:
    """As config.json says it, from resid_post_all/layer_13_width_16k_l0_big; empty where the names do not say."""
    folder = Path(os.path.abspath(path))
    match = re.match(r"layer_(\d+(?:_\d+)*)_", folder.name)
    kind = folder.parent.name.removesuffix("_all")
    if kind not in _FOLDERS or (match is None and kind != "clt"):
        return ""
    module = _FOLDERS[kind][side == "out"]
    layers = "{all}" if match is None else match[1] if "_" not in match[1] else f"{{{match[1].replace('_', ',')}}}"
    return f"model.layers.{layers}.{module}" if module else ""


def _model_name(path: Path, config: Mapping[str, Any]) -> str:
    """google/gemma-3-1b-pt, from config.json or the repository's name, which has it as gemma-v3 or gemma-scope-2."""
    name = config.get("model_name")
    if not isinstance(name, str) or not name:
        sizes = [
            m[1] for p in reversed(path.absolute().parts) if (m := re.search(r"gemma-scope-2-(\w+-(?:pt|it))$", p))
        ]
        name = f"gemma-3-{sizes[0]}" if sizes else ""
    name = name.replace("gemma-v3", "gemma-3")
    return f"google/{name}" if name.startswith("gemma-") else name


def _stacked(path: Path) -> tuple[NamedArrays, tuple[str, ...], int, str]:
    """({name: [L, ...]}, notes, L, topology) of the files of all layers."""
    files: list[Path] = []
    while (path / _layer(len(files))).is_file():
        files.append(path / _layer(len(files)))
    if len(files) > _MOST_LAYERS:
        raise DataError(f"{path} has {len(files):,} files of layers; a model has at most {_MOST_LAYERS:,} layers.")
    check_size(path, 2 * sum(file.stat().st_size for file in files))
    layers = [_JUMPRELU.read(file, read_safetensors(file)) for file in files]
    for file, arrays in zip(files, layers, strict=True):
        for name in arrays.keys() | layers[0].keys():
            shapes = [a[name].shape if name in a else "nothing" for a in (arrays, layers[0])]
            if shapes[0] != shapes[1]:
                raise DataError(f"{file} has {shapes[0]} for {name}, the first layer {shapes[1]}.")
        if arrays["W_dec"].ndim != 3 or arrays["W_dec"].shape[1] != len(files):
            raise DataError(
                f"{file} has {arrays['W_dec'].shape} for w_dec, [latents, {len(files)} files, width] is expected."
            )
    stacked = {name: [arrays[name] for arrays in layers] for name in layers[0]}
    decoders = stacked.pop("W_dec")
    out = {name: np.stack(parts) for name, parts in stacked.items()}
    topology = "skip_clt" if "W_skip" in out else "clt"
    out |= {f"W_dec_{i}": part for i, part in enumerate(decoders)}
    return out, half_precision_notes(files[0]), len(files), topology


def _by_layer(arrays: NamedArrays) -> dict[str, NamedArrays]:
    """{file: its arrays} of a cross-layer dictionary, whose latents write 0 to the layers below their own."""
    n = len(arrays["W_enc"])
    stacked = {name: value for name, value in arrays.items() if not name.startswith("W_dec_")}
    files = {_layer(i): {name: np.ascontiguousarray(value[i]) for name, value in stacked.items()} for i in range(n)}
    for i, file in enumerate(files.values()):
        file["W_dec"] = np.pad(arrays[f"W_dec_{i}"], ((0, 0), (i, 0), (0, 0)))
    return files


def _triangular(path: Path, arrays: NamedArrays, topology: str, same: bool) -> tuple[NamedArrays, str, tuple[str, ...]]:
    """(parameters, topology, notes) of a dictionary of several layers whose decoders W_dec_i write to all layers.

    Where no layer writes below itself, that is a cross-layer transcoder, or a weakly causal crosscoder if it writes
    what it reads. Where one does, a crosscoder says it: all latents in one group, and W_enc 0 but for the latent's own
    layer.
    """
    decoders = {name: value for name, value in arrays.items() if name.startswith("W_dec_")}
    if all(not value[:, :layer].any() for layer, value in enumerate(decoders.values())):
        above = {name: value[:, layer:] for layer, (name, value) in enumerate(decoders.items())}
        return arrays | above, "causal_crosscoder" if same and topology == "clt" else topology, ()
    if not same or topology != "clt":
        raise DataError(
            f"{path}: its latents write to layers below their own; saejax's {topology} does not. It is damaged."
        )
    L, D, F = arrays["W_enc"].shape
    W_enc = np.zeros((L, D, L, F), np.float32)
    W_enc[np.arange(L), :, np.arange(L)] = arrays["W_enc"]
    together: NamedArrays = {name: arrays[name].reshape(-1) for name in ("b_enc", "threshold")}
    together |= {"W_enc": W_enc.reshape(L, D, L * F), "W_dec": np.concatenate(list(decoders.values()))}
    note = f"Its {L} layers of {F:,} latents are one group of {L * F:,}: latent f of layer l is {F} l + f."
    return together | {"b_dec": arrays["b_dec"]}, "crosscoder", (note,)
