"""A language model of two layers with its text, coders for it, and what evaluation measures of them, done by hand."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers

from saejax.coders import Coder, CoderConfig, Latents, Sites, build
from saejax.lm import LanguageModel, decoder
from saejax.lm.conventions import DecoderConfig
from saejax.text import PackedRows, Packer, Source, Tokenizer


@dataclasses.dataclass(frozen=True)
class Batch:
    """Arrays of one batch; `latents` are dense or sparse, `f` the same dense."""

    x: np.ndarray
    x_hat: np.ndarray
    latents: Latents
    f: np.ndarray
    keep: np.ndarray


def oracle(batches: list[Batch]) -> dict[str, float]:
    """The definitions, over all kept tokens at once."""
    x, x_hat, f = (
        np.concatenate([getattr(b, name)[b.keep] for b in batches]).astype(np.float64) for name in ("x", "x_hat", "f")
    )
    e = x - x_hat
    norms = np.sqrt((x**2).sum(1))
    total_j = ((x - x.mean(0)) ** 2).sum(0)
    active = (f != 0).sum(1)
    return {
        "l0": active.mean(),
        "fve": 1 - (e**2).sum() / total_j.sum(),
        "r2": np.mean([1 - (e[:, j] ** 2).sum() / total_j[j] for j in range(x.shape[1])]),
        "fve_centred_error": 1 - e.var(0).sum() / x.var(0).sum(),
        "relative_error": (e**2).sum() / (x**2).sum(),
        "relative_norm_error": (np.sqrt((e**2).sum(1)) / norms).mean(),
        "mse": (e**2).mean(),
        "cosine": ((x * x_hat).sum(1) / norms / np.sqrt((x_hat**2).sum(1))).mean(),
        "zero_fraction": (f == 0).mean(),
        "dead_fraction": (f == 0).all(0).mean(),
    }


BOS, SPECIAL, ROW = 60, 61, 24
HOOK = "blocks.0.resid_post"


def tiny_lm(seed: int = 0, activation: str = "gelu_new") -> LanguageModel:
    """Two random layers, 62 tokens; nothing is zero or one, so that every part of the model matters."""
    backend = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(BOS)}, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<bos>", "<mask>"])
    tokenizer = Tokenizer(backend, BOS, frozenset({BOS, SPECIAL}), "0")
    config = DecoderConfig(2, 16, 2, 8, 24, 62, ROW, activation, 1e-5, True)
    shapes = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.4, leaf.shape).astype(np.float32), shapes)
    return LanguageModel(config, params, tokenizer, {"model": f"tiny{seed or ''}"})


def source(texts: list[str]) -> Source:
    """All documents held out."""
    return Source({}, lambda start: ((i, f"doc{i}", str(i), t) for i, t in enumerate(texts) if i >= start), 1.0)


def documents(count: int = 14, seed: int = 0) -> list[str]:
    """Lengths from 1 to 60 words, special tokens among them."""
    rng = np.random.default_rng(seed)
    words = [rng.integers(0, BOS, rng.integers(1, 60)) for _ in range(count)]
    return [" ".join("<mask>" if rng.random() < 0.1 else f"w{w}" for w in text) for text in words]


def pack_all(lm: LanguageModel) -> PackedRows:
    """All documents in one batch, with two rows of padding."""
    packer = Packer(source(documents()), lm.tokenizer, ROW)
    rows = sum(len(b.tokens) for b in packer.batches("heldout", 1))
    (batch,) = packer.batches("heldout", rows + 2)
    assert (batch.segments[-2:] == -1).all() and batch.segments.max() >= 2
    return batch


def arrays(packed: PackedRows) -> dict[str, jax.Array]:
    return {name: jnp.asarray(getattr(packed, name)) for name in ("tokens", "positions", "segments", "keep")}


Activations = dict[str, np.ndarray]


def log_p(lm: LanguageModel, packed: PackedRows, replacements: Activations) -> np.ndarray:
    """float64 log probabilities [R, S, V] of a run with activations replaced by constant arrays."""

    def instead(value: np.ndarray) -> decoder.Edit:
        return lambda _: jnp.asarray(value, jnp.float32)

    edits = {name: instead(value) for name, value in replacements.items()}
    logits, _ = lm.run(packed.tokens, packed.positions, packed.segments, edits=edits)
    shifted = np.asarray(logits, np.float64)
    shifted = shifted - shifted.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def splice_oracle(
    lm: LanguageModel, packed: PackedRows, y_hat: Activations, made: Activations | None = None
) -> dict[str, float]:
    """Three separate runs, then a loop over every pair of neighbouring tokens.

    A special token is not replaced, but may see tokens that were: at a later site it keeps what it has after the
    edits at the earlier ones. So the constant arrays are made one site after the other, in the order of the blocks.
    `made`: such arrays, in place of those of y_hat.
    """
    keep = packed.keep[:, :, None]

    def with_edits(values: Activations) -> np.ndarray:
        done: Activations = {}
        for name in sorted(values):
            edits = {at: lambda _, value=value: jnp.asarray(value, jnp.float32) for at, value in done.items()}
            _, seen = lm.run(packed.tokens, packed.positions, packed.segments, capture=[name], edits=edits)
            done[name] = np.where(keep, values[name], np.asarray(seen[name]))
        return log_p(lm, packed, done)

    clean = log_p(lm, packed, {})
    sae = log_p(lm, packed, made) if made else with_edits(y_hat)
    zero = with_edits({name: np.zeros_like(value) for name, value in y_hat.items()})
    rows: list[tuple[float, float, float, float]] = []
    for r in range(len(packed.tokens)):
        for s in range(ROW - 1):
            if packed.segments[r, s] >= 0 and packed.segments[r, s] == packed.segments[r, s + 1]:
                token = packed.tokens[r, s + 1]
                kl = sum(math.exp(p) * (p - q) for p, q in zip(clean[r, s], sae[r, s], strict=True))
                rows.append((-clean[r, s, token], -sae[r, s, token], -zero[r, s, token], kl))
    ce_clean, ce_sae, ce_zero, kl = np.mean(rows, axis=0)
    recovered = (ce_zero - ce_sae) / (ce_zero - ce_clean)
    return {"ce_clean": ce_clean, "ce_sae": ce_sae, "ce_zero": ce_zero, "loss_recovered": recovered, "kl": kl}


def in_turn_oracle(
    lm: LanguageModel, packed: PackedRows, topology: str, sparsity: str, params: dict[str, np.ndarray]
) -> dict[str, float]:
    """One run a site: what is read there with the sites before it replaced, and what the coder makes of it."""
    made: Activations = {}
    reads, writes = SIDES[topology]
    x = np.zeros((packed.tokens.size, len(reads), 16))
    for m, (read, write) in enumerate(zip(reads, writes, strict=True)):
        edits = {at: lambda _, value=value: jnp.asarray(value, jnp.float32) for at, value in made.items()}
        _, seen = lm.run(packed.tokens, packed.positions, packed.segments, capture=[read, write], edits=edits)
        x[:, m] = np.asarray(seen[read], np.float64).reshape(-1, 16)
        y_hat = numpy_coder(topology, sparsity, params, x)[1][:, m].reshape(*packed.tokens.shape, 16)
        made[write] = np.where(packed.keep[:, :, None], y_hat, np.asarray(seen[write]))
    found = splice_oracle(lm, packed, made, made)
    return {f"{name}_in_turn": found[name] for name in ("ce_sae", "loss_recovered", "kl")}


MLPS_IN, MLPS_OUT = ("blocks.0.mlp_in", "blocks.1.mlp_in"), ("blocks.0.mlp_out", "blocks.1.mlp_out")
RESIDUALS = (HOOK, "blocks.1.resid_mid")
SIDES = {
    "transcoder": (MLPS_IN[:1], MLPS_OUT[:1]),
    "skip_transcoder": (MLPS_IN[:1], MLPS_OUT[:1]),
    "layernorm_autoencoder": (RESIDUALS[:1], RESIDUALS[:1]),
    "crosscoder": (RESIDUALS, RESIDUALS),
    "causal_crosscoder": (RESIDUALS, RESIDUALS),
    "clt": (MLPS_IN, MLPS_OUT),
    "skip_clt": (MLPS_IN, MLPS_OUT),
    "per_layer_autoencoder": (RESIDUALS, RESIDUALS),
    "per_layer_transcoder": (MLPS_IN, MLPS_OUT),
}


def coder_of(
    topology: str, sparsity: str, reads: tuple[str, ...], writes: tuple[str, ...], width: int = 40, d_model: int = 16
) -> Coder:
    """For sites of `tiny_lm`, or of another model."""
    config = CoderConfig(
        "standard" if sparsity == "relu" else sparsity,
        topology=topology,
        d_sae=width,
        k=4,
        init="uniform",
        unit_decoder_every=0,
        matmul_dtype="float32",
        encoder_centre=False,
    )
    d_in, d_out = (24 if "mlp_act" in side[0] else d_model for side in (reads, writes))
    return build(config, [d_in] * len(reads), 10, [d_out] * len(writes))


def sites_of(coder: Coder, reads: tuple[str, ...], writes: tuple[str, ...]) -> Sites:
    return Sites(reads, writes, (1.0,) * len(reads), (1.0,) * len(writes), coder.topology.stacked)


def random_params(coder: Coder) -> dict[str, np.ndarray]:
    """The last five latents of each group are dead."""
    rng, shapes = np.random.default_rng(5), jax.eval_shape(coder.init, jax.random.key(0))
    params = {name: rng.normal(0, 0.3, s.shape).astype(np.float32) for name, s in sorted(shapes.items())}
    params["b_enc"][..., -5:] = -1e3
    return params


def numpy_coder(
    topology: str, sparsity: str, params: dict[str, np.ndarray], x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """x [N, S, D] -> (latents [N, G F], y_hat [N, S, D]) in float64, site by site and layer by layer."""
    p = {name: value.astype(np.float64) for name, value in params.items()}
    n_sites = x.shape[1]

    def code(pre: np.ndarray) -> np.ndarray:
        if sparsity == "abs_topk":
            return np.where(np.abs(pre) >= np.sort(np.abs(pre), axis=1)[:, -4:-3], pre, 0)
        f = np.maximum(pre, 0)
        return np.where(pre >= np.sort(pre, axis=1)[:, -4:-3], f, 0) if sparsity == "topk" else f

    if topology in ("clt", "skip_clt", "causal_crosscoder", "per_layer_autoencoder", "per_layer_transcoder"):
        f = [code(x[:, i] @ p["W_enc"][i] + p["b_enc"][i]) for i in range(n_sites)]
        writers = [[m] if topology.startswith("per_layer") else range(m + 1) for m in range(n_sites)]
        into = [p["b_dec"][m] + sum(f[i] @ p[f"W_dec_{i}"][:, m - i] for i in writers[m]) for m in range(n_sites)]
        if "W_skip" in p:
            into = [y + x[:, m] @ p["W_skip"][m] for m, y in enumerate(into)]
        return np.concatenate(f, axis=1), np.stack(into, axis=1)
    if topology == "crosscoder":
        f_NF = code(sum(x[:, i] @ p["W_enc"][i] for i in range(n_sites)) + p["b_enc"])
        return f_NF, np.stack([f_NF @ p["W_dec"][:, i] + p["b_dec"][i] for i in range(n_sites)], axis=1)
    if topology == "layernorm_autoencoder":
        mean, std = x[:, 0].mean(1, keepdims=True), x[:, 0].std(1, ddof=1, keepdims=True)
        f_NF = code(((x[:, 0] - mean) / (std + p["ln_eps"]) - p["b_dec"]) @ p["W_enc"] + p["b_enc"])
        return f_NF, (std * (f_NF @ p["W_dec"] + p["b_dec"]) + mean)[:, None]
    centred = x[:, 0] - p["b_dec"] if topology == "autoencoder" else x[:, 0]
    f_NF = code(centred @ p["W_enc"] + p["b_enc"])
    skip = x[:, 0] @ p["W_skip"] if topology == "skip_transcoder" else 0
    return f_NF, (f_NF @ p["W_dec"] + p["b_dec"] + skip)[:, None]


def captured_at(lm: Any, packed: PackedRows, names: Sequence[str]) -> np.ndarray:
    """Activations of a clean run, float64 [tokens of all rows, sites, D]."""
    _, seen = lm.apply(lm.params, *(arrays(packed)[n] for n in ("tokens", "positions", "segments")), names)
    flat = [np.asarray(seen[name], np.float64).reshape(-1, seen[name].shape[-1]) for name in names]
    return np.stack(flat, axis=1)


def expected(
    packed: PackedRows, writes: tuple[str, ...], f: np.ndarray, y: np.ndarray, y_hat: np.ndarray
) -> dict[str, float]:
    """The definitions with the sites' dimensions side by side, and the FVE of each where there are several."""

    def measured(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
        a, b = (side.reshape(len(side), -1) for side in (a, b))
        return oracle([Batch(a, b, Latents(jnp.asarray(f), None, f.shape[1]), f, packed.keep.ravel())])

    own = {f"fve/{name}": measured(y[:, i], y_hat[:, i])["fve"] for i, name in enumerate(writes)}
    return measured(y, y_hat) | (own if len(writes) > 1 else {})


def gram_by_hand(rows: Sequence[np.ndarray]) -> float:
    """Root mean square, over groups, of the double loop's figure for one matrix."""
    squares = []
    for matrix in rows:
        unit = [r.ravel() / np.linalg.norm(r) for r in matrix.astype(np.float64)]
        squares.append(np.mean([(a @ b) ** 2 for i, a in enumerate(unit) for j, b in enumerate(unit) if i != j]))
    return math.sqrt(np.mean(squares))
