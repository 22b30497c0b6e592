"""circuit-tracer: sets of per-layer transcoders and cross-layer transcoders, with config.yaml.

It trains none; its classes write their safetensors themselves (to_safetensors), config.yaml has the keys of those on
the hub. Expected through its load_transcoders, with the download answered by the folder.
"""

from pathlib import Path
from unittest import mock

import torch
import yaml
from circuit_tracer.transcoder.activation_functions import JumpReLU
from circuit_tracer.transcoder.cross_layer_transcoder import CrossLayerTranscoder
from circuit_tracer.transcoder.single_layer_transcoder import SingleLayerTranscoder, TranscoderSet
from circuit_tracer.utils import hf_utils
from stand_ins import version
from torch.nn import functional as F

from .common import D_IN, Fixtures, fill, inputs, weights

PEER = f"circuit-tracer=={version('circuit-tracer')}"
LAYERS, WIDTH = 3, 40
MODEL = "meta-llama/Llama-3.2-1B"
HERE = torch.device("cpu")


def loaded(folder: Path) -> TranscoderSet | CrossLayerTranscoder:
    """What circuit-tracer makes of a folder as if it were downloaded."""
    config = yaml.safe_load((folder / "config.yaml").read_text()) | {"repo_id": "local/local", "revision": None}
    config |= {"subfolder": None, "scan": config.get("scan")}
    with mock.patch.object(hf_utils, "snapshot_download", lambda *_, **__: str(folder)):
        return hf_utils.load_transcoders(config, HERE, torch.float32, False, False)


def expected(folder: Path, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """x [N, layers, d] and what circuit-tracer computes, tokens first."""
    model, by_layer = loaded(folder), x.transpose(0, 1)
    with torch.no_grad():
        latents = model.encode(by_layer)
        out = model(by_layer) if isinstance(model, CrossLayerTranscoder) else model.decode(latents, by_layer)
    return {"x": x, "latents": latents.transpose(0, 1), "reconstructions": out.transpose(0, 1)}


def _add(to: Fixtures, folder: Path, kind: str, seed: int, topology: str, sparsity: str, **more: object) -> None:
    hook_in, hook_out = ("hook_resid_mid", "hook_mlp_out") if topology == "clt" else ("mlp.hook_in", "mlp.hook_out")
    config = {
        "model_name": MODEL,
        "model_kind": kind,
        "feature_input_hook": hook_in,
        "feature_output_hook": hook_out,
        "scan": f"local/{folder.parent.name}",
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    to.add(
        folder,
        PEER,
        topology=topology,
        sparsity=sparsity,
        hooks_in=[f"blocks.{i}.{hook_in}" for i in range(LAYERS)],
        hooks_out=[f"blocks.{i}.{hook_out}" for i in range(LAYERS)],
        model=MODEL,
        arrays=expected(folder, inputs(seed, layers=LAYERS)),
        **more,
    )


def write(to: Fixtures) -> None:
    for seed, (case, jump, skip) in enumerate(
        (("plt_relu", False, False), ("plt_relu_skip", False, True), ("plt_jumprelu", True, False))
    ):
        _per_layer(to, case, 300 + 10 * seed, jump, skip)
    _per_layer(to, "plt_jumprelu_skip", 330, True, True)
    _per_layer(to, "plt_jumprelu_below_zero", 340, True, False, below=True)
    _cross_layer(to, "clt_relu", 350, False)
    _cross_layer(to, "clt_jumprelu", 360, True)


def _layer_weights(seed: int, below: bool) -> dict[str, torch.Tensor]:
    w = weights(seed, d_sae=WIDTH)
    if not below:
        w["threshold"] = w["threshold"].clamp(min=0)
    return w


def _per_layer(to: Fixtures, case: str, seed: int, jump: bool, skip: bool, below: bool = False) -> None:
    transcoders = {}
    for layer in range(LAYERS):
        w = _layer_weights(seed + layer, below)
        activation = JumpReLU(w["threshold"], 0.1) if jump else F.relu
        one = SingleLayerTranscoder(D_IN, WIDTH, activation, layer, skip, device=HERE, dtype=torch.float32)
        fill(one, {"W_enc": w["W_enc"].T, "W_dec": w["W_dec"], "b_enc": w["b_enc"], "b_dec": w["b_dec"]})
        if skip:
            fill(one, {"W_skip": w["W_skip"]})
        transcoders[layer] = one
    folder = to.folder("circuit_tracer", case)
    TranscoderSet(transcoders, "mlp.hook_in", "mlp.hook_out").to_safetensors(str(folder))
    refuse = "a threshold below 0: circuit-tracer's jumprelu has no relu, so that latents may be negative"
    topology = "skip_transcoder" if skip else "transcoder"
    sparsity = "jumprelu" if jump else "relu"
    _add(to, folder, "transcoder_set", seed, topology, sparsity, refuse=refuse if below else None)


def _cross_layer(to: Fixtures, case: str, seed: int, jump: bool) -> None:
    name = "jump_relu" if jump else "relu"
    clt = CrossLayerTranscoder(LAYERS, WIDTH, D_IN, name, lazy_decoder=False, device=HERE, dtype=torch.float32)
    w = [_layer_weights(seed + layer, below=False) for layer in range(LAYERS)]
    fill(clt, {"W_enc": torch.stack([a["W_enc"].T for a in w])})
    fill(clt, {name: torch.stack([a[name] for a in w]) for name in ("b_enc", "b_dec")})
    for layer in range(LAYERS):
        to_each = [weights(seed + 100 + 10 * layer + i, d_sae=WIDTH)["W_dec"] for i in range(LAYERS - layer)]
        fill(clt, {f"W_dec.{layer}": torch.stack(to_each, 1)})
    if jump:
        fill(clt, {"activation_function.threshold": torch.stack([a["threshold"] for a in w])[:, None]})
    folder = to.folder("circuit_tracer", case)
    clt.to_safetensors(str(folder))
    _add(to, folder, "cross_layer_transcoder", seed, "clt", "jumprelu" if jump else "relu")
