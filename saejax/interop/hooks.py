"""Names of hook points: TransformerLens's and the module paths of transformers, both ways.

Ours are in `saejax.lm.points`. A name that is not known stays as it is: a PyTorch model has any module as a hook
point.
"""

import re

from saejax.lm.points import TRANSFORMER_LENS

# Beside those that the language models take themselves. SAELens and circuit-tracer read transcoders here.
_THEIRS = TRANSFORMER_LENS | {"mlp.hook_in": "mlp_in", "mlp.hook_out": "mlp_out"}
_TO_THEIRS = {ours: theirs for theirs, ours in TRANSFORMER_LENS.items()} | {"mlp_in": "mlp.hook_in"}
UNKNOWN = "unknown"

# What stands at the input (False) or output (True) of a layer's modules, in the families of transformers.
_MODULE_SITES = {
    ("", True): "resid_post",
    ("", False): "resid_pre",
    ("mlp", True): "mlp_out",
    ("mlp", False): "mlp_in",
    ("pre_feedforward_layernorm", True): "mlp_in",
    ("post_feedforward_layernorm", True): "mlp_out",
    ("self_attn.o_proj", False): "attn_z",
    ("attn.c_proj", False): "attn_z",
    ("attention.dense", False): "attn_z",
}
_MODULE_SITES |= {(name, True): "attn_out" for name in ("self_attn", "attn", "attention")}
# And back, where a module's output, or its input and output, are these.
_OUTPUTS = {"resid_post": "", "mlp_out": ".mlp", "attn_out": ".self_attn"}
_THROUGH = {("resid_pre", "resid_post"): "", ("mlp_in", "mlp_out"): ".mlp"}
# Outputs of the modules themselves, as transformers, sparsify and circuit-tracer name them.
_BEFORE_NORM = re.compile(r"(?:.*\.)?(?:mlp|self_attn|attn|attention)(?:\.(?:hook_out|output|out))?")
_POST_NORMS = re.compile(r"gemma-?[23]", re.IGNORECASE)
_LAYER = re.compile(r"(?:[\w]+\.)*?(?:layers|h|blocks)\.(\d+)(?:\.(.+?))??(?:\.(input|output|in|out))?")


def from_transformer_lens(name: str) -> str:
    """blocks.6.hook_resid_pre -> blocks.6.resid_pre; a name of neither kind stays as it is."""
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    return f"blocks.{match[1]}.{_THEIRS.get(match[2], match[2])}" if match else name


def to_transformer_lens(name: str) -> str:
    """blocks.6.resid_pre -> blocks.6.hook_resid_pre; mlp_in is mlp.hook_in, as circuit-tracer calls it."""
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    return f"blocks.{match[1]}.{_TO_THEIRS.get(match[2], match[2])}" if match else name


def norm_notes(name: str, model: str) -> tuple[str, ...]:
    """The remark on a coder at another project's `name`, a module's output, in a model ("" is any).

    Gemma 2 and 3 norm it once more before they add it to the residual stream. TransformerLens's hook_mlp_out and
    hook_attn_out are behind that norm, and so are our mlp_out and attn_out.
    """
    if not _BEFORE_NORM.fullmatch(name) or (model and not _POST_NORMS.search(model)):
        return ()
    return (
        f"It stands at the output of the module {name}. In Gemma 2 and 3 a norm follows, and saejax's mlp_out and "
        "attn_out are behind it: other activations than this coder's.",
    )


def from_module(path: str, output: bool = True) -> str:
    """model.layers.6.mlp -> blocks.6.mlp_out; with .input (or output=False) blocks.6.mlp_in.

    A path that no rule knows becomes the name it has for a PyTorch model: path.out or path.in.
    """
    match = _LAYER.fullmatch(path)
    if match and match[3]:
        output = match[3] in ("output", "out")
    if match and (ours := _MODULE_SITES.get((match[2] or "", output))):
        return f"blocks.{match[1]}.{ours}"
    stem = re.sub(r"\.(input|output|in|out)$", "", path)
    return f"{stem}.{'out' if output else 'in'}"


def to_module(reads: str, writes: str, layers: str = "layers") -> str | None:
    """layers.6.mlp of (blocks.6.mlp_in, blocks.6.mlp_out): the module that writes one, and reads the other.

    Where both are one hook point, it is the module's output. None where no module is known. The path is relative to
    the base model; GPT-2 calls its layers h.
    """
    pair = [re.fullmatch(r"blocks\.(\d+)\.(\w+)", name) for name in (reads, writes)]
    if pair[0] and pair[1] and pair[0][1] == pair[1][1]:
        name = (pair[0][2], pair[1][2])
        module = _OUTPUTS.get(name[1]) if reads == writes else _THROUGH.get(name)
        return None if module is None else f"{layers}.{pair[0][1]}{module}"
    stem = writes.removesuffix(".out")
    return stem if stem != writes and reads in (writes, f"{stem}.in") else None


def layer_of(name: str) -> int | None:
    """6 of blocks.6.resid_pre; None where the name does not say."""
    match = re.search(r"(?:^|\.)(?:blocks|layers|h)\.(\d+)(?:\.|$)", name)
    return int(match[1]) if match else None
