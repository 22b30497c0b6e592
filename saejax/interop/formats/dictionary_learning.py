"""dictionary_learning: ae.pt and config.json, in a folder trainer_i. (saprmarks/dictionary_learning 0.1.0:
dictionary.py, trainers/, utils.load_dictionary)

What a coder does is what `encode` of its class does by default:

| class | latents |
|---|---|
| AutoEncoder | relu((x - bias) W + b); its loader scales latents so that decoder rows have length 1 |
| AutoEncoderNew | relu(x W + b) |
| GatedAutoEncoder | 1[pre + gate_bias > 0] relu(exp(r_mag) pre + mag_bias), pre = (x - decoder_bias) W |
| AutoEncoderTopK | the k largest of relu((x - b_dec) W + b); the threshold in the file is not used |
| BatchTopKSAE, MatryoshkaBatchTopKSAE | relu(pre) where it is above the one threshold, pre = (x - b_dec) W + b |
| JumpReluAutoEncoder | relu(pre) where it is above its threshold, pre = x W + b |

Linear layers are kept as [out, in], and those of the last two rows' Matryoshka and JumpReLU as we have them.
"""

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
from saejax.interop.tensors import mentions, read_config, whole_number
from saejax.trained import Format, TrainedCoder, centred, register_format

_CONFIG, _WEIGHTS = "config.json", "ae.pt"
_LINEAR = {"encoder.weight": "W_enc", "decoder.weight": "W_dec", "encoder.bias": "b_enc"}
_GATED = {"gate_bias": "b_enc", "mag_bias": "b_mag", "r_mag": "r_mag", "decoder_bias": "b_dec"}
_OURS = {name: name for name in ("W_enc", "b_enc", "W_dec", "b_dec", "threshold")}
_SELECTION = {"k": "k", "threshold": "threshold"}
# {class: (topology, sparsity, {its name: ours})}
_CLASSES = {
    "AutoEncoder": ("autoencoder", "relu", _LINEAR | {"bias": "b_dec"}),
    "AutoEncoderNew": ("transcoder", "relu", _LINEAR | {"decoder.bias": "b_dec"}),
    "GatedAutoEncoder": ("autoencoder", "gated", {name: _LINEAR[name] for name in list(_LINEAR)[:2]} | _GATED),
    "AutoEncoderTopK": ("autoencoder", "topk", _LINEAR | _SELECTION | {"b_dec": "b_dec"}),
    "BatchTopKSAE": ("autoencoder", "jumprelu", _LINEAR | _SELECTION | {"b_dec": "b_dec"}),
    "MatryoshkaBatchTopKSAE": ("autoencoder", "jumprelu", _OURS | {"k": "k", "group_sizes": "group_sizes"}),
    "JumpReluAutoEncoder": ("transcoder", "jumprelu", _OURS),
}
# What is written: (class, trainer). Encoders of x - b_dec or of x, whichever the class has.
_TRAINERS = {
    "relu": ("AutoEncoder", "StandardTrainer"),
    "gated": ("GatedAutoEncoder", "GatedSAETrainer"),
    "topk": ("AutoEncoderTopK", "TopKTrainer"),
    "jumprelu": ("JumpReluAutoEncoder", "JumpReluTrainer"),
}
_SITE = re.compile(r"(resid_pre|resid_mid|resid_post|attn_out|mlp_out|mlp_in)_layer_(\d+)")


@register_format
class DictionaryLearning(Format):
    """One folder a coder."""

    name = "dictionary_learning"
    title = "dictionary_learning"
    files = f"{_WEIGHTS}, {_CONFIG}"
    needs = ((_CONFIG, _WEIGHTS),)
    reads = frozenset(
        (UNCENTRED if topology == "transcoder" else topology, sparsity) for topology, sparsity, _ in _CLASSES.values()
    )

    def here(self, path: Path) -> list[Path]:
        both = (path / _WEIGHTS).exists() and (path / _CONFIG).is_file()
        return [path] if both or mentions(path / _CONFIG, '"dict_class"') else []

    def read(self, path: Path, hook_points: Sequence[str] = ()) -> TrainedCoder:
        config = read_config(path / _CONFIG)
        trainer = config.get("trainer")
        kind = trainer.get("dict_class") if isinstance(trainer, dict) else None
        if not isinstance(trainer, dict) or not isinstance(kind, str) or kind not in _CLASSES:
            raise DataError(
                f"{path / _CONFIG}: trainer.dict_class is {kind!r}; dictionary_learning has {', '.join(_CLASSES)}."
            )
        topology, sparsity, names = _CLASSES[kind]
        state, weights = read_torch(path / _WEIGHTS), path / _WEIGHTS
        if state.keys() != names.keys():
            raise DataError(
                f"{weights} holds {', '.join(map(str, state))}; a {kind} has {', '.join(names)}. It belongs to another "
                f"{_CONFIG}."
            )
        arrays = _layout(names).read(weights, state)
        arrays, k, notes = _with_numbers(kind, arrays, trainer, path)
        site, remarks = _hook_point(trainer, config.get("buffer"))
        model = trainer.get("lm_name")
        site = site or tuple(hook_points[:1])
        return assemble(
            path,
            topology,
            sparsity,
            arrays,
            reads=site,
            writes=site,
            k=k if sparsity == "topk" else None,
            model=model if isinstance(model, str) else "",
            notes=(*notes, *remarks),
        )

    def refuses(self, sae: TrainedCoder) -> str:
        topology, sparsity = coder_kind(sae)
        if topology not in ("autoencoder", UNCENTRED):
            return f"dictionary_learning has no {topology}"
        return "" if sparsity in _TRAINERS else f"dictionary_learning has no {sparsity}"

    def write(self, sae: TrainedCoder, folder: Path) -> list[str]:
        check_free(folder, bool(self.here(folder)), "dictionary of dictionary_learning")
        topology, sparsity = coder_kind(sae)
        arrays: NamedArrays = {name: np.asarray(value) for name, value in sae.params.items()}
        kind, trainer = _TRAINERS[sparsity]
        notes = []
        if kind == "AutoEncoder" and (topology == UNCENTRED or not _has_unit_rows(arrays)):
            # Its loader would make another coder of an AutoEncoder whose rows are not of length 1.
            kind = "AutoEncoderNew"
            if topology == "autoencoder":
                notes.append(
                    "The decoder rows are not of length 1, to which dictionary_learning's AutoEncoder sets them: "
                    "written as an AutoEncoderNew, with b_dec W_enc in its bias."
                )
        wanted = "autoencoder" if _CLASSES[kind][0] == "autoencoder" else UNCENTRED
        if topology != wanted:
            arrays = centred(arrays, 1 if wanted == "autoencoder" else -1)
        if sparsity == "topk":
            arrays |= {"k": np.asarray(sae.coder.sparsity.kept, np.int32), "threshold": np.asarray(-1, np.float32)}
        names = _CLASSES[kind][2]
        weights = _layout(names).write({ours: arrays[ours] for ours in names.values()})
        write_files(folder, {_WEIGHTS: weights, _CONFIG: _config_json(sae, kind, trainer)}, indent=4)
        return notes


def _layout(names: Mapping[str, str]) -> Layout:
    return Layout(names, transposed=[name for name in names if name.endswith(".weight")])


def _has_unit_rows(arrays: Mapping[str, np.ndarray]) -> bool:
    """True for decoder rows that its loader takes for ones of length 1."""
    return bool(np.allclose(np.linalg.norm(arrays["W_dec"], axis=1), 1, rtol=1e-5, atol=1e-8))


def _with_numbers(
    kind: str, arrays: NamedArrays, trainer: Mapping[str, Any], path: Path
) -> tuple[NamedArrays, int | None, list[str]]:
    """(parameters, k, notes): without the file's single numbers, which become k, thresholds or nothing."""
    notes = []
    k = arrays.pop("k", None)
    if k is not None and (k.size != 1 or k.item() != whole_number(trainer, "k", path / _CONFIG)):
        raise DataError(f"{path}: k is {k.tolist()} in {_WEIGHTS} and {trainer['k']} in {_CONFIG}.")
    if kind in ("AutoEncoderTopK", "BatchTopKSAE", "MatryoshkaBatchTopKSAE"):
        threshold = arrays.pop("threshold")
        if threshold.size != 1:
            raise DataError(f"{path / _WEIGHTS} has {threshold.shape} for threshold, which is one number.")
        theta = float(threshold.item())
        if kind != "AutoEncoderTopK":
            arrays["threshold"] = np.full(arrays["b_enc"].shape, theta, np.float32)
            if theta < 0:
                notes.append("Its threshold was not set in training, so that every positive pre-activation is kept.")
        elif theta >= 0:
            notes.append(f"encode(use_threshold=True) would keep what is above {theta:.6g}; this coder keeps the k.")
    if kind == "MatryoshkaBatchTopKSAE":
        sizes = arrays.pop("group_sizes")
        notes.append(f"Trained with prefixes: groups of {', '.join(map(str, sizes.ravel()[:20].tolist()))} latents.")
    if kind == "AutoEncoder" and arrays["W_dec"].ndim == 2 and not _has_unit_rows(arrays):
        norms = np.linalg.norm(arrays["W_dec"].astype(np.float64), axis=1)
        if (norms == 0).any():
            raise DataError(
                f"{path / _WEIGHTS}: {int((norms == 0).sum())} decoder rows are 0, which dictionary_learning's loader "
                "cannot scale to length 1. Leave out those latents."
            )
        arrays = weighted(arrays, norms)
        notes.append("As dictionary_learning's loader does, latents are scaled so that decoder rows have length 1.")
    return arrays, None if k is None else int(k.item()), notes


def _hook_point(trainer: Mapping[str, Any], buffer: Any) -> tuple[tuple[str, ...], list[str]]:
    """((hook point,) or (), notes)"""
    name, layer = trainer.get("submodule_name"), trainer.get("layer")
    if isinstance(name, str) and (match := _SITE.fullmatch(name)):
        return (f"blocks.{match[2]}.{match[1]}",), []
    if isinstance(name, str) and name:
        return (name,), []
    if type(layer) is not int or layer < 0:
        return (), []
    side = "resid_pre" if isinstance(buffer, dict) and buffer.get("io") == "in" else "resid_post"
    return (f"blocks.{layer}.{side}",), ["The file names a layer and no module: taken for the residual stream there."]


def _config_json(sae: TrainedCoder, kind: str, trainer: str) -> dict[str, Any]:
    """config.json as its trainers write it, with what its loaders and people's scripts ask for."""
    t, hook = sae.coder.topology, sae.hook_point
    match = re.fullmatch(r"blocks\.(\d+)\.(\w+)", hook)
    text = sae.settings.get("text") or {}
    described: dict[str, Any] = {
        "trainer_class": trainer,
        "dict_class": kind,
        "activation_dim": t.d_in,
        "dict_size": t.d_sae,
        "device": "cpu",
        "layer": int(match[1]) if match else None,
        "lm_name": sae.origin.model,
        "wandb_name": trainer.removesuffix("Trainer"),
        "submodule_name": f"{match[2]}_layer_{match[1]}" if match else hook,
    }
    if kind == "AutoEncoderTopK":
        described["k"] = sae.coder.sparsity.kept
    length = text.get("context_length")
    return {
        "trainer": described,
        "buffer": {"d_submodule": t.d_in, "io": "out", "ctx_len": length if type(length) is int else None},
    }
