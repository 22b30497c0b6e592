"""Any Hugging Face model, decoder or encoder, run by PyTorch and watched at any of its modules.

Hook points are places: a module's path as in `model.named_modules()` with `.in` (its first tensor argument) or `.out`
(its first tensor result; without a suffix, `.out`), as in `encoder.layer.2.output.out`. Where the layers are recognised
there are the names of the JAX decoder too, as in `blocks.2.mlp_out` (`saejax.lm.aliases`). Widths, names, whether
the model is causal and how documents are kept apart are measured at load, on a few tokens; no table says them.

torch is imported by this folder alone, in its functions: everything else works without it.

    hooks.py   one forward pass of a module, watched and edited
    model.py   TorchModel: packed rows, hook points, what capture and evaluation ask
    probe.py   any module -> TorchModel, by a few tokens
    memory.py  a module that a program holds: taken out of its wrapper, its tensors, their digest
    load.py    a Hugging Face folder -> TorchModel, or its shape
"""

from saejax.lm.torch_hooks.hooks import run_chunk
from saejax.lm.torch_hooks.load import load_torch, torch_shape, with_cls
from saejax.lm.torch_hooks.memory import ModuleTensors, held_module
from saejax.lm.torch_hooks.model import TorchModel, find_batch_rows
from saejax.lm.torch_hooks.probe import difference, from_module

__all__ = [
    "ModuleTensors",
    "TorchModel",
    "difference",
    "find_batch_rows",
    "from_module",
    "held_module",
    "load_torch",
    "run_chunk",
    "torch_shape",
    "with_cls",
]
