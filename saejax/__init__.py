"""saejax: sparse dictionaries on language models, trained in JAX.

sae = saejax.train(x, "topk", k=32)        # x: activations [N, D], a store, or batches
sae = saejax.load("runs/quickstart")       # encode, decode, params, config; a run or a saved folder
lm = saejax.load_lm("demo")                # run, activations, hook_points
saejax.features(sae, lm, text)             # the passages that each latent fires on
saejax.evaluate(sae, lm, text)             # L0, FVE, loss recovered
saejax.steer(sae, lm, prompt, 17)          # what the model writes with latent 17 turned up
saejax.graph(sae, lm, prompt)              # which features lead to the next token
saejax.probes(sae, lm, "all")              # what few latents tell about labelled texts
saejax.convert(place, folder, "saelens")   # another project's format
saejax.side_by_side([sae, other])          # several dictionaries as one; saejax.layers: each by itself
saejax.report("runs/quickstart")           # the page of a run
saejax.plan("models:gpt2", "h100")         # memory, time and cost of an experiment
saejax.study("study_quickstart")           # from a behaviour to the features that cause it
saejax.truth("truth")                      # how much of a known truth is found
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saejax.app.array_training import train
    from saejax.app.convert import convert
    from saejax.app.evaluation import evaluate
    from saejax.app.features import features
    from saejax.app.graph import graph
    from saejax.app.load import load
    from saejax.app.pretrained import from_pretrained
    from saejax.app.probes import probes
    from saejax.app.push import push_to_hub
    from saejax.app.report import report
    from saejax.app.steer import steer
    from saejax.app.truth import truth
    from saejax.coders import register_sparsity, register_term
    from saejax.experiment import default_config
    from saejax.lm import load_lm
    from saejax.plans.command import plan
    from saejax.studies.run import study
    from saejax.trained import TrainedCoder, layers, register_format, side_by_side

__all__ = [
    "TrainedCoder",
    "convert",
    "default_config",
    "evaluate",
    "features",
    "from_pretrained",
    "graph",
    "layers",
    "load",
    "load_lm",
    "plan",
    "probes",
    "push_to_hub",
    "register_format",
    "register_sparsity",
    "register_term",
    "report",
    "side_by_side",
    "steer",
    "study",
    "train",
    "truth",
]

_HOME = {
    "train": "saejax.app.array_training",
    "load": "saejax.app.load",
    "features": "saejax.app.features",
    "evaluate": "saejax.app.evaluation",
    "steer": "saejax.app.steer",
    "graph": "saejax.app.graph",
    "convert": "saejax.app.convert",
    "truth": "saejax.app.truth",
    "study": "saejax.studies.run",
    "report": "saejax.app.report",
    "probes": "saejax.app.probes",
    "plan": "saejax.plans.command",
    "from_pretrained": "saejax.app.pretrained",
    "push_to_hub": "saejax.app.push",
    "TrainedCoder": "saejax.app.load",  # with the formats that it is saved in
    "layers": "saejax.trained",
    "side_by_side": "saejax.trained",
    "load_lm": "saejax.lm",
    "default_config": "saejax.experiment",
    "register_sparsity": "saejax.coders",
    "register_term": "saejax.coders",
    "register_format": "saejax.interop",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `import saejax` stays quick."""
    if name == "__version__":
        import importlib.metadata

        return importlib.metadata.version("saejax")
    if name not in _HOME:
        raise AttributeError(f"module 'saejax' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
