"""Qwen-Scope: layer{n}.sae.pt, a torch.save of W_enc [d_sae, d_in], W_dec [d_in, d_sae], b_enc, b_dec; k in the name of
the repository. Read by SAELens' converter; Qwen publishes files and no writer."""

import torch

from .common import D_IN, D_SAE, Fixtures, K, few_positive, inputs, weights
from .gemma_scope import PEER, LocalHub, expected, through_saelens


def write(to: Fixtures) -> None:
    repo, file = f"SAE-Res-Qwen3-1.7B-Base-W32K-L0_{K}", "layer7.sae.pt"
    folder, w = to.folder("qwen_scope", "topk", repo), weights(700)
    named = {"W_enc": w["W_enc"].T.contiguous(), "W_dec": w["W_dec"].T.contiguous()}
    torch.save(named | {"b_enc": w["b_enc"], "b_dec": w["b_dec"]}, folder / file)
    hub = LocalHub(to.root / "qwen_scope" / "topk")
    sae, x = through_saelens(hub, "qwen_scope", repo, file, d_in=D_IN, d_sae=D_SAE), inputs(700)
    few_positive(x @ sae.W_enc + sae.b_enc)
    to.add(
        folder / file,
        PEER,
        topology="autoencoder",
        sparsity="topk",
        hooks_in=["model.layers.7"],
        model="Qwen/Qwen3-1.7B-Base",
        arrays=expected(sae, x),
        note="the encoder sees x itself; SAELens' name of the hook: blocks.7.hook_resid_post",
    )
