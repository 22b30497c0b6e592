"""Bytes of the row program of an attribution graph against the length of the prompt, for Gemma-2-2B, from its shapes.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.attribution_memory

Nothing is allocated: shapes alone are compiled. Transcoders on all 26 MLPs, or with --cross_layer one cross-layer
transcoder. Temporaries are those of XLA's schedule for this backend.
"""

import time

import jax
import jax.numpy as jnp
from absl import app, flags

from benchmarks.row_memory import row_memory, transcoder_layers
from saejax.attribution.settings import AttributionConfig
from saejax.lm.families import ARCHITECTURES
from saejax.parallel import ParallelConfig, make_mesh

_LENGTHS = flags.DEFINE_multi_integer("length", [512, 1024, 2048, 4096, 8192], "Tokens of the prompt.")
_CHUNK = flags.DEFINE_integer("chunk", 8, "Rows computed at once.")
_LATENTS = flags.DEFINE_integer("d_sae", 16_384, "Latents of a layer.")
_ACTIVE = flags.DEFINE_integer("active", 64, "Active latents of a token and layer.")
_MESHES = flags.DEFINE_multi_string("mesh", ["1,1", "1,8", "8,1"], "Devices along data, latent.")
_CROSS_LAYER = flags.DEFINE_bool("cross_layer", False, "One cross-layer transcoder instead.")
_BFLOAT16 = flags.DEFINE_bool("bfloat16", True, "The model's parameters are bfloat16; else float32.")

# google/gemma-2-2b's config.json, as far as shapes and conventions go.
GEMMA_2_2B = {
    "model_type": "gemma2",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
GB = 1e9


def row(length: int, mesh_shape: tuple[int, ...]) -> str:
    """A line of the table."""
    started = time.perf_counter()
    config = ARCHITECTURES["gemma2"].read_config(GEMMA_2_2B)
    layers = transcoder_layers(config, _CROSS_LAYER.value)
    found = row_memory(
        config,
        layers,
        _LATENTS.value,
        length,
        _ACTIVE.value,
        AttributionConfig(chunk=_CHUNK.value),
        make_mesh(ParallelConfig(mesh_shape), jax.devices()),
        jnp.bfloat16 if _BFLOAT16.value else jnp.float32,
    )
    cells = " | ".join(f"{n / GB:.2f}" for n in (found.arguments, found.rows, found.temporaries, found.total))
    return f"| {mesh_shape[0]}, {mesh_shape[1]} | {length:,} | {cells} | {time.perf_counter() - started:.0f} |"


def main(_: list[str]) -> None:
    what = "one cross-layer transcoder" if _CROSS_LAYER.value else "26 transcoders"
    kind = "bfloat16" if _BFLOAT16.value else "float32"
    print(
        f"Gemma-2-2B ({kind}), {what} of {_LATENTS.value:,} latents a layer (float32), {_ACTIVE.value} active a token "
        f"and layer, {_CHUNK.value} rows at once; GB (10^9 bytes) a device; {jax.devices()[0].device_kind}, jax "
        f"{jax.__version__}\n"
    )
    print("| mesh data, latent | tokens | arguments | rows | temporaries | together | seconds to compile |")
    print("|---|---|---|---|---|---|---|")
    for mesh in _MESHES.value:
        for length in _LENGTHS.value:
            print(row(length, tuple(int(n) for n in mesh.split(","))), flush=True)


if __name__ == "__main__":
    app.run(main)
