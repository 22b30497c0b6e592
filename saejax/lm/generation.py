"""Text that the model continues, token by token, with keys and values kept between the steps.

    next = argmax logits                                          temperature 0 (greedy)
    next ~ softmax(logits / temperature), within top_p            else: the most likely tokens whose share reaches top_p

Rows of different lengths stand to the right: filling is in front, and nothing attends to it. Every step is the model of
`decoder.run`, so edits act on new tokens as they do on those of the prompt. Embeddings may stand before a prompt.
(Nucleus sampling: Holtzman et al. 2020.)

Shape letters as in `decoder`; T tokens that the kept keys have room for.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from saejax.core.errors import ConfigError, DataError
from saejax.lm import decoder
from saejax.lm.conventions import DecoderConfig
from saejax.lm.rows import check_ids

# What a step edits, by the place of each of its tokens in its row's text [B, S] (0 is the first, negative is filling),
# and by arrays that the caller gives along, such as a dictionary's parameters.
EditsAt = Callable[[jax.Array, Any], Mapping[str, decoder.Edit]]
Edits = Mapping[str, decoder.Edit] | EditsAt | None

# Embeddings [B, S, M] that stand in place of tokens, and where they do, bool [B, S].
Placed = tuple[jax.Array, jax.Array]

# (parameters, cache, tokens [B, S], key, given, placed) -> (the next token [B], the cache with these tokens), compiled.
Step = Callable[..., tuple[jax.Array, "Cache"]]

_MOST_PROGRAMS = 8
_LENGTH_STEP = 16  # prompts are filled up to a multiple of this, so that few lengths need programs of their own


# Logits are divided by the temperature in float32, where a smaller one overflows; it draws what 0 draws.
_COLDEST = 1e-6


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The choice of the next token.

    Attributes:
        tokens: how many are added at most.
        temperature: 0 takes the most likely token.
        top_p: only the most likely tokens whose probabilities add up to this are drawn from.
        seed: of the draws; the same seed draws the same tokens.
        stop: ids after which a row ends.

    Raises:
        ConfigError: a number out of its range.
    """

    tokens: int = 32
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value, right in (
            ("tokens", self.tokens, self.tokens >= 1),
            ("temperature", self.temperature, self.temperature == 0 or _COLDEST <= self.temperature <= 1 / _COLDEST),
            ("top_p", self.top_p, _COLDEST <= self.top_p <= 1),
        ):
            if not right:
                ranges = f"temperature 0 or from {_COLDEST:g} to {1 / _COLDEST:g}, top_p from {_COLDEST:g} to 1"
                raise ConfigError(f"{name} is {value}; tokens >= 1, {ranges}.")


@flax.struct.dataclass
class Cache:
    """Keys and values of each layer [B, G, T, D], tokens so far (with filling), and each row's filling, int32 [B]."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array
    filling: jax.Array


def start_cache(config: DecoderConfig, filling_B: jax.Array, room: int, dtype: Any = jnp.float32) -> Cache:
    """A cache of no token yet, with room for `room`."""
    shape = (filling_B.shape[0], config.kv_heads, room, config.d_head)
    keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(config.n_layer)) for _ in range(2))
    return Cache(keys, values, jnp.int32(0), filling_B.astype(jnp.int32))


def extend(
    config: DecoderConfig,
    params: decoder.Params,
    cache: Cache,
    tokens_BS: jax.Array,
    edits: Edits = None,
    given: Any = None,
    capture: Sequence[str] = (),
    placed: Placed | None = None,
) -> tuple[jax.Array, dict[str, jax.Array], Cache]:
    """(logits [B, S, V], {hook point: activation}, the cache with these tokens) of S more tokens of each row. Pure.

    The same as `decoder.run` on all tokens so far gives for the last S. attn_pattern has T keys. The caller sees to it
    that there is room. Tokens in whose place embeddings are `placed` are not looked at.
    """
    length, room = tokens_BS.shape[1], cache.keys[0].shape[2]
    column_S = cache.length + jnp.arange(length)
    place_BS = column_S[None] - cache.filling[:, None]
    new_keys_values: list[tuple[jax.Array, jax.Array]] = []

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, tap: decoder.Tap) -> jax.Array:
        at = (0, 0, cache.length, 0)
        k, v = (
            jax.lax.dynamic_update_slice(old, new, at)
            for old, new in ((cache.keys[layer], k), (cache.values[layer], v))
        )
        new_keys_values.append((k, v))
        mask = _visible(column_S, cache.filling, room, config.layer_windows[layer])
        return decoder.attended(config, q, k, v, mask, tap)

    attends = [functools.partial(attend, layer) for layer in range(config.n_layer)]
    named = edits(place_BS, given) if callable(edits) else edits or {}
    with jax.default_matmul_precision("highest" if params["W_E"].dtype == jnp.float32 else None):
        x_BSM = decoder.embed(config, params, tokens_BS)
        if placed is not None:
            x_BSM = jnp.where(placed[1][..., None], placed[0].astype(x_BSM.dtype), x_BSM)
        logits_BSV, captured = decoder.forward(
            config, params, x_BSM, jnp.maximum(place_BS, 0), attends, frozenset(capture), named
        )
    keys, values = zip(*new_keys_values, strict=True)
    return logits_BSV, captured, Cache(keys, values, cache.length + length, cache.filling)


def _visible(column_S: jax.Array, filling_B: jax.Array, room: int, window: int | None) -> jax.Array:
    """True where a new token reads a kept one, bool [B, S, T]: not filling, not after it, within the window."""
    back_ST = column_S[:, None] - jnp.arange(room)[None]
    seen_ST = (back_ST >= 0) if window is None else (back_ST >= 0) & (back_ST < window)
    # Filling reads itself: a softmax of nothing would be no number.
    own_ST = back_ST == 0
    return (seen_ST[None] & (jnp.arange(room)[None, None] >= filling_B[:, None, None])) | own_ST[None]


def choose(logits_BV: jax.Array, sampling: Sampling, key: jax.Array) -> jax.Array:
    """The next token of each row, int32 [B]."""
    logits_BV = logits_BV.astype(jnp.float32)
    if sampling.temperature == 0:
        return logits_BV.argmax(-1).astype(jnp.int32)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_p < 1:
        falling_BV = -jnp.sort(-logits_BV, axis=-1)
        before_BV = jnp.cumsum(jax.nn.softmax(falling_BV), axis=-1) - jax.nn.softmax(falling_BV)
        least_B1 = jnp.where(before_BV < sampling.top_p, falling_BV, jnp.inf).min(-1, keepdims=True)
        logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
    return jax.random.categorical(key, logits_BV).astype(jnp.int32)


def generate(
    config: DecoderConfig,
    params: decoder.Params,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    edits: Edits = None,
    given: Any = None,
    kept: dict[Sampling, Step] | None = None,
    prefixes: Sequence[np.ndarray] | None = None,
) -> Iterator[np.ndarray]:
    """The next token of each row, int [B], one array a step, as soon as it is known; -1 in rows that have ended.

    Ends when every row has, or after `sampling.tokens`. Two programs are compiled: one for the prompt, one for a token.
    Without edits they are kept for later prompts, of as many rows and about the same length.

    Args:
        kept: where programs with edits are kept, for later calls with this very function `edits` and other arrays
            `given`.
        prefixes: of each row embeddings [P, M] that stand before its prompt, as `decoder.run` takes them; P may be 0,
            and another for each row. For `edits` they are the first of the row's text.

    Raises:
        DataError: an empty prompt, an id that the model does not have, more tokens than its context with the prefix, or
            prefixes that are not one [P, M] for each row.
    """
    tokens_BS, filling_B, placed = lay_out(config, prompts, sampling.tokens, prefixes)
    columns = tokens_BS.shape[1]
    choice = dataclasses.replace(sampling, tokens=1, seed=0, stop=())
    if edits is None:
        step = _kept_without_edits(config, choice)
    else:
        programs = {} if kept is None else kept
        if choice not in programs:
            if len(programs) >= _MOST_PROGRAMS:
                programs.clear()
            programs[choice] = _step(config, choice, edits)
        step = programs[choice]
    cache = start_cache(config, jnp.asarray(filling_B), _rounded(columns + sampling.tokens), params["W_E"].dtype)
    going_B, root = np.ones(len(prompts), bool), jax.random.key(sampling.seed)
    new_BS = jnp.asarray(tokens_BS)
    for number in range(sampling.tokens):
        next_B, cache = step(params, cache, new_BS, jax.random.fold_in(root, number), given, placed)
        yield np.where(going_B, np.asarray(next_B), -1)
        going_B &= ~np.isin(np.asarray(next_B), sampling.stop)
        if not going_B.any():
            return
        new_BS, placed = next_B[:, None], None


def lay_out(
    config: DecoderConfig, prompts: Sequence[Sequence[int]], more: int, prefixes: Sequence[np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray, Placed | None]:
    """(tokens [B, S], filling [B], what is placed) of rows to the right, for `extend`; `more` tokens are to come."""
    lengths = [0] * len(prompts)
    if prefixes is not None:
        if len(prefixes) != len(prompts) or any(x.ndim != 2 or x.shape[1] != config.d_model for x in prefixes):
            shapes = ", ".join(str(list(prefix.shape)) for prefix in prefixes)
            wanted = f"each of the {len(prompts)} prompts needs one of [P, {config.d_model}]"
            raise DataError(f"The prefixes are {shapes}; {wanted}.")
        lengths = [len(prefix) for prefix in prefixes]
    longest = max((n + len(row) for n, row in zip(lengths, prompts, strict=True)), default=0)
    if not prompts or not all(map(len, prompts)):
        raise DataError("A prompt has no tokens: there is nothing to continue.")
    if (most := longest + more) > config.context_length:
        raise DataError(
            f"{longest} tokens of prompt and {more} more are {most}; the model reads {config.context_length}. Ask for "
            "fewer."
        )
    for row in prompts:
        check_ids("tokens", np.asarray([row]), config.vocab_size)
    columns = _rounded(longest)
    tokens_BS = np.stack([np.pad(np.asarray(row, np.int32), (columns - len(row), 0)) for row in prompts])
    filling_B = np.asarray([columns - n - len(row) for n, row in zip(lengths, prompts, strict=True)], np.int32)
    return tokens_BS, filling_B, None if prefixes is None else _placed(prefixes, filling_B, columns)


def _placed(prefixes: Sequence[np.ndarray], filling_B: np.ndarray, columns: int) -> Placed:
    """Each row's prefix right after its filling."""
    x_BSM = np.zeros((len(prefixes), columns, prefixes[0].shape[1]), np.float32)
    for x_SM, first, prefix in zip(x_BSM, filling_B, prefixes, strict=True):
        x_SM[first : first + len(prefix)] = prefix
    at_BS = np.arange(columns)[None] - filling_B[:, None]
    lengths_B = np.asarray([len(prefix) for prefix in prefixes])
    return jnp.asarray(x_BSM), jnp.asarray((at_BS >= 0) & (at_BS < lengths_B[:, None]))


def _rounded(length: int) -> int:
    return -(-length // _LENGTH_STEP) * _LENGTH_STEP


def _step(config: DecoderConfig, choice: Sampling, edits: Edits) -> Step:
    """jit of what `Step` says."""

    @functools.partial(jax.jit, donate_argnums=1)
    def step(
        params: decoder.Params, cache: Cache, tokens_BS: jax.Array, key: jax.Array, given: Any, placed: Placed | None
    ) -> tuple[jax.Array, Cache]:
        logits_BSV, _, cache = extend(config, params, cache, tokens_BS, edits, given, placed=placed)
        return choose(logits_BSV[:, -1], choice, key), cache

    return step


# Edits hold on to what they were made of, such as a model's parameters: here programs with edits are not kept.
_kept_without_edits = functools.lru_cache(maxsize=_MOST_PROGRAMS)(functools.partial(_step, edits=None))
