"""A training under pmap is that of one device: compared with SGD, since Adam hides a gradient of the wrong scale."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

from saejax.coders import CoderConfig, Sites, build
from saejax.core.errors import ConfigError
from saejax.kernels.batch import whole_batch
from saejax.kernels.selection import largest_mask
from saejax.parallel import MODES, ParallelConfig, batch_sharding, make_mesh
from saejax.train.config import TrainConfig
from saejax.train.state import abstract_state, init_state, make_init
from saejax.train.step import compile_step, default_hyper, make_step

B, D, F, L = 64, 8, 32, 2


def _trained(mode: str, n: int, topology: str, sparsity: str, steps: int = 8, **own: Any) -> tuple[list[Any], Any]:
    """(metrics of the steps, state after them) on n devices, dead latents, resampling and all."""
    mesh = make_mesh(ParallelConfig((n, 1), mode=mode))
    config = CoderConfig(
        sparsity if sparsity != "relu" else "standard",
        topology=topology,
        d_sae=F,
        k=3,
        auxk_k=4,
        dead_after_tokens=2 * B,
        init="kaiming",
        matmul_dtype="float32",
        **own,
    )
    stacked = topology != "autoencoder"
    coder = build(config, [D] * L if stacked else D, steps)
    hooks = tuple(f"h{i}" for i in range(L if stacked else 1))
    sites = Sites(hooks, hooks, (1.0,) * len(hooks), (1.0,) * len(hooks), stacked)
    train = TrainConfig(batch_size=B, tokens=steps * B, accumulate=2, resample_every=5, resample_until_fraction=1.0)
    optimizer = optax.with_extra_args_support(optax.sgd(0.02))
    init = make_init(coder, optimizer, train)
    abstract = abstract_state(coder, init, mesh)
    step = make_step(coder, optimizer, optax.constant_schedule(0.02), sites, train)
    compiled = compile_step(step, abstract, mesh, mode)
    state, rows = init_state(init, 0, abstract), []
    for i in range(steps):
        x = np.random.default_rng(i).normal(size=(len(hooks), B, D)).astype(np.float32)
        arrays = {hook: jax.device_put(x[j], batch_sharding(mesh)) for j, hook in enumerate(hooks)}
        state, metrics = compiled(state, arrays, default_hyper(0))
        rows.append({name: float(value) for name, value in metrics.items()})
    return rows, state


CODERS = (
    ("autoencoder", "relu"),
    ("autoencoder", "gated"),
    ("autoencoder", "topk"),
    ("autoencoder", "batchtopk"),
    ("autoencoder", "jumprelu"),
    ("autoencoder", "matryoshka"),
    ("crosscoder", "batchtopk"),
    ("clt", "topk"),
)


@pytest.mark.parametrize(("topology", "sparsity"), CODERS)
def test_pmap_gives_the_numbers_of_one_device(topology: str, sparsity: str) -> None:
    want_rows, want = _trained("jit", 1, topology, sparsity)
    rows, state = _trained("pmap", 8, topology, sparsity)
    for got, expected in zip(rows, want_rows, strict=True):
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for name, value in (want.params | want.stats).items():
        got = (state.params | state.stats)[name]
        atol = 1e-5 * np.abs(value).max()
        np.testing.assert_allclose(got, value, rtol=1e-5, atol=atol, err_msg=name)
        for shard in got.addressable_shards:  # every device has come to the same, to the bit
            np.testing.assert_array_equal(shard.data, got, err_msg=name)


def test_a_batch_is_all_devices_tokens() -> None:
    """Ties over devices go to the first rows, as in one array."""
    values = np.maximum(np.random.default_rng(0).integers(-4, 5, (16, 12)), 0).astype(np.float32)
    each = MODES["pmap"](lambda k, rows: whole_batch(largest_mask(rows["x"], k)), make_mesh(ParallelConfig((8, 1))))
    order = np.argsort(-values.ravel(), kind="stable")
    for k in (0, 1, 17, 40, 150):
        want = np.zeros(values.size, bool)
        want[order[:k]] = True
        np.testing.assert_array_equal(jax.jit(each)(k, {"x": values}).ravel(), want & (values.ravel() > 0), str(k))


def test_what_pmap_cannot_do_is_refused_with_the_remedy() -> None:
    for own in ({"mesh": (4, 2)}, {"fsdp": True}):
        with pytest.raises(ConfigError, match=r"parallel\.mode=pmap has all parameters on every device.*parallel\.mode=jit"):
            ParallelConfig(mode="pmap", **own)
    with pytest.raises(ConfigError, match=r"parallel\.mode is 'pmaps'\..*'pmap'"):
        ParallelConfig(mode="pmaps")
