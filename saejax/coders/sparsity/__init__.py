"""Sparsities: from pre-activations to latents. One file each; a new one is a new file and a line here."""

from saejax.coders.sparsity.abs_topk import AbsTopK
from saejax.coders.sparsity.base import Keep, Sparsity
from saejax.coders.sparsity.batchtopk import BatchTopK
from saejax.coders.sparsity.gated import Gated
from saejax.coders.sparsity.jumprelu import JumpRelu
from saejax.coders.sparsity.relu import Relu
from saejax.coders.sparsity.topk import TopK

SPARSITIES: dict[str, type[Sparsity]] = {
    "relu": Relu,
    "gated": Gated,
    "topk": TopK,
    "abs_topk": AbsTopK,
    "batchtopk": BatchTopK,
    "jumprelu": JumpRelu,
}

__all__ = ["SPARSITIES", "AbsTopK", "BatchTopK", "Gated", "JumpRelu", "Keep", "Relu", "Sparsity", "TopK"]
