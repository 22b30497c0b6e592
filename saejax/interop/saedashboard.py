"""SAEDashboard: a SAELens folder, or for a cross-layer transcoder the folder of its `clt` package. Out only.

    cfg.json            num_features, num_layers, d_model, activation_fn, normalization_method, tl_input_template, ...
    clt.safetensors     encoder_module.encoders.{l}.weight [F, D], .bias_param [F]; theta_manager.log_threshold [L, F];
                        decoder_module.decoders.{l}->{m}.weight [D, F], .bias_param [D]

Our weights take raw activations, so normalization_method is "none", and norm_stats.json, which is for others, is not
written. b_dec of layer m is the bias of m->m, from which the dashboard takes it; the other decoders' biases are 0.
(sae-dashboard 0.8.0: clt_layer_wrapper.py, neuronpedia_runner.py; decode-clt 0.0.1: clt_config.py, models/)
"""

import json
from pathlib import Path

import numpy as np

from saejax.interop.hooks import to_transformer_lens
from saejax.interop.tensors import write_safetensors
from saejax.trained import FORMATS, TrainedCoder

_ACTIVATIONS = ("relu", "jumprelu")


def refuses(sae: TrainedCoder) -> str:
    """The reason why SAEDashboard cannot show this coder; empty where it can."""
    if not _is_clt(sae):
        return FORMATS["saelens"].refuses(sae)
    sparsity, topology = sae.describe()["sparsity"]["name"], sae.coder.topology
    if sparsity not in _ACTIVATIONS:
        return f"it shows cross-layer transcoders of {' and '.join(_ACTIVATIONS)}, not of {sparsity}"
    if topology.d_in != topology.out_shape[-1]:
        return f"its cross-layer transcoders read and write one width, not {topology.d_in} and {topology.out_shape[-1]}"
    if _template(sae) is None:
        return f"its layers are 0, 1, 2, ... of one kind of hook point; these are {', '.join(sae.sites.reads)}"
    return ""


def write_saedashboard(folder: Path, sae: TrainedCoder) -> list[str]:
    """Write a coder that `refuses` has nothing against into a new folder; returns remarks on the files."""
    if _is_clt(sae):
        _write_clt(folder, sae)
        return []
    notes, reads = sae.save(folder, format="saelens"), to_transformer_lens(sae.hook_point)
    if reads.endswith("mlp.hook_in"):
        notes.append(f"SAEDashboard 0.8.0 runs HookedTransformer, which has no {reads}: it loads this and stops there.")
    elif "transcoder" in sae.describe()["topology"]:
        notes.append("SAEDashboard 0.8.0 loads transcoders from the hub alone: push the folder to owner/name.")
    return notes


def flags(sae: TrainedCoder) -> str:
    """Flags of neuronpedia-runner for such a folder."""
    topology = sae.describe()["topology"]
    if _is_clt(sae):
        return "--from-local-sae --use-clt --clt-layer-idx=0"
    return f"--use-{topology.replace('_', '-')}" if "transcoder" in topology else "--from-local-sae"


def _is_clt(sae: TrainedCoder) -> bool:
    return sae.describe()["topology"] == "clt"


def _write_clt(folder: Path, sae: TrainedCoder) -> None:
    topology, params = sae.coder.topology, {name: np.asarray(value) for name, value in sae.params.items()}
    arrays: dict[str, np.ndarray] = {}
    for layer, (W_enc_DF, b_enc_F) in enumerate(zip(params["W_enc"], params["b_enc"], strict=True)):
        arrays[f"encoder_module.encoders.{layer}.weight"] = W_enc_DF.T
        arrays[f"encoder_module.encoders.{layer}.bias_param"] = b_enc_F
        for to, b_dec_D in enumerate(params["b_dec"][layer:], layer):
            name = f"decoder_module.decoders.{layer}->{to}"
            arrays[f"{name}.weight"] = params[f"W_dec_{layer}"][:, to - layer].T
            arrays[f"{name}.bias_param"] = b_dec_D if layer == to else np.zeros_like(b_dec_D)
    config = {
        "num_features": topology.d_sae,
        "num_layers": len(params["W_enc"]),
        "d_model": topology.d_in,
        "model_name": sae.origin.model or None,
        "normalization_method": "none",
        "activation_fn": sae.describe()["sparsity"]["name"],
        "clt_dtype": "float32",
        "tl_input_template": _template(sae),
        "tl_output_template": to_transformer_lens(sae.sites.writes[0]).replace("blocks.0.", "blocks.{}."),
    }
    if "threshold" in params:
        with np.errstate(divide="ignore"):  # the logarithm of 0 is -inf, and back it is 0
            theta_LF = np.broadcast_to(np.maximum(params["threshold"], 0), params["b_enc"].shape)
            arrays["theta_manager.log_threshold"] = np.log(theta_LF)
    write_safetensors(folder / "clt.safetensors", arrays)
    (folder / "cfg.json").write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")


def _template(sae: TrainedCoder) -> str | None:
    """blocks.{}.hook_resid_mid, where site l is that of block l."""
    reads = [to_transformer_lens(name) for name in sae.sites.reads]
    template = reads[0].replace("blocks.0.", "blocks.{}.", 1)
    return template if template != reads[0] and reads == [template.format(i) for i in range(len(reads))] else None
