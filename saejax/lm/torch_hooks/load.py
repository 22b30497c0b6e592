"""A Hugging Face folder as a `TorchModel`, or as a `TorchShape` by its config.json alone."""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saejax.core.errors import ConfigError, DataError
from saejax.core.extras import installing
from saejax.core.files import read_json
from saejax.lm.points import HOOK_NAMES
from saejax.lm.torch_hooks.hooks import watching
from saejax.lm.torch_hooks.model import TorchModel, TorchShape
from saejax.lm.torch_hooks.probe import HEADS, KV_HEADS, config_number, from_module, text_config
from saejax.lm.weight_files import LARGEST_CONFIG, TensorFiles
from saejax.text import IdsAlone, Tokenizer

# What config.json files call their numbers of layers: n_layer, num_hidden_layers, encoder_layers.
_LAYERS = re.compile(r"layers$|^n(um)?_layer$")
# Tables of transformers whose models have a head over the vocabulary; the last of the first came after 5.0.
_DECODERS = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
_MASKED = "AutoModelForMaskedLM"
_GENERATES = re.compile("CausalLM|LMHead|ConditionalGeneration")
# Sizes, as config.json files call them.
_WIDTH_KEYS = ("hidden_size", "n_embd", "d_model", "dim")
_MLP = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


def load_torch(
    folder: Path,
    tokenizer: Tokenizer,
    identity: dict[str, Any],
    dtype: str = "float32",
    device: str = "",
    synonyms: Mapping[str, str] | None = None,
) -> TorchModel:
    """The model of a Hugging Face folder; its class by `kind_of`. No pickle, no code of the folder.

    For a model of encoder and decoder it loads the encoder.
    """
    torch, transformers = torch_and_transformers()
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:200]
        raise ConfigError(f"lm.device is {where!r}, which PyTorch cannot use here: {reason}") from None
    tensors, numbers = TensorFiles(folder).count()
    _refuse_sizes(read_json(folder / "config.json", LARGEST_CONFIG), tensors, str(folder))
    try:
        # Left open, transformers asks on the terminal whether to run the folder's code.
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        kind = kind_of(transformers, config)
        _refuse_larger(torch, kind, config, numbers)
        module = _from_pretrained(kind, folder, config, getattr(torch, dtype))
    except DataError:
        raise
    except Exception as error:  # transformers and torch raise many kinds for a configuration that cannot be
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"transformers cannot load the model in {folder} ({type(error).__name__}: {reason}). "
            "It needs config.json and safetensors of an architecture that transformers itself has."
        ) from None
    if config.is_encoder_decoder:
        module = module.get_encoder()
    module = module.to(where)
    tokenizer = tokenizer.for_rows(module.get_input_embeddings().weight.shape[0])
    return with_cls(from_module(module, tokenizer, identity, synonyms=synonyms))


def with_cls(lm: TorchModel) -> TorchModel:
    """The model with [CLS] for bos, where it is an encoder whose tokenizer has that token and no bos."""
    tokenizer = lm.tokenizer
    if lm.causal or tokenizer.bos_id is not None or isinstance(tokenizer, IdsAlone):
        return lm
    if (cls := tokenizer.backend.token_to_id("[CLS]")) is None:
        return lm
    return dataclasses.replace(lm, tokenizer=dataclasses.replace(tokenizer, bos_id=cls, bos_unknown=False))


def torch_and_transformers() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"lm.backend=torch needs PyTorch: {installing('torch')} ({error}). Or choose a model that "
            "the JAX decoder knows, with lm.backend=jax."
        ) from None
    return torch, transformers


def _refuse_sizes(value: Any, tensors: int, folder: str, key: str = "") -> None:
    """Refuses numbers of layers that the files cannot hold: transformers would build each layer before it looks."""
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_sizes(item, tensors, folder, name)
    elif isinstance(value, int) and _LAYERS.search(key) and value > tensors:
        raise DataError(
            f"{folder}: config.json says {key} = {value:,}, and there are {tensors:,} tensors in all. It is not the "
            "configuration of these weights."
        )


def _refuse_larger(torch: Any, kind: Any, config: Any, numbers: int) -> None:
    """Refuses a model with far more numbers than its files hold, before memory is taken for it.

    Twice as many are allowed, because weights that the files leave out are tied to weights that they have. Quantised
    weights are packed, several to a number.
    """
    with torch.device("meta"):
        wanted = sum(parameter.numel() for parameter in kind.from_config(config, trust_remote_code=False).parameters())
    packed = 32 if getattr(config, "quantization_config", None) else 1
    if wanted > (2 * numbers + 1_000_000) * packed:
        raise ValueError(f"config.json describes {wanted:,} parameters, and the files hold {numbers:,} numbers")


def kind_of(transformers: Any, config: Any) -> Any:
    """The class of transformers that reads this model, with the head over the vocabulary that the model has.

    transformers' own tables say what has one: a class called ForConditionalGeneration may be a decoder of images and
    text. Of a model of encoder and decoder the encoder is read, which has none.
    """
    if config.is_encoder_decoder:
        return transformers.AutoModel
    named = config.architectures or []
    kinds = [getattr(transformers, name) for name in (*_DECODERS, _MASKED) if hasattr(transformers, name)]
    fitting = [kind for kind in kinds if type(config) in kind._model_mapping]
    for kind in fitting:
        classes = kind._model_mapping[type(config)]
        if {one.__name__ for one in (classes if isinstance(classes, tuple) else (classes,))} & set(named):
            return kind
    if any(hasattr(transformers, name) for name in named):
        return transformers.AutoModel
    # A class of somebody else's, or none is named: then by the words of its name.
    words = " ".join(named) or "CausalLM"
    wanted = (_MASKED,) if "MaskedLM" in words else _DECODERS if _GENERATES.search(words) else ()
    return next((kind for kind in fitting if kind.__name__ in wanted), transformers.AutoModel)


def _from_pretrained(kind: Any, folder: Path, config: Any, dtype: Any) -> Any:
    wanted = {"config": config, "dtype": dtype, "local_files_only": True}
    wanted |= {"use_safetensors": True, "trust_remote_code": False}
    try:
        module, info = kind.from_pretrained(folder, **wanted, attn_implementation="sdpa", output_loading_info=True)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        module, info = kind.from_pretrained(folder, **wanted, attn_implementation="eager", output_loading_info=True)
    # A pooler comes after everything that is studied, and checkpoints of masked models have none.
    if missing := [name for name in info["missing_keys"] if "pooler" not in name]:
        raise ValueError(f"the weights {', '.join(sorted(missing)[:3])} are missing")
    return module


def torch_shape(folder: Path) -> TorchShape:
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
    config = text_config(module)
    total = sum(parameter.numel() for parameter in module.parameters())
    lists = [part for part in module.modules() if isinstance(part, torch.nn.ModuleList) and len(part) > 1]
    blocks: Any = max(lists, key=lambda part: sum(p.numel() for p in part.parameters()), default=[])
    inside = sum(p.numel() for block in blocks for p in block.parameters())
    n_layer, heads = max(1, len(blocks)), config_number(config, HEADS)
    width = config_number(config, _WIDTH_KEYS)
    if not width:  # the usual one
        widths_of_linears = Counter(int(m.weight.shape[-1]) for m in module.modules() if isinstance(m, torch.nn.Linear))
        width = max(widths_of_linears, key=widths_of_linears.__getitem__, default=1)
    d_mlp = config_number(config, _MLP) or 4 * width
    d_head = config_number(config, ("head_dim", "d_kv")) or (width // heads if heads else 0)
    widths = dict.fromkeys(HOOK_NAMES, width) | {"mlp_act": d_mlp, "attn_z": heads * d_head}
    in_blocks = {f"blocks.{i}.{name}": widths[name] for i in range(n_layer) for name in HOOK_NAMES}
    return TorchShape(
        n_layer=n_layer,
        d_model=width,
        n_head=heads,
        d_head=d_head,
        d_mlp=d_mlp,
        vocab_size=int(module.get_input_embeddings().weight.shape[0]),
        context_length=config_number(config, _CONTEXT) or 2**20,
        n_kv_head=config_number(config, KV_HEADS) or None,
        block=inside // n_layer,
        outer=total - inside // n_layer * n_layer,
        widths=in_blocks | _module_widths(torch, module),
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
