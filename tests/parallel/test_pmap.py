"""Training under pmap: what the equality table (tests/test_equality.py) leaves out, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from tiny import planted_experiment, replaced

from saejax.app.stages import run_train
from saejax.app.workspace import Workspace
from saejax.coders import CoderConfig, Sites, build
from saejax.core.errors import ConfigError
from saejax.kernels.batch import whole_batch
from saejax.kernels.selection import largest_mask
from saejax.parallel import MODES, ParallelConfig, batch_sharding, make_mesh
from saejax.training.config import TrainConfig
from saejax.training.state import TrainState, abstract_state, init_state, make_init
from saejax.training.step import compile_step, default_hyper, make_step

B, D, F = 64, 8, 32
HOOKS = ("h0", "h1")


def _trained(mode: str, n: int, preset: str) -> tuple[list[dict[str, float]], TrainState]:
    """(metrics, state) of 8 SGD steps with latents that die and start anew."""
    hooks = HOOKS if preset == "clt" else HOOKS[:1]
    mesh, one = make_mesh(ParallelConfig((n, 1), mode=mode)), (1.0,) * len(hooks)
    config = CoderConfig(
        preset, d_sae=F, k=3, auxk_k=4, dead_after_tokens=2 * B, matmul_dtype="float32", sparsity="topk"
    )
    coder, sites = build(config, [D] * len(hooks), 8), Sites(hooks, hooks, one, one, preset == "clt")
    train = TrainConfig(batch_size=B, tokens=8 * B, accumulate=2, resample_every=5, resample_until_fraction=1.0)
    optimizer = optax.with_extra_args_support(optax.sgd(0.02))
    # Three latents (of each group) that never fire, until they are resampled at step 5.
    init = make_init(coder, optimizer, train, lambda params: params | {"b_enc": params["b_enc"].at[..., :3].set(-5.0)})
    abstract = abstract_state(coder, init, mesh)
    step = make_step(coder, optimizer, optax.constant_schedule(0.02), sites, train)
    compiled: Any = None
    state, rows = init_state(init, 0, abstract), []
    for i in range(8):
        x = np.random.default_rng(i).normal(size=(len(hooks), B, D)).astype(np.float32)
        arrays = {hook: jax.device_put(x[j], batch_sharding(mesh)) for j, hook in enumerate(hooks)}
        if compiled is None:
            lowered = compile_step(step, abstract, mesh, mode).lower(abstract, arrays, default_hyper(0))  # type: ignore[attr-defined]
            compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
        state, metrics = compiled(state, arrays, default_hyper(0))
        rows.append({name: float(value) for name, value in metrics.items()})
    return rows, state


@pytest.mark.ci
@pytest.mark.parametrize("preset", ["topk", pytest.param("clt", marks=pytest.mark.soak)])
def test_accumulation_and_resampling_are_those_of_one_device(preset: str) -> None:
    """A device resamples from all devices' tokens. (jax 0.10.2 crashed at clt with sums in AuxK's branches.)"""
    (want_rows, want), (rows, state) = _trained("jit", 1, preset), _trained("pmap", 8, preset)
    for got, expected in zip(rows, want_rows, strict=True):
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-5)
    dead = [row["dead"] for row in rows]
    assert all(max(row[name] for row in rows) > 0 for name in ("auxk", "lift") if name in rows[0])
    assert dead[4] >= 3 > dead[5]
    arrays, wanted = state.params | state.stats, want.params | want.stats
    for name, value in wanted.items():
        np.testing.assert_allclose(arrays[name], value, rtol=1e-5, atol=1e-5 * np.abs(value).max(), err_msg=name)
        for shard in arrays[name].addressable_shards:  # every device has come to the same, to the bit
            np.testing.assert_array_equal(shard.data, arrays[name], err_msg=name)


def test_a_batch_is_all_devices_tokens() -> None:
    """The k largest of all devices' tokens; ties go to the first rows, as in one array."""
    values = np.maximum(np.random.default_rng(0).integers(-4, 5, (16, 12)), 0).astype(np.float32)

    def choose(k: Any, rows: Any) -> jax.Array:
        return whole_batch(largest_mask(rows["x"], k))

    each = jax.jit(MODES["pmap"](choose, make_mesh(ParallelConfig((8, 1)))))
    order = np.argsort(-values.ravel(), kind="stable")
    for k in (0, 1, 17, 40, 150):
        want = np.zeros(values.size, bool)
        want[order[:k]] = True
        np.testing.assert_array_equal(each(k, {"x": values}).ravel(), want & (values.ravel() > 0), str(k))


def test_what_pmap_cannot_do_is_refused_with_the_remedy() -> None:
    for own in ({"mesh": (4, 2)}, {"fsdp": True}):
        with pytest.raises(ConfigError, match=r"parallel\.mode=pmap has all parameters .*parallel\.mode=jit"):
            ParallelConfig(mode="pmap", **own)
    with pytest.raises(ConfigError, match=r"parallel\.mode is 'pmaps'\..*'pmap'"):
        ParallelConfig(mode="pmaps")


@pytest.mark.parametrize("mode", MODES)
def test_parts_that_do_not_divide_among_devices_are_refused_before_a_run_is_written(tmp_path: Path, mode: str) -> None:
    """Four rows a part and eight devices. Under jit kernels would take them as whole, on every device."""
    e = replaced(planted_experiment(tmp_path, "parts", accumulate=32), "parallel", mesh=(8, 1), mode=mode)
    with pytest.raises(
        ConfigError, match=r"batch_size 128 in 32 parts .* 8 devices .* train\.batch_size=256, or another"
    ):
        run_train(Workspace(e))
    assert not (e.run_dir / "config.json").exists()


def test_several_processes_are_told_to_use_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make_mesh(ParallelConfig((8, 1)))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        ConfigError, match=r"parallel\.mode=pmap is for the devices of one process; .*parallel\.mode=jit"
    ):
        MODES["pmap"](lambda state, rows: state, mesh)
