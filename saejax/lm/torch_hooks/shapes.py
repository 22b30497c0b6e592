"""The shapes of any model of transformers from its config.json: PyTorch's meta device, which holds no numbers."""

import dataclasses
import functools
from collections import Counter
from pathlib import Path
from typing import Any

from saejax.core.config import nearest
from saejax.core.errors import ConfigError, DataError
from saejax.lm.points import HOOK_NAMES
from saejax.lm.torch_hooks.hooks import watching
from saejax.lm.torch_hooks.load import kind_of, torch_and_transformers
from saejax.lm.torch_hooks.probe import text_config

# As config.json files call them.
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
_MLP = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


@dataclasses.dataclass(frozen=True)
class TorchShapes:
    """What a plan must know of a model that PyTorch runs.

    Attributes:
        block, outer: parameters of one block, and of all outside of the blocks, each counted once.
        places: {path.in or path.out: width}, of the modules that pass one vector a token.
    """

    n_layer: int
    d_model: int
    d_mlp: int
    n_head: int
    kv_heads: int
    d_head: int
    vocab_size: int
    context_length: int
    block: int
    outer: int
    places: dict[str, int] = dataclasses.field(repr=False)

    def hook_points(self) -> dict[str, int]:
        """{hook point: width}: the names in blocks, then the places of modules."""
        widths = dict.fromkeys(HOOK_NAMES, self.d_model) | {"mlp_act": self.d_mlp, "attn_z": self.n_head * self.d_head}
        named = {f"blocks.{i}.{name}": widths[name] for i in range(self.n_layer) for name in HOOK_NAMES}
        return named | self.places

    def hook_point(self, name: str) -> str:
        """The name itself, or a ConfigError with the nearest; a loaded model may know more names."""
        there = self.hook_points()
        if name not in there:
            raise ConfigError(f"The plan finds no hook point {name!r} in the model.{nearest(name, there)}")
        return name


def torch_shapes(folder: Path) -> TorchShapes:
    """The shapes of the model that config.json in `folder` describes; its own code is never run.

    Raises:
        ConfigError: no torch.
        DataError: transformers cannot build it.
    """
    torch, transformers = torch_and_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            module = kind_of(transformers, config).from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers and torch raise many kinds for a configuration that cannot be
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"transformers cannot build the model of {folder}/config.json ({type(error).__name__}: {reason})."
        ) from None
    if config.is_encoder_decoder:
        module = module.get_encoder()
    return _measured(torch, module)


def _measured(torch: Any, module: Any) -> TorchShapes:
    own = text_config(module)
    total = sum(parameter.numel() for parameter in module.parameters())
    lists = [one for one in module.modules() if isinstance(one, torch.nn.ModuleList) and len(one) > 1]
    blocks: Any = max(lists, key=lambda one: sum(p.numel() for p in one.parameters()), default=[])
    inside = sum(p.numel() for one in blocks for p in one.parameters())
    n_layer = max(1, len(blocks))
    width = _said(own, _WIDTH) or _usual_width(torch, module)
    heads = _said(own, _HEADS)
    return TorchShapes(
        n_layer=n_layer,
        d_model=width,
        d_mlp=_said(own, _MLP) or 4 * width,
        n_head=heads,
        kv_heads=_said(own, _KV_HEADS) or heads,
        d_head=_said(own, ("head_dim", "d_kv")) or (width // heads if heads else 0),
        vocab_size=int(module.get_input_embeddings().weight.shape[0]),
        context_length=_said(own, _CONTEXT) or 2**20,
        block=inside // n_layer,
        outer=total - inside // n_layer * n_layer,
        places=_places(torch, module),
    )


def _places(torch: Any, module: Any) -> dict[str, int]:
    """Widths of what passes the modules, by a pass of four tokens without numbers."""
    rows, widths = (1, 4), dict[str, int]()

    def visit(place: str, value: Any) -> None:
        if value.dim() == 3 and tuple(value.shape[:2]) == rows:
            widths[place] = int(value.shape[-1])

    names = [path for path, _ in module.named_modules() if path]
    try:
        visits = {at: functools.partial(visit, at) for name in names for at in (f"{name}.in", f"{name}.out")}
        with torch.no_grad(), watching(module.eval(), visits):
            module(input_ids=torch.zeros(rows, dtype=torch.long, device="meta"))
    except Exception:  # some models look at numbers in their forward pass, and there are none
        for path, one in module.named_modules():
            if isinstance(one, torch.nn.Linear | torch.nn.LayerNorm):
                widths[f"{path}.out"] = int(one.weight.shape[0])
    return widths


def _said(config: Any, names: tuple[str, ...]) -> int:
    """The first of these that the configuration says as a number; 0 where it says none."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if type(value) is int), 0)


def _usual_width(torch: Any, module: Any) -> int:
    widths = Counter(int(one.weight.shape[-1]) for one in module.modules() if isinstance(one, torch.nn.Linear))
    return widths.most_common(1)[0][0] if widths else 1
