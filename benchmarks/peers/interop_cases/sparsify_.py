"""sparsify: SparseCoder.save_to_disk, read by SparseCoder.load_from_disk. Its forward adds the skip."""

import torch
from sparsify import SparseCoder, SparseCoderConfig
from stand_ins import version

from .common import D_IN, D_SAE, Fixtures, K, few_positive, fill, inputs, weights

PEER = f"eai-sparsify=={version('eai-sparsify')}"

# {case: (settings, topology, sparsity, why it is refused)}
CASES = {
    "topk": ({"num_latents": D_SAE}, "autoencoder", "topk", None),
    "topk_decoder_norms": ({"num_latents": D_SAE, "normalize_decoder": False}, "autoencoder", "topk", None),
    "topk_expansion_factor": ({"num_latents": 0, "expansion_factor": 3}, "autoencoder", "topk", None),
    "transcoder": ({"num_latents": D_SAE, "transcode": True}, "transcoder", "topk", None),
    "skip_transcoder": (
        {"num_latents": D_SAE, "transcode": True, "skip_connection": True, "normalize_decoder": False},
        "skip_transcoder",
        "topk",
        None,
    ),
    "groupmax": (
        {"num_latents": D_SAE, "activation": "groupmax", "k": 4},
        "autoencoder",
        "groupmax",
        "activation groupmax: saejax has none such",
    ),
}


def expected(coder: SparseCoder, x: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        out = coder(x)
    latents = torch.zeros(len(x), coder.num_latents).scatter_(1, out.latent_indices, out.latent_acts)
    return {"x": x, "latents": latents, "reconstructions": out.sae_out}


def write(to: Fixtures) -> None:
    for seed, (case, (settings, topology, sparsity, refuse)) in enumerate(CASES.items(), start=400):
        coder = SparseCoder(D_IN, SparseCoderConfig(**{"k": K} | settings))
        w = weights(seed, d_sae=coder.num_latents)
        fill(
            coder,
            {"encoder.weight": w["W_enc"].T, "encoder.bias": w["b_enc"], "b_dec": w["b_dec"], "W_dec": w["W_dec"]},
        )
        if coder.cfg.skip_connection:
            fill(coder, {"W_skip": w["W_skip"]})
        if coder.cfg.normalize_decoder:
            coder.set_decoder_norm_to_unit_norm()
        hook = "layers.3.mlp" if coder.cfg.transcode else "layers.3"
        folder = to.folder("sparsify", case, hook)
        coder.save_to_disk(folder)
        x = inputs(seed, centre=None if coder.cfg.transcode else w["b_dec"])
        if sparsity == "topk":
            few_positive(coder.encode(x).pre_acts)
        to.add(
            folder,
            PEER,
            topology=topology,
            sparsity=sparsity,
            hooks_in=[hook],
            model=None,
            arrays=expected(SparseCoder.load_from_disk(folder), x),
            refuse=refuse,
            note="a transcoder of sparsify reads the module's input and writes its output"
            if coder.cfg.transcode
            else None,
        )
