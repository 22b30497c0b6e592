"""Empty modules for what the peers import and what reading, writing and scoring dictionaries never touches.

Import this before a peer. dictionary_learning imports nnsight for its language models; circuit-tracer for one of its
two model backends, and a constant that huggingface_hub has no longer since 1.0; delphi imports vllm and
sentence_transformers for local explainers and contrastive examples. With these in their places one environment holds
all peers. As a script: imports every peer and prints its version.
"""

import importlib
import importlib.metadata
import sys
import types
from importlib.machinery import ModuleSpec

import huggingface_hub.constants


def _put(name: str, *things: str) -> None:
    """An empty module `name` whose `things` are empty classes, unless it is installed."""
    module = types.ModuleType(name)
    for thing in things:
        setattr(module, thing, type(thing, (), {}))
    if "." in name:
        parent, child = name.rsplit(".", 1)
        setattr(sys.modules[parent], child, module)
    module.__path__, module.__spec__ = [], ModuleSpec(name, None)
    sys.modules.setdefault(name, module)


_put("nnsight", "LanguageModel", "Envoy", "CONFIG", "save")
_put("nnsight.intervention")
_put("nnsight.intervention.tracing")
_put("nnsight.intervention.tracing.tracer", "Barrier")
_put("vllm", "LLM", "SamplingParams")
_put("vllm.distributed")
_put("vllm.distributed.parallel_state", "destroy_distributed_environment", "destroy_model_parallel")
_put("vllm.inputs", "TokensPrompt")
_put("sentence_transformers", "SentenceTransformer")
if not hasattr(huggingface_hub.constants, "HF_HUB_ENABLE_HF_TRANSFER"):
    huggingface_hub.constants.HF_HUB_ENABLE_HF_TRANSFER = False

# {package: the modules that the scripts here, the tests and the exports use}
PEERS = {
    "sae-lens": ("sae_lens", "sae_lens.loading.pretrained_sae_loaders"),
    "dictionary-learning": ("dictionary_learning.dictionary", "dictionary_learning.utils"),
    "eai-sparsify": ("sparsify",),
    "circuit-tracer": ("circuit_tracer.utils.hf_utils", "circuit_tracer.frontend.feature_models"),
    "eai-delphi": ("delphi.latents", "delphi.scorers", "delphi.explainers"),
    "sae-dashboard": ("sae_dashboard.neuronpedia.neuronpedia_runner", "sae_dashboard.sae_vis_runner"),
    "sae-probes": ("sae_probes",),
    "sae-bench": ("sae_bench.custom_saes.base_sae", "sae_bench.evals.sparse_probing_sae_probes.main"),
}


def version(peer: str) -> str:
    return importlib.metadata.version(peer)


if __name__ == "__main__":
    for peer, modules in PEERS.items():
        for module in modules:
            importlib.import_module(module)
        print(peer, version(peer))
