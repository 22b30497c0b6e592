"""OpenAI's sparse_autoencoder: torch.save of Autoencoder.state_dict(), read by Autoencoder.from_state_dict.

Not on a registry: a checkout of github.com/openai/sparse_autoencoder is named by --openai.
"""

import importlib.util
from pathlib import Path

import torch

from .common import D_IN, D_SAE, Fixtures, K, few_positive, fill, inputs, weights

COMMIT = "4965b94"
PEER = f"openai/sparse_autoencoder=={COMMIT}"
checkout: Path | None = None


def _module() -> object:
    if checkout is None:
        raise SystemExit("name a checkout of github.com/openai/sparse_autoencoder by --openai")
    spec = importlib.util.spec_from_file_location("openai_model", checkout / "sparse_autoencoder" / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(to: Fixtures) -> None:
    peer = _module()
    norm = "it normalises each token (from_state_dict: every topk); arrays on normalised tokens are there too"
    tied = "its from_state_dict cannot read it (it builds an untied one): expected is of the module that was saved"
    cases = {
        "relu": (torch.nn.ReLU(), {}, "relu", None),
        "topk": (peer.TopK(K), {"normalize": True}, "topk", norm),
        "relu_tied": (torch.nn.ReLU(), {"tied": True}, "relu", tied),
    }
    for seed, (case, (activation, settings, sparsity, note)) in enumerate(cases.items(), start=500):
        coder, w = peer.Autoencoder(D_SAE, D_IN, activation, **settings), weights(seed)
        if sparsity == "topk":
            w["b_enc"] -= 1.0  # normalised tokens are all long: few positive pre-activations
        fill(coder, {"encoder.weight": w["W_enc"].T, "latent_bias": w["b_enc"], "pre_bias": w["b_dec"]})
        if case != "relu_tied":
            fill(coder, {"decoder.weight": w["W_dec"].T})
        folder = to.folder("openai", case)
        torch.save(coder.state_dict(), folder / "8.pt")
        if case != "relu_tied":
            state = torch.load(folder / "8.pt", weights_only=True)
            # What a topk saves has two keys too many for its own strict reading.
            coder = peer.Autoencoder.from_state_dict(state, strict=sparsity != "topk")
        x = inputs(seed, centre=w["b_dec"])
        with torch.no_grad():
            pre, latents, out = coder(x)
            arrays = {"x": x, "latents": latents, "reconstructions": out}
            if coder.normalize:
                few_positive(pre)
                arrays["x_normalised"] = coder.preprocess(x)[0]
                arrays["reconstructions_normalised"] = coder.decoder(latents) + coder.pre_bias
        to.add(
            folder / "8.pt",
            PEER,
            topology="autoencoder",
            sparsity=sparsity,
            hooks_in=[],
            model=None,
            arrays=arrays,
            note=note,
        )
