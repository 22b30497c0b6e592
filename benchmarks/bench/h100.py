"""Compiles the train steps of the GPU's rows for an H100, where there is none: which kernels, how much memory.

    pip install jax[cuda13]                              Python 3.12; a GPU is not needed
    python -m benchmarks.bench.h100 [row ...]            a line of JSON for each; minutes each on two cores

XLA's whole GPU compiler runs, down to machine code; only what is tried out on the card is not: autotuning is off, and
sorts that would be handed to NVIDIA's library are XLA's own. Nothing is run, so no time is measured.
"""

import json
import os
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench.device_costs import step_of
from benchmarks.bench.rows import GPU_ROWS, Row

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
_COUNTED = ("fusion", "while", "conditional", "copy")
_WITHIN = ("sort", "scatter", "gather", "dot")


def device() -> Any:
    """A device of that description, which can be compiled for."""
    import jax
    from jax.experimental import topologies

    jax.devices()  # finds the plugin
    return topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=H100).devices[0]


def compiled(row: Row, sharding: Any) -> dict[str, Any]:
    import jax

    step, inputs = step_of(row)
    inputs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), inputs)
    started = time.perf_counter()
    program = jax.jit(step, donate_argnums=0).trace(*inputs).lower(lowering_platforms=("cuda",)).compile()
    memory, text = program.memory_analysis(), program.as_text()
    entry = text[text.index("\nENTRY") :]
    return {
        "row": row.name,
        "compile_seconds": round(time.perf_counter() - started, 1),
        "state_gb": memory.argument_size_in_bytes / 1e9,
        "temporary_gb": memory.temp_size_in_bytes / 1e9,
        "kernels": {name: len(re.findall(rf" {name}\(", entry)) for name in _COUNTED},
        "operations": {name: len(re.findall(rf" {name}\(", text)) for name in _WITHIN},
        "libraries": Counter(re.findall(r'custom_call_target="([^"]+)"', text)),
    }


def main(names: Sequence[str]) -> None:
    # Before JAX starts. The compiler asks for the assembler and libdevice of NVIDIA's wheels.
    cuda = Path(sysconfig.get_paths()["purelib"]) / "nvidia/cu13"
    os.environ["PATH"] = f"{cuda / 'bin'}:{os.environ['PATH']}"
    flags = f"--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={cuda}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    sharding = jax.sharding.SingleDeviceSharding(device())
    for row in GPU_ROWS:
        if not names or row.name in names:
            print(json.dumps(compiled(row, sharding)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
