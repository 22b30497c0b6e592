"""Llama Scope: hyperparams.json + checkpoints/final.safetensors (2024), config.json + sae_weights.safetensors under the
same names (2025), both read by SAELens' converters; and what llamascopium writes and reads today.

llamascopium asks for a database and a notebook server to be imported as a whole; its modules of dictionaries do not. A
checkout of github.com/OpenMOSS/Language-Model-SAEs is named by --llamascopium, and those modules are imported alone.
"""

import importlib
import json
import math
import sys
import types
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file

from .common import D_IN, Fixtures, K, fill, inputs, weights
from .gemma_scope import PEER, LocalHub, expected, through_saelens

checkout: Path | None = None
VERSION = "2.0.0b34"
LLAMASCOPIUM = f"llamascopium=={VERSION}"
MODEL = "meta-llama/Llama-3.1-8B"
EXPANSION, NORM_IN, NORM_OUT = 3, 5.3, 2.9
D_SAE = EXPANSION * D_IN
HOOK, HOOK_OUT = "blocks.15.hook_resid_post", "blocks.15.hook_mlp_out"


def write(to: Fixtures) -> None:
    _through_saelens(to)
    _today(to)


def _positive(seed: int) -> dict[str, torch.Tensor]:
    """Weights whose thresholds have a logarithm, and none of whose pre-activations is one."""
    w = weights(seed, d_sae=D_SAE)
    w["threshold"] = w["threshold"].abs() + 0.05
    return w


def _through_saelens(to: Fixtures) -> None:
    scale = math.sqrt(D_IN) / NORM_IN
    note = "latents are those of inputs scaled by sqrt(d) / norm, as SAELens has them"
    for seed, case in ((600, "v1"), (601, "v1_unit_rows"), (602, "r1_distill")):
        w, norm_of_rows = _positive(seed), case == "v1_unit_rows"
        if norm_of_rows:
            w["W_dec"] /= w["W_dec"].norm(dim=1, keepdim=True)
        named = {
            "encoder.weight": w["W_enc"].T.contiguous(),
            "decoder.weight": w["W_dec"].T.contiguous(),
            "encoder.bias": w["b_enc"],
            "decoder.bias": w["b_dec"],
        }
        config = {
            "hook_point_in": HOOK,
            "hook_point_out": HOOK,
            "use_decoder_bias": True,
            "expansion_factor": EXPANSION,
            "d_model": D_IN,
            "d_sae": D_SAE,
            "act_fn": "jumprelu",
            "norm_activation": "dataset-wise",
            "sparsity_include_decoder_norm": norm_of_rows,
            "top_k": 50,
        }
        if case == "r1_distill":
            repo, path, loader = "Llama-Scope-R1-Distill", "400M-Slimpajama-400M-OpenR1-Math-220k/L15R", "_r1_distill"
            folder = to.folder("llama_scope", case, f"{repo}/{path}")
            named |= {"log_jumprelu_threshold": w["threshold"].log()}
            named |= {f"dataset_average_activation_norm.{HOOK}": torch.tensor(NORM_IN)}
            save_file(named, folder / "sae_weights.safetensors")
            (folder / "config.json").write_text(json.dumps(config | {"sae_type": "sae"}, indent=4))
        else:
            repo, path, loader = "Llama3_1-8B-Base-LXR-8x", "Llama3_1-8B-Base-L15R-8x", ""
            folder = to.folder("llama_scope", case, f"{repo}/{path}")
            (folder / "checkpoints").mkdir()
            save_file(named, folder / "checkpoints" / "final.safetensors")
            config |= {
                "dataset_average_activation_norm": {"in": NORM_IN, "out": NORM_IN},
                "jump_relu_threshold": 0.35546875,
                "apply_decoder_bias_to_pre_encoder": False,
            }
            (folder / "hyperparams.json").write_text(json.dumps(config, indent=4))
        hub = LocalHub(to.root / "llama_scope" / case)
        sae = through_saelens(hub, f"llama_scope{loader}", repo, path, dtype="float32")
        sae.fold_activation_norm_scaling_factor(scale)  # what SAE.from_pretrained does with its registry's factor
        to.add(
            folder,
            PEER,
            topology="autoencoder",
            sparsity="jumprelu",
            hooks_in=[HOOK],
            model=MODEL,
            arrays=expected(sae, inputs(seed)),
            note=note,
        )


def modules() -> types.SimpleNamespace:
    """llamascopium's dictionaries, without the rest of its package."""
    if checkout is None:
        raise SystemExit("name a checkout of github.com/OpenMOSS/Language-Model-SAEs by --llamascopium")
    for name in ("llamascopium", "llamascopium.models"):
        package = types.ModuleType(name)
        package.__path__ = [str(checkout / "src" / name.replace(".", "/"))]
        sys.modules[name] = package
    one = {name: importlib.import_module(f"llamascopium.models.{name}") for name in ("sae", "clt", "crosscoder")}
    return types.SimpleNamespace(**one, base=importlib.import_module("llamascopium.models.sparse_dictionary"))


def _today(to: Fixtures) -> None:
    peer = modules()
    sae, clt, cross = peer.sae.SAEConfig, peer.clt.CLTConfig, peer.crosscoder.CrosscoderConfig
    one, to_mlp = {"hook_point_in": HOOK, "hook_point_out": HOOK}, {"hook_point_in": HOOK, "hook_point_out": HOOK_OUT}
    layers_in, layers_out = ([f"blocks.{i}.{hook}" for i in range(3)] for hook in ("hook_resid_mid", "hook_mlp_out"))
    per_layer = {"hook_points_in": layers_in, "hook_points_out": layers_out}
    heads = {"hook_points": [f"blocks.{i}.hook_resid_post" for i in (7, 15, 23)]}
    apart = (
        "each hook point has its own decoder norms in its gate, so that a latent may be on for one and off for another"
    )
    cases = {
        "today_relu": (sae, one, "autoencoder", "relu", None),
        "today_topk": (sae, one, "autoencoder", "topk", None),
        "today_topk_by_value": (sae, one | {"sparsity_include_decoder_norm": False}, "autoencoder", "topk", None),
        "today_jumprelu": (sae, one, "autoencoder", "jumprelu", None),
        "today_jumprelu_inference": (sae, one | {"norm_activation": "inference"}, "autoencoder", "jumprelu", None),
        "today_transcoder_jumprelu": (sae, to_mlp, "transcoder", "jumprelu", None),
        "today_clt_relu": (clt, per_layer, "clt", "relu", None),
        "today_clt_jumprelu": (clt, per_layer, "clt", "jumprelu", None),
        "today_crosscoder_relu": (cross, heads, "crosscoder", "relu", None),
        "today_crosscoder_jumprelu": (cross, heads, "crosscoder", "jumprelu", apart),
        "today_token_wise": (
            sae,
            one | {"norm_activation": "token-wise"},
            "autoencoder",
            "relu",
            "norm_activation token-wise: the scale depends on the token",
        ),
    }
    size = {"d_model": D_IN, "expansion_factor": EXPANSION, "top_k": K}
    for seed, (case, (config, settings, topology, sparsity, refuse)) in enumerate(cases.items()):
        model = peer.base.SparseDictionary.from_config(config(**size, **settings, act_fn=sparsity))
        n_layers = len(model.cfg.hooks_in)
        stacked = topology in ("clt", "crosscoder")
        _fill(model, topology, 610 + 20 * seed, n_layers)
        norms = {hook: NORM_IN + i for i, hook in enumerate(model.cfg.hooks_in)}
        norms |= {hook: NORM_OUT + i for i, hook in enumerate(model.cfg.hooks_out) if hook not in norms}
        model.set_dataset_average_activation_norm(norms)
        folder = to.folder("llama_scope", case)
        with mock.patch.object(peer.base, "version", lambda _: VERSION):
            model.save_pretrained(folder)
        model.cfg.save_hyperparameters(folder)
        x = inputs(610 + seed, layers=n_layers if stacked else 0)
        to.add(
            folder,
            LLAMASCOPIUM,
            topology=topology,
            sparsity=sparsity,
            hooks_in=model.cfg.hooks_in,
            hooks_out=model.cfg.hooks_out,
            model=None,
            arrays=as_used(peer, folder, x, stacked),
            refuse=refuse,
            note="latents are those of inputs scaled by sqrt(d) / norm",
        )


def _fill(model: torch.nn.Module, topology: str, seed: int, n_layers: int) -> None:
    w = [_positive(seed + i) for i in range(n_layers)]
    stack = {
        "W_E": torch.stack([a["W_enc"] for a in w]),
        "b_E": torch.stack([a["b_enc"] for a in w]),
        "W_D": torch.stack([a["W_dec"] for a in w]),
        "b_D": torch.stack([a["b_dec"] for a in w]),
    }
    threshold = torch.stack([a["threshold"] for a in w]).log()
    if topology == "clt":
        del stack["W_D"]
        for i in range(n_layers):  # by the layer written to: from layers 0..i
            to_i = [weights(seed + 100 + 10 * i + j, d_sae=D_SAE)["W_dec"] for j in range(i + 1)]
            stack |= {f"W_D.{i}": torch.stack(to_i), f"b_D.{i}": w[i]["b_dec"]}
        del stack["b_D"]
    elif topology != "crosscoder":
        stack, threshold = {name: a[0] for name, a in stack.items()}, threshold[0]
    elif "activation_function.log_jumprelu_threshold" in dict(model.named_parameters()):
        threshold = threshold[0]
    fill(model, stack)
    if model.cfg.act_fn == "jumprelu":
        fill(model, {"activation_function.log_jumprelu_threshold": threshold})


def as_used(peer: types.SimpleNamespace, folder: Path, x: torch.Tensor, stacked: bool) -> dict[str, torch.Tensor]:
    """Loaded again, inputs normalised, reconstructions scaled back: as its trainer and its analyses call it."""
    model = peer.base.SparseDictionary.from_pretrained(str(folder)).eval()
    by_hook = {hook: x[:, i] if stacked else x for i, hook in enumerate(model.cfg.hooks_in)}
    hooks_out = model.cfg.hooks_out
    with torch.no_grad():
        normed, scales = model.normalize_activations(by_hook, return_scale_factor=True)
        zeros = {hook: torch.zeros(len(x), D_IN) for hook in hooks_out if hook not in scales}
        scales |= model.normalize_activations(zeros, return_scale_factor=True)[1]
        seen = (
            torch.stack([normed[hook] for hook in model.cfg.hooks_in], 1) if stacked else normed[model.cfg.hooks_in[0]]
        )
        latents = model.encode(seen)
        out = model.decode(latents, batch_first=True)
        factors = [scales[hook].reshape(-1, 1).expand(len(x), 1) for hook in hooks_out]
        out = out / (torch.stack(factors, 1) if stacked else factors[0])
    arrays = {"x": x, "latents": latents, "reconstructions": out}
    if model.cfg.act_fn == "topk" and model.cfg.sparsity_include_decoder_norm and not stacked:
        arrays["latents_weighted"] = latents * model.decoder_norm()  # what it selects by
    return arrays
