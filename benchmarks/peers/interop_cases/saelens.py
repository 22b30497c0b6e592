"""SAELens: SAE.save_model and TrainingSAE.save_inference_model, read by SAE.load_from_disk."""

import json
import warnings
from pathlib import Path

import sae_lens
import torch
from stand_ins import version

from .common import D_IN, D_OUT, D_SAE, Fixtures, K, few_positive, fill, inputs, weights

PEER = f"sae-lens=={version('sae-lens')}"
HOOK, HOOK_IN, HOOK_OUT = "blocks.3.hook_resid_post", "blocks.3.ln2.hook_normalized", "blocks.3.hook_mlp_out"


def _config(name: str, d_out: int | None = None, **settings: object) -> object:
    """A configuration by the name of its class, with the metadata that a run of SAELens writes."""
    hooks = {"hook_name": HOOK_IN, "hook_name_out": HOOK_OUT} if d_out else {"hook_name": settings.pop("hook", HOOK)}
    metadata = sae_lens.saes.sae.SAEMetadata(model_name="gpt2", context_size=64, prepend_bos=True, **hooks)
    if d_out:
        settings |= {"d_out": d_out, "apply_b_dec_to_input": False}
    return getattr(sae_lens, name)(d_in=D_IN, d_sae=D_SAE, metadata=metadata, **settings)


def _filled(name: str, seed: int, d_out: int | None = None, **settings: object) -> torch.nn.Module:
    """A module of the class `name` with weights in no special position."""
    sae = getattr(sae_lens, name)(_config(f"{name}Config", d_out, **settings))
    w = weights(seed, d_out=d_out)
    names = {"b_gate": "b_enc"}
    fill(sae, {n: w[names.get(n, n)] for n, p in sae.named_parameters()})
    return sae


def _expected(folder: Path, x: torch.Tensor, heads: int = 0) -> dict[str, torch.Tensor]:
    """What SAELens computes from the folder, in float32."""
    sae = sae_lens.SAE.load_from_disk(folder, dtype="float32").eval()
    shown = x.reshape(1, len(x), heads, -1) if heads else x
    if heads:
        sae.turn_on_forward_pass_hook_z_reshaping()
    with torch.no_grad():
        return {
            "x": x,
            "latents": sae.encode(shown).reshape(len(x), -1),
            "reconstructions": sae(shown).reshape(len(x), -1),
        }


# {case: (class, d_out, settings, topology, sparsity, why it is refused)}
PLAIN = {
    "standard": ("StandardSAE", None, {}, "autoencoder", "relu", None),
    "standard_uncentred": ("StandardSAE", None, {"apply_b_dec_to_input": False}, "autoencoder", "relu", None),
    "gated": ("GatedSAE", None, {}, "autoencoder", "gated", None),
    "gated_uncentred": ("GatedSAE", None, {"apply_b_dec_to_input": False}, "autoencoder", "gated", None),
    "topk": ("TopKSAE", None, {"k": K}, "autoencoder", "topk", None),
    "topk_rescaled": ("TopKSAE", None, {"k": K, "rescale_acts_by_decoder_norm": True}, "autoencoder", "topk", None),
    "abstopk": ("AbsTopKSAE", None, {"k": K}, "autoencoder", "abs_topk", None),
    "jumprelu": ("JumpReLUSAE", None, {}, "autoencoder", "jumprelu", None),
    "jumprelu_uncentred": ("JumpReLUSAE", None, {"apply_b_dec_to_input": False}, "autoencoder", "jumprelu", None),
    "transcoder": ("Transcoder", D_OUT, {}, "transcoder", "relu", None),
    "skip_transcoder": ("SkipTranscoder", D_OUT, {}, "skip_transcoder", "relu", None),
    "jumprelu_transcoder": ("JumpReLUTranscoder", D_OUT, {}, "transcoder", "jumprelu", None),
    "jumprelu_skip_transcoder": ("JumpReLUSkipTranscoder", D_OUT, {}, "skip_transcoder", "jumprelu", None),
    "bf16": ("JumpReLUSAE", None, {"dtype": "bfloat16"}, "autoencoder", "jumprelu", None),
    "layer_norm": ("StandardSAE", None, {"normalize_activations": "layer_norm"}, "autoencoder", "relu", None),
    "constant_norm_rescale": (
        "StandardSAE",
        None,
        {"normalize_activations": "constant_norm_rescale"},
        "autoencoder",
        "relu",
        "normalize_activations constant_norm_rescale: the scale depends on the token",
    ),
    "expected_average_not_folded": (
        "StandardSAE",
        None,
        {"normalize_activations": "expected_average_only_in"},
        "autoencoder",
        "relu",
        None,
    ),
}

NOTES = {
    "bf16": "bfloat16 weights; SAELens computed in float32",
    "layer_norm": "each token normalised, its reconstruction scaled back",
    "expected_average_not_folded": "the factor is not in the file; SAELens reads it from a disk without one",
}


def write(to: Fixtures) -> None:
    warnings.filterwarnings("ignore")
    for seed, (case, (name, d_out, settings, topology, sparsity, refuse)) in enumerate(PLAIN.items()):
        sae, folder = _filled(name, seed, d_out, **settings), to.folder("saelens", case)
        sae.save_model(folder)
        x = inputs(seed, centre=None if d_out else sae.b_dec.detach().float())
        if "topk" in sparsity:
            few_positive(sae.process_sae_in(x) @ sae.W_enc + sae.b_enc)
        hooks = {"hooks_in": [HOOK_IN], "hooks_out": [HOOK_OUT]} if d_out else {"hooks_in": [HOOK]}
        note = NOTES.get(case)
        arrays = _expected(folder, x)
        to.add(folder, PEER, topology=topology, sparsity=sparsity, arrays=arrays, refuse=refuse, note=note, **hooks)
    _trained(to)
    _hook_z(to)
    _folded(to)
    _legacy(to)
    _unsayable(to)


def _trained(to: Fixtures) -> None:
    """What trains with another activation than it infers with: saved for inference as jumprelu."""
    for seed, (case, name, settings) in enumerate(
        (
            ("batchtopk", "BatchTopKTrainingSAE", {"k": 5.0}),
            ("matryoshka", "MatryoshkaBatchTopKTrainingSAE", {"k": 5.0, "matryoshka_widths": [10, 20, D_SAE]}),
        ),
        start=40,
    ):
        sae, folder = _filled(name, seed, **settings), to.folder("saelens", case)
        sae.topk_threshold.fill_(0.6)
        sae.save_inference_model(folder)
        arrays = _expected(folder, inputs(seed, centre=sae.b_dec.detach()))
        to.add(folder, PEER, topology="autoencoder", sparsity="jumprelu", hooks_in=[HOOK], arrays=arrays)


def _hook_z(to: Fixtures) -> None:
    """Attention heads flattened: the weights know nothing of it."""
    hook = "blocks.3.attn.hook_z"
    sae, folder = _filled("StandardSAE", 50, reshape_activations="hook_z", hook=hook), to.folder("saelens", "hook_z")
    sae.save_model(folder)
    arrays = _expected(folder, inputs(50), heads=2)
    to.add(folder, PEER, topology="autoencoder", sparsity="relu", hooks_in=[hook], arrays=arrays, note="2 heads")


def _folded(to: Fixtures) -> None:
    """Trained on scaled inputs; the factor is folded into the weights before saving, as SAELens' runner does."""
    sae, folder = _filled("TopKTrainingSAE", 51, k=K, normalize_activations="expected_average_only_in"), None
    folder = to.folder("saelens", "expected_average_folded")
    sae.fold_activation_norm_scaling_factor(1.7)
    sae.save_inference_model(folder)
    arrays = _expected(folder, inputs(51, centre=sae.b_dec.detach()))
    to.add(folder, PEER, topology="autoencoder", sparsity="topk", hooks_in=[HOOK], arrays=arrays)


def _legacy(to: Fixtures) -> None:
    """cfg.json as SAELens wrote it before version 6, which its own parser accepts."""
    old = {
        "model_name": "gpt2-small",
        "hook_layer": 3,
        "hook_head_index": None,
        "context_size": 64,
        "dataset_path": "Skylion007/openwebtext",
        "dataset_trust_remote_code": True,
        "prepend_bos": True,
        "d_in": D_IN,
        "d_sae": D_SAE,
        "dtype": "torch.float32",
        "device": "cpu",
        "finetuning_scaling_factor": False,
        "sae_lens_training_version": "3.12.0",
    }
    cases = {
        "legacy_standard": ("StandardSAE", {}, {"hook_point": HOOK, "activation_fn_str": "relu"}),
        "legacy_topk": (
            "TopKSAE",
            {"k": K},
            {
                "hook_name": HOOK,
                "architecture": "standard",
                "activation_fn_str": "topk",
                "activation_fn_kwargs": {"k": K},
                "apply_b_dec_to_input": False,
                "normalize_activations": "none",
            },
        ),
        "legacy_gated": (
            "GatedSAE",
            {},
            {"hook_name": HOOK, "architecture": "gated", "activation_fn_str": "relu", "normalize_activations": False},
        ),
    }
    for seed, (case, (name, settings, own)) in enumerate(cases.items(), start=60):
        sae, folder = _filled(name, seed, **settings), to.folder("saelens", case)
        sae.save_model(folder)
        (folder / "cfg.json").write_text(json.dumps(old | own))
        arrays = _expected(folder, inputs(seed, centre=sae.b_dec.detach()))
        sparsity = {"StandardSAE": "relu", "TopKSAE": "topk", "GatedSAE": "gated"}[name]
        to.add(
            folder,
            PEER,
            topology="autoencoder",
            sparsity=sparsity,
            hooks_in=[HOOK],
            model="gpt2-small",
            arrays=arrays,
            note="SAELens' weights; cfg.json by hand in the old form",
        )


def _unsayable(to: Fixtures) -> None:
    """The inference architectures that saejax has no name for."""
    cases = {
        "temporal": ("TemporalSAE", {"n_heads": 2, "bottleneck_factor": 2, "kval_topk": K, "sae_diff_type": "topk"}),
        "matching_pursuit": ("MatchingPursuitSAE", {"residual_threshold": 0.1, "max_iterations": 6}),
    }
    for case, (name, settings) in cases.items():
        sae, folder = getattr(sae_lens, name)(_config(f"{name}Config", **settings)), to.folder("saelens", case)
        sae.save_model(folder)
        refuse = f"architecture {case}: saejax has none such"
        to.add(folder, PEER, topology="autoencoder", sparsity=case, hooks_in=[HOOK], refuse=refuse)
