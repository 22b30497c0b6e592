"""Which of XLA's two libraries for a CPU's products is the faster one for blocks: forward passes in turn.

    python -m benchmarks.products [--rounds=7] [SHAPE ...]

Prints a table: milliseconds of a pass with XLA's default and with Eigen, medians. Weights are random: that costs what
trained ones cost. saejax/lm/product.py says on which processors Eigen is asked for.
"""

import argparse
import statistics
import time
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from saejax.lm import LanguageModel, checkpoint, decoder, product

_GPT2: dict[str, Any] = {"model_type": "gpt2", "n_positions": 1024, "vocab_size": 512}
_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "max_position_embeddings": 2048,
    "vocab_size": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
# {shape: (config.json of a few blocks of it, rows, tokens of a row)}
SHAPES = {
    "GPT-2, 4 blocks": (_GPT2 | {"n_embd": 768, "n_head": 12, "n_layer": 4}, 8, 512),
    "GPT-2 medium, 3 blocks": (_GPT2 | {"n_embd": 1024, "n_head": 16, "n_layer": 3}, 8, 512),
    "SmolLM2-135M, 4 blocks": (
        _LLAMA
        | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4}
        | {"num_attention_heads": 9, "num_key_value_heads": 3},
        8,
        512,
    ),
    "width 128, 4 blocks": (_GPT2 | {"n_embd": 128, "n_head": 4, "n_layer": 4}, 32, 256),
}


def passes(name: str) -> dict[str, Any]:
    """{library: a call that runs the pass to the last block's end}."""
    config_json, rows, length = SHAPES[name]
    config = checkpoint.architecture(config_json, "").read_config(config_json)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.02, x.shape), jnp.float32), shapes)
    lm, last = LanguageModel(config, params, cast(Any, None), {}), f"blocks.{config.n_layer - 1}.resid_post"
    tokens = jnp.asarray(rng.integers(0, config_json["vocab_size"], (rows, length)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)

    def forward(params: Any) -> jax.Array:
        return lm.apply(params, tokens, positions, jnp.zeros_like(tokens), [last])[1][last]

    lowered = jax.jit(forward).lower(params)
    programs = {"default": lowered.compile(), "Eigen": lowered.compile(compiler_options=product.EIGEN)}
    return {library: lambda program=program: program(params) for library, program in programs.items()}


def seconds(calls: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """{library: seconds of each round}; everybody takes turns, after one call each that does not count."""
    taken: dict[str, list[float]] = {library: [] for library in calls}
    for number in range(rounds + 1):
        for library, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            if number:
                taken[library].append(time.perf_counter() - began)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), help=f"of {'; '.join(SHAPES)} (all)")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if unknown := set(options.shapes) - set(SHAPES):
        parser.error(f"no such shape: {', '.join(sorted(unknown))}. There are {'; '.join(SHAPES)}.")
    print("| shape | tokens | default, ms | Eigen, ms | default / Eigen |\n|---|---|---|---|---|")
    for name in options.shapes:
        taken = seconds(passes(name), options.rounds)
        middle = {library: statistics.median(of) for library, of in taken.items()}
        cells = [f"{1e3 * middle[n]:.0f} ({1e3 * min(of):.0f} to {1e3 * max(of):.0f})" for n, of in taken.items()]
        _, rows, length = SHAPES[name]
        print(
            f"| {name} | {rows} x {length} | {' | '.join(cells)} | {middle['default'] / middle['Eigen']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
