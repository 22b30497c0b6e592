"""Gemma Scope 1 (params.npz) and 2 (safetensors), in the layouts of the hub repositories, read by SAELens' and
circuit-tracer's own loaders from local files.

DeepMind publishes files and no writer: the files are made by numpy.savez and safetensors, under the names, shapes and
folders that the loaders ask for.
"""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from circuit_tracer.transcoder.cross_layer_transcoder import load_gemma_scope_2_clt
from huggingface_hub.errors import EntryNotFoundError
from sae_lens import SAE
from sae_lens.loading import pretrained_sae_loaders as loaders
from safetensors import safe_open
from safetensors.torch import save_file
from stand_ins import version

from .common import D_IN, D_SAE, Fixtures, N, inputs, weights

PEER = f"sae-lens=={version('sae-lens')}"
TRACER = f"circuit-tracer=={version('circuit-tracer')}"
FILES = ("W_enc", "W_dec", "b_enc", "b_dec", "threshold")
V1, V2 = "gemma-scope-2b-pt", "gemma-scope-2-1b-pt"
LAYERS = 3


class LocalHub:
    """Stands for the hub while a loader of SAELens runs: downloads answer with the file below `root`/<name of repo>."""

    def __init__(self, root: Path):
        self.root = root

    def download(self, repo_id: str, filename: str, subfolder: str | None = None, **_: object) -> str:
        path = self.root / repo_id.split("/")[-1] / (subfolder or "") / filename
        if not path.exists():
            raise EntryNotFoundError(f"{path} is not there")
        return str(path)

    def shapes(self, repo_id: str, filename: str) -> dict[str, list[int]]:
        with safe_open(self.download(repo_id, filename), framework="pt") as f:
            return {name: f.get_slice(name).get_shape() for name in f.keys()}  # noqa: SIM118 - no dict

    def __call__(self) -> mock._patch_dict:
        return mock.patch.multiple(loaders, hf_hub_download=self.download, get_safetensors_tensor_shapes=self.shapes)


def through_saelens(hub: LocalHub, loader: str, repo: str, path: str, **overrides: object) -> SAE:
    """What SAE.from_pretrained makes with the named converter, without its registry of releases."""
    with hub():
        convert = loaders.NAMED_PRETRAINED_SAE_LOADERS[loader]
        cfg, state, _ = convert(f"google/{repo}", path, "cpu", False, overrides)
    cfg = loaders.handle_config_defaulting(cfg)
    sae = SAE.from_dict(cfg)
    sae.load_state_dict({name: a.contiguous() for name, a in state.items()})
    if sae.hook_z_reshaping_mode:  # x is given flat, [N, heads x d_head]
        sae.turn_off_forward_pass_hook_z_reshaping()
    return sae.eval()


def expected(sae: SAE, x: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {"x": x, "latents": sae.encode(x), "reconstructions": sae(x)}


def write(to: Fixtures) -> None:
    _v1(to)
    _v2(to)
    _clt(to)
    _crosscoder(to)


def _v1(to: Fixtures) -> None:
    cases = {
        "v1_res": ("res", "layer_20/width_16k/average_l0_71", "blocks.20.hook_resid_post"),
        "v1_mlp": ("mlp", "layer_5/width_16k/average_l0_70", "blocks.5.hook_mlp_out"),
        "v1_att": ("att", "layer_5/width_16k/average_l0_68", "blocks.5.attn.hook_z"),
        "v1_embedding": ("res", "embedding/width_4k/average_l0_6", "hook_embed"),
        "v1_transcoder": ("transcoders", "layer_5/width_16k/average_l0_76", "blocks.5.ln2.hook_normalized"),
    }
    for seed, (case, (kind, path, hook)) in enumerate(cases.items(), start=200):
        repo, w = f"{V1}-{kind}", weights(seed)
        folder = to.folder("gemma_scope", case, f"{repo}/{path}")
        np.savez(folder / "params.npz", **{name: w[name].numpy() for name in FILES})
        hub, out = LocalHub(to.root / "gemma_scope" / case), None
        if kind == "transcoders":
            own = {"d_in": D_IN, "d_out": D_IN, "d_sae": D_SAE}
            sae, out = through_saelens(hub, "gemma_2_transcoder", repo, path, **own), ["blocks.5.hook_mlp_out"]
        else:
            sae = through_saelens(hub, "gemma_2", repo, path, d_in=D_IN, d_sae=D_SAE)
        to.add(
            folder,
            PEER,
            topology="transcoder" if out else "autoencoder",
            sparsity="jumprelu",
            hooks_in=[hook],
            hooks_out=out,
            model="gemma-2-2b",
            arrays=expected(sae, inputs(seed)),
            note="the encoder sees x itself"
            + ("; W_enc / sqrt(d_in), W_dec * sqrt(d_in)" if kind == "embedding" else ""),
        )


def tensors(w: dict[str, torch.Tensor], affine: bool = False) -> dict[str, torch.Tensor]:
    """The tensors under version 2's names; affine_skip_connection [d_in, d_out]."""
    named = {name.lower(): w[name].contiguous() for name in FILES}
    return named | ({"affine_skip_connection": w["W_skip"].T.contiguous()} if affine else {})


def _config(hook_in: str, hook_out: str, kind: str, affine: bool = False) -> str:
    """config.json with the keys of the published ones."""
    return json.dumps(
        {
            "architecture": "jump_relu",
            "model_name": "gemma-v3-1b-pt",
            "hf_hook_point_in": hook_in,
            "hf_hook_point_out": hook_out,
            "width": D_SAE,
            "l0": 20,
            "affine_connection": affine,
            "type": kind,
        }
    )


def _v2(to: Fixtures) -> None:
    block = "model.layers.13"
    ln_in, ln_out = f"{block}.pre_feedforward_layernorm.output", f"{block}.post_feedforward_layernorm.output"
    cases = {
        "v2_resid_post": ("resid_post/layer_13_width_16k_l0_small", f"{block}.output", f"{block}.output", "sae", True),
        "v2_mlp_out": ("mlp_out/layer_13_width_16k_l0_big", ln_out, ln_out, "sae", True),
        "v2_attn_out": (
            "attn_out/layer_13_width_16k_l0_big",
            f"{block}.self_attn.o_proj.input",
            f"{block}.self_attn.o_proj.input",
            "sae",
            True,
        ),
        "v2_without_config": ("resid_post_all/layer_13_width_16k_l0_big", f"{block}.output", None, "sae", False),
        "v2_transcoder": ("transcoder/layer_13_width_16k_l0_big", ln_in, ln_out, "transcoder", True),
        "v2_transcoder_affine": ("transcoder/layer_13_width_16k_l0_big_affine", ln_in, ln_out, "transcoder", True),
    }
    for seed, (case, (path, hook_in, hook_out, kind, config)) in enumerate(cases.items(), start=210):
        affine, folder = path.endswith("affine"), to.folder("gemma_scope", case, f"{V2}/{path}")
        save_file(tensors(weights(seed), affine), folder / "params.safetensors")
        if config:
            (folder / "config.json").write_text(_config(hook_in, hook_out, kind, affine))
        sae = through_saelens(LocalHub(to.root / "gemma_scope" / case), "gemma_3", V2, path)
        topology = {"sae": "autoencoder", "transcoder": "transcoder"}[kind]
        to.add(
            folder,
            PEER,
            topology="skip_transcoder" if affine else topology,
            sparsity="jumprelu",
            hooks_in=[hook_in],
            hooks_out=[hook_out] if hook_out else None,
            model=sae.cfg.metadata.model_name,
            arrays=expected(sae, inputs(seed)),
            note="the encoder sees x itself; SAELens' name of the hook: " + sae.cfg.metadata.hook_name,
        )


def _layers(seed: int, n_layers: int, d_sae: int, causal: bool) -> list[dict[str, torch.Tensor]]:
    """One dictionary a layer that writes to all (or only to itself and later ones), thresholds above 0."""
    rng, all_layers = np.random.default_rng(seed), []
    for layer in range(n_layers):
        w = weights(seed + layer, d_sae=d_sae)
        w["threshold"] = w["threshold"].abs() + 0.01
        w_dec = rng.normal(size=(d_sae, n_layers, D_IN)) * np.exp(rng.normal(size=(d_sae, 1, 1)) * 0.5) / np.sqrt(D_IN)
        if causal:
            w_dec[:, :layer] = 0
        all_layers.append(w | {"W_dec": torch.tensor(w_dec, dtype=torch.float32)})
    return all_layers


def _clt(to: Fixtures) -> None:
    for seed, affine in ((230, False), (240, True)):
        case = "v2_clt_affine" if affine else "v2_clt"
        path = "clt/width_262k_l0_medium" + ("_affine" if affine else "")
        folder = to.folder("gemma_scope", case, f"{V2}/{path}")
        hooks = [f"model.layers.{i}.{{}}_feedforward_layernorm.output" for i in range(LAYERS)]
        for i, w in enumerate(_layers(seed, LAYERS, 40, causal=True)):
            save_file(tensors(w, affine), folder / f"params_layer_{i}.safetensors")
        paths = {i: str(folder / f"params_layer_{i}.safetensors") for i in range(LAYERS)}
        # Its loader counts to the largest key and leaves that one out: one key more, and it reads all of them.
        clt = load_gemma_scope_2_clt(paths | {LAYERS: ""}, device=torch.device("cpu"), dtype=torch.float32)
        x = inputs(seed, layers=LAYERS)
        by_layer = x.transpose(0, 1)
        with torch.no_grad():
            latents = clt.encode(by_layer)
            out = clt.decode(latents.to_sparse(), by_layer)  # its forward() decodes without the input that a skip needs
        arrays = {"x": x, "latents": latents.transpose(0, 1), "reconstructions": out.transpose(0, 1)}
        to.add(
            folder,
            TRACER,
            topology="clt",
            sparsity="jumprelu",
            hooks_in=[hook.format("pre") for hook in hooks],
            hooks_out=[hook.format("post") for hook in hooks],
            model="google/gemma-3-1b-pt",
            arrays=arrays,
            note="skip of each layer: x @ affine_skip_connection; no config.json" if affine else "no config.json",
        )


def _crosscoder(to: Fixtures) -> None:
    """No peer's code reads these. Each layer's latents see that layer alone and write to all of the crosscoder's
    layers: relu(x_l W_enc_l + b_enc_l) above the threshold, sum over l of latents_l W_dec_l[:, m] + b_dec_m."""
    layers = _layers(250, 4, 40, causal=False)
    folder = to.folder("gemma_scope", "v2_crosscoder", f"{V2}/crosscoder/layer_7_13_17_22_width_262k_l0_medium")
    for i, w in enumerate(layers):
        save_file(tensors(w), folder / f"params_layer_{i}.safetensors")
    x = inputs(250, layers=4)
    pre = torch.stack([x[:, i] @ w["W_enc"] + w["b_enc"] for i, w in enumerate(layers)], 1)
    latents = pre.relu() * (pre > torch.stack([w["threshold"] for w in layers]))
    out = sum(torch.einsum("bf,fmd->bmd", latents[:, i], w["W_dec"]) for i, w in enumerate(layers))
    hooks = [f"model.layers.{layer}.output" for layer in (7, 13, 17, 22)]
    to.add(
        folder,
        "none==",
        topology="crosscoder",
        sparsity="jumprelu",
        hooks_in=hooks,
        model="google/gemma-3-1b-pt",
        arrays={"x": x, "latents": latents, "reconstructions": out + torch.stack([w["b_dec"] for w in layers])},
        note=f"no peer reads these: expected is the published formula; latents [{N}, 4 layers, 40], a layer's see "
        "it alone and write to all of them",
    )
