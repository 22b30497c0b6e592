"""Any PyTorch module as a `TorchModel`: what its config does not say is measured on a few tokens."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from saejax.core.errors import ConfigError, DataError
from saejax.lm.aliases import LISTS, find_aliases
from saejax.lm.rows import WAYS, Chunk
from saejax.lm.torch_hooks.hooks import REFUSALS, evaluating, forward, result_of, results_for, watching
from saejax.lm.torch_hooks.model import TorchModel, TorchShape, versions
from saejax.text import IdsAlone, Tokenizer

# Attention that looks no further than this many tokens, whatever a 4-D mask says.
_WINDOWS = ("sliding_window", "local_attention", "window_size", "attention_window", "attention_chunk_size")
# As config.json files call numbers of heads.
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_CONTEXT = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length"),
    *("n_ctx", "block_size"),
)
# Tokens of a document, of a check of all that shows in short ones, and of a check of attention windows, at most.
_SHORT, _LONG = 7, 256
# Rounding between two ways of batching may change a token's values by this much, relative to their norm: at most and
# at least.
_MOST = {"float64": 1e-3, "float32": 1e-3, "float16": 1e-2, "bfloat16": 3e-2}
_LEAST = {"float64": 2e-6, "float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}
_ROUNDING = {"float64": 1e-5, "float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}
# Kinds of rotary positions, as transformers calls them: those that follow no length, and those that do.
_FIXED = ("default", "linear", "llama3", "proportional", "yarn")
_FOLLOWING = ("dynamic", "longrope", "su")
# The length of a model whose files name none; a position as late may be in no table.
_UNBOUNDED = 2**20


def from_module(
    module: Any,
    tokenizer: Tokenizer | None,
    identity: dict[str, Any],
    context_length: int = 0,
    synonyms: Mapping[str, str] | None = None,
) -> TorchModel:
    """Any torch module whose forward takes token ids [B, T] and gives one vector a token, as a `TorchModel`.

    It runs in eval mode, and is left in the mode in which it was.

    Args:
        tokenizer: None: the model takes ids alone.
        context_length: 0: from the module's `config`.

    Raises:
        ConfigError: no context length, or without a tokenizer no vocabulary.
        DataError: the module gives something else, has no float parameters, or mixes what is in one batch.
    """
    with evaluating(module):
        return _measured(module, tokenizer, identity, context_length, synonyms or {})


def _measured(
    module: Any, tokenizer: Tokenizer | None, identity: dict[str, Any], context_length: int, synonyms: Mapping[str, str]
) -> TorchModel:
    config = text_config(module)
    pad = getattr(config, "pad_token_id", None)
    length = context_length or _context_length(module, config)
    vocabulary = _vocabulary(module, config)
    if tokenizer is None:
        tokenizer = IdsAlone.of(vocabulary or _rows_of_first_table(module))
    elif vocabulary and tokenizer.rows is None:
        tokenizer = tokenizer.for_rows(vocabulary)
    vocabulary = vocabulary or tokenizer.largest_id + 1
    usable = [i for i in tokenizer.usable_ids if i < tokenizer.vocab_size and i != pad]
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    if dtype not in _MOST:
        raise DataError(f"{type(module).__name__} has parameters of {dtype}; hooks need one of {', '.join(_MOST)}.")
    windows = [getattr(config, name, None) for name in _WINDOWS]
    window = min([w for w in windows if isinstance(w, int) and w > 0], default=length)
    predicts = results_for(module, _drawn(usable, min(_SHORT, length))).shape[-1] == vocabulary
    mixed = _longest_mixed(module, config, _drawn(usable, min(_SHORT, length))[0], length, dtype)
    # Longer than the window if that is not too long, so that a window of another name shows too.
    longest = min(window + _SHORT + 1, mixed or length, _LONG)
    drawn = _drawn(usable, max(longest, min(_SHORT, length)))
    probe = drawn[:, : min(_SHORT, length)]
    causal = _is_causal(module, probe, usable)
    layers, widths, seen = _measure(module, Chunk(probe, _numbered(probe)), _layer_lists(module))
    aliases = find_aliases(layers, seen, _ROUNDING[dtype])
    way, long_way = (
        _choose_way(module, drawn[:, :size], causal, dtype, ways)
        for size, ways in ((min(window, longest), list(WAYS)), (longest, ["padded", "equal"]))
    )
    block = sum(p.numel() for layer in layers for p in module.get_submodule(layer).parameters()) // max(1, len(layers))
    shape = TorchShape(
        n_layer=len(layers),
        d_model=next((widths[place] for place in aliases.values()), next(iter(widths.values()), 0)),
        n_head=config_number(config, HEADS),
        d_head=config_number(config, ("head_dim", "d_kv", "d_head")),
        d_mlp=widths.get(aliases.get("blocks.0.mlp_act", ""), 0),
        vocab_size=vocabulary,
        context_length=length,
        n_kv_head=config_number(config, KV_HEADS) or None,
        block=block,
        outer=sum(p.numel() for p in module.parameters()) - block * len(layers),
        widths={name: widths[place] for name, place in aliases.items()} | widths,
    )
    return TorchModel(
        module=module,
        tokenizer=tokenizer,
        identity=identity | {"backend": "torch"},
        config=shape,
        widths=widths,
        aliases=aliases,
        synonyms=synonyms,
        causal=causal,
        predicts=predicts,
        way=way,
        long_way=long_way,
        window=min(window, longest),
        longest_mixed=mixed,
        versions=versions(module),
    )


def _vocabulary(module: Any, config: Any) -> int:
    """The number of ids that the module has embeddings of; 0 where neither it nor its configuration says it."""
    embeddings = getattr(module, "get_input_embeddings", lambda: None)()
    return config_number(config, ("vocab_size", "d_vocab")) if embeddings is None else int(embeddings.weight.shape[0])


def _rows_of_first_table(module: Any) -> int:
    """Rows of the first table of embeddings that is not called one of positions. Raises ConfigError: there is none."""
    import torch

    for name, child in module.named_modules():
        if isinstance(child, torch.nn.Embedding) and "pos" not in name.lower():
            return child.num_embeddings
    raise ConfigError(
        f"{type(module).__name__} does not say how many token ids it has. Give a tokenizer, or set "
        "module.config.vocab_size."
    )


def _drawn(usable: Sequence[int], length: int) -> np.ndarray:
    """Two texts of so many tokens, int64 [2, T]."""
    return np.random.default_rng(0).choice(usable, (2, length)).astype(np.int64)


def text_config(module: Any) -> Any:
    """The module's `config` (or `cfg`); of a model that reads more than text, that of the text. None: it has none."""
    config: Any = getattr(module, "config", None) or getattr(module, "cfg", None)
    try:
        return config.get_text_config()
    except (AttributeError, ValueError):  # not a configuration of transformers, or one with several such parts
        return config


def config_number(config: Any, names: tuple[str, ...]) -> int:
    """The first of these that the configuration says as a number; 0 where it says none."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if type(value) is int), 0)


def _context_length(module: Any, config: Any) -> int:
    import torch

    for name in _CONTEXT:
        length = getattr(config, name, None)
        if isinstance(length, int) and length > 0:
            break
    else:
        # Positions without a table (ALiBi, relative): the tokenizer's packing is the only bound.
        length = _UNBOUNDED if hasattr(config, "to_dict") else 0
    if not length:
        raise ConfigError("The module has no config that says how many tokens it reads; give context_length.")
    # RoBERTa's family counts positions from its padding id on.
    tables = [m for name, m in module.named_modules() if name.endswith("position_embeddings")]
    return length - max(
        (m.padding_idx + 1 for m in tables if isinstance(m, torch.nn.Embedding) and m.padding_idx), default=0
    )


def _layer_lists(module: Any) -> list[list[str]]:
    """Paths of the layers of each list of modules with a usual name, the longest list first."""
    lists = [
        [f"{name}.{i}" for i in range(len(child))]
        for name, child in module.named_modules()
        if name.rpartition(".")[2] in LISTS and type(child).__name__ == "ModuleList"
    ]
    return sorted(lists, key=len, reverse=True)


def _numbered(tokens_BT: np.ndarray) -> np.ndarray:
    return np.arange(tokens_BT.size).reshape(tokens_BT.shape)


def _measure(
    module: Any, chunk: Chunk, lists: Sequence[Sequence[str]]
) -> tuple[Sequence[str], dict[str, int], dict[str, np.ndarray]]:
    """(layers, {place: width} in the order passed, {place in a layer: values [tokens, d]}) by one pass of the module.

    Places are those with a vector a token. The layers are the first list that is passed: a model of images and text has
    layers that no text comes past. A module that runs several times in a pass (shared layers) has no place: it would
    not be said which time.
    """
    rows, length = chunk.tokens.shape
    widths: dict[str, int] = {}
    times: dict[str, int] = {}
    seen: dict[str, np.ndarray] = {}
    inside = tuple(f"{layer}." for layers in lists for layer in layers)

    def visit(place: str, value: Any) -> None:
        times[place] = times.get(place, 0) + 1
        if tuple(value.shape[:-1]) in ((rows, length), (rows * length,)):
            widths[place] = value.shape[-1]
            if place.startswith(inside) and inside:
                seen[place] = value.float().reshape(rows * length, -1).cpu().numpy().copy()

    places = [f"{name}.{side}" for name, _ in module.named_modules() if name for side in ("in", "out")]
    with watching(module, {place: functools.partial(visit, place) for place in places}):
        forward(module, chunk)
    once = {place: width for place, width in widths.items() if times[place] == 1}
    if not once:
        raise DataError("No module of the model gives one vector for each token; there is nothing to capture.")
    passed = [layers for layers in lists if layers and any(place.startswith(f"{layers[0]}.") for place in once)]
    return (passed or [[]])[0], once, {place: value for place, value in seen.items() if place in once}


def _is_causal(module: Any, tokens_BT: np.ndarray, usable: Sequence[int]) -> bool:
    """True where another last token changes the others' results by less than 1 % of its own change."""
    other = tokens_BT.copy()
    other[:, -1] = [next(i for i in usable if i != last) for last in tokens_BT[:, -1]]
    one, two = (result_of(module, Chunk(tokens, _numbered(tokens))) for tokens in (tokens_BT, other))
    return difference(one[:, :-1], two[:, :-1]) <= 0.01 * difference(one[:, -1:], two[:, -1:])


def _choose_way(module: Any, tokens_2T: np.ndarray, causal: bool, dtype: str, ways: Sequence[str]) -> str:
    """The first of `ways` that gives each document, packed with others, what it gives it alone.

    There are four documents of up to `_SHORT` tokens, and one of nearly T behind a short one. The last `_SHORT` tokens
    of each are compared; they are beyond any window of attention that is that much shorter than T.
    """
    first, second = tokens_2T[:, :_SHORT]
    # Two in the first row, in the others one each and padding; {(row, start): document}.
    trials = [{(0, 0): first[:3], (1, 0): first, (0, 3): second[:5], (2, 0): second}]
    if len(tokens_2T[0]) > _SHORT + 1:
        trials.append({(0, 0): first[:3], (0, 3): tokens_2T[1, :-3]})
    alone = [
        [result_of(module, Chunk(d[None], _numbered(d[None])))[0, -_SHORT:] for d in documents.values()]
        for documents in trials
    ]
    # By what it does to a document to stand behind another: what a model gives may hardly depend on its tokens.
    behind = np.concatenate([first[:3], second[:5]])[None]
    mixed = difference(result_of(module, Chunk(behind, _numbered(behind)))[0, 3:], alone[0][2])
    tolerance = max(min(_MOST[dtype], 0.1 * mixed), _LEAST[dtype])

    def is_right(name: str) -> bool:
        return all(
            difference(got, want) < tolerance
            for documents, wanted in zip(trials, alone, strict=True)
            for got, want in zip(_together(module, documents, causal, name), wanted, strict=True)
        )

    for name in ways:
        try:
            if is_right(name):
                return name
        except REFUSALS:
            continue  # a model that does not take such masks says so in one of these ways
    raise DataError("What the model gives a document depends on the others in the batch; it cannot be captured.")


def _together(module: Any, documents: Mapping[tuple[int, int], np.ndarray], causal: bool, way: str) -> list[np.ndarray]:
    """The last `_SHORT` results of each of the documents {(row, start): tokens}, in rows above one of padding."""
    length = max(start + len(document) for (_, start), document in documents.items())
    rows = np.full((max(row for row, _ in documents) + 2, max(length, _SHORT + 1)), documents[0, 0][0])
    segments, positions, number = np.full(rows.shape, -1), np.zeros_like(rows), np.full(rows.shape, -1)
    for i, ((row, start), document) in enumerate(documents.items()):
        span = slice(start, start + len(document))
        rows[row, span], segments[row, span], positions[row, span] = document, i, np.arange(len(document))
        number[row, span][-_SHORT:] = i
    out: dict[int, np.ndarray] = {}
    for chunk in WAYS[way](rows, positions, segments, causal):
        compared = (chunk.at >= 0) & (number.ravel()[chunk.at] >= 0)
        out |= dict(zip(chunk.at[compared].tolist(), result_of(module, chunk)[compared], strict=True))
    return [np.stack([out[at] for at in np.flatnonzero(number == i).tolist()]) for i in range(len(documents))]


def _longest_mixed(module: Any, config: Any, tokens_T: np.ndarray, length: int, dtype: str) -> int:
    """Tokens of documents that may share a forward pass; a longer one shares it with documents of its own length.

    It is `length` where frequencies follow no length, and 0 where it cannot be seen from which length on they do.
    `config` is of the text model, or None; `tokens_T` are any tokens, a few.
    """
    named, kinds = _lengths_and_kinds(config)
    follows = any(kind in _FOLLOWING for kind in kinds)
    # Where a configuration says nothing, a difference may come from what a batch does to sums, as in experts'.
    tolerance = _LEAST[dtype] if follows else _MOST[dtype]

    def stays(short: int, long: int) -> bool:
        """A document of `short` tokens has the same values beside its equal and beside one of `long` tokens."""
        return difference(*(_beside(module, tokens_T, short, other) for other in (long, short))) <= tolerance

    if length >= _UNBOUNDED or not _takes_positions(module, tokens_T):
        return length if all(kind in _FIXED for kind in kinds) else 0
    few = len(tokens_T)
    if not follows and all(stays(short, length) for short in {few, max(few, length // 2), *named} if short <= length):
        return length
    # The first length that is named: a later one may only seem to stay, in bfloat16.
    first = min([n for n in named if n > 1] + [length])
    return first if all(stays(short, first) for short in (min(few, first), max(1, first // 2))) else 0


def _beside(module: Any, tokens_T: np.ndarray, own: int, other: int) -> np.ndarray:
    """Values of tokens at positions from 0 to own - 1, in a pass with as many at positions from 0 to other - 1."""
    positions = np.stack([np.linspace(0, n - 1, len(tokens_T)).astype(np.int64) for n in (own, other)])
    tokens = np.stack([tokens_T] * 2)
    # Beside a mask, transformers takes no jump of the positions for a border between documents.
    return result_of(module, Chunk(tokens, np.zeros_like(tokens), np.ones_like(tokens, bool), positions))[0]


def _takes_positions(module: Any, tokens_T: np.ndarray) -> bool:
    """True where other positions give other values."""
    try:
        one, two = (_beside(module, tokens_T, own, len(tokens_T)) for own in (len(tokens_T), 1))
    except REFUSALS:
        return False
    return not np.array_equal(one, two)


def _lengths_and_kinds(config: Any) -> tuple[list[int], list[str]]:
    """(lengths at which frequencies may change, kinds of rotary positions) that a configuration names."""
    try:
        settings = config.to_dict()
    except AttributeError:  # none of transformers
        return [], []
    lengths = [n for name, n in _walk(settings) if name.endswith("max_position_embeddings") and type(n) is int]
    ropes = {name: value for name, value in settings.items() if name.startswith("rope_")}
    return lengths, [kind for name, kind in _walk(ropes) if name in ("rope_type", "type") and isinstance(kind, str)]


def _walk(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, str(key))
    else:
        yield name, value


def difference(one: np.ndarray, two: np.ndarray) -> float:
    """Largest ||a - b|| / ||b|| of all tokens; infinity where there is NaN."""
    norm = np.linalg.norm(two, axis=-1)
    error = np.linalg.norm(one - two, axis=-1) / np.maximum(norm, np.finfo(np.float32).tiny)
    return float(np.nan_to_num(error, nan=np.inf).max())
