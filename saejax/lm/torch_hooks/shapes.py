"""The shapes of any model of transformers from its config.json: PyTorch's meta device, which holds no numbers."""

import dataclasses
import functools
from collections import Counter
from pathlib import Path
from typing import Any

from saejax.core.config import nearest
from saejax.core.errors import ConfigError, DataError
from saejax.lm.points import HOOK_NAMES
from saejax.lm.shape import ModelShape
from saejax.lm.torch_hooks.hooks import watching
from saejax.lm.torch_hooks.load import kind_of, torch_and_transformers
from saejax.lm.torch_hooks.probe import text_config

# As config.json files call them.
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_WIDTH_KEYS = ("hidden_size", "n_embd", "d_model", "dim")
_MLP = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


@dataclasses.dataclass(frozen=True)
class TorchPoints:
    """The hook points of a model that PyTorch runs: the names in blocks, then the places of modules.

    Attributes:
        widths: {hook point: width}.
    """

    widths: dict[str, int] = dataclasses.field(repr=False)

    def hook_points(self) -> dict[str, int]:
        return self.widths

    def hook_point(self, name: str) -> str:
        """The name itself, or a ConfigError with the nearest; a loaded model may know more names."""
        if name not in self.widths:
            raise ConfigError(f"The plan finds no hook point {name!r} in the model.{nearest(name, self.widths)}")
        return name


def torch_shape(folder: Path) -> ModelShape:
    """The shape of the model that config.json in `folder` describes; its own code is never run.

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
    return _shape(torch, module)


def _shape(torch: Any, module: Any) -> ModelShape:
    config = text_config(module)
    total = sum(parameter.numel() for parameter in module.parameters())
    lists = [part for part in module.modules() if isinstance(part, torch.nn.ModuleList) and len(part) > 1]
    blocks: Any = max(lists, key=lambda part: sum(p.numel() for p in part.parameters()), default=[])
    inside = sum(p.numel() for block in blocks for p in block.parameters())
    n_layer, heads = max(1, len(blocks)), config_number(config, _HEADS)
    width = config_number(config, _WIDTH_KEYS) or _usual_width(torch, module)
    d_mlp = config_number(config, _MLP) or 4 * width
    d_head = config_number(config, ("head_dim", "d_kv")) or (width // heads if heads else 0)
    widths = dict.fromkeys(HOOK_NAMES, width) | {"mlp_act": d_mlp, "attn_z": heads * d_head}
    in_blocks = {f"blocks.{i}.{name}": widths[name] for i in range(n_layer) for name in HOOK_NAMES}
    return ModelShape(
        model="",
        n_layer=n_layer,
        d_model=width,
        d_mlp=d_mlp,
        n_head=heads,
        kv_heads=config_number(config, _KV_HEADS) or heads,
        d_head=d_head,
        vocab_size=int(module.get_input_embeddings().weight.shape[0]),
        context_length=config_number(config, _CONTEXT) or 2**20,
        block=inside // n_layer,
        outer=total - inside // n_layer * n_layer,
        names=TorchPoints(in_blocks | _module_widths(torch, module)),
        config=None,
    )


def _module_widths(torch: Any, module: Any) -> dict[str, int]:
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


def config_number(config: Any, names: tuple[str, ...]) -> int:
    """The first of these that the configuration says as a number; 0 where it says none."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if type(value) is int), 0)


def _usual_width(torch: Any, module: Any) -> int:
    widths = Counter(int(one.weight.shape[-1]) for one in module.modules() if isinstance(one, torch.nn.Linear))
    return widths.most_common(1)[0][0] if widths else 1
