"""saejax: sparse dictionaries on language models, trained in JAX.

sae = saejax.load("runs/quickstart")       # encode, decode, params, config
lm = saejax.load_lm("demo")                # run, activations, hook_points
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saejax.app.loading import LoadedCoder, load
    from saejax.lm import load_lm

__all__ = ["LoadedCoder", "load", "load_lm"]

_HOME = {"load": "saejax.app.loading", "LoadedCoder": "saejax.app.loading", "load_lm": "saejax.lm"}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `import saejax` stays quick."""
    if name == "__version__":
        import importlib.metadata

        return importlib.metadata.version("saejax")
    if name not in _HOME:
        raise AttributeError(f"module 'saejax' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
