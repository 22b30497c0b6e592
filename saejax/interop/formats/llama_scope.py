"""Llama Scope, and what its trainer Llamascopium writes today. (OpenMOSS/Language-Model-SAEs, 2024-10 to 2.0.0b34)

    f = act(pre n) / n,   pre = s_in x W_E + b_E,   y_hat = (f W_D + b_D) / s_out,   s = sqrt(D) / (mean norm there)

n is the length of a latent's decoder row where sparsity_include_decoder_norm says so, else 1. Three ages of files:

- 2024: hyperparams.json, checkpoints/final.safetensors with encoder.weight [F, D], decoder.weight [D, F] and biases;
  one number jump_relu_threshold, and the mean norms by "in" and "out". The threshold is measured after s_in and n were
  folded in, with rows of length 1: pre n > threshold s_out, or pre > threshold s_in without n. (SAELens's converter
  takes the second always; for an autoencoder with rows of length 1 they are one.)
- 2025: config.json, sae_weights.safetensors, the same names, log_jumprelu_threshold [F] of pre n, and a mean norm for
  each hook point among the tensors.
- since: W_E [D, F], b_E, W_D [F, D], b_D; a cross-layer transcoder has W_E [L, D, F] and, by the layer written to,
  W_D.<m> [m + 1, F, D]; a crosscoder has W_D [S, F, D] and sums b_E over its hook points.

Latents are those of scaled inputs, as SAELens and Llamascopium have them; the loader of 2024 gave f / s_in.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saejax.core.errors import DataError
from saejax.core.torch_file import read_torch
from saejax.interop.assemble import (
    UNCENTRED,
    Layout,
    NamedArrays,
    assemble,
    check_free,
    coder_kind,
    weighted,
    write_files,
)
from saejax.interop.hooks import from_transformer_lens, to_transformer_lens
from saejax.interop.tensors import half_precision_notes, mentions, read_config, read_safetensors
from saejax.trained import Format, Kind, TrainedCoder, centred, register_format

_OLD, _CONFIG, _WEIGHTS = "hyperparams.json", "config.json", "sae_weights.safetensors"
# In the order in which its own loader looks.
_STEMS, _ENDS = ("sae_weights", "checkpoints/pruned", "checkpoints/final"), ("safetensors", "pt", "dcp")
_PLACES = [f"{stem}.{end}" for stem in _STEMS for end in _ENDS]
_LINEAR = Layout(
    {"encoder.weight": "W_E", "encoder.bias": "b_E", "decoder.weight": "W_D", "decoder.bias": "b_D"},
    transposed=("encoder.weight", "decoder.weight"),
)
_LOG = ("log_jumprelu_threshold", "activation_function.log_jumprelu_threshold")
_NORM = "dataset_average_activation_norm"
_HUGE = 1e30
_ACTIVATIONS = ("relu", "jumprelu", "topk")
_HOOKS = {"sae": "hook_point", "clt": "hook_points"}
_BATCHED = "selects over a batch or over layers, and its files hold no threshold"


@register_format
class LlamaScope(Format):
    """One folder a coder."""

    name = "llama_scope"
    title = "Llama Scope (Llamascopium)"
    files = f"{_CONFIG}, {_WEIGHTS}; or {_OLD}, checkpoints/final.safetensors"
    needs = ((_CONFIG, _WEIGHTS), (_OLD, "checkpoints/final.safetensors"))
    reads = frozenset(
        {(topology, sparsity) for topology in (UNCENTRED, "transcoder", "clt") for sparsity in _ACTIVATIONS}
        | {("crosscoder", "relu")}
    )

    def here(self, path: Path) -> list[Path]:
        if (path / _OLD).is_file() or mentions(path / _CONFIG, '"sae_type"'):
            return [path]
        weights = any((path / place).exists() for place in _PLACES[:3])
        return [path] if weights and mentions(path / _CONFIG, '"hook_point_in"') else []

    def read(self, path: Path, hook_points: Sequence[str] = ()) -> TrainedCoder:
        file = path / (_OLD if (path / _OLD).is_file() else _CONFIG)
        config = read_config(file)
        tensors, notes = _tensors(path)
        sparsity, kind = str(config.get("act_fn", "relu")).lower(), str(config.get("sae_type", "sae"))
        if kind not in (*_HOOKS, "crosscoder"):
            raise DataError(f"{file}: saejax has no coder that does what sae_type {kind!r} of Llamascopium does.")
        if config.get("use_glu_encoder"):
            raise DataError(f"{file}: use_glu_encoder: saejax has no coder with a second encoder.")
        threshold = config.get("jump_relu_threshold", 0.0 if file.name == _OLD else None)
        if sparsity == "topk" and file.name == _OLD and threshold:
            sparsity = "jumprelu"  # as its loader has it: a threshold was fitted to the topk
        if sparsity not in _ACTIVATIONS:
            raise DataError(f"{file}: act_fn {sparsity!r} {_BATCHED}. Convert it to jumprelu with Llamascopium first.")
        reads, writes = _hook_points(config, file, kind)
        s_in, s_out = _scales(config, tensors, file, reads, writes)
        arrays = _stacked(file, kind, tensors, len(reads))
        if (D := arrays["W_enc"].shape[-2]) != config.get("d_model", D):
            raise DataError(f"{file}: d_model is {config['d_model']!r}; the weights are {D} wide. One is damaged.")
        if kind == "crosscoder":
            arrays, sites = _crosscoder(file, sparsity, arrays, s_in), tuple(map(from_transformer_lens, reads))
            notes += ("Llamascopium repeats these latents for each hook point.",)
            arrays, model = _single(arrays), _model_name(path)
            return assemble(path, kind, "relu", arrays, reads=sites, writes=sites, model=model, notes=notes)
        norms = _norms(arrays) if config.get("sparsity_include_decoder_norm", True) else None
        if sparsity == "jumprelu":
            arrays["threshold"] = _threshold(file, arrays, threshold, norms, s_in, s_out)
        k = config.get("top_k") if sparsity == "topk" else None
        if sparsity == "topk" and (type(k) is not int or k < 1):
            raise DataError(f"{file}: top_k is {k!r}; it must be a whole number of at least 1.")
        topology = "clt" if kind == "clt" else "transcoder"
        if config.get("apply_decoder_bias_to_pre_encoder"):
            arrays["b_enc"] = arrays["b_enc"] - s_in[0] / s_out[0] * (arrays["b_dec"] @ arrays["W_enc"])
        arrays = _raw(arrays, s_in, s_out)
        if norms is not None and sparsity == "topk" and not np.allclose(norms, 1, rtol=1e-6, atol=0):
            arrays = _lengthened(arrays, norms)
            notes += ("It keeps the k largest by pre ||W_dec||, so latents here are times ||W_dec||, which is 1.",)
        return assemble(
            path,
            topology,
            sparsity,
            _single(arrays),
            hook_points,
            reads=tuple(map(from_transformer_lens, reads)),
            writes=tuple(map(from_transformer_lens, writes)),
            k=k,
            model=_model_name(path),
            notes=notes,
        )

    def refuses(self, sae: TrainedCoder) -> str:
        topology, sparsity = coder_kind(sae)
        if (topology, sparsity) not in _WRITABLE:
            return f"Llamascopium has no {topology} with {sparsity}, or none that its files say alike"
        if sae.coder.topology.in_shape != sae.coder.topology.out_shape:
            return "Llamascopium's coders are as wide where they write as where they read"
        return ""

    def write(self, sae: TrainedCoder, folder: Path) -> list[str]:
        check_free(folder, bool(self.here(folder)), "dictionary of Llamascopium")
        arrays = {name: np.asarray(value) for name, value in sae.params.items()}
        (topology, sparsity), t = coder_kind(sae), sae.coder.topology
        if topology == "autoencoder":
            arrays = centred(arrays, -1)
        named = {"W_E": arrays["W_enc"], "b_E": arrays["b_enc"]}
        if topology == "clt":
            for m, b_D in enumerate(arrays["b_dec"]):
                rows = [arrays[f"W_dec_{i}"][:, m - i] for i in range(m + 1)]
                named |= {f"W_D.{m}": np.stack(rows), f"b_D.{m}": b_D}
        else:
            named |= {"W_D": arrays["W_dec"], "b_D": arrays["b_dec"]}
        if "threshold" in arrays:
            named[_LOG[1]] = _logarithm(np.maximum(arrays["threshold"], 0))
        kind, factor = "clt" if topology == "clt" else "sae", t.d_sae / t.d_in
        if int(t.d_in * factor) != t.d_sae:  # the product is cut to a whole number
            factor = math.nextafter(factor, math.inf)
        config: dict[str, Any] = {
            "sae_type": kind,
            "d_model": t.d_in,
            "expansion_factor": factor,
            "use_decoder_bias": True,
            "act_fn": sparsity,
            "norm_activation": "inference",
            "sparsity_include_decoder_norm": False,
            "top_k": sae.coder.sparsity.kept or 50,
        }
        for side, ours in (("in", sae.sites.reads), ("out", sae.sites.writes)):
            names = [to_transformer_lens(name) for name in ours]
            config[f"{_HOOKS[kind]}_{side}"] = names if kind == "clt" else names[0]
        write_files(folder, {_WEIGHTS: named, _CONFIG: config}, indent=4)
        notes = [f"The files do not name the language model, {sae.origin.model}."] if sae.origin.model else []
        if "threshold" in arrays:
            notes.append("They hold logarithms of thresholds: the last digits of a threshold may differ.")
        return notes


_WRITABLE: frozenset[Kind] = LlamaScope.reads - {("crosscoder", "relu")} | {("autoencoder", s) for s in _ACTIVATIONS}


# --- configuration --------------------------------------------------------------------------------------------


def _tensors(path: Path) -> tuple[NamedArrays, tuple[str, ...]]:
    """(tensors by today's names, encoder and decoder as [.., D, F] and [.., F, D]; notes)"""
    file = next((path / place for place in _PLACES if (path / place).exists()), path / _WEIGHTS)
    if file.suffix == ".dcp":
        raise DataError(
            f"{file} is a sharded checkpoint of PyTorch. Load it with Llamascopium without a device mesh and save it "
            f"again: that writes {_WEIGHTS}."
        )
    if file.suffix != ".pt":
        return _LINEAR.read(file, read_safetensors(file)), half_precision_notes(file)
    tensors = read_torch(file).get("sae")
    if not isinstance(tensors, dict) or not all(isinstance(value, np.ndarray) for value in tensors.values()):
        raise DataError(f"{file} has no dict 'sae' of tensors: it is no checkpoint of Llamascopium.")
    return _LINEAR.read(file, {name: value.astype(np.float32) for name, value in tensors.items()}), ()


def _hook_points(config: Mapping[str, Any], file: Path, kind: str) -> tuple[list[str], list[str]]:
    """Names of the hook points as the file has them."""
    keys = ["hook_points"] * 2 if kind == "crosscoder" else [f"{_HOOKS[kind]}_{side}" for side in ("in", "out")]
    reads, writes = (config.get(key) for key in keys)
    sides: list[Any] = [[reads], [writes or reads]] if kind == "sae" else [reads, writes]
    for names in sides:
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            raise DataError(f"{file}: the hook points are {str(names)[:200]}; names are expected.")
    return sides[0], sides[1]


def _scales(
    config: Mapping[str, Any], tensors: NamedArrays, file: Path, reads: Sequence[str], writes: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """s of each hook point, in and out; takes the mean norms out of the tensors."""
    there = {name.removeprefix(f"{_NORM}."): tensors.pop(name) for name in list(tensors) if name.startswith(_NORM)}
    how = config.get("norm_activation", "dataset-wise")
    if how in ("inference", "none"):  # norms in the file are then folded in already, or never set
        return np.ones(len(reads)), np.ones(len(writes))
    if how != "dataset-wise":
        raise DataError(f"{file}: norm_activation {how!r} scales each token or batch by itself; no coder here does.")
    by_side = config.get(_NORM)
    if isinstance(by_side, dict):
        norms = [[by_side.get("in")], [by_side.get("out", by_side.get("in"))]]
    else:
        norms = [[there.get(name) for name in names] for names in (reads, writes)]
    width, *values = (_positive(value) for value in (config.get("d_model"), *norms[0], *norms[1]))
    if not all((width, *values)):
        raise DataError(
            f"{file}: norm_activation dataset-wise needs d_model and a mean norm above 0 of {reads} and {writes}."
        )
    scales = math.sqrt(width) / np.array(values)
    return scales[: len(norms[0])], scales[len(norms[0]) :]


def _positive(value: Any) -> float:
    """A number above 0 of JSON or of a tensor; 0.0 for anything else."""
    if not isinstance(value, int | float | np.ndarray) or isinstance(value, bool) or np.size(value) != 1:
        return 0.0
    number = float(value.item()) if isinstance(value, np.ndarray) else float(min(value, _HUGE))
    return number if 0 < number < _HUGE else 0.0


def _model_name(path: Path) -> str:
    """By the names of the repositories of Llama Scope, of which its files say nothing."""
    return "meta-llama/Llama-3.1-8B" if re.search(r"Llama3_1-8B-Base", str(path.absolute())) else ""


# --- arrays --------------------------------------------------------------------------------------------------------


def _stacked(file: Path, kind: str, tensors: NamedArrays, n: int) -> NamedArrays:
    """saejax's names, float64; decoders of a cross-layer transcoder by the layer that reads."""
    named = {name: value.astype(np.float64) for name, value in tensors.items()}
    renamed = {"W_E": "W_enc", "b_E": "b_enc", "W_D": "W_dec", "b_D": "b_dec"} | dict.fromkeys(_LOG, "log_threshold")
    arrays = {renamed.get(name, name): value for name, value in named.items()}
    if kind == "clt":
        into = [arrays.pop(f"W_D.{m}", np.zeros(0)) for m in range(n)]
        biases = [arrays.pop(f"b_D.{m}", np.zeros(0)) for m in range(n)]
        shape = into[0].shape[1:]
        if (
            len(shape) != 2
            or any(into[m].shape != (m + 1, *shape) for m in range(n))
            or len({*map(np.shape, biases)}) > 1
        ):
            raise DataError(f"{file.parent}: W_D.0 ... b_D.{n - 1} are not those of {n} layers of one width.")
        arrays["b_dec"] = np.stack(biases)
        arrays |= {f"W_dec_{i}": np.stack([into[m][i] for m in range(i, n)], axis=1) for i in range(n)}
    elif "W_dec" in arrays and "b_dec" not in arrays:  # use_decoder_bias=False
        arrays["b_dec"] = np.zeros(np.delete(arrays["W_dec"].shape, -2 if arrays["W_dec"].ndim > 1 else []))
    if missing := {"W_enc", "b_enc", "b_dec", "W_dec_0" if kind == "clt" else "W_dec"} - arrays.keys():
        raise DataError(f"{file.parent} has no tensor for {', '.join(sorted(missing))}: it is damaged.")
    # What is computed with below must fit; `assemble` says what is wrong with the rest.
    sites = (n,) if kind != "sae" else ()
    W_enc = arrays["W_enc"].shape
    if W_enc[:-2] != sites or len(W_enc) != len(sites) + 2:
        raise DataError(f"{file.parent} has an encoder of {W_enc} for {n} hook points: it is damaged.")
    D, F = W_enc[-2:]
    wanted = {"b_enc": (*sites, F), "W_dec": (*sites, F, D), "b_dec": (*sites, D)}
    wanted |= {f"W_dec_{i}": (F, n - i, D) for i in range(n)} | {"log_threshold": ((n, F) if kind == "clt" else (F,))}
    for name, value in arrays.items():
        if name != "W_enc" and value.shape != wanted.get(name):
            raise DataError(
                f"{file.parent} has {value.shape} for {name}; an encoder of {W_enc} goes with {wanted.get(name)}."
            )
    return arrays


def _norms(arrays: NamedArrays) -> np.ndarray:
    """[F], or [L, F]: the length of all that a latent writes."""
    if "W_dec" in arrays:
        return np.linalg.norm(arrays["W_dec"], axis=-1)
    return np.stack([np.sqrt((arrays[f"W_dec_{i}"] ** 2).sum((1, 2))) for i in range(len(arrays["W_enc"]))])


def _threshold(
    file: Path, arrays: NamedArrays, one: Any, norms: np.ndarray | None, s_in: np.ndarray, s_out: np.ndarray
) -> np.ndarray:
    """Thresholds of pre, for scaled inputs."""
    if "log_threshold" in arrays:
        with np.errstate(over="ignore"):
            theta = np.exp(arrays.pop("log_threshold"))
    elif type(one) not in (int, float) or not 0 <= one < _HUGE or arrays["b_enc"].ndim > 1:
        raise DataError(f"{file}: jump_relu_threshold is {one!r}, and there is no log_jumprelu_threshold.")
    else:
        theta = np.full(arrays["b_enc"].shape, one * (s_in[0] if norms is None else s_out[0]))
    if norms is None:
        return theta
    # A latent that writes nothing has pre n = 0, above no threshold.
    return np.divide(theta, norms, out=np.full_like(theta, np.finfo(np.float32).max), where=norms > 0)


def _raw(arrays: NamedArrays, s_in: np.ndarray, s_out: np.ndarray) -> NamedArrays:
    """For raw activations: the latents stay those of scaled ones."""
    if "W_dec" in arrays:
        folded = {
            "W_enc": arrays["W_enc"] * s_in[0],
            "W_dec": arrays["W_dec"] / s_out[0],
            "b_dec": arrays["b_dec"] / s_out[0],
        }
        return arrays | folded
    folded = {"W_enc": arrays["W_enc"] * s_in[:, None, None], "b_dec": arrays["b_dec"] / s_out[:, None]}
    return arrays | folded | {f"W_dec_{i}": arrays[f"W_dec_{i}"] / s_out[None, i:, None] for i in range(len(s_in))}


def _lengthened(arrays: NamedArrays, norms: np.ndarray) -> NamedArrays:
    """Latents times the length of what they write, which becomes 1."""
    if "W_dec" in arrays:
        return weighted(arrays, norms)
    rows = np.where(norms > 0, norms, 1)[..., None, None]
    scaled = {f"W_dec_{i}": arrays[f"W_dec_{i}"] / rows[i] for i in range(len(norms))}
    return arrays | scaled | {"W_enc": arrays["W_enc"] * norms[:, None], "b_enc": arrays["b_enc"] * norms}


def _crosscoder(file: Path, sparsity: str, arrays: NamedArrays, s: np.ndarray) -> NamedArrays:
    """Each hook point gates pre times its own decoder's length: the latents are one only where the gate is pre > 0."""
    if sparsity != "relu" or not (np.linalg.norm(arrays["W_dec"], axis=-1) > 0).all():
        raise DataError(
            f"{file}: in this crosscoder a latent may be on at one hook point and off at another, since each gates it "
            "by its own decoder's length; saejax's latents are on for all. It reads those with act_fn relu."
        )
    return {
        "W_enc": arrays["W_enc"] * s[:, None, None],
        "b_enc": arrays["b_enc"].sum(0),
        "W_dec": (arrays["W_dec"] / s[:, None, None]).transpose(1, 0, 2),
        "b_dec": arrays["b_dec"] / s[:, None],
    }


def _single(arrays: NamedArrays) -> NamedArrays:
    """float32; what does not fit into it becomes infinite, which `assemble` refuses."""
    with np.errstate(over="ignore"):
        return {name: value.astype(np.float32) for name, value in arrays.items()}


def _logarithm(theta: np.ndarray) -> np.ndarray:
    """Of the float32 numbers near log theta the one whose exponential comes nearest; -inf of 0."""
    with np.errstate(divide="ignore"):
        middle = np.log(theta.astype(np.float64)).astype(np.float32)
    near = [middle, *(np.nextafter(middle, np.float32(towards)) for towards in (-np.inf, np.inf))]
    errors = np.abs([np.exp(value.astype(np.float64)).astype(np.float32) - theta for value in near])
    best: np.ndarray = np.choose(np.nan_to_num(errors, nan=np.inf).argmin(0), near)
    return np.where(theta > 0, best, np.float32(-np.inf))
