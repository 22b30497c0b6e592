"""SAELens: cfg.json and sae_weights.safetensors. (decoderesearch/SAELens 6.54.12: saes/, loading/)

An autoencoder's encoder sees x - b_dec where cfg.apply_b_dec_to_input says so, else x; a transcoder's sees x, and
SAELens refuses one whose configuration says otherwise. Its names and layouts are ours, but for the gate's bias b_gate
and W_skip [D_out, D_in].
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saejax.coders.topologies import EPS
from saejax.core.errors import DataError
from saejax.interop.assemble import UNCENTRED, Layout, assemble, check_free, coder_kind, weighted, write_files
from saejax.interop.hooks import from_module, from_transformer_lens, norm_notes, to_transformer_lens
from saejax.interop.tensors import half_precision_notes, read_config, read_safetensors, whole_number
from saejax.trained import Format, TrainedCoder, centred, register_format

_CFG, _WEIGHTS = "cfg.json", "sae_weights.safetensors"
# The version whose way of saying things this is: older readers would take the file for one of theirs.
_VERSION = "6.54.12"
_AUTOENCODERS = {"standard": "relu", "gated": "gated", "topk": "topk", "abstopk": "abs_topk", "jumprelu": "jumprelu"}
_TRANSCODERS = {
    "transcoder": ("transcoder", "relu"),
    "skip_transcoder": ("skip_transcoder", "relu"),
    "jumprelu_transcoder": ("transcoder", "jumprelu"),
    "jumprelu_skip_transcoder": ("skip_transcoder", "jumprelu"),
}
_MODEL_WITH, _CENTRING = "model_from_pretrained_kwargs", "center_writing_weights"
_WEIGHTS_LAYOUT = Layout({"b_gate": "b_enc"}, transposed=("W_skip",))
_FOLDED_BEFORE = ("expected_average_only_in", "covariance_whitening")


@register_format
class SAELens(Format):
    """One folder a coder."""

    name = "saelens"
    title = "SAELens"
    files = f"{_CFG}, {_WEIGHTS}"
    needs = ((_CFG, _WEIGHTS),)
    reads = frozenset(
        [
            *((topology, sparsity) for topology in ("autoencoder", UNCENTRED) for sparsity in _AUTOENCODERS.values()),
            *(("layernorm_autoencoder", sparsity) for sparsity in _AUTOENCODERS.values()),
            *_TRANSCODERS.values(),
        ]
    )

    def here(self, path: Path) -> list[Path]:
        return [path] if (path / _CFG).is_file() and (path / _WEIGHTS).is_file() else []

    def read(self, path: Path, hook_points: Sequence[str] = ()) -> TrainedCoder:
        config = _modern(read_config(path / _CFG), path / _CFG)
        topology, sparsity, known = _described_by(config, path)
        arrays = _WEIGHTS_LAYOUT.read(path / _WEIGHTS, read_safetensors(path / _WEIGHTS))
        if (scale := arrays.pop("scaling_factor", None)) is not None and not np.allclose(scale, 1):
            raise DataError(f"{path / _WEIGHTS} has a scaling_factor of finetuning; fold it into W_dec with SAELens.")
        if sparsity in ("topk", "abs_topk") and config.get("rescale_acts_by_decoder_norm"):
            arrays = weighted(arrays, np.linalg.norm(arrays["W_dec"].astype(np.float64), axis=-1))
        if topology == "layernorm_autoencoder" and not config.get("apply_b_dec_to_input", True):
            arrays = centred(arrays, 1)
        return assemble(path, topology, sparsity, arrays, hook_points, **known)

    def refuses(self, sae: TrainedCoder) -> str:
        topology, sparsity = coder_kind(sae)
        if topology in ("autoencoder", UNCENTRED, "layernorm_autoencoder"):
            known = sparsity in _AUTOENCODERS.values()
        elif topology in ("transcoder", "skip_transcoder"):
            known = (topology, sparsity) in _TRANSCODERS.values()
        else:
            return f"SAELens has no {topology}"
        if "ln_eps" in sae.params and not np.allclose(sae.params["ln_eps"], EPS, rtol=1e-6, atol=0):
            return f"its layer_norm has eps {EPS}, this coder {float(sae.params['ln_eps'][0]):.3g}; train unscaled"
        return "" if known else f"SAELens has no {topology} with {sparsity}"

    def usage(self, repo: str, folder: str) -> str:
        if folder:
            return f'from sae_lens import SAE\n\nsae = SAE.from_pretrained("{repo}", "{folder}")'
        download = "from huggingface_hub import snapshot_download\nfrom sae_lens import SAE"
        return f'{download}\n\nsae = SAE.load_from_disk(snapshot_download("{repo}"))'

    def write(self, sae: TrainedCoder, folder: Path) -> list[str]:
        check_free(folder, bool(self.here(folder)), "SAELens dictionary")
        layout = _WEIGHTS_LAYOUT if "b_mag" in sae.params else dataclasses.replace(_WEIGHTS_LAYOUT, names={})
        arrays = layout.write({name: value for name, value in sae.params.items() if name != "ln_eps"})
        write_files(folder, {_WEIGHTS: arrays, _CFG: _config(sae)}, indent=2)
        return []


def _config(sae: TrainedCoder) -> dict[str, Any]:
    """cfg.json of version 6: what the class takes, and metadata about the language model."""
    (topology, sparsity), t = coder_kind(sae), sae.coder.topology
    reads, writes = (to_transformer_lens(names[0]) for names in (sae.sites.reads, sae.sites.writes))
    config: dict[str, Any] = {
        "d_in": t.d_in,
        "d_sae": t.d_sae,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": topology in ("autoencoder", "layernorm_autoencoder"),
        "normalize_activations": "layer_norm" if topology == "layernorm_autoencoder" else "none",
        "reshape_activations": "hook_z" if reads.endswith("hook_z") else "none",
        "metadata": {
            "sae_lens_version": _VERSION,
            "sae_lens_training_version": None,
            "model_name": sae.origin.model,
            "hook_name": reads,
            "hook_head_index": None,
            "trained_with": f"saejax {sae.origin.saejax}".strip(),
        },
    }
    if sae.origin.center_writing_weights:
        config["metadata"][_MODEL_WITH] = {_CENTRING: True}
    if topology in ("transcoder", "skip_transcoder"):
        names = {kind: name for name, kind in _TRANSCODERS.items()}
        config |= {"architecture": names[topology, sparsity], "d_out": t.out_shape[-1]}
        config["metadata"] |= {"hook_name_out": writes, "hook_head_index_out": None}
        config["reshape_activations"] = "none"
        return config
    config["architecture"] = {ours: name for name, ours in _AUTOENCODERS.items()}[sparsity]
    if sparsity in ("topk", "abs_topk"):
        config |= {"k": sae.coder.sparsity.kept, "rescale_acts_by_decoder_norm": False}
    return config


def _described_by(config: Mapping[str, Any], path: Path) -> tuple[str, str, dict[str, Any]]:
    """(topology, sparsity, what `assemble` is told besides) of a cfg.json. Raises DataError for what saejax has not."""
    cfg, meta, architecture = path / _CFG, config.get("metadata") or {}, config.get("architecture")
    if not isinstance(architecture, str) or architecture not in _AUTOENCODERS | _TRANSCODERS:
        known = ", ".join([*_AUTOENCODERS, *_TRANSCODERS])
        raise DataError(
            f"{cfg}: saejax has no coder that does what {architecture!r} of SAELens does; it reads {known}."
        )
    normalize, centre = config.get("normalize_activations") or "none", config.get("apply_b_dec_to_input", True)
    notes = [*half_precision_notes(path / _WEIGHTS)]
    if normalize in _FOLDED_BEFORE:
        notes.append(
            f"SAELens trained it with normalize_activations={normalize}, and the file does not say whether that is "
            "folded in: it is read as SAELens reads it from a disk, without."
        )
    elif normalize not in ("none", "layer_norm"):
        raise DataError(f"{cfg}: normalize_activations={normalize!r}: saejax has no coder that scales tokens so.")
    for key, why in (
        ("hook_head_index", "has no hook point of one head"),
        ("hook_head_index_out", "writes no single head"),
    ):
        if meta.get(key) is not None:
            raise DataError(f"{cfg}: {key}={meta[key]!r}: saejax {why}.")
    if config.get("dtype") in ("bfloat16", "float16"):
        notes.append("SAELens multiplies in 16 bits, as cfg.dtype says; saejax in 32.")
    reads, writes = (_hook(meta, name) for name in ("hook_name", "hook_name_out"))
    if architecture in _TRANSCODERS:
        topology, sparsity = _TRANSCODERS[architecture]
        if config.get("apply_b_dec_to_input"):
            raise DataError(
                f"{cfg}: apply_b_dec_to_input is true, which SAELens refuses of transcoders: their b_dec is of the "
                "output. Set it to false if the encoder sees x itself."
            )
        if normalize == "layer_norm":
            raise DataError(f"{cfg}: saejax has no transcoder with normalize_activations='layer_norm'.")
    else:
        sparsity, writes = _AUTOENCODERS[architecture], reads
        topology = "autoencoder" if centre else "transcoder"
        if normalize == "layer_norm":
            topology = "layernorm_autoencoder"
    k = whole_number(config, "k", cfg) if sparsity in ("topk", "abs_topk") else None
    model = meta["model_name"] if isinstance(meta.get("model_name"), str) else ""
    theirs = dict.fromkeys(
        str(meta.get(f"hf_{name}") or meta.get(name) or "") for name in ("hook_name", "hook_name_out")
    )
    notes += [note for name in theirs for note in norm_notes(name, model)]
    told = {"reads": reads, "writes": writes, "k": k, "model": model, "notes": tuple(notes)}
    return topology, sparsity, {**told, "centring": centring_said(meta)}


def centring_said(meta: Mapping[str, Any]) -> bool | None:
    """The flag center_writing_weights of what SAELens loaded the model with; None where that is not said."""
    loaded_with = meta.get(_MODEL_WITH)
    flag = loaded_with.get(_CENTRING) if isinstance(loaded_with, Mapping) else None
    return flag if isinstance(flag, bool) else None


def _hook(meta: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The hook point in saejax's name; () where it is not said."""
    module, name = meta.get(f"hf_{key}"), meta.get(key)
    if isinstance(module, str) and module and (ours := from_module(module)).startswith("blocks."):
        return (ours,)
    return (from_transformer_lens(name),) if isinstance(name, str) and name else ()


def _modern(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """cfg.json as version 6 writes it: older ones say everything on one level, some by other names."""
    meta = config.get("metadata")
    if meta is not None and not isinstance(meta, dict):
        raise DataError(f"{path}: metadata is {meta!r}, not an object. The file is damaged.")
    version = config.get("sae_lens_version") or (meta or {}).get("sae_lens_version")
    if isinstance(version, str) and version.split(".")[0].isdigit() and int(version.split(".")[0]) >= 6:
        return config
    renamed = {
        "hook_point": "hook_name",
        "hook_point_head_index": "hook_head_index",
        "activation_fn_str": "activation_fn",
    }
    old = {renamed.get(key, key): value for key, value in config.items()}
    old = {"architecture": "standard", "activation_fn": "relu"} | old
    more = old.get("activation_fn_kwargs") or {}
    if old["activation_fn"] == "topk" and isinstance(more, dict) and "k" in more:
        old |= {"architecture": "topk", "k": more["k"]}
    elif old["activation_fn"] != "relu":
        raise DataError(f"{path}: activation_fn is {old['activation_fn']!r}; saejax reads relu and topk of such files.")
    if isinstance(old.get("normalize_activations"), bool):
        old["normalize_activations"] = "expected_average_only_in" if old["normalize_activations"] else "none"
    known = ("model_name", "hook_name", "hook_head_index", _MODEL_WITH)
    return old | {"metadata": {key: old[key] for key in known if key in old}}
