"""Any Hugging Face model, decoder or encoder, run by PyTorch and watched at any of its modules.

Hook points are places: a module's path as in `model.named_modules()` with `.in` (its first tensor argument) or `.out`
(its first tensor result; without a suffix, `.out`), as in `encoder.layer.2.output.out`. Where the layers are recognised
there are the names of the JAX decoder too, as in `blocks.2.mlp_out` (`saejax.lm.aliases`). Widths, names, whether
the model is causal and how documents are kept apart are measured at load, on a few tokens; nothing is from a table.

torch is imported by this file alone, in its functions: everything else works without it.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from saejax.core.errors import ConfigError, DataError
from saejax.lm.aliases import LISTS, find_aliases
from saejax.lm.forward import Edit, Forward
from saejax.lm.rows import WAYS, Chunk
from saejax.text import PackedRows, Tokenizer

_CPU_ROWS = 32
_MOST_ROWS = 512
# Of a token's values by their norm: what rounding may change between two ways of batching, at most and at least.
_SAME = {"float32": 1e-3, "bfloat16": 3e-2}
_LEAST = {"float32": 2e-6, "bfloat16": 8e-3}
_ROUNDING = {"float32": 1e-5, "bfloat16": 8e-3}
# Attention that looks no further than this many tokens, whatever a 4-D mask says.
_WINDOWS = ("sliding_window", "local_attention", "window_size", "attention_window", "attention_chunk_size")


class _Stop(Exception):
    """All that was wanted has been seen."""


@dataclasses.dataclass(frozen=True)
class TorchConfig:
    """What the rest of saejax asks of a model's configuration; d_model is the width of its layers."""

    context_length: int
    vocab_size: int
    n_layer: int
    d_model: int


@dataclasses.dataclass(frozen=True)
class TorchModel:
    """A PyTorch model with its tokenizer and hook points; made by `from_module` or `load_torch`.

    Attributes:
        module: in eval mode, on its device.
        identity: as a `LanguageModel`'s, with backend torch; part of a store's identity.
        widths: {place: width}, in the order in which the model passes them.
        aliases: {blocks.{i}.<name>: place}.
        synonyms: {name in TransformerLens: <name>}.
        causal: a token's values do not depend on later tokens.
        way, long_way: of keeping documents apart, of `saejax.lm.rows.WAYS`: in rows of up to `window` tokens, and in
            longer ones, where a 4-D mask would undo the model's own window of attention.
        window: tokens.
    """

    module: Any
    tokenizer: Tokenizer
    identity: dict[str, Any]
    config: TorchConfig
    widths: dict[str, int]
    aliases: dict[str, str]
    synonyms: Mapping[str, str]
    causal: bool
    way: str
    long_way: str
    window: int

    pure = False
    params: Any = dataclasses.field(default_factory=dict, init=False)

    # -------------------------------------------------------------------------------------------------- hook points

    def hook_points(self) -> dict[str, int]:
        """{hook point: width}: the names in blocks first, then every module's places."""
        return {alias: self.widths[place] for alias, place in self.aliases.items()} | self.widths

    def hook_point(self, name: str) -> str:
        """The canonical name of a hook point; a module's path alone is its `.out`, TransformerLens names are accepted.

        Raises:
            ConfigError: it does not exist; the message has the nearest that does.
        """
        match = re.fullmatch(r"(blocks\.\d+)\.(.+)", name)
        canonical = f"{match[1]}.{self.synonyms.get(match[2], match[2])}" if match else name
        there = self.hook_points()
        for candidate in (canonical, f"{name}.out"):
            if candidate in there:
                return candidate
        close = difflib.get_close_matches(canonical, there, n=1, cutoff=0.3)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        kinds = ", ".join(dict.fromkeys(alias.split(".")[2] for alias in self.aliases))
        blocks = f"blocks.0 to blocks.{self.config.n_layer - 1}, with {kinds}, and " if kinds else ""
        raise ConfigError(
            f"The model has no hook point {name!r}.{hint} There are {blocks}the paths of its modules with .in or .out "
            f"({', '.join(list(self.widths)[:3])}, ...)."
        )

    def _place(self, name: str) -> str:
        name = self.hook_point(name)
        return self.aliases.get(name, name)

    # ------------------------------------------------------------------------------------------------------ running

    def apply(
        self,
        params: Any,
        tokens: Any,
        positions: Any = None,
        segments: Any = None,
        capture: Sequence[str] = (),
        edits: Mapping[str, Edit] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """(logits [R, S, V], {hook point: [R, S, d]}) of packed rows, as JAX arrays; `params` is not used.

        What the model gives where it has no logits is its last hidden state. An edit gets and gives [R, S, d], once for
        each chunk of rows, and must change each document alone; what a module reads or gives is replaced by its values.

        Raises:
            ConfigError: an edit that changes the shape, or two at one place.
        """
        tokens_RS, positions_RS, segments_RS = _full(tokens, positions, segments)
        places = {name: self._place(name) for name in capture}
        changes = {self._place(name): edit for name, edit in (edits or {}).items()}
        if len(changes) < len(edits or {}):
            raise ConfigError(f"Two edits at one hook point under two names: {', '.join(edits or {})}. Compose them.")
        seen = self._run(tokens_RS, positions_RS, segments_RS, ["", *places.values()], changes)
        # The last hidden state or the logits, under the name of the model itself.
        arrays = {place: jnp.asarray(value.float().cpu().numpy()) for place, value in seen.items()}
        arrays = {place: value.reshape(*tokens_RS.shape, -1) for place, value in arrays.items()}
        return arrays[""], {name: arrays[place] for name, place in places.items()}

    def activations(self, text: str, hook_point: str) -> np.ndarray:
        """Activations [S, d] float32 of one text at one hook point, the model's bos in front."""
        ids = ([] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]) + self.tokenizer.encode(text)
        if len(ids) > self.config.context_length:
            raise DataError(f"The text has {len(ids)} tokens; the model reads {self.config.context_length}.")
        place = self._place(hook_point)
        return self._run(*_full([ids]), [place], {})[place].float().cpu().numpy()

    def measures_loss(self, names: Sequence[str]) -> bool:
        """Whether the logits are of the next token and what is put in at these hook points goes on into them.

        At resid_mid it would reach the norm that reads it, but not the residual stream.
        """
        predicts = self.causal and hasattr(self.module, "lm_head")
        predicts = predicts or (
            self.causal and getattr(self.module, "get_output_embeddings", lambda: None)() is not None
        )
        return predicts and not any(self.hook_point(name).endswith(".resid_mid") for name in names)

    def _head(self) -> Any:
        """The unembedding of a model that predicts the next token, or None."""
        return getattr(self.module, "get_output_embeddings", lambda: None)() if self.causal else None

    def readout(self) -> tuple[jax.Array, jax.Array] | None:
        """(scale of the final norm [D], W_U [D, V]), float32; None for a model that does not predict the next token.

        The final norm is the last module outside the layers that is called a norm and has the model's width. Its scale
        is measured: of +-1 in turn, whose mean is 0 and mean square 1, it gives the scale and its bias.
        """
        import torch

        head = self._head()
        if head is None or getattr(head, "weight", None) is None:
            return None
        W_U_DV = jnp.asarray(head.weight.detach().float().cpu().numpy().T)
        norms = [
            module
            for name, module in self.module.named_modules()
            if "norm" in type(module).__name__.lower() and not re.search(r"\.\d+\.", name)
        ]
        norms = [norm for norm in norms if getattr(norm, "weight", head.weight).shape == (len(W_U_DV),)]
        if not norms:
            return jnp.ones(len(W_U_DV)), W_U_DV
        sign_D = torch.ones_like(norms[-1].weight)
        sign_D[1::2] = -1
        with torch.inference_mode():
            scale_D = sign_D * (norms[-1](sign_D) - norms[-1](-sign_D)) / 2
        return jnp.asarray(scale_D.float().cpu().numpy()), W_U_DV

    def rows_that_fit(self, names: Sequence[str], length: int) -> int:
        """Rows of `length` tokens for a capture: the most, of 512, 256, ..., that the GPU holds; on a CPU 32."""
        if self._device().type != "cuda":
            return _CPU_ROWS
        places = [self._place(name) for name in names]

        def attempt(rows: int) -> None:
            tokens_RS = np.ones((rows, length), np.int32)
            self._run(*_full(tokens_RS), places, {})

        return find_batch_rows(attempt, _MOST_ROWS)

    def make_forward(self, names: Sequence[str], shape: tuple[int, int], mesh: Mesh) -> Forward:
        """packed rows [R, S] -> ({hook point: bfloat16 [R S, d]}, finite bool [R S]).

        The model runs no further than the last hook point. On a GPU the results are still under way when this returns;
        whoever reads them (`np.asarray`) waits. Padding is zeros.

        Raises:
            DataError: out of memory.
        """
        import torch

        places = {name: self._place(name) for name in names}

        def forward(packed: PackedRows) -> Any:
            try:
                seen = self._run(packed.tokens, packed.positions, packed.segments, list(places.values()), {})
            except RuntimeError as error:
                if not _out_of_memory(error):
                    raise
                raise DataError(
                    f"The GPU has no memory for {len(packed.tokens)} rows of {packed.tokens.shape[1]} tokens. Lower "
                    "capture.batch_rows, or set it to 0 to have it found."
                ) from None
            finite = torch.stack([torch.isfinite(value).all(-1) for value in seen.values()]).all(0)
            stored = {place: _to_host(value.to(torch.bfloat16)) for place, value in seen.items()}
            return {name: stored[place] for name, place in places.items()}, _to_host(finite)

        return forward

    def _run(
        self,
        tokens_RS: np.ndarray,
        positions_RS: np.ndarray,
        segments_RS: np.ndarray,
        places: Sequence[str],
        edits: Mapping[str, Edit],
    ) -> dict[str, Any]:
        """{place: tensor [R S, d]} of packed rows, zeros at padding; the place "" is the model's own result."""
        import torch

        way = self.way if tokens_RS.shape[1] <= self.window else self.long_way
        count = tokens_RS.size
        out: dict[str, Any] = {}
        with torch.inference_mode():
            for chunk in WAYS[way](tokens_RS, positions_RS, segments_RS, self.causal):
                at = torch.from_numpy(chunk.at.ravel()).to(self._device())
                changes = {place: _edit(edit, place, at, tokens_RS.shape) for place, edit in edits.items()}
                for place, value in run_chunk(self.module, chunk, places, changes).items():
                    full = out.setdefault(place, value.new_zeros(count, value.shape[-1]))
                    full[at[at >= 0]] = value.reshape(-1, value.shape[-1])[at >= 0]
            if not out:  # padding alone
                widths = self.widths | {"": self.config.vocab_size}
                out = {place: torch.zeros(count, widths[place], device=self._device()) for place in places}
        return out

    def _device(self) -> Any:
        return next(self.module.parameters()).device


def _full(tokens: Any, positions: Any = None, segments: Any = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed rows as numpy arrays; by default one document a row."""
    tokens_RS = np.asarray(tokens)
    positions_RS = np.arange(tokens_RS.shape[1])[None].repeat(len(tokens_RS), 0) if positions is None else positions
    segments_RS = np.zeros_like(tokens_RS) if segments is None else segments
    return tokens_RS, np.asarray(positions_RS), np.asarray(segments_RS)


def _edit(edit: Edit, place: str, at: Any, shape: tuple[int, int]) -> Callable[[Any], Any]:
    """The edit of packed rows [R, S, d] as one of a chunk's values; what is padding stays."""
    import torch

    def change(value: Any) -> Any:
        rows = value.reshape(-1, value.shape[-1])
        full = rows.new_zeros(shape[0] * shape[1], rows.shape[1])
        full[at[at >= 0]] = rows[at >= 0]
        given = jnp.asarray(full.float().cpu().numpy()).reshape(*shape, -1)
        edited = np.array(edit(given), np.float32)
        if edited.shape != given.shape:
            raise ConfigError(f"The edit at {place} made {edited.shape} of {given.shape}; it must keep the shape.")
        new = torch.from_numpy(edited).reshape(full.shape).to(full)
        # `at` is -1 at padding, which takes some row and does not keep it.
        return torch.where((at >= 0)[:, None], new[at], rows).reshape(value.shape)

    return change


# ------------------------------------------------------------------------------------------------------------- hooks


def run_chunk(
    module: Any, chunk: Chunk, places: Sequence[str], edits: Mapping[str, Callable[[Any], Any]] | None = None
) -> dict[str, Any]:
    """{place: tensor [B, T, d]} of one forward pass, which ends at the last place wanted, leaving no hooks behind."""
    missing = set(places)
    seen: dict[str, Any] = {}

    def visit(place: str, value: Any) -> Any:
        edit = (edits or {}).get(place)
        new = value if edit is None else edit(value)
        if place in missing:
            # A later module may change the tensor in place.
            seen[place] = new.reshape(*chunk.tokens.shape, -1).clone()
            missing.discard(place)
            if not missing:
                raise _Stop
        return None if edit is None else new

    visits = {p: functools.partial(visit, p) for p in {*places, *(edits or {})} if p}
    with contextlib.suppress(_Stop), watching(module, visits):
        result = _first_tensor(module(**_inputs(module, chunk)))
        if missing - {""}:
            raise DataError(f"The model did not come past {', '.join(sorted(missing - {''}))} in this forward pass.")
        seen[""] = result.reshape(*chunk.tokens.shape, -1)
    return seen


@contextlib.contextmanager
def watching(module: Any, visits: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
    """Calls {place: value -> replacement or None} whenever the module comes past; the hooks are gone afterwards."""

    def before(visit: Callable[[Any], Any], _: Any, args: Any, kwargs: Any) -> Any:
        flat = [*args, *kwargs.values()]
        at = next((i for i, value in enumerate(flat) if _is_values(value)), None)
        new = None if at is None else visit(flat[at])
        if new is None:
            return None
        flat[at] = new  # type: ignore[index]
        return tuple(flat[: len(args)]), dict(zip(kwargs, flat[len(args) :], strict=True))

    def after(visit: Callable[[Any], Any], _: Any, __: Any, output: Any) -> Any:
        value = _first_tensor(output)
        new = None if value is None else visit(value)
        if new is None or not isinstance(output, tuple):
            return new
        return tuple(new if item is value else item for item in output)

    with contextlib.ExitStack() as stack:
        for place, visit in visits.items():
            path, _, side = place.rpartition(".")
            child = module.get_submodule(path)
            if side == "in":
                handle = child.register_forward_pre_hook(functools.partial(before, visit), with_kwargs=True)
            else:
                handle = child.register_forward_hook(functools.partial(after, visit))
            stack.callback(handle.remove)
        yield


def _is_values(value: Any) -> bool:
    return hasattr(value, "is_floating_point") and value.is_floating_point()


def _first_tensor(output: Any) -> Any:
    """The values in a module's result: a tensor, or the first one of a tuple or of a Hugging Face output."""
    if _is_values(output):
        return output
    items = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return next((item for item in items if _is_values(item)), None)


def _takes(module: Any) -> frozenset[str]:
    return frozenset(inspect.signature(module.forward).parameters)


def _inputs(module: Any, chunk: Chunk) -> dict[str, Any]:
    """What `module.forward` takes of a chunk; how well it listens is for `choose_way` to find out."""
    import torch

    weight = next(module.parameters())
    takes = _takes(module)
    inputs: dict[str, Any] = {"input_ids": torch.from_numpy(chunk.tokens).to(weight.device)}
    if chunk.mask is not None and "attention_mask" in takes:
        mask = torch.from_numpy(chunk.mask).to(weight.device)
        if mask.ndim == 4:  # added to the scores: that is what every attention takes
            lowest = torch.finfo(weight.dtype).min
            mask = torch.zeros_like(mask, dtype=weight.dtype).masked_fill(~mask, lowest)
        inputs["attention_mask"] = mask if mask.ndim == 4 else mask.long()
    if chunk.positions is not None and "position_ids" in takes:
        inputs["position_ids"] = torch.from_numpy(chunk.positions).to(weight.device)
    if "use_cache" in takes:
        inputs["use_cache"] = False
    return inputs


def find_batch_rows(attempt: Callable[[int], object], start: int) -> int:
    """The largest of start, start / 2, ... with which `attempt` does not run out of memory.

    Raises:
        DataError: one row is too much.
    """
    rows = start
    while rows:
        try:
            attempt(rows)
            return rows
        except RuntimeError as error:
            if not _out_of_memory(error):
                raise
        # Only here, where the failed attempt's tensors are no longer held by its traceback.
        _free()
        rows //= 2
    raise DataError("The GPU has no memory for a single row. Lower text.context_length, or set lm.dtype=bfloat16.")


def _out_of_memory(error: RuntimeError) -> bool:
    return type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error)


def _free() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _OnItsWay:
    """An array that is being copied from the GPU; numpy waits for it."""

    def __init__(self, value: Any):
        import torch

        self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._host.copy_(value, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._done.synchronize()
        return np.asarray(_as_numpy(self._host), dtype)


def _to_host(value: Any) -> Any:
    return _OnItsWay(value) if value.is_cuda else _as_numpy(value)


def _as_numpy(value: Any) -> np.ndarray:
    import torch

    if value.dtype == torch.bfloat16:  # which numpy has from ml_dtypes, and torch does not know
        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


# ----------------------------------------------------------------------------------------------------------- loading


def load_torch(
    folder: Path,
    tokenizer: Tokenizer,
    identity: dict[str, Any],
    dtype: str = "float32",
    device: str = "",
    synonyms: Mapping[str, str] | None = None,
) -> TorchModel:
    """The model of a Hugging Face folder; its class by config.json's `architectures`. No pickle, no code of the folder.

    Of a model of encoder and decoder the encoder.

    Raises:
        ConfigError: no torch, or a device that is not there.
        DataError: transformers cannot load it, or weights are missing.
    """
    torch, transformers = _torch()
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:200]
        raise ConfigError(f"lm.device is {where!r}, which PyTorch cannot use here: {reason}") from None
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        module = _from_pretrained(transformers, folder, config, getattr(torch, dtype))
    except (ValueError, OSError, KeyError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"transformers cannot load the model in {folder} ({type(error).__name__}: {reason}). "
            "It needs config.json and safetensors of an architecture that transformers itself has."
        ) from None
    if config.is_encoder_decoder:
        module = module.get_encoder()
    module = module.to(where)
    largest, rows = tokenizer.largest_id, module.get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise DataError(
            f"{folder}: the tokenizer has the id {largest}, the model only {rows} tokens (0 to {rows - 1}); "
            "they do not belong together."
        )
    lm = from_module(module, tokenizer, identity, synonyms=synonyms)
    cls = tokenizer.backend.token_to_id("[CLS]")
    if lm.causal or tokenizer.bos_id is not None or cls is None:
        return lm
    return dataclasses.replace(lm, tokenizer=dataclasses.replace(tokenizer, bos_id=cls))


def _torch() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"lm.backend=torch needs PyTorch, an extra: pip install 'saejax[torch]' ({error}). Or choose a model that "
            "the JAX decoder knows, with lm.backend=jax."
        ) from None
    return torch, transformers


def _from_pretrained(transformers: Any, folder: Path, config: Any, dtype: Any) -> Any:
    named = " ".join(config.architectures or ["ForCausalLM"])
    classes = ["AutoModel"]
    if "MaskedLM" in named:
        classes.insert(0, "AutoModelForMaskedLM")
    if ("ForCausalLM" in named or "LMHead" in named) and not config.is_encoder_decoder:
        classes.insert(0, "AutoModelForCausalLM")
    kinds = [getattr(transformers, name) for name in classes]
    kind = next(k for k in kinds if type(config) in k._model_mapping or k is kinds[-1])
    wanted = {"config": config, "dtype": dtype, "use_safetensors": True, "local_files_only": True}
    try:
        module, info = kind.from_pretrained(folder, **wanted, attn_implementation="sdpa", output_loading_info=True)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        module, info = kind.from_pretrained(folder, **wanted, attn_implementation="eager", output_loading_info=True)
    # A pooler is above all that is studied, and checkpoints of masked models have none.
    if missing := [name for name in info["missing_keys"] if "pooler" not in name]:
        raise ValueError(f"the weights {', '.join(sorted(missing)[:3])} are missing")
    return module


def from_module(
    module: Any,
    tokenizer: Tokenizer,
    identity: dict[str, Any],
    context_length: int = 0,
    synonyms: Mapping[str, str] | None = None,
) -> TorchModel:
    """Any torch module whose forward takes `input_ids` [B, T] and gives one vector a token, as a `TorchModel`.

    Args:
        context_length: 0: from the module's `config`.

    Raises:
        ConfigError: no context length.
        DataError: the module gives something else, or mixes what is in one batch.
    """
    import torch

    module = module.eval()
    own = getattr(module, "config", None)
    pad = getattr(own, "pad_token_id", None)
    length = context_length or _context_length(module, own)
    usable = [i for i in range(min(tokenizer.vocab_size, tokenizer.largest_id + 1)) if i != pad]
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    with torch.inference_mode():
        probe = np.random.default_rng(0).choice(usable, (2, min(7, length))).astype(np.int64)
        causal = _is_causal(module, probe, usable)
        layers = _layers(module)
        widths, seen = _measure(module, Chunk(probe, _at(probe)), layers)
        aliases = find_aliases(layers, seen, _ROUNDING[dtype])
        way, long_way = (_choose_way(module, probe, causal, dtype, ways) for ways in (list(WAYS), ["padded", "equal"]))
    windows = [getattr(own, name, None) for name in _WINDOWS]
    embeddings = getattr(module, "get_input_embeddings", lambda: None)()
    vocabulary = tokenizer.largest_id + 1 if embeddings is None else embeddings.weight.shape[0]
    d_model = next((widths[place] for place in aliases.values()), next(iter(widths.values()), 0))
    return TorchModel(
        module=module,
        tokenizer=tokenizer,
        identity=identity | {"backend": "torch"},
        config=TorchConfig(length, vocabulary, len(layers), d_model),
        widths=widths,
        aliases=aliases,
        synonyms=synonyms or {},
        causal=causal,
        way=way,
        long_way=long_way,
        window=min([w for w in windows if isinstance(w, int) and w > 0], default=length),
    )


def _context_length(module: Any, config: Any) -> int:
    import torch

    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length"):
        length = getattr(config, name, None)
        if isinstance(length, int) and length > 0:
            break
    else:
        # Positions without a table (ALiBi, relative): the tokenizer's packing is the only bound.
        length = 2**20 if config is not None else 0
    if not length:
        raise ConfigError("The module has no config that says how many tokens it reads; give context_length.")
    # RoBERTa's family counts positions from its padding id on.
    tables = [m for name, m in module.named_modules() if name.endswith("position_embeddings")]
    return length - max(
        (m.padding_idx + 1 for m in tables if isinstance(m, torch.nn.Embedding) and m.padding_idx), default=0
    )


def _layers(module: Any) -> list[str]:
    """Paths of the layers: of the longest list of modules with a usual name; none where there is no such list."""
    lists = {
        name: len(child)
        for name, child in module.named_modules()
        if name.rpartition(".")[2] in LISTS and type(child).__name__ == "ModuleList"
    }
    longest = max(lists, key=lambda name: lists[name], default="")
    return [f"{longest}.{i}" for i in range(lists.get(longest, 0))]


def _at(tokens_BT: np.ndarray) -> np.ndarray:
    return np.arange(tokens_BT.size).reshape(tokens_BT.shape)


def _measure(module: Any, chunk: Chunk, layers: Sequence[str]) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """({place: width} in the order passed, {place in a layer: values [tokens, d]}) of all places with a vector a token.

    A module that runs several times in a pass (shared layers) has no place: it would not be said which time.
    """
    rows, length = chunk.tokens.shape
    widths: dict[str, int] = {}
    times: dict[str, int] = {}
    seen: dict[str, np.ndarray] = {}
    inside = tuple(f"{layer}." for layer in layers)

    def visit(place: str, value: Any) -> None:
        times[place] = times.get(place, 0) + 1
        if tuple(value.shape[:-1]) in ((rows, length), (rows * length,)):
            widths[place] = value.shape[-1]
            if place.startswith(inside) and inside:
                seen[place] = value.float().reshape(rows * length, -1).cpu().numpy().copy()

    places = [f"{name}.{side}" for name, _ in module.named_modules() if name for side in ("in", "out")]
    with watching(module, {place: functools.partial(visit, place) for place in places}):
        module(**_inputs(module, chunk))
    once = {place: width for place, width in widths.items() if times[place] == 1}
    if not once:
        raise DataError("No module of the model gives one vector for each token; there is nothing to capture.")
    return once, {place: value for place, value in seen.items() if place in once}


def _result(module: Any, chunk: Chunk) -> np.ndarray:
    return run_chunk(module, chunk, [""])[""].float().cpu().numpy()


def _is_causal(module: Any, tokens_BT: np.ndarray, usable: Sequence[int]) -> bool:
    """Whether another last token changes the results at the others by less than a hundredth of its own change."""
    other = tokens_BT.copy()
    other[:, -1] = [next(i for i in usable if i != last) for last in tokens_BT[:, -1]]
    one, two = (_result(module, Chunk(tokens, _at(tokens))) for tokens in (tokens_BT, other))
    return _difference(one[:, :-1], two[:, :-1]) <= 0.01 * _difference(one[:, -1:], two[:, -1:])


def _choose_way(module: Any, tokens_BT: np.ndarray, causal: bool, dtype: str, ways: Sequence[str]) -> str:
    """The first of `ways` that gives each document, packed with others, what it gives it alone.

    Raises:
        DataError: none does, as in a model whose batch is not independent rows.
    """
    documents = [tokens_BT[0, :3], tokens_BT[0], tokens_BT[1, :5], tokens_BT[1]]
    # Two in the first row, in the others one each and padding.
    places = [(0, 0), (1, 0), (0, 3), (2, 0)]
    rows = np.zeros((3, 8), np.int64) + tokens_BT[0, 0]
    segments, positions = np.full(rows.shape, -1), np.zeros_like(rows)
    for i, ((row, start), document) in enumerate(zip(places, documents, strict=True)):
        span = slice(start, start + len(document))
        rows[row, span], segments[row, span], positions[row, span] = document, i, np.arange(len(document))
    alone = [_result(module, Chunk(d[None], _at(d[None])))[0] for d in documents]
    # By what it does to a document to stand behind another: what a model gives may hardly depend on its tokens.
    mixed = _difference(_result(module, Chunk(rows[:1], _at(rows[:1])))[0, 3:], alone[2])
    tolerance = max(min(_SAME[dtype], 0.1 * mixed), _LEAST[dtype])
    for name in ways:
        try:
            out = np.zeros((rows.size, alone[0].shape[-1]), np.float32)
            for chunk in WAYS[name](rows, positions, segments, causal):
                kept = chunk.at >= 0
                out[chunk.at[kept]] = _result(module, chunk)[kept]
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
            continue  # a model that does not take such masks says so in one of these ways
        at = [row * rows.shape[1] + start for row, start in places]
        if all(_difference(out[a : a + len(x)], x) < tolerance for a, x in zip(at, alone, strict=True)):
            return name
    raise DataError("What the model gives a document depends on the others in the batch; it cannot be captured.")


def _difference(one: np.ndarray, two: np.ndarray) -> float:
    """Largest ||a - b|| / ||b|| of all tokens; infinity where there is NaN."""
    norm = np.linalg.norm(two, axis=-1)
    error = np.linalg.norm(one - two, axis=-1) / np.maximum(norm, np.finfo(np.float32).tiny)
    return float(np.nan_to_num(error, nan=np.inf).max())
