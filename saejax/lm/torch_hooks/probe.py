"""Any PyTorch module as a `TorchModel`: what is not known of it is measured on a few tokens."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from saejax.core.errors import ConfigError, DataError
from saejax.lm.aliases import LISTS, find_aliases
from saejax.lm.rows import WAYS, Chunk
from saejax.lm.torch_hooks.hooks import inputs_of, run_chunk, watching
from saejax.lm.torch_hooks.model import TorchConfig, TorchModel
from saejax.text import Tokenizer

# Of a token's values by their norm: what rounding may change between two ways of batching, at most and at least.
_SAME = {"float32": 1e-3, "bfloat16": 3e-2}
_LEAST = {"float32": 2e-6, "bfloat16": 8e-3}
_ROUNDING = {"float32": 1e-5, "bfloat16": 8e-3}
# Attention that looks no further than this many tokens, whatever a 4-D mask says.
_WINDOWS = ("sliding_window", "local_attention", "window_size", "attention_window", "attention_chunk_size")


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
        module(**inputs_of(module, chunk))
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
