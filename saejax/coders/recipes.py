"""The names people use, as products of topology, sparsity and losses: the only place that knows a family's name.

A recipe is a row of settings, keys of `CoderConfig`. Where a row is silent, the key's own `base` holds.
"""

from typing import Any


class Recipe:
    """A row: what it is, where it was published, and the settings."""

    def __init__(self, title: str, paper: str, **settings: Any):
        self.title, self.paper, self.settings = title, paper, settings


# What dead latents learn from: AuxK where a token makes them positive, Lift where none does. Lift's weight is that of a
# loss that is a share of the variance, and where it is a sum over the width ten times as large.
_REVIVED: dict[str, Any] = {"auxk_coefficient": 1 / 32, "lift_coefficient": 1e-3}
_UNIT: dict[str, Any] = {"unit_decoder_every": 1, **_REVIVED}
_LIFTED: dict[str, Any] = {"lift_coefficient": 1e-2}
# A random encoder says nothing of what its latents write: they start small (benchmarks/quality/encoder_scale.md).
_APART: dict[str, Any] = _UNIT | {"init": "kaiming", "encoder_scale": 0.1}
_FREE: dict[str, Any] = {"decoder_norm": 0.1, "reconstruction": "mse"}
# At unit mean square the thresholds that are needed are near 0.1, where a threshold that moves by lr a step gets soon.
# Thresholds move by themselves: with a centre these fit no better, and more of their latents die.
_OWN_THRESHOLDS: dict[str, Any] = {"encoder_centre": False}
_THRESHOLD: dict[str, Any] = {
    "sparsity": "jumprelu",
    "normalize": "mean_square",
    "unit_decoder_every": 1,
    **_OWN_THRESHOLDS,
}
_SATURATING: dict[str, Any] = {
    "sparsity": "jumprelu",
    **_OWN_THRESHOLDS,
    "threshold_init": 0.1,
    "bandwidth": 2.0,
    "tanh_coefficient": 1.0,
    "sparsity_warmup_fraction": 1.0,
    "pre_activation_coefficient": 3e-6,
    "init": "uniform",
    "reconstruction": "mse",
}
_PREFIXES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
_GAO = "https://arxiv.org/abs/2406.04093"
_GEMMA_SCOPE_2 = (
    "https://deepmind.google/blog/"
    "gemma-scope-2-helping-the-ai-safety-community-deepen-understanding-of-complex-language-model-behavior/"
)
_CROSSCODERS = "https://transformer-circuits.pub/2024/crosscoders/index.html"
_CIRCUITS = "https://transformer-circuits.pub/2025/attribution-graphs/methods.html"

RECIPES: dict[str, Recipe] = {
    "standard": Recipe(
        "relu + norm-weighted L1",
        "https://transformer-circuits.pub/2024/april-update/index.html",
        sparsity="relu",
        l1_coefficient=5.0,
        **_LIFTED,
        **_FREE,
    ),
    "p_anneal": Recipe(
        "relu + Lp with falling p", "https://arxiv.org/abs/2408.00113", sparsity="relu", lp_coefficient=5.0, **_FREE
    ),
    "ghost": Recipe(
        "relu + norm-weighted L1 + ghost gradients",
        "https://transformer-circuits.pub/2024/jan-update/index.html",
        sparsity="relu",
        l1_coefficient=5.0,
        ghost_coefficient=1.0,
        **_FREE,
    ),
    # Rows of length 1: with free rows the price of a latent falls with its row, and the gate, whose reconstruction
    # holds the rows frozen, never reaches the size it needs. A penalty that is whole from the start closes gates for
    # good: without centre and Lift 29 % of latents died on the demo model at L0 24, and 6 % with half a training to
    # rise. With Lift a fifth of the training is better at L0 24 of the known truth, and worse at L0 6.
    "gated": Recipe(
        "gated",
        "https://arxiv.org/abs/2404.16014",
        sparsity="gated",
        l1_coefficient=5.0,
        gate_coefficient=1.0,
        sparsity_warmup_fraction=0.5,
        reconstruction="mse",
        unit_decoder_every=1,
        **_LIFTED,
    ),
    "topk": Recipe("TopK + AuxK", _GAO, **_UNIT),
    "hierarchical_topk": Recipe(
        "TopK at every number of latents up to k", "https://arxiv.org/abs/2505.24473", hierarchical_every=1, **_UNIT
    ),
    "multi_topk": Recipe("TopK at k and 4 k", _GAO, multi_topk_coefficient=1 / 8, **_UNIT),
    # A latent that is negative fires here: there is nothing to lift.
    "abs_topk": Recipe(
        "TopK of both signs",
        "https://arxiv.org/abs/2510.00404",
        sparsity="abs_topk",
        **_UNIT | {"lift_coefficient": 0.0},
    ),
    # The paper penalises each latent's largest cosine; this is the mean square over all pairs.
    "decorrelated": Recipe(
        "TopK + decorrelated decoder rows", "https://arxiv.org/abs/2509.22033", decorrelation_coefficient=1.0, **_UNIT
    ),
    "batchtopk": Recipe("BatchTopK + AuxK", "https://arxiv.org/abs/2412.06410", sparsity="batchtopk", **_UNIT),
    # FVE is above batchtopk's on four data sets; on the known truth MCC and F1 are below (docs/quality.md).
    "lista_batchtopk": Recipe(
        "BatchTopK whose encoder looks twice",
        "https://icml.cc/Conferences/2010/papers/449.pdf",
        sparsity="batchtopk",
        lista_steps=1,
        **_UNIT,
    ),
    # Many latents at first, and a penalty that rises slowly: benchmarks/quality/changes.py.
    "jumprelu": Recipe(
        "JumpReLU at a chosen L0",
        "https://arxiv.org/abs/2407.14435",
        target_l0_coefficient=1.0,
        target_l0_start=4.0,
        threshold_init=0.01,
        sparsity_warmup_fraction=0.5,
        **_REVIVED,
        **_THRESHOLD,
    ),
    "jumprelu_l0": Recipe("JumpReLU + L0", "https://arxiv.org/abs/2408.05147", l0_coefficient=3e-3, **_THRESHOLD),
    # Sections 2.3 and 3 of the report. Ours is what it leaves open: the prefixes, the form of the frequency penalty and
    # all weights; and the bandwidth, of which it has a tenth at a far lower learning rate.
    "gemma_scope_2": Recipe(
        "Matryoshka JumpReLU + quadratic L0 + frequency penalty",
        _GEMMA_SCOPE_2,
        target_l0_coefficient=0.02,
        target_l0_of="token",
        target_l0_start=2.0,
        frequency_coefficient=1e-3,
        prefixes=_PREFIXES,
        reconstruction="mse",
        **_THRESHOLD,
    ),
    "jumprelu_tanh": Recipe(
        "JumpReLU + tanh + pre-activation loss",
        "https://transformer-circuits.pub/2025/january-update/index.html",
        **_SATURATING,
    ),
    # The whole dictionary has a fifth of the loss, which is a mean over five prefixes; so has its AuxK.
    "matryoshka": Recipe(
        "Matryoshka BatchTopK",
        "https://arxiv.org/abs/2503.17547",
        sparsity="batchtopk",
        prefixes=_PREFIXES,
        **_UNIT | {"auxk_coefficient": 1 / 32 / len(_PREFIXES)},
    ),
    # The two reconstructions have one weight each here; the authors' code has a fifth and four fifths.
    "temporal": Recipe(
        "Matryoshka BatchTopK + contrast of neighbouring tokens",
        "https://arxiv.org/abs/2511.05541",
        sparsity="batchtopk",
        prefixes=(0.2, 1.0),
        contrastive_coefficient=0.3,
        **_UNIT | {"auxk_coefficient": 1 / 32 / 2},
    ),
    "transcoder": Recipe("transcoder, TopK", "https://arxiv.org/abs/2406.11944", topology="transcoder", **_APART),
    "skip_transcoder": Recipe(
        "transcoder with a linear skip, TopK", "https://arxiv.org/abs/2501.18823", topology="skip_transcoder", **_APART
    ),
    "crosscoder": Recipe(
        "crosscoder, relu + L1", _CROSSCODERS, topology="crosscoder", sparsity="relu", l1_coefficient=2.0, **_FREE
    ),
    "crosscoder_batchtopk": Recipe(
        "crosscoder, BatchTopK",
        "https://arxiv.org/abs/2504.02922",
        topology="crosscoder",
        sparsity="batchtopk",
        **_UNIT,
    ),
    # As published: trained as a BatchTopK, which is a JumpReLU afterwards (appendix B.1 of the report).
    "crosscoder_causal": Recipe(
        "weakly causal crosscoder, BatchTopK",
        _GEMMA_SCOPE_2,
        topology="causal_crosscoder",
        sparsity="batchtopk",
        init="uniform",
        auxk_coefficient=1 / 32,
    ),
    "clt": Recipe(
        "cross-layer transcoder, BatchTopK",
        _CIRCUITS,
        topology="clt",
        sparsity="batchtopk",
        init="uniform",
        auxk_coefficient=1 / 32,
    ),
    "clt_jumprelu": Recipe("cross-layer transcoder, JumpReLU + tanh", _CIRCUITS, topology="clt", **_SATURATING),
}
